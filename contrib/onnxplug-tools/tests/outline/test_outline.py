"""Modules as ONNX functions: inlined, a model is the plain export node for node; its numbers are those of PyTorch."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from onnxplug_tools.outline.request import UnusedClassWarning
from torch import nn
from torch.export import Dim

import onnxplug
from onnxplug import Functions, OnnxProgram, Rule
from onnxplug.build.provenance import MODULE_CALL
from onnxplug.build.scope import nodes_of
from onnxplug.build.stored import META
from onnxplug.errors import UsageError
from tests.support.contrib import installed, plugged
from tests.support.sampling import rotated
from tests.support.structure import same_inlined
from tests.support.tolerances import looser
from tests.support.zoo import ZOO

DOMAIN = "onnxplug.modules"


def outlined(model: Any, args: Any = (), *, functions: Any = True, verify: bool = True, **options: Any) -> OnnxProgram:
    """Exports with functions, and compares the model with the plain export and with PyTorch."""
    program = onnxplug.to_onnx(model, args, functions=functions, **options)
    assert program.recipe is not None
    plain = program.recipe.convert(program.recipe.optimize, (), None)
    same_inlined(program.model, plain)
    assert not any(MODULE_CALL in node.metadata_props for body in bodies(program.model) for node in nodes_of(body))
    if verify:
        assert {case.runtime for case in program.verify(seeds=(0,)).cases} == {"onnxruntime"}
    return program


def bodies(model: ir.Model) -> list[Any]:
    return [model.graph, *model.functions.values()]


def calls(body: Any, domain: str = DOMAIN) -> list[str]:
    """The functions that a body calls, in order."""
    return [node.op_type for node in body if node.domain == domain]


def function(program: OnnxProgram, name: str, domain: str = DOMAIN) -> ir.Function:
    return program.model.functions[domain, name, ""]


# -- whole models ------------------------------------------------------------------------------------------------------

#: For some models, the number of calls of modules that each function stands for.
COUNTS = {
    "bert": {"BertLayer": 2, "BertAttention": 2, "BertSelfAttention": 2},
    "llama": {"LlamaDecoderLayer": 2, "LlamaAttention": 2, "LlamaMLP": 2, "LlamaRMSNorm": 5},
    "resnet18": {"BasicBlock": 5, "BasicBlock_1": 3, "Sequential": 3},
    "swin_tiny_patch4_window7_224": {"WindowAttention": 3, "SwinTransformerBlock": 3},
}


@pytest.mark.parametrize("name", rotated(ZOO, every=len(ZOO)))
def test_models_of_the_zoo(name: str) -> None:
    case = ZOO[name]()
    program = outlined(case.module, case.args, kwargs=case.kwargs, dynamic_shapes=case.dynamic_shapes)
    assert program.statistics.functions
    assert COUNTS.get(name, {}).items() <= program.statistics.functions.items()


# -- kinds of modules --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-2, -1)).masked_fill(mask[:length, :length] == 0, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x), mask)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.mask)
        return self.norm(x) @ self.embedding.weight.T


IDS = torch.arange(10).reshape(2, 5)
TOKENS: Any = ({0: Dim("batch", min=2, max=99), 1: Dim("sequence", min=2, max=60)},)


@pytest.fixture(scope="module")
def decoder() -> OnnxProgram:
    return outlined(Decoder().eval(), (IDS,), dynamic_shapes=TOKENS)


def test_blocks_of_a_decoder(decoder: OnnxProgram) -> None:
    assert calls(decoder.model.graph) == ["Block"] * 3
    # The first block computes the mask, which the others use: it is an input of all three.
    expected = {"Attention": 3, "Sequential": 3, "Block": 3}
    assert decoder.statistics.functions == expected
    assert calls(function(decoder, "Block")) == ["Attention", "Sequential"]
    assert decoder.statistics.onnx_nodes == decoder.model.graph.num_nodes()


def test_names(decoder: OnnxProgram) -> None:
    state = Decoder().state_dict().keys()
    initializers = decoder.model.graph.initializers
    assert {"blocks.0.norm.weight", "blocks.2.mlp.2.bias"} <= state & initializers.keys()
    block = function(decoder, "Block")
    names = [v.name for v in block.inputs]
    assert {"norm.weight", "attention.out.bias", "mlp.2.bias"} <= set(names)
    assert names.index("norm.weight") > names.index("x")  # computed inputs come before the weights
    for call, layer in zip([n for n in decoder.model.graph if n.domain == DOMAIN], range(3), strict=True):
        assert call.name == f"blocks/{layer}/Block"
        assert f"/blocks.{layer}: " in call.metadata_props["namespace"]
        names_of_inputs = {
            formal: value.name for formal, value in zip(names, call.inputs, strict=True) if value is not None
        }
        assert names_of_inputs["norm.weight"] == f"blocks.{layer}.norm.weight"
    inner = {n.name for n in block if n.domain == DOMAIN}
    assert inner == {"attention/Attention", "mlp/Sequential"}
    assert block.metadata_props["pkg.onnxplug.class"].endswith(".Block")


def test_metadata_within_functions(decoder: OnnxProgram) -> None:
    """Metadata of a body's node have its place in the module, and the user's line, which is the same for all calls."""
    body = [n for n in function(decoder, "Attention") if n.op_type not in ("Constant", "Linear")]
    spaces = {n.metadata_props["namespace"] for n in body}
    assert "softmax: aten.softmax.int" in spaces
    assert any(space.startswith("qkv: torch.nn.modules.linear.Linear/linear: ") for space in spaces)
    assert not any("blocks" in space for space in spaces)
    assert all("outline/test_outline.py:" in n.metadata_props["pkg.onnxplug.source"] for n in body)


def test_values_within_functions_are_described(decoder: OnnxProgram) -> None:
    block = function(decoder, "Block")
    assert str(block.outputs[0].shape) == "[batch,sequence,8]"
    assert {v.dtype for v in block.inputs} == {ir.DataType.FLOAT, ir.DataType.BOOL}


def test_text_is_small(decoder: OnnxProgram) -> None:
    text = str(decoder)
    assert "function Block: 3 calls" in text
    deep = outlined(Decoder(12).eval(), (IDS,), dynamic_shapes=TOKENS, verify=False)
    more = len(onnx.printer.to_text(deep.model_proto.graph)) - len(onnx.printer.to_text(decoder.model_proto.graph))
    assert deep.model.graph.num_nodes() == decoder.model.graph.num_nodes() + 9
    assert [len(f) for f in deep.model.functions.values()] == [len(f) for f in decoder.model.functions.values()]
    assert more > 0


@pytest.mark.parametrize(
    "options", [{"capture": "whole"}, {"strict": True}, {"exported": True}, {"optimize": False}], ids=str
)
@pytest.mark.long
def test_ways_of_capture(options: dict[str, Any], decoder: OnnxProgram) -> None:
    model: Any = Decoder().eval()
    if options.pop("exported", False):
        program = torch.export.export(model, (IDS,), dynamic_shapes=TOKENS)
        file = io.BytesIO()
        torch.export.save(program, file)
        outline = outlined(torch.export.load(io.BytesIO(file.getvalue())))
    else:
        outline = outlined(model, (IDS,), dynamic_shapes=TOKENS, **options)
    if options.get("optimize", True):
        assert outline.statistics.functions == decoder.statistics.functions
        assert [f.name for f in outline.model.functions.values()] == [f.name for f in decoder.model.functions.values()]
    else:
        assert outline.statistics.functions["Block"] == 3


def test_modules_that_only_the_capture_tells() -> None:
    """Modules of a script and of a graph have other classes than the modules that they were made of."""
    model = parts(plain).eval()
    traced = torch.jit.trace(model, (X,))
    graph = torch.export.export(model, (X,), dynamic_shapes=ROWS).module()
    with installed("onnxplug-tools", "onnxplug-torchscript"):
        for captured, requested in ((traced, True), (traced, [Part]), (graph, [Part]), (graph, ["Part"])):
            assert outlined(captured, (X,), dynamic_shapes=ROWS, functions=requested).statistics.functions == {
                "Part": 3
            }


@pytest.mark.parametrize(("opset", "target"), [(13, "onnxruntime"), (17, None), (23, None)])
def test_opsets(opset: int, target: str | None) -> None:
    program = outlined(Decoder().eval(), (IDS,), dynamic_shapes=TOKENS, opset_version=opset, target=target)
    assert program.statistics.functions["Block"] == 3
    assert function(program, "Block").opset_imports == {"": opset, DOMAIN: 1}


class Model(nn.Module):
    """Modules one after the other."""

    def __init__(self, *parts: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.times = times

    def forward(self, x: torch.Tensor) -> Any:
        for part in self.parts:
            for _ in range(self.times):
                x = part(x)
        return x


class EveryResult(Model):
    """Returns the result of each of its modules."""

    def forward(self, x: torch.Tensor) -> Any:
        results = [x]
        for part in self.parts:
            results.append(part(results[-1]))
        return results[1:]


class Part(nn.Module):
    """A module that runs a function of itself and its input."""

    def __init__(self, run: Callable[[Any, torch.Tensor], Any], width: int = 4, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.run = run
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def plain(part: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(part.linear(x)) * 2 + x


def branching(part: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 2  # read by the branches
    return torch.cond(x.sum() > 0, lambda x: part.linear(x) + y, lambda x: x - y, (x,))


def looping(part: Any, x: torch.Tensor) -> torch.Tensor:
    start = torch.zeros_like(x[0])
    return torch._higher_order_ops.scan(lambda c, r: (c + part.linear(r), c * r), start, x)[1]


def scaled(part: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(part.linear(x)) * part.scale + 1


def two_results(part: Any, x: torch.Tensor) -> torch.Tensor:
    y, z = part.inner(x)
    return y * z + part.linear(y)


def both(part: Any, x: torch.Tensor) -> Any:
    return torch.sin(x) + 1, torch.cos(part.linear(x)) * 2


def passing(part: Any, x: torch.Tensor) -> Any:
    y, same = part.inner(x)
    return y + same


def with_its_input(part: Any, x: torch.Tensor) -> Any:
    return torch.exp(-part.linear(x)) + 1, x


def normalised(part: Any, x: torch.Tensor) -> torch.Tensor:
    return F.relu(part.norm(part.linear(x))) + x


def dropped(part: Any, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.tanh(part.linear(x)), 0.3, part.training) + x


def sized(part: Any, x: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    return (part.linear(x).reshape(2, -1) / rows + rows).reshape(rows, -1) + torch.arange(4)


def written(part: Any, x: torch.Tensor) -> torch.Tensor:
    y = part.linear(x)
    y[:, 0] = 1.5
    return y + x


def tabled(part: Any, x: torch.Tensor) -> torch.Tensor:
    return part.linear(x) @ torch.arange(400.0).reshape(4, 100)[:, :4] * 1e-3 + part.table.sum(0)


def along(part: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(part.linear(x), part.axis) * 2 + x


def turned(part: Any, x: torch.Tensor) -> torch.Tensor:
    return part.linear(x) * torch.cos(x + 1)  # both parts of a pair share the cosine


def paired(part: Any, x: torch.Tensor) -> torch.Tensor:
    return part.linear(part.one(x) + part.other(x)).tanh()


def parts(run: Callable[..., Any], count: int = 3, **attributes: Any) -> Model:
    return Model(*(Part(run, **attributes) for _ in range(count)))


def tied() -> Model:
    model = parts(plain)
    model.parts[1].linear.weight = model.parts[0].linear.weight
    return model


def tied_within() -> Model:
    """One tensor for two weights of a part: another wiring, not the same function."""
    model = Model(*(Part(lambda p, x: p.other(p.linear(x).tanh()) + x, other=nn.Linear(4, 4)) for _ in range(3)))
    model.parts[2].other.weight = model.parts[2].linear.weight
    return model


def nested() -> Model:
    return Model(*(Part(two_results, inner=Part(both)) for _ in range(3)))


X = torch.randn(3, 4)
ROWS: Any = ({0: Dim("rows", min=2)},)

#: Models, with the number of calls of modules that each function stands for; all parts are of one class.
KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, int], Any]] = {
    "plain": (lambda: parts(plain), {"Part": 3}, ROWS),
    "static": (lambda: parts(plain), {"Part": 3}, None),
    "tied weights": (tied, {"Part": 3}, ROWS),
    "weights tied within one": (tied_within, {"Part": 2}, ROWS),
    "called twice": (lambda: Model(Part(plain), times=2), {"Part": 2}, ROWS),
    "two modules called twice": (lambda: Model(Part(plain), Part(plain), times=2), {"Part": 4}, ROWS),
    "If": (lambda: parts(branching), {"Part": 3}, ROWS),
    "Scan": (lambda: parts(looping), {"Part": 3}, ROWS),
    "nested": (nested, {"Part": 3, "Part_1": 3}, ROWS),
    "passes its input on": (
        lambda: Model(*(Part(passing, inner=Part(with_its_input)) for _ in range(2))),
        {"Part": 2, "Part_1": 2},
        ROWS,
    ),
    "sizes": (lambda: parts(sized), {"Part": 3}, ROWS),
    "in-place writes": (lambda: parts(written), {"Part": 3}, ROWS),
    "large constants": (lambda: Model(*(Part(tabled, table=torch.rand(30, 4)) for _ in range(3))), {"Part": 3}, ROWS),
    "other constants": (lambda: Model(*(Part(scaled, scale=s) for s in (2.0, 2.0, 3.0))), {"Part": 2}, ROWS),
    "other attributes": (lambda: Model(*(Part(along, axis=a) for a in (0, 1, 0))), {"Part": 2}, ROWS),
    "shared within": (
        lambda: Model(*(Part(paired, one=Part(turned), other=Part(turned)) for _ in range(2))),
        {"Part": 2},
        ROWS,
    ),
    "every result": (lambda: EveryResult(*(Part(plain) for _ in range(3))), {"Part": 3}, ROWS),
    "signs of zero": (lambda: Model(*(Part(scaled, scale=torch.tensor(s)) for s in (0.0, -0.0))), {}, ROWS),
    "other widths": (
        lambda: Model(Part(plain), Part(plain), nn.Linear(4, 6), Part(plain, 6), Part(plain, 6)),
        {"Part": 4},
        ROWS,
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_modules(name: str) -> None:
    make, expected, dynamic = KINDS[name]
    program = outlined(make().eval(), (X,), dynamic_shapes=dynamic)
    assert {k: n for k, n in program.statistics.functions.items() if not k.startswith("Linear")} == expected
    if expected and not name.startswith(("other", "weights")):  # nodes that stay outside read no weights
        outside = [node for node in program.model.graph if node.domain != DOMAIN]
        assert not any(META in v.meta for node in outside for v in node.inputs if v is not None)


def test_sizes_that_differ_are_left_open() -> None:
    make, _, dynamic = KINDS["other widths"]
    program = outlined(make().eval(), (X,), dynamic_shapes=dynamic)
    assert str(function(program, "Part").outputs[0].shape) == "[rows,None]"


def test_buffers_that_are_written() -> None:
    """Batch normalisation in training: each call's new statistics are outputs of the model."""
    model = Model(*(Part(normalised, norm=nn.BatchNorm1d(4)) for _ in range(3))).train()
    program = outlined(model, (X,), dynamic_shapes=ROWS, verify=False)
    assert program.statistics.functions["Part"] == 3
    assert len(program.model.graph.outputs) == 1 + 3 * 3
    plain = onnxplug.to_onnx(model, (X,), dynamic_shapes=ROWS)
    for inputs in (X, torch.randn(7, 4)):
        for one, other in zip(program(inputs), plain(inputs), strict=True):
            torch.testing.assert_close(one, other)


def test_random_numbers() -> None:
    """Each call of a function draws its own numbers."""
    program = outlined(parts(dropped).train(), (X,), dynamic_shapes=ROWS, verify=False)
    assert program.statistics.functions["Part"] == 3
    masks = Model(
        *(Part(lambda p, x: x + F.dropout(torch.ones_like(x) + 0 * p.linear(x), 0.5, True)) for _ in range(2))
    )
    program = outlined(masks.train(), (torch.zeros(200, 4),), dynamic_shapes=ROWS, verify=False)
    assert program.statistics.functions["Part"] == 2
    (result,) = program(torch.zeros(200, 4))
    assert set(result.unique().tolist()) == {0.0, 2.0, 4.0}  # 2.0: the masks differ


# -- which modules -----------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        (True, {}),  # a single node each
        ([Scaled], {"Scaled": 2, "Scaled_1": 1}),
        (Scaled, {"Scaled": 2, "Scaled_1": 1}),
        (["Scaled"], {"Scaled": 2, "Scaled_1": 1}),
        ("tests.outline.test_outline.Scaled", {"Scaled": 2, "Scaled_1": 1}),
        ((nn.Tanh,), {"Tanh": 1}),  # once
        ([nn.Sequential, Scaled], {"Scaled": 2, "Scaled_1": 1, "Sequential": 1}),
        ([], {}),
        (False, {}),
        (None, {}),
    ],
    ids=str,
)
def test_classes(requested: Any, expected: dict[str, int]) -> None:
    model = nn.Sequential(
        Scaled(2.0), nn.Tanh(), Scaled(2.0), nn.Tanh() if expected == {} else nn.Identity(), Scaled(3.0)
    )
    model[0].__class__.__module__ = "tests.outline.test_outline"
    program = outlined(model, (X,), dynamic_shapes=({0: Dim("rows")},), functions=requested)
    assert program.statistics.functions == expected


def test_domain_and_version() -> None:
    wanted = Functions(["Part"], domain="acme.parts")
    program = outlined(parts(plain), (X,), functions=wanted, opset_version={"": 21, "acme.parts": 3})
    assert calls(program.model.graph, "acme.parts") == ["Part"] * 3
    assert program.model.opset_imports == {"": 21, "acme.parts": 3}
    assert function(program, "Part", "acme.parts").opset_imports == {"": 21}


def test_functions_of_rules_within() -> None:
    """Functions that plugins' rules call are within the functions, in their own domain; equal names get numbers."""

    def soft(g: Any, node: Any) -> Any:
        return g.function("acme", "Part", lambda x: g.op.Mul(g.op.Tanh(x), x), [node.args[0]], version=2)

    for domain, name in (("acme.parts", "Part"), ("acme", "Part_1")):
        program = outlined(
            parts(plain),
            (X,),
            functions=Functions(domain=domain),
            rules=[Rule("aten::tanh", soft)],
            dynamic_shapes=ROWS,
            verify=False,
        )
        assert program.statistics.functions == {name: 3}
        assert calls(function(program, name, domain), "acme") == ["Part"]
        assert program.model.opset_imports["acme"] == 2 == function(program, name, domain).opset_imports["acme"]
        assert program(X)[0].shape == X.shape


def test_functions_of_a_plugin_within() -> None:
    registry = plugged("onnxplug-softcap")
    from onnxplug_softcap import softcap

    model = parts(lambda part, x: softcap(part.linear(x), 3.0) * 2 + x)
    program = outlined(model.eval(), (X,), registry=registry, dynamic_shapes=ROWS)
    assert calls(program.model.graph) == ["Part"] * 3
    assert calls(function(program, "Part"), "onnxplug.softcap") == ["Softcap"]
    torch.testing.assert_close(program.call_reference(X)[0], program(X)[0])


def test_domains_that_are_used_within_functions_alone() -> None:
    rule = Rule("aten::tanh", lambda g, node: g.domain("acme.ops").Curve(node.args[0], slope=2.0))
    versions = {"": 21, "acme.ops": 5}
    program = outlined(parts(plain), (X,), rules=[rule], opset_version=versions, verify=False)
    assert calls(function(program, "Part"), "acme.ops") == ["Curve"]
    assert function(program, "Part").opset_imports == versions
    assert program.model.opset_imports == {**versions, DOMAIN: 1}


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ([3], "classes of modules or their names, got 3"),
        (7, "takes classes of modules, got an int"),
        ([torch.Tensor], "got <class 'torch.Tensor'>"),
        ([nn.Linear(2, 2)], r"got a module, not its class\nHint: functions=\[Linear\]"),
        (["Parts"], r"names Parts, and the model has no module of that class\nHint: Did you mean Part"),
        ([nn.Conv2d], r"names Conv2d.*\nHint: It has modules of Linear, Model, ModuleList, Part\."),
    ],
    ids=str,
)
def test_refused(requested: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        onnxplug.to_onnx(parts(plain), (X,), functions=requested)


@pytest.mark.parametrize("domain", ["", "ai.onnx", "ai.onnx.ml", "com.microsoft", "my blocks", "a..b", None])
def test_refused_domains(domain: Any) -> None:
    with pytest.raises(UsageError, match="functions can't be in the domain"):
        Functions(domain=domain)


def test_a_class_that_an_exported_program_lacks() -> None:
    program = torch.export.export(parts(plain), (X,))
    with pytest.raises(UsageError, match=r"names Conv2d.*\nHint: It has modules of Linear, Model, Part\."):
        onnxplug.to_onnx(program, functions=["Conv2d"])


def test_a_class_without_operators() -> None:
    with pytest.warns(UnusedClassWarning, match="no function was made of Identity"):
        program = outlined(nn.Sequential(nn.Identity(), nn.Tanh()), (X,), functions=[nn.Identity, nn.Tanh])
    assert program.statistics.functions == {"Tanh": 1}


# -- what a program does -----------------------------------------------------------------------------------------------


def test_saved_and_run_by_the_evaluator(decoder: OnnxProgram, tmp_path: Path) -> None:
    inputs = (IDS[:, :3],)
    (expected,) = decoder(*inputs)
    torch.testing.assert_close(decoder.call_reference(*inputs)[0], expected)
    decoder.save(tmp_path / "model.onnx", external_data=True)
    assert (tmp_path / "model.onnx.data").is_file()
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (result,) = session.run(None, {"ids": inputs[0].numpy()})
    np.testing.assert_allclose(result, expected.numpy(), **looser("properties"))


def test_weights_are_replaced() -> None:
    torch.manual_seed(0)
    first, second = Decoder().eval(), Decoder().eval()
    program = outlined(first, (IDS,), dynamic_shapes=TOKENS, verify=False)
    program.apply_weights(second.state_dict())
    torch.testing.assert_close(program(IDS)[0], second(IDS), **looser("core"))


@pytest.mark.long
def test_verdict_and_optimizer(decoder: OnnxProgram) -> None:
    assert decoder.verify(seeds=(), intermediates=True).intermediates is not None
    program = onnxplug.to_onnx(Decoder().eval(), (IDS,), dynamic_shapes=TOKENS, functions=True)
    expected = program(IDS)[0]
    program.optimize()
    torch.testing.assert_close(program(IDS)[0], expected)
    assert "OnnxProgram(" in str(program)


def test_no_functions_no_warning() -> None:
    program = onnxplug.to_onnx(parts(plain), (X,))
    assert program.statistics.functions == {}
    assert not any(MODULE_CALL in node.metadata_props for node in program.model.graph)

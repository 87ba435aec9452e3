"""``onnxplug.export``: the effect of each argument of ``torch.onnx.export``, and the errors for wrong ones."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxplug_torch_onnx.request import ExportWarning
from onnxplug_torch_onnx.translations import autograd_rules, registered_rules
from torch import nn
from torch.export import Dim
from torch.onnx import OperatorExportTypes, TrainingMode
from torch.utils import _pytree as pytree

import onnxplug
import onnxplug.pipeline
from onnxplug import CaptureError, FixedDimensionError, MissingRuleError, Rule, UsageError, VerificationError
from onnxplug.registry.registry import OnnxRegistry
from tests.support.torch_onnx_calls import Capped, Net, X, exported, files, net

later = pytest.mark.skipif(
    not hasattr(torch.onnx.ONNXProgram, "rename_axes"), reason="parameters and methods are those of a later torch"
)


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def symbolic(g: Any, x: Any) -> Any:
        return g.op("com.inplace::Triple", x)


class Tripled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Triple.apply(x) + 1
        return result


def same(program: onnxplug.OnnxProgram, model: Any, *inputs: torch.Tensor) -> None:
    for result, expected in zip(program(*inputs), [model(*inputs)], strict=True):
        torch.testing.assert_close(result, expected)


@later
def test_the_signature_is_torchs() -> None:
    theirs, ours = (inspect.signature(f).parameters.values() for f in (torch.onnx.export, onnxplug.export))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@later
def test_every_parameter_is_in_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "coming-from-torch-onnx.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip().strip("`") for line in page.splitlines() if line.startswith("| `")}
    assert set(inspect.signature(torch.onnx.export).parameters) <= {name for row in rows for name in row.split("`, `")}


# -- the file ----------------------------------------------------------------------------------------------------------


def test_weights_lie_beside_the_file_as_torch_puts_them(folder: Path) -> None:
    model = nn.Linear(64, 64)
    args = (torch.randn(2, 64),)
    onnxplug.export(model, args, "beside.onnx")
    onnxplug.export(model, args, Path("one.onnx"), external_data=False)
    onnxplug.export(model, args, "old.onnx", dynamo=False)
    assert files(folder) == ["beside.onnx", "beside.onnx.data", "old.onnx", "one.onnx"]


def test_a_file_object(folder: Path) -> None:
    for dynamo in (True, False):
        buffer = io.BytesIO()
        onnxplug.export(net(), (X,), buffer, dynamo=dynamo)  # type: ignore[arg-type]
        result = onnxruntime.InferenceSession(buffer.getvalue()).run(None, {"x": X.numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(result), net()(X).detach())


@pytest.mark.parametrize("dynamo", [True, False])
def test_parameters_are_left_out(folder: Path, dynamo: bool) -> None:
    """Constants stay; the exporter of old lists parameters that it leaves out as inputs."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).reshape(-1, 2) + torch.tensor([1.0, 7.0])

    model = Model()
    onnxplug.export(model, (X,), "bare.onnx", dynamo=dynamo, export_params=False, keep_initializers_as_inputs=dynamo)
    graph = onnx.load("bare.onnx").graph
    assert "weight" not in {tensor.name for tensor in graph.initializer}
    assert "weight" in {value.name for value in graph.input}
    session = onnxruntime.InferenceSession("bare.onnx")
    for weight in (model.weight.detach(), torch.randn(4)):
        feed = {"x": X.numpy(), "weight": weight.numpy()}
        result = session.run(None, feed)[0]
        expected = torch.func.functional_call(model, {"weight": weight}, (X,))
        torch.testing.assert_close(torch.from_numpy(result), expected.detach())


def test_a_weight_at_run_time(folder: Path) -> None:
    model = net()
    onnxplug.export(model, (X,), "open.onnx", keep_initializers_as_inputs=True, external_data=False)
    bias = np.array([9.0, 8.0, 7.0], np.float32)
    result = onnxruntime.InferenceSession("open.onnx").run(None, {"x": X.numpy(), "linear.bias": bias})[0]
    expected = torch.func.functional_call(model, {"linear.bias": torch.from_numpy(bias)}, (X,))
    torch.testing.assert_close(torch.from_numpy(result), expected.detach())


def test_verification_goes_before_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(g: Any, node: Any) -> Any:
        return g.op.Neg(node.args[0])

    with pytest.raises(VerificationError):
        onnxplug.export(
            nn.ReLU(), (X,), "m.onnx", verify=True, custom_translation_table={torch.ops.aten.relu.default: wrong}
        )
    assert files(folder) == []


# -- names and sizes ---------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.cat([x, y]), x.nonzero()


def dims(value: Any) -> list[Any]:
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape]


@pytest.mark.parametrize("dynamo", [True, False])
def test_dynamic_axes_name_sizes(folder: Path, dynamo: bool) -> None:
    names: dict[str, Any] = {"input_names": ["a", "b"], "output_names": ["both", "places"]}
    axes = {"b": {-2: "m"}, "a": {0: "n"}, "places": {0: "found"}}
    onnxplug.export(Two(), (X, X[:1]), "m.onnx", dynamic_axes=axes, dynamo=dynamo, **names)
    graph = onnx.load("m.onnx").graph
    results = [
        [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*graph.input, *graph.output)
    ]
    assert [results[0], results[1], results[3]] == [["n", 4], ["m", 4], ["found", 2]]
    session = onnxruntime.InferenceSession("m.onnx")
    for rows, more in ((2, 1), (3, 5), (1, 1)):
        x, y = torch.randn(rows, 4).relu(), torch.randn(more, 4)
        for result, expected in zip(session.run(None, {"a": x.numpy(), "b": y.numpy()}), Two()(x, y), strict=True):
            torch.testing.assert_close(torch.from_numpy(result), expected)


class Parts(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Pair:
    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.one, self.other = one, other


pytree.register_pytree_node(
    Pair,
    lambda p: ([p.one, p.other], None),
    lambda parts, _: Pair(*parts),
    flatten_with_keys_fn=lambda p: ([(pytree.GetAttrKey(name), getattr(p, name)) for name in ("one", "other")], None),
)


@pytest.mark.parametrize("dynamo", [True, False])
def test_dynamic_axes_of_the_parts_of_inputs(folder: Path, dynamo: bool) -> None:
    class Model(nn.Module):
        def forward(self, parts: Parts, pair: Pair, table: dict[str, Any]) -> Any:
            return parts.left + pair.one, parts.right * 2, pair.other - 1, table["x"][0] * 3

    a, b, c, d = torch.ones(2, 4), torch.ones(3), torch.ones(5, 6), torch.ones(7)
    inputs = {"parts": Parts(a, b), "pair": Pair(a, c), "table": {"x": [d]}}
    names = ["left", "right", "one", "other", "x"]
    axes = {"other": {1: "o"}, "right": {0: "r"}, "left": {0: "n"}, "one": {0: "n"}, "x": [0]}
    onnxplug.export(Model(), (), "m.onnx", kwargs=inputs, input_names=names, dynamic_axes=axes, dynamo=dynamo)
    session = onnxruntime.InferenceSession("m.onnx")
    assert {value.name: value.shape for value in session.get_inputs()} == {
        "left": ["n", 4],
        "right": ["r"],
        "one": ["n", 4],
        "other": [5, "o"],
        "x": ["x_dynamic_axes_1"],
    }
    values = dict(zip(names, map(torch.randn, ((6, 4), (1,), (6, 4), (5, 2), (9,))), strict=True))
    expected = [values["left"] + values["one"], values["right"] * 2, values["other"] - 1, values["x"] * 3]
    outcome = session.run(None, {name: value.numpy() for name, value in values.items()})
    for result, wanted in zip(outcome, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(result), wanted)


def test_names_of_dynamic_axes_are_labels() -> None:
    """One name for two sizes, as the exporter of old takes it."""
    options: dict[str, Any] = {"input_names": ["a", "b"], "dynamic_axes": {"a": {0: "n"}, "b": {0: "n"}}}
    with pytest.warns(ExportWarning, match="dimensions of the sizes 2 and 1 'n'; the second is 'n_2'"):
        program = exported(Two(), (X, X[:1]), **options)
    assert [dims(v)[0] for v in program.model.graph.inputs] == ["n", "n_2"]


def test_dynamic_axes_of_names_that_nothing_has() -> None:
    axes = {"xx": {0: "n"}}
    with pytest.raises(UsageError, match="dynamic_axes names 'xx', but the inputs and outputs are a, x"):
        onnxplug.export(net(), (X,), input_names=["a"], dynamic_axes=axes)
    with pytest.warns(ExportWarning, match="it is left out"):
        onnxplug.export(net(), (X,), io.BytesIO(), input_names=["a"], dynamic_axes=axes, dynamo=False)  # type: ignore[arg-type]
    # Without names of inputs torch goes by the order.
    assert dims(exported(net(), (X,), dynamic_axes=axes).model.graph.inputs[0]) == ["n", 4]


def test_dynamic_axes_beside_dynamic_shapes() -> None:
    with pytest.warns(ExportWarning, match="dynamic_axes is not looked at"):
        program = exported(net(), (X,), dynamic_shapes=({0: "rows"},), dynamic_axes={"x": {0: "n"}})
    assert dims(program.model.graph.inputs[0]) == ["rows", 4]


def test_an_exported_program_gets_names() -> None:
    exported_program = torch.export.export(net(), (X,), dynamic_shapes=({0: Dim.DYNAMIC},))
    program = exported(exported_program, (), dynamic_shapes={"x": {0: "rows"}}, verify=True)
    assert dims(program.model.graph.inputs[0]) == [*dims(program.model.graph.outputs[0])[:1], 4] == ["rows", 4]
    same(program, net(), torch.randn(5, 4))
    two = torch.export.export(Two(), (X, torch.ones(3, 4)), dynamic_shapes=({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}))
    program = exported(two, (), dynamic_shapes={"y": {0: "m"}, "x": (Dim("n"), None)})
    assert [dims(v) for v in program.model.graph.inputs] == [["n", 4], ["m", 4]]
    with pytest.raises(UsageError, match="names 'z', but the inputs of the ExportedProgram are x, y"):
        onnxplug.export(two, dynamic_shapes={"z": {0: "m"}})
    with pytest.raises(UsageError, match="axis 1 of x 'columns', which the ExportedProgram fixes at 4"):
        onnxplug.export(exported_program, dynamic_shapes={"x": {1: "columns"}})
    with pytest.raises(UsageError, match="2 entries for the 1 inputs"):
        onnxplug.export(exported_program, dynamic_shapes=({0: "rows"}, None))


@pytest.mark.parametrize("scale", [torch.ones(3, 4), [torch.ones(3, 4)]])
def test_an_input_of_an_exported_program_whose_name_begins_like_another(scale: Any) -> None:
    class Scaled(nn.Module):
        def forward(self, x_scale: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sum() * (x_scale if isinstance(x_scale, torch.Tensor) else x_scale[0])

    axes = {0: Dim.DYNAMIC}
    shapes = {"x_scale": axes if isinstance(scale, torch.Tensor) else [axes], "x": axes}
    two = torch.export.export(Scaled(), (scale, torch.ones(5)), dynamic_shapes=shapes)
    named = {"x": {0: "items"}, "x_scale": {0: "rows"} if isinstance(scale, torch.Tensor) else [{0: "rows"}]}
    program = exported(two, (), dynamic_shapes=named)
    assert [dims(v) for v in program.model.graph.inputs] == [["rows", 4], ["items"]]


def test_more_names_than_values() -> None:
    with pytest.warns(ExportWarning, match="input_names has 1 more names than the graph has values: b"):
        program = exported(net(), (X,), input_names=["a", "b"])
    assert [v.name for v in program.model.graph.inputs] == ["a"]
    with pytest.raises(UsageError, match="output_names has 2 names for 1 values"):
        onnxplug.export(net(), (X,), io.BytesIO(), output_names=["a", "b"], dynamo=False)  # type: ignore[arg-type]
    names = ["a", *(f"w{i}" for i in range(9))]
    with pytest.raises(UsageError, match="9 names more than the model has inputs, and it has 7 weights"):
        onnxplug.export(net(), (X,), io.BytesIO(), input_names=names, dynamo=False)  # type: ignore[arg-type]


def test_names_of_weights(folder: Path) -> None:
    model = Relus()
    model.unused = nn.Parameter(torch.ones(2))
    with pytest.warns(ExportWarning, match="in another form, or not at all: second"):
        onnxplug.export(model, (X,), "m.onnx", input_names=["x", "first", "second"], dynamo=False)
    assert "first" in {tensor.name for tensor in onnx.load("m.onnx").graph.initializer}
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    onnxplug.export(tied, (X,), "m.onnx", input_names=["x", "both"], dynamo=False)
    assert [tensor.name for tensor in onnx.load("m.onnx").graph.initializer] == ["both"]
    with pytest.raises(UsageError, match="'relu', which is the name of another value"):
        onnxplug.export(Relus(), (X,), "m.onnx", input_names=["x", "relu"], dynamo=False)


class Relus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).relu().cumsum(0)


def test_a_size_that_the_model_fixes(folder: Path) -> None:
    """The exporter of old writes a model that is wrong at other sizes."""
    for dynamo in (True, False):
        with pytest.raises(FixedDimensionError, match=r"declared dynamic, but aten::linear at .* fixes it at 4"):
            onnxplug.export(net(), (X,), "m.onnx", dynamic_axes={"x": {1: "width"}}, dynamo=dynamo)
    assert files(folder) == []


# -- modes -------------------------------------------------------------------------------------------------------------


def operators(program: Any) -> list[str]:
    return [node.op_type for node in program.model.graph]


@pytest.mark.parametrize(
    ("mode", "before", "drops"),
    [
        (TrainingMode.EVAL, True, False),
        (TrainingMode.TRAINING, False, True),
        (TrainingMode.PRESERVE, True, True),
        (TrainingMode.PRESERVE, False, False),
    ],
)
def test_training_of_old(folder: Path, mode: TrainingMode, before: bool, drops: bool) -> None:
    model = Net().train(before)
    model.norm.train(not before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        onnxplug.export(model, (X,), "m.onnx", dynamo=False, training=mode)
    loaded = {node.op_type for node in onnx.load("m.onnx").graph.node}
    assert bool(loaded & {"Dropout", "RandomUniformLike", "RandomUniform", "Bernoulli"}) == drops
    assert (model.training, model.norm.training, model.drop.training) == (before, not before, before)


def test_written_buffers_are_left_out() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x + self.count

    assert len(exported(Counter(), (X,)).model.graph.outputs) == 1


def test_functions_of_modules(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        every = exported(model.append(nn.Identity()), (X,), export_modules_as_functions=True)
    assert {name for _, name, _ in every.model.functions} == {
        "Linear",
        "Sequential",
        "Sequential_1",
        "ReLU",
    }
    assert len(every.model.graph) == 1
    some = exported(model, (X,), export_modules_as_functions={nn.ReLU, nn.Conv2d})
    assert operators(some).count("ReLU") == 1
    assert [name for _, name, _ in some.model.functions] == ["ReLU"]
    for program in (every, some):
        same(program, model, X)
        same(program, model, torch.randn(2, 4))
    with pytest.warns(ExportWarning, match="no module of the classes"):
        onnxplug.export(model, (X,), export_modules_as_functions={nn.Conv2d})


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_model_knows_that_it_is_exported(dynamo: bool) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if torch.onnx.is_in_onnx_export() else x * 3

    buffer = io.BytesIO()
    onnxplug.export(Branches(), (X,), buffer, dynamo=dynamo)  # type: ignore[arg-type]
    assert not torch.onnx.is_in_onnx_export()
    (result,) = onnxruntime.InferenceSession(buffer.getvalue()).run(None, {"x": X.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), X * 2)


def test_optimize_and_do_constant_folding() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).transpose(0, 1) + torch.ones(4) * 2

    counts = [
        len(exported(model, (X,), **options).model.graph)
        for options in ({}, {"optimize": False}, {"do_constant_folding": False})
    ]
    assert counts[0] < counts[1] == counts[2]


# -- translations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.long
def test_operators_that_nothing_translates(folder: Path, dynamo: bool) -> None:
    for kind in (OperatorExportTypes.ONNX, OperatorExportTypes.ONNX_ATEN):
        with pytest.raises(MissingRuleError, match="inplace::cap"):
            onnxplug.export(Capped(), (X,), "no.onnx", operator_export_type=kind, dynamo=dynamo)
    kept = {
        OperatorExportTypes.ONNX_FALLTHROUGH: ("inplace", "cap"),
        OperatorExportTypes.ONNX_ATEN_FALLBACK: ("org.pytorch.aten", "ATen"),
    }
    for kind, (domain, name) in kept.items():
        onnxplug.export(Capped(), (X,), "kept.onnx", operator_export_type=kind, dynamo=dynamo)
        model = onnx.load("kept.onnx")
        node = model.graph.node[0]
        assert (node.domain, node.op_type, len(node.input)) == (domain, name, 3)
        assert domain in {item.domain for item in model.opset_import}
        constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        assert [constants[name].tolist() for name in node.input[1:]] == [1.5, [0, 1]]
        assert [node.op_type for node in model.graph.node][1:] == ["Add"]
    assert files(folder) == ["kept.onnx"]


@pytest.fixture
def registered() -> Iterator[None]:
    def twice(g: Any, x: Any) -> Any:
        return g.op("com.inplace::Twice", x)

    def relu(g: Any, x: Any) -> Any:
        return g.op("Max", x, g.op("Constant", value_t=torch.tensor(0.0)))

    torch.onnx.register_custom_op_symbolic("inplace::twice", twice, 9)
    torch.onnx.register_custom_op_symbolic("aten::relu", relu, 9)
    yield
    torch.onnx.unregister_custom_op_symbolic("inplace::twice", 9)
    torch.onnx.unregister_custom_op_symbolic("aten::relu", 9)


@pytest.mark.parametrize("dynamo", [True, False])
def test_registered_symbolics(registered: None, folder: Path, dynamo: bool) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.inplace.twice(x.relu())
        return result

    for versions, version in ((None, 1), ({"com.inplace": 4, "com.unused": 2}, 4)):
        onnxplug.export(model, (X,), "m.onnx", custom_opsets=versions, dynamo=dynamo)  # type: ignore[arg-type]
        loaded = onnx.load("m.onnx")
        assert [node.op_type for node in loaded.graph.node] == ["Max", "Twice"]
        assert {item.domain: item.version for item in loaded.opset_import} == {"": 21, "com.inplace": version}


def test_a_plugins_rule_goes_before_a_librarys_registration(registered: None) -> None:
    def plugins(g: Any, node: Any) -> Any:
        return g.op.Abs(node.args[0])

    assert {r.op for r in registered_rules(OnnxRegistry((), (), ()), {})} >= {"aten::relu", "inplace::twice"}
    table = OnnxRegistry((), (Rule("inplace::twice.default", plugins),), ())
    assert "inplace::twice" not in {rule.op for rule in registered_rules(table, {})}
    assert "aten::relu" in {rule.op for rule in registered_rules(table, {})}


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, False), ({"autograd_inlining": False}, True), ({"dynamo": False}, True)],
)
def test_symbolics_of_autograd_functions(folder: Path, options: dict[str, Any], kept: bool) -> None:
    onnxplug.export(Tripled(), (X,), "m.onnx", custom_opsets={"com.inplace": 3}, **options)
    model = onnx.load("m.onnx")
    assert [node.op_type for node in model.graph.node] == ["Triple" if kept else "Mul", "Add"]
    assert not kept or {item.domain: item.version for item in model.opset_import}["com.inplace"] == 3
    assert Triple.apply(X).equal(X * 3)
    assert "Triple" in {rule.name.rpartition(":")[2].partition(".")[0] for rule in autograd_rules({})}


def test_a_table(folder: Path) -> None:
    from onnxscript import opset18 as op

    def onnx_relu(x: Any) -> Any:
        return op.Max(x, op.Constant(value_float=0.0))

    program = exported(nn.ReLU(), (X,), custom_translation_table={torch.ops.aten.relu.default: onnx_relu}, verify=True)
    assert operators(program)[-1] == "Max"


# -- the returned program ----------------------------------------------------------------------------------------------


@later
@pytest.mark.long
def test_methods_of_the_result(folder: Path) -> None:
    model = net()
    program = onnxplug.export(model, (X,), dynamic_shapes=({0: "n"},))
    assert isinstance(program, torch.onnx.ONNXProgram)
    for x in (X, torch.randn(5, 4)):
        same(program, model, x)
        torch.testing.assert_close(program.call_reference(x)[0], model(x))
        (inner,) = program.compute_values(["linear"], (x,))
        torch.testing.assert_close(inner, model.linear(x))
    assert isinstance(program.model_proto, onnx.ModelProto)
    onnx.checker.check_model(program.model_proto)
    program.initialize_inference_session()
    same(program, model, X)
    program.release()
    program.apply_weights({"linear.bias": torch.ones(3)})
    changed = torch.func.functional_call(model, {"linear.bias": torch.ones(3)}, (X,))
    torch.testing.assert_close(program(X)[0], changed)
    program.optimize()
    program.rename_axes({"n": "rows"})
    torch.testing.assert_close(program(X)[0], changed)
    program.save("m.onnx", keep_initializers_as_inputs=True)
    assert onnx.load("m.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_param == "rows"
    assert program.exported_program is not None


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failed_export_leaves_the_file_that_was_there(folder: Path) -> None:
    for path in ("m.onnx", "m.onnx.data"):
        (folder / path).write_bytes(b"old")

    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else x.flip(0)

    with pytest.raises(CaptureError):
        onnxplug.export(Breaks(), (X,), "m.onnx")
    assert (folder / "m.onnx").read_bytes() == (folder / "m.onnx.data").read_bytes() == b"old"

"""``metadata=none|short|full``: what models state of their origin, and the names of their nodes."""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from torch._higher_order_ops import scan, while_loop

import onnxplug
from onnxplug import Metadata, OnnxProgram, Rule, UsageError
from onnxplug.build.provenance import MODULE_CALL
from onnxplug.build.scope import nodes_of
from onnxplug.cli.app import run
from onnxplug.run.save import to_bytes
from tests.support.check import check

X = torch.randn(3, 4)
BATCH = torch.export.Dim("batch")
ROOT = Path(__file__).resolve().parents[1]

NODE_KEYS = {
    "namespace",
    "pkg.torch.onnx.class_hierarchy",
    "pkg.torch.onnx.name_scopes",
    "pkg.torch.onnx.fx_node",
    "pkg.torch.onnx.stack_trace",
}
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
PERSISTENT = "pkg.torch.export.graph_signature.InputSpec.persistent"
OUTPUT_KIND = "pkg.torch.export.graph_signature.OutputSpec.kind"
ORIGINAL = "pkg.torch.onnx.original_node_name"
SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
RANGES = "pkg.torch.export.ExportedProgram.range_constraints"
PACKAGE = "pkg.onnxplug.package"
REWRITE = "pkg.onnxplug.rewrite"
REPLACED = "pkg.onnxplug.rewritten_from"


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.register_buffer("mask", torch.arange(4.0))
        self.register_buffer("shift", torch.full((4,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.lin(x)))
        x = torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos(), (x,))
        return x * self.mask + self.shift


class Model(torch.nn.Module):
    """Modules in modules, a branch, a size that is computed, buffers, a constant, a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.register_buffer("seen", torch.zeros(()))
        self.table = torch.arange(200.0).reshape(50, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        self.seen.add_(1)
        return x.reshape(-1, 2) + y.reshape(-1, 2), x.shape[0] * 3, x * self.table.sum(0)


def softcap_rule() -> Rule:
    """A rule that defines a function."""

    def convert(g: Any, node: Any) -> Any:
        return g.function("acme", "Softcap", lambda x: g.op.Mul(g.op.Tanh(g.op.Div(x, 2.0)), 2.0), [node.args[0]])

    return Rule("aten::tanh", convert)


class Repeated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(
            *[torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True) for _ in range(3)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


#: Models, arguments and options of exports, which make nodes in every way.
MODELS: dict[str, Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "modules": lambda: (Model().eval(), (X, X), {"dynamic_shapes": ({0: BATCH}, {0: BATCH})}),
    "unoptimised": lambda: (Model().eval(), (X, X), {"dynamic_shapes": ({0: BATCH}, {0: BATCH}), "optimize": False}),
    "checks": lambda: (
        lambda x: x.reshape(2, -1).sum(0),
        (torch.randn(4, 4),),
        {"dynamic_shapes": ({0: 2 * torch.export.Dim("half", min=2, max=9)},), "checks": True},
    ),
    "functions": lambda: (Repeated().eval(), (torch.randn(2, 3, 4),), {"functions": True}),
    "a rule's function": lambda: (
        lambda x: (x.tanh() + 1).tanh(),
        (X,),
        {"rules": [softcap_rule()], "opset_version": {"": 21, "acme": 1}},
    ),
    "loop": lambda: (
        lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * x.shape[0]), (torch.tensor(0), x))[1].exp(),
        (X,),
        {"dynamic_shapes": ({0: BATCH},)},
    ),
    "scan": lambda: (lambda x: scan(lambda c, y: (c + y, c * y), torch.zeros(4), x)[1].exp(), (X,), {}),
    "decomposition": lambda: (lambda x: torch.ops.aten.addr(x, x[:, 0], x[0]).exp(), (X,), {}),
    "complex": lambda: (lambda x: torch.fft.rfft(torch.complex(x, x)[:, :4].real) * 1j, (X,), {}),
    "rewritten": lambda: (lambda x: (x @ x.T) @ torch.ones(3, 5) + torch.arange(5.0), (X,), {}),
    "data-dependent": lambda: (lambda x: x[x > 0].reshape(-1, 1) * 2, (X,), {}),
    "an output twice": lambda: (lambda x: (y := x.exp(), y, x), (X,), {}),
    "no element": lambda: (lambda x: (x[:0].exp(), x.exp()), (X,), {"dynamic_shapes": ({0: BATCH},)}),
    "in place": lambda: (lambda x: x.clone().index_fill_(0, torch.tensor([0]), 2.0), (X,), {}),
    "TorchScript": lambda: (torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())), (X,), {}),
}


@functools.cache
def exported(name: str, metadata: Any = "full") -> OnnxProgram:
    """An export of a model; with other metadata it is made of the program that was captured before."""
    torch.manual_seed(0)
    model, args, options = MODELS[name]()
    if metadata != "full" and name != "checks":
        model, args = exported(name).exported_program, ()
        options.pop("dynamic_shapes", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return onnxplug.to_onnx(model, args, metadata=metadata, **options)


def graphs(model: ir.Model) -> list[ir.Graph]:
    return [model.graph, *(function.graph for function in model.functions.values())]


# -- every node ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["short", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_every_node_says_where_it_comes_from(name: str, level: str) -> None:
    model = exported(name, level).model
    wanted = {*NODE_KEYS, PACKAGE} if level == "full" else {"namespace"}
    for graph in graphs(model):
        for node in nodes_of(graph):
            metadata = node.metadata_props
            assert wanted <= metadata.keys(), (node.name, node.op_type, metadata)
            assert metadata["namespace"] != "onnxplug: graph", (node.name, node.op_type)
            assert MODULE_CALL not in metadata
            assert all(isinstance(text, str) for text in metadata.values())
            if level == "short":
                assert metadata.keys() <= {"namespace", "pkg.onnxplug.source", REWRITE}, metadata


@pytest.mark.parametrize("name", MODELS)
def test_nodes_are_called_after_their_modules(name: str) -> None:
    model = exported(name, "full").model
    for graph in graphs(model):
        names = [str(node.name) for node in nodes_of(graph)]
        assert len(set(names)) == len(names)
        for node in nodes_of(graph):
            if str(node.name).startswith("check"):
                continue
            place, _, last = str(node.name).rpartition("/")
            assert re.fullmatch(rf"{node.op_type}(_\d+)?", last)
            *scopes, _ = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "['']")) or [""]
            if node.domain != "onnxplug.modules":
                assert place == (scopes[-1].replace(".", "/") if scopes else ""), node.metadata_props


def test_names_of_a_model() -> None:
    graph = exported("modules", "short").model.graph
    names = {node.name for node in nodes_of(graph)}
    assert {"blocks/0/lin/Gemm", "blocks/1/lin/Gemm", "blocks/0/norm/LayerNormalization", "blocks/1/If"} <= names
    assert {"blocks/0/Sin", "blocks/1/Cos"} <= names  # nodes within branches


def test_names_do_not_depend_on_metadata() -> None:
    pieces = [[n.name for n in nodes_of(exported("modules", level).model.graph)] for level in ("none", "short", "full")]
    assert pieces[0] == pieces[1] == pieces[2]


def test_equal_exports_say_the_same() -> None:
    """Nothing of this process is in the metadata: no address of a function."""

    def largest(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.new_ones(torch.sym_max(x.shape[0], y.shape[0])).sum() + torch.sym_min(x.shape[0], y.shape[0])

    rows = {"x": {0: torch.export.Dim("a")}, "y": {0: torch.export.Dim("b")}}
    program = onnxplug.to_onnx(largest, (X, X), dynamic_shapes=rows, metadata="full")
    text = str(program.model_proto)
    assert "sym_max" in text
    assert not re.search(r" at 0x[0-9a-f]{6}", text)


def test_a_rule_is_named_with_its_package_and_version() -> None:
    model = exported("a rule's function", "full").model
    (function,) = model.functions.values()
    for node in function:
        assert node.metadata_props["pkg.onnxplug.rule"].endswith("softcap_rule.<locals>.convert")
        assert node.metadata_props["pkg.onnxplug.package"] == "rules of the call"
        assert node.metadata_props["namespace"] == "Softcap: aten.tanh.default"
    add = next(node for node in model.graph if node.op_type == "Add")
    assert add.metadata_props["pkg.onnxplug.rule"] == "onnxplug.converters.arithmetic:add"
    assert add.metadata_props["pkg.onnxplug.package"] == f"onnxplug {onnxplug.__version__}"


def test_a_decomposition_names_the_operator() -> None:
    nodes = list(exported("decomposition", "full").model.graph)
    assert any("aten::addr" in node.metadata_props.get("pkg.onnxplug.decomposed", "") for node in nodes)
    assert all("test_metadata.py:" in node.metadata_props["pkg.onnxplug.source"] for node in nodes)


def test_a_rewritten_node_names_the_nodes_that_it_replaces() -> None:
    for level in ("short", "full"):
        graph = exported("rewritten", level).model.graph
        (gemm,) = [node for node in graph if node.op_type == "Gemm"]
        metadata = gemm.metadata_props
        assert metadata[REWRITE] == "gemm_from_matmul_add"
        if level == "full":
            replaced = ast.literal_eval(metadata[REPLACED])
            assert [title.rpartition(": ")[2] for title in replaced] == ["Add", "MatMul"]
            assert "Model" not in metadata["namespace"]
        others = [node for node in graph if node is not gemm]
        assert others
        assert not any(REWRITE in node.metadata_props for node in others)


# -- as torch.onnx writes them -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both() -> tuple[ir.Model, OnnxProgram]:
    """One model by torch.onnx, without its optimiser, and by onnxplug."""
    model, args, options = MODELS["modules"]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, args, dynamo=True, optimize=False, verbose=False, **options)
    assert program is not None
    return program.model, exported("modules")


def _by_operator(graph: ir.Graph) -> dict[tuple[str, str], list[Mapping[str, str]]]:
    """The metadata of the nodes of each operator of torch in each module; torch names no modules within branches."""
    results: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for node in graph:
        metadata = node.metadata_props
        if "namespace" in metadata:
            scopes, _, last = metadata["namespace"].rpartition("/")
            results.setdefault((scopes, last.rpartition(": ")[2]), []).append(metadata)
    return results


def test_nodes_have_the_keys_that_torch_writes(both: tuple[ir.Model, OnnxProgram]) -> None:
    theirs, ours = both[0].graph, both[1].model.graph
    keys = {key for node in nodes_of(theirs) for key in node.metadata_props}
    assert keys == NODE_KEYS  # torch writes these, and this test knows all of them
    assert all(keys <= node.metadata_props.keys() for node in nodes_of(ours))
    expected, result = _by_operator(theirs), _by_operator(ours)
    # torch decomposes the program first and makes other sizes: nodes that it leaves as captured are compared.
    common = [key for key in expected.keys() & result.keys() if key[0]]
    assert {operator for _, operator in common} >= {"aten.relu.default", "aten.mul.Tensor", "aten.add.Tensor", "cond"}
    assert {scopes.rpartition("/")[2].partition(":")[0] for scopes, _ in common} >= {"blocks.0", "blocks.1"}
    target = re.compile(r"%\w+ : \[num_users=\d+\] = call_function\[target=([\w.]+)\]\(args = .*kwargs = .*\)")
    for key in common:
        (first, *_), (mine, *_) = expected[key], result[key]
        for name in ("pkg.torch.onnx.class_hierarchy", "pkg.torch.onnx.name_scopes"):
            theirs_list, ours_list = ast.literal_eval(first[name]), ast.literal_eval(mine[name])
            last = -1 if name.endswith("name_scopes") else None  # FX nodes have other names after a decomposition
            assert ours_list[:last] == theirs_list[:last]
            assert len(ours_list) == len(theirs_list)
        targets = [target.match(text["pkg.torch.onnx.fx_node"]) for text in (first, mine)]
        assert all(targets)
        assert len({match[1] for match in targets if match is not None}) == 1
        traces = {text["pkg.torch.onnx.stack_trace"] for text in result[key]}
        for text in expected[key]:
            trace = text["pkg.torch.onnx.stack_trace"].replace(__file__, "tests/test_metadata.py")
            assert re.sub(r"(<eval_with_key>)\.\d+", r"\1", re.sub(r'"[^"]*/site-packages/', '"', trace)) in traces


def test_the_graph_has_the_keys_that_torch_writes(both: tuple[ir.Model, OnnxProgram]) -> None:
    theirs, program = both
    metadata = program.model.graph.metadata_props
    assert theirs.graph.metadata_props.keys() == {SIGNATURE, RANGES}
    of_onnxplug = {"pkg.onnxplug.exported_program", "onnxplug.target", "onnxplug.torch_version"}
    assert {*metadata} == {SIGNATURE, RANGES, *of_onnxplug}
    assert not program.model.metadata_props  # which ONNX Runtime's QNN preprocessing fails on
    assert program.exported_program is not None
    assert metadata[SIGNATURE] == str(program.exported_program.graph_signature)
    assert metadata[RANGES] == str(program.exported_program.range_constraints)
    # torch's decomposed program has its inputs in the same words; names of results differ.
    inputs = re.compile(r"# inputs\n(.*)\n\n# outputs", re.DOTALL)
    mine, torchs = inputs.search(metadata[SIGNATURE]), inputs.search(theirs.graph.metadata_props[SIGNATURE])
    assert mine is not None
    assert torchs is not None
    assert set(mine[1].splitlines()) == set(torchs[1].splitlines())
    ranges = [re.sub(r"s\d+", "s", text[RANGES]) for text in (metadata, theirs.graph.metadata_props)]
    assert ranges[0] == ranges[1]


def test_values_have_the_keys_that_torch_writes(both: tuple[ir.Model, OnnxProgram]) -> None:
    theirs, ours = both[0].graph, both[1].model.graph
    for mine, torchs in zip(ours.inputs, theirs.inputs, strict=True):
        assert torchs.metadata_props.items() <= mine.metadata_props.items()
    names = [name for name in theirs.initializers if name in ours.initializers]
    assert {"blocks.0.lin.weight", "blocks.1.mask", "blocks.0.shift"} <= set(names)
    for name in names:
        metadata = theirs.initializers[name].metadata_props
        assert metadata.keys() == {KIND, PERSISTENT, ORIGINAL}
        assert ours.initializers[name].metadata_props == metadata
    # The outputs of written buffers come first in torch's program, last in ours.
    kinds = sorted(value.metadata_props[OUTPUT_KIND] for value in theirs.outputs if OUTPUT_KIND in value.metadata_props)
    assert kinds == ["USER_OUTPUT"] * 3
    results = [value.metadata_props[OUTPUT_KIND] for value in ours.outputs]
    assert results == ["USER_OUTPUT"] * 3 + ["BUFFER_MUTATION"]


def test_the_program_is_there(both: tuple[ir.Model, OnnxProgram]) -> None:
    program = both[1].exported_program
    assert program is not None
    text = both[1].model.graph.metadata_props["pkg.onnxplug.exported_program"]
    lines = text.splitlines()
    nodes = [node for node in program.graph.nodes if node.op != "output"]
    assert len(lines) == 1 + len(nodes)
    for line, node in zip(lines[1:], nodes, strict=True):
        assert line.strip() == re.sub(r" : \w+(\[\S*\])?(?= : \[num_users)", "", str(node.format_node()))


def test_kinds_and_persistence_of_derived_weights_and_constants() -> None:
    values = exported("modules", "full").model.graph.initializers
    kinds = {name: (v.metadata_props.get(KIND), v.metadata_props.get(PERSISTENT)) for name, v in values.items()}
    assert kinds["blocks.0.lin.weight"] == ("PARAMETER", "None")
    assert kinds["blocks.0.mask"] == ("BUFFER", "True")
    assert kinds["blocks.0.shift"] == ("BUFFER", "False")
    assert ("CONSTANT_TENSOR", "None") in kinds.values()
    transposed = onnxplug.to_onnx(
        torch.nn.Linear(4, 2, bias=False), (torch.randn(2, 3, 4),), metadata="full"
    ).model.graph.initializers
    (derived,) = [v for name, v in transposed.items() if name.startswith("weight")]
    assert derived.name != "weight"
    assert derived.metadata_props[KIND] == "PARAMETER"
    assert derived.metadata_props[ORIGINAL] == "p_weight"


# -- paths ---------------------------------------------------------------------------------------------------------------

#: The beginnings of all whole paths of this machine.
PLACES = (str(ROOT), str(Path(torch.__file__).parents[1]), str(Path.home()), "/tmp/")


@pytest.mark.parametrize("level", ["short", "full"])
@pytest.mark.parametrize("name", ["modules", "functions", "decomposition", "TorchScript", "loop"])
def test_no_whole_path_is_in_the_file(name: str, level: str) -> None:
    text = exported(name, level).model_proto.SerializeToString().decode("latin-1")
    assert "namespace" in text
    assert [place for place in PLACES if place in text] == []
    assert 'File "/' not in text


def test_whole_paths_on_request() -> None:
    program = exported("modules", Metadata("full", absolute_paths=True))
    node = next(n for n in program.model.graph if n.op_type == "LayerNormalization")
    assert node.metadata_props["pkg.onnxplug.source"].startswith(f"{__file__}:")
    assert f'File "{__file__}"' in node.metadata_props["pkg.torch.onnx.stack_trace"]
    relative = next(n for n in exported("modules", "short").model.graph if n.op_type == "LayerNormalization")
    assert relative.metadata_props["pkg.onnxplug.source"].startswith("tests/test_metadata.py:")


# -- nothing -------------------------------------------------------------------------------------------------------------


def _messages(proto: Any) -> Iterator[Any]:
    """Every message within a message, itself first."""
    yield proto
    for field, value in proto.ListFields():
        if field.message_type is not None:
            for item in value if field.is_repeated else [value]:
                yield from _messages(item)


@pytest.mark.parametrize("name", MODELS)
def test_none_writes_nothing(name: str) -> None:
    proto = exported(name, "none").model_proto
    for message in _messages(proto):
        assert not getattr(message, "metadata_props", ()), message
        assert not getattr(message, "doc_string", ""), message
    assert "tests" not in re.sub(r"blocks", "", str([n.name for n in proto.graph.node]))


def test_a_portable_model_without_metadata_is_run_as_a_portable_model() -> None:
    program = onnxplug.to_onnx(torch.nn.Linear(4, 2), (X,), target=None, metadata="none", verify=True)
    assert not program.model.graph.metadata_props
    assert program(X)[0].shape == (3, 2)


# -- what lasts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("external_data", [False, True])
@pytest.mark.parametrize("name", ["modules", "functions"])
def test_metadata_are_in_the_file(tmp_path: Path, name: str, external_data: bool) -> None:
    program = exported(name, "full")
    program.save(tmp_path / "model.onnx", external_data=external_data)
    onnx.checker.check_model(tmp_path / "model.onnx")
    loaded = ir.load(tmp_path / "model.onnx")
    for mine, stored in zip(graphs(program.model), graphs(loaded), strict=True):
        assert [n.metadata_props for n in nodes_of(stored)] == [n.metadata_props for n in nodes_of(mine)]
        assert [n.name for n in nodes_of(stored)] == [n.name for n in nodes_of(mine)]
        assert stored.metadata_props == mine.metadata_props
    for value in (*program.model.graph.inputs, *program.model.graph.outputs):
        assert value.metadata_props
    for name_of, value in program.model.graph.initializers.items():
        assert loaded.graph.initializers[name_of].metadata_props == value.metadata_props
    assert loaded.metadata_props == program.model.metadata_props


def test_metadata_outlast_other_weights(tmp_path: Path) -> None:
    program = onnxplug.to_onnx(torch.nn.Linear(4, 2), (X,), metadata="full")
    before = {name: dict(v.metadata_props) for name, v in program.model.graph.initializers.items()}
    program.apply_weights({"weight": torch.ones(2, 4), "bias": torch.zeros(2)})
    assert {name: dict(v.metadata_props) for name, v in program.model.graph.initializers.items()} == before
    assert before["weight"][KIND] == "PARAMETER"
    assert all("namespace" in node.metadata_props for node in ir.from_proto(program.model_proto).graph)


def test_pieces(tmp_path: Path) -> None:
    for level, keys in (("none", set()), ("full", NODE_KEYS)):
        chain = onnxplug.to_onnx(
            Model().eval(), (X, X), tmp_path / level, pieces=["blocks.0", "blocks.1"], metadata=level
        )
        for program in chain.programs.values():
            for node in nodes_of(program.model.graph):
                assert keys <= node.metadata_props.keys()
                assert bool(node.metadata_props) == bool(keys)


@pytest.mark.parametrize("level", ["none", "short", "full"])
def test_the_numbers_are_those_of_eager(level: str) -> None:
    check(Block().eval(), X, others=[(torch.randn(5, 4) * -5,)], dynamic=({0: BATCH},), metadata=level)


def test_size(both: tuple[ir.Model, OnnxProgram]) -> None:
    """The bytes of metadata for each node: the default is a fraction of all."""
    sizes = {level: len(to_bytes(exported("modules", level).model)) for level in ("none", "short", "full")}
    count = len(list(nodes_of(both[1].model.graph)))
    assert 0 < (sizes["short"] - sizes["none"]) / count < 250
    assert sizes["full"] - sizes["none"] > 3 * (sizes["short"] - sizes["none"])
    assert (sizes["full"] - sizes["none"]) / count < 3000


# -- asking for it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["long", "", "FULL", 3, True, ["full"], object()])
def test_wrong_levels_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"metadata= takes 'none', 'short' or 'full', not .*\n.*full: all"):
        onnxplug.to_onnx(torch.nn.Linear(4, 2), (X,), metadata=wrong)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="metadata= takes"):
        Metadata("all")
    with pytest.raises(UsageError, match="absolute_paths takes True or False"):
        Metadata("full", absolute_paths="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(("message", "level"), [("none", "none"), ("full", "full"), ("", "short")])
def test_the_default_level_from_the_environment(message: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPLUG_METADATA", message)
    assert Metadata.of_option(None).level == level
    assert Metadata.of_option("short").level == "short"
    program = onnxplug.export(torch.nn.Linear(4, 2), (X,), verbose=False)
    (node,) = program.model.graph
    assert len(node.metadata_props) == {"none": 0, "short": 2}.get(level, len(node.metadata_props))
    assert ("pkg.torch.onnx.fx_node" in node.metadata_props) == (level == "full")


def test_a_wrong_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPLUG_METADATA", "everything")
    with pytest.raises(UsageError, match="the environment variable ONNXPLUG_METADATA takes 'none'"):
        onnxplug.to_onnx(torch.nn.Linear(4, 2), (X,))


MAKE = """
import torch

def make():
    return torch.nn.Linear(4, 2).eval(), (torch.randn(3, 4),)
"""


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ([], {"namespace", "pkg.onnxplug.source"}),
        (["--metadata", "none"], set()),
        (["--metadata", "full", "--absolute-paths"], NODE_KEYS),
    ],
)
def test_command_line(flags: list[str], keys: set[str], tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(MAKE)
    assert run(["export", f"{tmp_path / 'made.py'}:make", "-o", str(tmp_path / "model.onnx"), *flags]) == 0
    (node,) = ir.load(tmp_path / "model.onnx").graph
    assert keys <= node.metadata_props.keys()
    assert bool(keys) == bool(node.metadata_props)


def test_command_line_refuses_other_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "made.py").write_text(MAKE)
    target, output = f"{tmp_path / 'made.py'}:make", str(tmp_path / "model.onnx")
    assert run(["export", target, "-o", output, "--metadata", "much"]) == 2
    assert "'none', 'short' or 'full', not 'much'" in " ".join(capsys.readouterr().err.split())

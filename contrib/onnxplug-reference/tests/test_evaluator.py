"""The evaluator itself: inputs, hooks, steps, text, memory, functions, control flow, errors."""

from __future__ import annotations

import concurrent.futures
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnxplug_reference import ExtendedReferenceEvaluator, Kernel, Step, TorchReferenceEvaluator

import onnxplug
from onnxplug.errors import EvaluationError, PluginError, UsageError

X = np.array([[1, -2, 3], [4, 5, -6]], np.float32)


def parsed(text: str, version: int = 21) -> onnx.ModelProto:
    """A model from onnx's own text form."""
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {version}, "local": 1]> {text}')


TWO = parsed("g (float[N, 3] x) => (float[N, 3] y) { a = Abs(x)\n b = Neg(a)\n c = Exp(b)\n y = Add(a, c) }")
LOOP = parsed(
    """g (int64 n, float[3] x, float bias) => (float[3] last, float[T, 3] every) {
        last, every = Loop(n, , x) <body = b (int64 i, bool go, float[3] s) => (bool more, float[3] t, float[3] row)
        { more = Identity(go)\n u = Add(s, bias)\n t = Identity(u)\n row = Neg(u) }>
    }"""
)
CALL = parsed(
    """g (float[N] x) => (float[N] y) { y = local.twice <k = 3.0> (x) }
    <opset_import: ["": 21, "local": 1], domain: "local"> twice <k> (a) => (b) { c = local.scaled <by: float = @k> (a)\n b = local.scaled(c) }
    <opset_import: ["": 21], domain: "local"> scaled <by: float = 10.0> (a, shift) => (b)
    { f = Constant <value_float: float = @by> ()\n b = Mul(a, f) }"""
)


def test_it_is_onnxs_evaluator_with_more() -> None:
    evaluator = ExtendedReferenceEvaluator(TWO)
    assert isinstance(evaluator, ReferenceEvaluator)
    assert (evaluator.input_names, evaluator.output_names, evaluator.opsets[""]) == (["x"], ["y"], 21)
    (mine,), (theirs,) = evaluator.run(None, {"x": X}), ReferenceEvaluator(TWO).run(None, {"x": X})
    np.testing.assert_array_equal(mine, theirs)


def test_every_form_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(TWO, path)
    expected = np.abs(X) + np.exp(-np.abs(X))
    for form in (TWO, path, str(path), TWO.SerializeToString(), ir.serde.deserialize_model(TWO)):
        np.testing.assert_allclose(ExtendedReferenceEvaluator(form).run(None, {"x": X})[0], expected, rtol=1e-6)
    graph = ExtendedReferenceEvaluator(TWO.graph, opsets={"": 21})
    np.testing.assert_allclose(graph.run(None, {"x": X})[0], expected, rtol=1e-6)
    (node,) = ExtendedReferenceEvaluator(onnx.helper.make_node("Abs", ["p"], ["q"])).run(None, {"p": X})
    np.testing.assert_array_equal(node, np.abs(X))
    program = onnxplug.to_onnx(lambda x: x.abs() + 1, (torch.from_numpy(X),), plugins=[])
    np.testing.assert_array_equal(ExtendedReferenceEvaluator(program).run(None, {"x": X})[0], np.abs(X) + 1)
    function = ExtendedReferenceEvaluator(CALL.functions[1])
    np.testing.assert_array_equal(function.run(None, {"a": X, "shift": None})[0], X * 10)
    np.testing.assert_array_equal(function.run(None, {"a": X, "shift": None}, attributes={"by": 2.0})[0], X * 2)


def test_weights_in_a_file_beside_the_model(tmp_path: Path) -> None:
    model = parsed("g (float[3] x) => (float[3] y) { y = Mul(x, w) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 2, 3], np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    (y,) = ExtendedReferenceEvaluator(tmp_path / "m.onnx").run(None, {"x": np.ones(3, np.float32)})
    np.testing.assert_array_equal(y, [1, 2, 3])
    alone = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    with pytest.raises(EvaluationError, match=r"the weight 'w' is in a file.*\n?.*model's path"):
        ExtendedReferenceEvaluator(alone)


def test_hooks_see_every_node_and_may_replace() -> None:
    seen: list[str] = []

    def before(step: Step) -> list[Any] | None:
        seen.append(f"before {step.op_type} {list(step.named_inputs())}")
        return [step.inputs[0] * 2] if step.op_type == "Abs" else None

    def after(step: Step) -> list[Any] | None:
        seen.append(f"after {step.op_type} {list(step.named_outputs())}")
        return [np.zeros_like(step.outputs[0])] if step.op_type == "Exp" else None

    (y,) = ExtendedReferenceEvaluator(TWO, before=before, after=after).run(None, {"x": X})
    np.testing.assert_array_equal(y, np.abs(2 * X))
    assert seen[:4] == ["before Abs ['x']", "after Abs ['a']", "before Neg ['a']", "after Neg ['b']"]
    assert len(seen) == 8


@pytest.mark.parametrize("returned", [X * 10, X[:1], [], [X, X], "X"])
def test_a_hook_returns_as_many_values_as_the_node_has(returned: Any) -> None:
    """An array alone would be a list of its rows, the first of which would be the node's output."""
    for which in ("before", "after"):
        evaluator = ExtendedReferenceEvaluator(TWO, **{which: lambda step: returned if step.op_type == "Neg" else None})
        with pytest.raises(
            UsageError, match=r"a hook of the node Neg\(a\) -> b returned .*; it returns a list of the node's 1 "
        ):
            evaluator.run(None, {"x": X})


def test_an_error_of_a_hook_is_raised_as_it_is() -> None:
    """From within subgraphs and functions too, where it isn't the fault of the node around."""
    feeds = {"n": np.array(2), "x": np.ones(3, np.float32), "bias": np.float32(1)}

    def stop(step: Step) -> None:
        raise ValueError(step.op_type)

    for model, given in ((TWO, {"x": X}), (LOOP, feeds), (CALL, {"x": X[0]})):
        for options in ({"before": stop}, {"after": stop}):
            with pytest.raises(ValueError, match=r"^\w+$"):
                ExtendedReferenceEvaluator(model, **options).run(None, given)


def test_steps_go_through_subgraphs_and_functions() -> None:
    feeds = {"n": np.array(2), "x": np.ones(3, np.float32), "bias": np.float32(1)}
    run = ExtendedReferenceEvaluator(LOOP).steps(feeds)
    assert run.outputs is None
    places = [(step.op_type, step.path[-1:] or "graph") for step in run]
    assert places[0] == ("Identity", ("Loop body, iteration 0",))
    assert [op for op, _ in places] == ["Identity", "Add", "Identity", "Neg"] * 2 + ["Loop"]
    assert places[-1] == ("Loop", "graph")
    assert run.outputs is not None
    np.testing.assert_array_equal(run.outputs[0], np.full(3, 3, np.float32))
    np.testing.assert_array_equal(run.outputs[1], -np.array([[2] * 3, [3] * 3], np.float32))
    called = [step.path for step in ExtendedReferenceEvaluator(CALL).steps({"x": np.ones(2, np.float32)})]
    assert called[0] == ("function local::twice", "function local::scaled")


def test_a_loop_that_never_runs() -> None:
    feeds = {"n": np.array(0), "x": np.ones(3, np.float32), "bias": np.float32(1)}
    last, every = ExtendedReferenceEvaluator(LOOP).run(None, feeds)
    np.testing.assert_array_equal(last, np.ones(3))
    assert (every.shape, every.dtype) == ((0, 3), np.float32)


def scan_8(dtype: str, size: str = "2") -> onnx.ModelProto:
    """Scan of opset 8 with lengths: each output row is the larger of the row's input and the state."""
    larger = "Or(s, v)" if dtype == "bool" else "Max(s, v)"
    body = f"b ({dtype}[2] s, {dtype}[2] v) => ({dtype}[2] t, {dtype}[{size}] o) {{ t = {larger} o = Identity(t) }}"
    return onnx.parser.parse_model(
        f"""<ir_version: 3, opset_import: ["": 8]>
        g (int64[B] n, {dtype}[B, 2] s, {dtype}[B, L, 2] x) => ({dtype}[B, 2] t, {dtype}[B, L, 2] y)
        {{ t, y = Scan <num_scan_inputs = 1, body = {body}> (n, s, x) }}"""
    )


@pytest.mark.parametrize("evaluator", [ExtendedReferenceEvaluator, TorchReferenceEvaluator])
def test_sequences_of_different_lengths(evaluator: Any) -> None:
    """As ONNX Runtime pads their rows: with zeros of the type, after infinities too."""
    x = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    x[0, 0] = np.inf, -np.inf
    for model, cut in ((scan_8("float"), x), (scan_8("bool"), x > 3)):
        feeds = {"n": np.array([1, 2]), "s": cut[:, 1], "x": cut}
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        for result, wanted in zip(evaluator(model).run(None, feeds), session.run(None, feeds), strict=True):
            np.testing.assert_array_equal(result, wanted, strict=True)


@pytest.mark.parametrize("evaluator", [ExtendedReferenceEvaluator, TorchReferenceEvaluator])
def test_sequences_without_rows(evaluator: Any) -> None:
    """ONNX Runtime refuses the length 0; the rows of such a sequence are padding alone, and its state is unchanged."""
    x, states = np.arange(12, dtype=np.float32).reshape(2, 3, 2), np.full((2, 2), 5, np.float32)
    for lengths, size in (([0, 2], "N"), ([0, 2], "2"), ([0, 0], "2")):
        last, rows = evaluator(scan_8("float", size)).run(None, {"n": np.array(lengths), "s": states, "x": x})
        wanted = np.zeros_like(x)
        wanted[1, : lengths[1]] = np.maximum(x[1, : lengths[1]], 5)
        np.testing.assert_array_equal(rows, wanted, strict=True)
        np.testing.assert_array_equal(last, [[5, 5], [8, 9] if lengths[1] else [5, 5]])
    for feeds, shape in (({"s": states, "x": x[:, :0]}, (2, 0, 2)), ({"s": states[:0], "x": x[:0]}, (0, 3, 2))):
        results = evaluator(scan_8("float")).run(None, {"n": np.zeros(len(feeds["s"]), np.int64), **feeds})
        last, rows = map(np.asarray, results)
        assert (rows.shape, rows.dtype, last.shape) == (shape, np.float32, feeds["s"].shape)
    for lengths in ([4, 1], [-1, 1], [1]):
        with pytest.raises(EvaluationError, match=r"the lengths of the sequences are .* 2 sequences of 3 rows"):
            evaluator(scan_8("float")).run(None, {"n": np.array(lengths), "s": states, "x": x})


def test_functions_in_any_order_with_defaults_and_absent_inputs() -> None:
    (y,) = ExtendedReferenceEvaluator(CALL).run(None, {"x": np.array([1, 2], np.float32)})
    np.testing.assert_array_equal(y, [30, 60])


def test_text() -> None:
    lines: list[str] = []

    def text(verbose: int) -> list[str]:
        lines.clear()
        model = parsed("g (float[N] x) => (float[N] y) <float w = {2}> { y = Mul(x, w) }")
        ExtendedReferenceEvaluator(model, verbose=verbose, write=lines.append).run(
            None, {"x": np.array([1, np.nan, 3, 4, 5, 6], np.float32)}
        )
        return list(lines)

    assert text(0) == []
    assert text(1) == ["Mul(x, w) -> y"]
    assert text(2) == [
        " +C w: float32:() in [2.0, 2.0]",
        " +I x: float32:(6,) in [1.0, 6.0], 1 NaN",
        "Mul(x, w) -> y",
        " + y: float32:(6,) in [2.0, 12.0], 1 NaN",
    ]
    assert text(3)[-1] == " + y: float32:(6,):2.0,nan,6.0,8.0,10.0..."
    assert text(10)[-1] == " + y: float32:(6,):2.0,nan,6.0,8.0,10.0,12.0"


def test_the_text_goes_to_the_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    ExtendedReferenceEvaluator(LOOP, verbose=1).run(None, {"n": np.array(1), "x": X[0], "bias": np.float32(1)})
    assert capsys.readouterr().out.splitlines()[:3] == [
        "Loop(n, , x) -> last, every",
        "  Identity(go) -> more",
        "  Add(s, bias) -> u",
    ]


@pytest.mark.long
def test_memory_is_freed_after_the_last_use() -> None:
    alive: dict[str, list[str]] = {}
    made: dict[str, weakref.ref[Any]] = {}

    def after(step: Step) -> None:
        gc.collect()
        alive[step.op_type] = sorted(name for name, ref in made.items() if ref() is not None)
        made.update({name: weakref.ref(value) for name, value in step.named_outputs().items()})

    evaluator = ExtendedReferenceEvaluator(TWO, after=after)
    evaluator.run(None, {"x": X})
    assert alive == {"Abs": [], "Neg": ["a"], "Exp": ["a", "b"], "Add": ["a", "c"]}
    made.clear()
    kept = evaluator.run(None, {"x": X}, intermediate=True)
    assert set(kept) == {"x", "a", "b", "c", "y"}
    np.testing.assert_array_equal(evaluator.run(["b", "y"], {"x": X})[0], -np.abs(X))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8]
)
def test_torch_tensors_in_and_out(dtype: torch.dtype) -> None:
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(ir.DataType[_ONNX[dtype]].numpy()))
    names = [onnx.helper.make_tensor_value_info(name, element, ["N"]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", names[:1], names[1:])
    evaluator = ExtendedReferenceEvaluator(onnx.helper.make_model(graph))
    x = torch.tensor([0.0, 1.0, 2.5]).to(dtype)
    (y,) = evaluator.run(None, {"x": x})
    assert y.dtype == dtype
    assert torch.equal(y.float(), x.float())


_ONNX = {
    torch.float32: "FLOAT",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float8_e4m3fn: "FLOAT8E4M3FN",
    torch.int64: "INT64",
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
}


@pytest.mark.parametrize(
    ("feeds", "text"),
    [
        ({}, "the model needs the input 'x'"),
        ({"x": X, "z": X}, "the model has no input 'z'; its inputs are x"),
        ({"x": X.astype(np.float64)}, r"the input 'x' is float\[N, 3\] in the model, got float64\[2, 3\]"),
        ({"x": X[0]}, r"the input 'x' is float\[N, 3\] in the model, got float32\[3\]"),
        ({"x": X[:, :2]}, r"the input 'x' is float\[N, 3\] in the model, got float32\[2, 2\]"),
        ({"x": [X]}, "the input 'x' is a tensor, got a list"),
        ({"x": None}, "the input 'x' is a tensor, got a NoneType"),
    ],
)
def test_wrong_inputs(feeds: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ExtendedReferenceEvaluator(TWO).run(None, feeds)


@pytest.mark.parametrize("evaluator", [ExtendedReferenceEvaluator, TorchReferenceEvaluator])
def test_inputs_that_are_sequences_and_optionals(evaluator: Any) -> None:
    model = parsed(
        """g (seq(float[N]) s, optional(float[M]) o) => (int64 n, bool h) { n = SequenceLength(s)\n h = OptionalHasElement(o) }"""
    )
    row = X[0]
    for sequence, value, wanted in (([row, row[:1]], None, [2, 0]), ((), row, [0, 1]), ((row,), row[:0], [1, 1])):
        assert [int(r) for r in evaluator(model).run(None, {"s": sequence, "o": value})] == wanted
    for feeds, text in (
        ({"s": X, "o": None}, r"the input 's' is a sequence, a list of values, got float32\[2, 3\]"),
        ({"s": None, "o": None}, "the input 's' is a sequence, a list of values, got none"),
        (
            {"s": [row, row.astype(np.float64)], "o": None},
            r"the input 's\[1\]' is float\[N\] in the model, got float64\[3\]",
        ),
        ({"s": [], "o": X}, r"the input 'o' is float\[M\] in the model, got float32\[2, 3\]"),
    ):
        with pytest.raises(UsageError, match=text):
            evaluator(model).run(None, feeds)


def test_attributes_that_a_function_lacks() -> None:
    scaled = ExtendedReferenceEvaluator(CALL.functions[1])
    feeds = {"a": X, "shift": None}
    with pytest.raises(UsageError, match="the function has no attribute 'By'; it has by"):
        scaled.run(None, feeds, attributes={"By": 2.0})
    with pytest.raises(UsageError, match="gives the attributes of a FunctionProto"):
        ExtendedReferenceEvaluator(CALL).run(None, {"x": X[0]}, attributes={"by": 2.0})


def test_bodies_of_one_operator_for_several_types() -> None:
    """ONNX's body of GroupNormalization depends on the types of its inputs."""
    values = ["float", "double", "float16"]
    inputs = ", ".join(f"{t}[1, 4, 3] x{i}, {t}[4] s{i}, {t}[4] b{i}" for i, t in enumerate(values))
    nodes = "".join(f"y{i} = GroupNormalization<num_groups = 2>(x{i}, s{i}, b{i})\n" for i in range(3))
    model = parsed(f"g ({inputs}) => ({', '.join(f'{t}[1, 4, 3] y{i}' for i, t in enumerate(values))}) {{ {nodes} }}")
    x = np.linspace(-3, 2, 12).reshape(1, 4, 3)
    feeds: dict[str, Any] = {}
    for i, dtype in enumerate((np.float32, np.float64, np.float16)):
        feeds |= {f"x{i}": x.astype(dtype), f"s{i}": np.ones(4, dtype), f"b{i}": np.zeros(4, dtype)}
    for i, result in enumerate(ExtendedReferenceEvaluator(model).run(None, feeds)):
        wanted = torch.nn.functional.group_norm(torch.from_numpy(feeds[f"x{i}"].astype(np.float64)), 2)
        torch.testing.assert_close(torch.from_numpy(result), wanted.to(torch.from_numpy(feeds[f"x{i}"]).dtype))


def test_errors_name_the_node_its_place_and_its_inputs() -> None:
    model = parsed("g (float[N] x, float[M] y) => (float[N] z) { a = Abs(x)\n [sum] z = Add(a, y) }")
    with pytest.raises(
        EvaluationError, match=r"the node Add 'sum' \(number 1\) on a=float32\[2\], y=float32\[3\]: "
    ) as e:
        ExtendedReferenceEvaluator(model).run(None, {"x": np.ones(2, np.float32), "y": np.ones(3, np.float32)})
    assert "Hint" in str(e.value)
    feeds = {"n": np.array(3), "x": np.ones(3, np.float32), "bias": np.array(1.0, np.float32)}

    def broken(step: Step) -> list[Any] | None:
        return [np.ones(2, np.float32), step.inputs[1]] if step.op_type == "Neg" else None

    evaluator = ExtendedReferenceEvaluator(
        LOOP, before=lambda s: [np.ones(2, np.float32), X] if "1" in str(s) and s.op_type == "Add" else None
    )
    with pytest.raises(EvaluationError, match=r"the node Add \(number 1 in Loop body, iteration 1\) on s="):
        evaluator.run(None, feeds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("g (float[N] x) => (float[N] y) { [odd] y = local.Nothing(x) }", "nothing computes local::Nothing .* 'odd'"),
        ("g (float[N] x) => (float[N] y) { [odd] y = other.Op(x) }", "imports no version of the domain 'other'.*'odd'"),
        ("g (float[N] x) => (float[N] y) { y = Abs(nowhere) }", r"the node Abs \(number 0\) reads 'nowhere'"),
        ("g (float[N] x) => (float[N] y) { z = Abs(x) }", "nothing in the graph makes its output 'y'"),
    ],
)
def test_broken_models(text: str, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        ExtendedReferenceEvaluator(parsed(text)).run(None, {"x": X[0]})


def test_files_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    for wrong, message in (
        (3, "an object of type int is not an ONNX model"),
        (tmp_path / "none.onnx", "there is no file"),
        (tmp_path / "text.onnx", "is not an ONNX model that can be read"),
        (TWO.graph, "does not say which opsets"),
    ):
        with pytest.raises(UsageError, match=message):
            ExtendedReferenceEvaluator(wrong)
    with pytest.raises(UsageError, match="the model has no result 'q'"):
        ExtendedReferenceEvaluator(TWO).run(["q"], {"x": X})
    recursive = parsed(
        """g (float[N] x) => (float[N] y) { y = local.f(x) }
        <opset_import: ["": 21, "local": 1], domain: "local"> f (a) => (b) { b = local.f(a) }"""
    )
    with pytest.raises(EvaluationError, match="the function local::f calls itself"):
        ExtendedReferenceEvaluator(recursive)


class Twice(OpRun):
    op_domain = "local"

    def _run(self, x: Any, by: float = 2.0) -> Any:
        return (x * np.float32(by),)


CUSTOM = parsed("g (float[N] x) => (float[N] y) { y = local.Twice <by = 3.0> (x) }")


def test_kernels_of_the_call() -> None:
    x = np.array([1, 2], np.float32)
    (y,) = ExtendedReferenceEvaluator(CUSTOM, new_ops=[Twice]).run(None, {"x": x})
    np.testing.assert_array_equal(y, x * 3)
    kernel = Kernel("Twice", lambda x, *, by=2.0: x + by, domain="local")
    np.testing.assert_array_equal(ExtendedReferenceEvaluator(CUSTOM, kernels=[kernel]).run(None, {"x": x})[0], x + 3)
    with pytest.raises(UsageError, match="new_ops takes OpRun classes"):
        ExtendedReferenceEvaluator(CUSTOM, new_ops=[kernel])
    narrower = Kernel("Twice", lambda x: x, domain="local")
    with pytest.raises(EvaluationError, match="the kernel of local::Twice of the node '' does not know by"):
        ExtendedReferenceEvaluator(CUSTOM, kernels=[narrower])
    with pytest.raises(PluginError):
        ExtendedReferenceEvaluator(CUSTOM, plugins=["no-such-plugin"])


def test_kernels_of_the_plugins_of_an_export() -> None:
    """The evaluator uses the kernels of an export's ``runtime=``."""
    with torch.library._scoped_library("reference_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 5, "CompositeExplicitAutograd")
        library.impl("twice", torch.empty_like, "Meta")
        rule = onnxplug.Rule("reference_test::twice", lambda g, node: g.domain("local", 1).Twice(node.args[0], by=5.0))
        program = onnxplug.to_onnx(
            lambda x: torch.ops.reference_test.twice(x) + 1,
            (torch.from_numpy(X),),
            rules=[rule],
            runtime=[onnxplug.ReferenceOp(Twice)],
            plugins=[],
        )
    np.testing.assert_array_equal(ExtendedReferenceEvaluator(program).run(None, {"x": X})[0], X * 5 + 1)
    with pytest.raises(EvaluationError, match="nothing computes local::Twice"):
        ExtendedReferenceEvaluator(program, plugins=[])


def test_a_kernel_replaces_a_function_of_the_model() -> None:
    (y,) = ExtendedReferenceEvaluator(
        CALL, kernels=[Kernel("scaled", lambda a, shift=None, *, by=10.0: a + by, domain="local")]
    ).run(None, {"x": np.array([1, 2], np.float32)})
    np.testing.assert_array_equal(y, [14, 15])


def test_a_kernel_of_a_later_version_does_not_replace_a_function() -> None:
    later = Kernel("scaled", lambda a, shift=None, *, by=10.0: a + by, since=2, domain="local")
    for evaluator in (ExtendedReferenceEvaluator, TorchReferenceEvaluator):
        (y,) = evaluator(CALL, kernels=[later]).run(None, {"x": np.array([1, 2], np.float32)})
        np.testing.assert_array_equal(y, [30, 60])


def test_plugins_kernels_for_graphs_nodes_and_given_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxplug_reference import evaluator

    from onnxplug.plugins.runtime import PluginRuntime

    class Host:
        def runtimes(self) -> list[PluginRuntime]:
            return [PluginRuntime("acme (acme 1.0)", ("local",), (onnxplug.ReferenceOp(Twice),))]

    monkeypatch.setattr(evaluator, "plugin_host", lambda plugins: Host())
    x = np.array([1, 2], np.float32)
    opsets = {"": 21, "local": 1}
    np.testing.assert_array_equal(ExtendedReferenceEvaluator(CUSTOM.graph, opsets).run(None, {"x": x})[0], x * 3)
    np.testing.assert_array_equal(ExtendedReferenceEvaluator(CUSTOM.graph.node[0]).run(None, {"x": x})[0], x * 3)
    outer = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "other": 1]> g (float[N] x) => (float[N] y) { y = other.f(x) }
        <opset_import: ["local": 1], domain: "other"> f (a) => (b) { b = local.Twice(a) }"""
    )
    function = outer.functions.pop()
    (y,) = ExtendedReferenceEvaluator(outer, functions=[function]).run(None, {"x": x})
    np.testing.assert_array_equal(y, x * 2)


class Applied(OpRun):
    """A custom operator that runs a subgraph itself, which captures a value."""

    op_domain = "local"

    def need_context(self) -> bool:
        return True

    def _run(self, x: Any, body: Any = None, context: Any = None, attributes: Any = None) -> Any:
        return tuple(self._run_body({**context, body.input_names[0]: x}))


def test_a_custom_operator_with_a_subgraph() -> None:
    model = parsed(
        """g (float[N] x, float[N] z) => (float[N] y) {
            w = Neg(z)\n y = local.Applied(x) <body = b (float[N] p) => (float[N] q) { q = Add(p, w) }>
        }"""
    )
    feeds = {"x": np.array([1, 2], np.float32), "z": np.array([10, 20], np.float32)}
    np.testing.assert_array_equal(ExtendedReferenceEvaluator(model, new_ops=[Applied]).run(None, feeds)[0], [-9, -18])


class Slowly(OpRun):
    """A custom operator whose subgraph reads a captured value, after other threads have had their turn."""

    op_domain = "local"

    def _run(self, x: Any, body: Any = None, attributes: Any = None) -> Any:
        time.sleep(0.002)
        return tuple(self._run_body({body.input_names[0]: x}))


def test_captured_values_of_runs_in_several_threads() -> None:
    model = parsed(
        """g (float[N] x, float[N] z) => (float[N] y) {
            w = Neg(z)\n y = local.Slowly(x) <body = b (float[N] p) => (float[N] q) { q = Add(p, w) }>
        }"""
    )
    evaluator = ExtendedReferenceEvaluator(model, new_ops=[Slowly])

    def run(number: int) -> float:
        return float(evaluator.run(None, {"x": np.zeros(1, np.float32), "z": np.full(1, number, np.float32)})[0][0])

    numbers = list(range(1, 5)) * 10
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, numbers)) == [-n for n in numbers]


def test_four_bit_results_for_torch() -> None:
    model = parsed("g (float[N] x) => (int4[N] y) { y = Cast <to = 22> (x) }")
    (y,) = ExtendedReferenceEvaluator(model).run(None, {"x": torch.tensor([-8.0, 3.0])})
    assert y.dtype == torch.int8
    assert y.tolist() == [-8, 3]
    (y,) = ExtendedReferenceEvaluator(model).run(None, {"x": np.array([-8, 3], np.float32)})
    assert y.dtype == ml_dtypes.int4

"""Branches on sizes that no list of sample sizes finds: at every size the model is right, or a warning names them."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.export import Dim

import onnxplug
from tests.support.sampling import examples
from tests.support.tolerances import LOOSER

Model = Callable[[torch.Tensor], torch.Tensor]


def lenient(x: torch.Tensor, is_lenient: bool = True) -> torch.Tensor:
    if x.shape[0] > 8:
        if is_lenient:
            return x * 100
        raise ValueError("too long")
    return x


def handled(x: torch.Tensor) -> torch.Tensor:
    try:
        return checked(x)
    except ValueError:
        return x * 100


def checked(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 8:
        raise ValueError("too long")
    return x


def either(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 8 or x.shape[1] == 11:
        x = x * 100
    return x


#: Each with the condition of the warning, and sizes (b, n) at which the branch is the other one. The example is (5, 4).
SILENT: dict[str, tuple[Model, str, tuple[int, int]]] = {
    "a number": (lambda x: x * 100 if x.shape[0] == 77 else x, "b != 77", (77, 4)),
    "one of some": (lambda x: x * 100 if x.shape[0] in (20, 28, 40) else x, "b != 28", (28, 4)),
    "a remainder": (lambda x: x * 100 if x.shape[0] % 37 == 0 else x, "(b % 37) != 0", (74, 4)),
    "a product": (lambda x: x * 100 if x.shape[0] * x.shape[1] == 143 else x, "(b*n) != 143", (11, 13)),
    "a branch before a check": (lenient, "b <= 8", (9, 4)),
    "an error that is handled": (handled, "b <= 8", (9, 4)),
    "the second of two": (either, "n != 11", (5, 11)),
    "no row": (lambda x: x.new_ones(3) if x.shape[0] == 0 else x, "b != 0", (0, 4)),
    "not a row": (lambda x: x if x.shape[0] else x.new_ones(3), "b != 0", (0, 4)),
    "no element": (lambda x: x if x.numel() > 0 else x.new_ones(3), "> 0", (3, 0)),
    "at least one": (lambda x: x if x.shape[0] >= 1 else x.new_ones(3), "b >= 1", (0, 4)),
    "a large number": (lambda x: x * 100 if x.shape[0] > 99_999 else x, "b <= 99999", (100_000, 1)),
    "a power": (lambda x: x * 100 if x.shape[0] & (x.shape[0] - 1) == 0 else x, "b", (8, 4)),
    "a quotient of two": (lambda x: x if x.shape[0] // (x.shape[1] + 1) >= 1 else x * 100, ">= ", (3, 4)),
    "a quotient": (lambda x: x * 100 if x.shape[0] // 7 == 3 else x, "(b // 7) != 3", (22, 4)),
    "a difference": (lambda x: x * 100 if x.shape[0] - x.shape[1] == 12 else x, "12", (13, 1)),
    "a float": (lambda x: x * 100 if x.shape[0] * 0.5 == 38.5 else x, "38.5", (77, 4)),
}


@pytest.mark.parametrize("wanted", ["name", "Dim", "DYNAMIC", "strict"])
@pytest.mark.parametrize("name", SILENT)
def test_a_branch_that_samples_miss_is_said(name: str, wanted: str) -> None:
    model, expected_text, size = SILENT[name]
    makers: dict[str, Any] = {"Dim": Dim, "DYNAMIC": lambda _: Dim.DYNAMIC}
    b, n = map(makers.get(wanted, str), ("b", "n"))
    if wanted == "DYNAMIC":
        expected_text = expected_text.replace("b", "x.shape[0]").replace("n", "x.shape[1]")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shapes = ({0: b, 1: n},)
        program = onnxplug.to_onnx(
            model, (torch.randn(5, 4),), dynamic_shapes=shapes, strict=wanted == "strict" or None
        )
    texts = [str(w.message) for w in caught if "is right only where" in str(w.message)]
    assert any(expected_text in text and "test_size_guards.py:" in text for text in texts), texts
    x = torch.randn(size)
    assert not same(program, model, x), "this test is for sizes at which the model is wrong"
    assert {*program.verify().cases[0].sizes.values()} == {4, 5}


def same(program: onnxplug.OnnxProgram, model: Any, x: torch.Tensor) -> bool:
    got, expected = program(x)[0], model(x)
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=LOOSER["core"].rtol)


@pytest.mark.parametrize("strict", [False, True])
def test_a_check_is_a_bound_with_a_warning(strict: bool) -> None:
    """Whether the other side raises or computes is not looked at: the model is right within the bound in both cases."""
    with pytest.warns(UserWarning, match=r"right only where b <= 8: the model's code at .*test_size_guards\.py:\d+"):
        program = onnxplug.to_onnx(checked, (torch.randn(5, 4),), dynamic_shapes=({0: "b"},), strict=strict)
    assert program.model.graph.metadata_props["onnxplug.dimensions"] == '{"b": {"min": 0, "max": 8}}'
    assert max(case.sizes["b"] for case in program.verify(seeds=range(6)).cases) <= 8


def of_one_shape(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.shape != y.shape:
        raise ValueError("two shapes")
    return x + y


def of_a_shape(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not (x.shape == y.shape):
        raise ValueError(f"{y.dtype}")
    if x.shape[0] in (99, 100) or y.shape[1] in (7, 3):
        raise ValueError("a size that is not supported")
    if x.shape[0] == 0:
        raise ValueError("nothing")
    return x + y


@pytest.mark.parametrize(
    ("model", "strict"), [(of_one_shape, False), (of_one_shape, True), (of_a_shape, False), (of_a_shape, True)]
)
def test_a_check_of_shapes_is_reported_unless_a_name_implies_it(model: Any, strict: bool) -> None:
    args = torch.randn(5, 4), torch.randn(5, 4)
    with pytest.warns(UserWarning, match="right only where (b == c|c == b):"):
        onnxplug.to_onnx(model, args, dynamic_shapes=({0: "b"}, {0: "c"}), strict=strict)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        onnxplug.to_onnx(model, args, dynamic_shapes=({0: "b"}, {0: "b"}), strict=strict)
    assert not any("b == b" in text or "c" in text for text in (str(w.message).partition(":")[0] for w in caught))


@pytest.mark.parametrize("strict", [False, True])
def test_a_branch_on_shapes_is_a_guard(strict: bool) -> None:
    def unequal(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape != y.shape:
            return x
        return x + y

    def member(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape[0] not in (99, 100):
            return x + y
        raise ValueError("not supported")

    args, shapes = (torch.randn(5, 4), torch.randn(5, 4)), ({0: "b"}, {0: "c"})
    with pytest.warns(UserWarning, match="right only where (b == c|c == b)"):
        onnxplug.to_onnx(unequal, args, dynamic_shapes=shapes, strict=strict)
    with pytest.warns(UserWarning, match=r"right only where (b != 99|not \(b == 99 or b == 100\)):"):
        onnxplug.to_onnx(member, args, dynamic_shapes=shapes, strict=strict)


HOLDS: dict[str, Model] = {
    "a sum": lambda x: x if x.shape[0] + x.shape[1] >= x.shape[1] else x * 100,
    "a half": lambda x: x if x.shape[0] // 2 <= x.shape[0] else x * 100,
    "an even number": lambda x: x if (x.shape[0] * 6) % 3 == 0 else x * 100,
    "a rest": lambda x: x if x.shape[0] % 7 < 7 else x * 100,
    "parts": lambda x: x if 4 * (x.shape[0] // 4) + x.shape[0] % 4 == x.shape[0] else x * 100,
    "a square": lambda x: x if x.shape[0] ** 2 + 1 > x.shape[0] else x * 100,
    "not negative": lambda x: x if x.shape[0] >= 0 else x * 100,
    "a root": lambda x: x if x.shape[0] ** 0.5 > -1 else x * 100,
}


@pytest.mark.parametrize("name", HOLDS)
def test_conditions_that_the_ranges_imply_give_no_warning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(HOLDS[name], (torch.randn(5, 4),), dynamic_shapes=({0: "b", 1: "n"},))
    for size in ((1, 4), (0, 4), (7, 3)):
        assert same(program, HOLDS[name], torch.randn(size))


@pytest.mark.parametrize(
    ("model", "limits"),
    [
        (SILENT["a number"][0], {"max": 76}),
        (SILENT["one of some"][0], {"min": 29, "max": 39}),
        (SILENT["a remainder"][0], {"min": 38, "max": 73}),
        (SILENT["no row"][0], {"min": 1}),
        (lambda x: x if (x.shape[0] * 3) // 2 < 45 else x * 100, {"max": 29}),
    ],
)
def test_a_declared_range_implies_it(model: Model, limits: dict[str, int]) -> None:
    x = torch.randn(limits.get("min", 5) if limits != {"min": 1} else 3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: Dim("b", **limits)},))
    assert len({case.sizes["b"] for case in program.verify(seeds=range(5)).cases}) > 1


# -- bounds and fixed sizes --------------------------------------------------------------------------------------------


class Positions(torch.nn.Module):
    def __init__(self, rows: int = 64) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(rows, 4))
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + self.table[: x.shape[1], :2]) * mask[..., None]


def limited(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if x.shape[1] > 64:
        raise ValueError("too long")
    return x * mask[..., None]


def looked_up(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * mask[..., None] + torch.arange(64.0)[None, : x.shape[1], None]


@pytest.mark.parametrize("model", [Positions().eval(), limited, looked_up], ids=["table", "check", "arange"])
@pytest.mark.parametrize("wanted", ["names", "Dim", "strict"])
def test_a_known_bound_is_applied(model: Any, wanted: str) -> None:
    b, n = (Dim("b"), Dim("n")) if wanted == "Dim" else ("b", "n")
    shapes = {"x": {0: b, 1: n}, "mask": {0: b, 1: n}}
    inputs = torch.randn(2, 5, 4), torch.ones(2, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = onnxplug.to_onnx(model, inputs, dynamic_shapes=shapes, strict=wanted == "strict" or None, report=True)
    messages = [str(w.message).partition(":")[0] for w in caught]
    assert messages == (["the exported model is right only where n <= 64"] if model is limited else [])
    assert '"n": {"min": 0, "max": 64}' in program.model.graph.metadata_props["onnxplug.dimensions"]
    assert program.captured is not None
    bounds = [(bound.text(program.captured.dim_names), bound.place) for bound in program.captured.bounds]
    assert [text for text, _ in bounds] == ["n <= 64"]
    assert "test_size_guards.py:" in str(bounds[0][1])
    assert program.report is not None
    assert program.report.capture is not None
    assert [condition.text for condition in program.report.capture.conditions] == ["n <= 64"]
    assert program.report.capture.dimensions["n"].endswith("to 64")
    x = torch.randn(3, 64, 4), torch.rand(3, 64)
    torch.testing.assert_close(program(*x)[0], model(*x))
    near = onnxplug.to_onnx(model, (torch.randn(2, 63, 4), torch.ones(2, 63)), dynamic_shapes=shapes)
    assert max(case.sizes["n"] for case in near.verify(seeds=range(6)).cases) in (63, 64)


def test_a_long_table() -> None:
    inputs = torch.randn(2, 5, 4), torch.ones(2, 5)
    shapes = {"x": {0: "b", 1: "n"}, "mask": {0: "b", 1: "n"}}
    program = onnxplug.to_onnx(Positions(9999).eval(), inputs, dynamic_shapes=shapes)
    assert '"n": {"min": 0, "max": 9999}' in program.model.graph.metadata_props["onnxplug.dimensions"]


def test_a_slice_of_a_table_beyond_its_end_is_no_bound() -> None:
    """Both torch and ONNX end a slice at the end of the table."""
    table = torch.randn(64, 4)

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return table[: x.shape[1]].sum(0) + x.sum(1), table[: x.shape[1]] * 2

    program = onnxplug.to_onnx(model, (torch.randn(2, 5, 4),), dynamic_shapes=({0: "b", 1: "n"},))
    for n in (0, 1, 64, 65, 100):
        x = torch.randn(3, n, 4)
        for got, expected in zip(program(x), model(x), strict=True):
            torch.testing.assert_close(got, expected)


def test_a_declared_range_beyond_a_bound_is_an_error() -> None:
    inputs, n = (torch.randn(2, 5, 4), torch.ones(2, 5)), Dim("n", max=100)
    with pytest.raises(
        onnxplug.CaptureError,
        match=r"axis 1 of the input x \('n'\) was declared dynamic, from 0 to 100, but .*test_size_guards\.py:\d+ .*n <= 64",
    ):
        onnxplug.to_onnx(Positions().eval(), inputs, dynamic_shapes={"x": {1: n}, "mask": {1: n}})


@pytest.mark.parametrize("wanted", ["c", Dim("c"), Dim.DYNAMIC], ids=str)
def test_the_tensor_that_fixes_a_size_is_named(wanted: Any) -> None:
    inputs = torch.randn(2, 5, 4), torch.ones(2, 5)
    with pytest.raises(onnxplug.CaptureError) as caught:
        onnxplug.to_onnx(Positions().eval(), inputs, dynamic_shapes={"x": {0: "b", 2: wanted}, "mask": {0: "b"}})
    text = str(caught.value)
    assert "axis 2 of the input x" in text
    assert "aten::linear at " in text
    assert "test_size_guards.py:" in text
    assert "fixes it at 4, the size of its other argument of shape [2, 4] (linear.weight)" in text


@pytest.mark.parametrize("strict", [None, False])
def test_a_branch_that_fixes_a_size_is_named(strict: bool | None) -> None:
    """Code that keeps a tensor of an earlier call compares its size with the next call's."""
    kept = torch.zeros(2, 3)

    def model(x: torch.Tensor) -> torch.Tensor:
        return x + (kept if kept.shape[0] == x.shape[0] else 1)

    match = r"axis 0 .*test_size_guards\.py:\d+ fixes it at 2 \(`return x \+ \(kept if kept"
    with pytest.raises(onnxplug.CaptureError, match=match):
        onnxplug.to_onnx(model, (torch.randn(2, 3),), dynamic_shapes=({0: "batch"},), strict=strict)


@pytest.mark.parametrize("strict", [None, True])
def test_torchs_names_of_sizes_are_put_in_words(strict: bool | None) -> None:
    with pytest.raises(onnxplug.CaptureError) as caught:
        onnxplug.to_onnx(
            lambda wave, mel: wave[1:] + mel,
            (torch.randn(4), torch.randn(3)),
            dynamic_shapes=({0: Dim("a")}, {0: Dim("c")}),
            strict=strict,
        )
    assert "L['" not in str(caught.value)
    assert "axis 0 of the input wave" in str(caught.value)


# -- models drawn at random --------------------------------------------------------------------------------------------

_COMPARE = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_numbers = st.integers(0, 40)
_terms = st.recursive(
    st.sampled_from([("size", 0), ("size", 1)]),
    lambda inner: st.one_of(
        st.tuples(st.just("*"), inner, st.integers(1, 4)),
        st.tuples(st.just("+"), inner, inner),
        st.tuples(st.just("-"), inner, _numbers),
        st.tuples(st.just("product"), inner, inner),
        st.tuples(st.just("//"), inner, st.integers(1, 9)),
        st.tuples(st.just("%"), inner, st.integers(2, 9)),
    ),
    max_leaves=2,
)
_conditions = st.one_of(
    st.tuples(st.sampled_from(sorted(_COMPARE)), _terms, st.one_of(_numbers, _terms)),
    st.tuples(st.just("in"), _terms, st.lists(_numbers, min_size=1, max_size=3).map(tuple)),
)
_trees = st.recursive(
    st.one_of(st.integers(1, 99), st.just("raise")),
    lambda inner: st.tuples(_conditions, inner, inner),
    max_leaves=5,
)


def value(term: Any, shape: Any) -> Any:
    if isinstance(term, int):
        return term
    kind, first, *rest = term
    if kind == "size":
        return shape[first]
    a, b = value(first, shape), value(rest[0], shape)
    return {
        "*": lambda: a * b,
        "product": lambda: a * b,
        "+": lambda: a + b,
        "-": lambda: a - b,
        "//": lambda: a // b,
        "%": lambda: a % b,
    }[kind]()


def holds(condition: Any, shape: Any) -> Any:
    kind, first, second = condition
    if kind == "in":
        return value(first, shape) in second
    return _COMPARE[kind](value(first, shape), value(second, shape))


def run(tree: Any, x: torch.Tensor) -> torch.Tensor:
    while isinstance(tree, tuple):
        if holds(tree[0], x.shape):
            tree = tree[1]
        else:
            tree = tree[2]
    if tree == "raise":
        raise ValueError("refused")
    return x * tree


def constants(tree: Any) -> set[int]:
    if isinstance(tree, tuple):
        return {n for part in tree for n in constants(part)}
    return {tree} if isinstance(tree, int) else set()


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=_trees, example=st.tuples(st.integers(1, 12), st.integers(1, 12)), wanted=st.sampled_from(["name", "Dim"]))
def test_branches_drawn_at_random(tree: Any, example: tuple[int, int], wanted: str) -> None:
    """At every size the model computes what eager PyTorch does, or PyTorch refuses it, or a warning named what it is not."""
    x = torch.ones(example)
    try:
        run(tree, x)
    except (ValueError, ZeroDivisionError):
        return
    error = None
    dims = ("b", "n") if wanted == "name" else (Dim("b"), Dim("n"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program = onnxplug.to_onnx(lambda x: run(tree, x), (x,), dynamic_shapes=(dict(enumerate(dims)),))
        except onnxplug.CaptureError as caught_error:
            error = str(caught_error)
    if error is not None:
        assert "declared dynamic" in error
        return
    messages = " ".join(str(w.message) for w in caught)
    captured = program.captured
    assert captured is not None
    limits = [*captured.conditions, *captured.assumptions, *captured.bounds]
    assert all(f"right only where {condition.text(captured.dim_names)}:" in messages for condition in limits), messages
    near = sorted({n + d for n in constants(tree) for d in (-1, 0, 1)} | {0, 1, 2, 3, 50, 121})
    sizes = (
        [(b, example[1]) for b in near if b >= 0]
        + [(example[0], n) for n in near if n >= 0]
        + [(n, n) for n in near[1:9]]
    )
    for size in sizes:
        values = {symbol: size[int(name == "n")] for symbol, name in symbols(program).items()}
        if not all(condition.allows(values) for condition in limits):
            continue
        x = torch.ones(size)
        try:
            expected = run(tree, x)
        except (ValueError, ZeroDivisionError):
            continue
        assert torch.equal(program(x)[0], expected), (size, messages)


def symbols(program: onnxplug.OnnxProgram) -> dict[Any, str]:
    import sympy

    assert program.captured is not None
    captured = program.captured
    exprs = {s for c in (*captured.conditions, *captured.assumptions, *captured.bounds) for s in c.symbols}
    assert all(isinstance(s, sympy.Symbol) for s in exprs)
    return {s: program.captured.dim_names.get(str(s), str(s)) for s in exprs}


def test_an_expression_that_an_operator_fixes() -> None:
    """A convolution asks whether its result has one element; torch then takes the size for 1 in later code."""

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x[:, None, :, None]
        for _ in range(3):
            y = torch.nn.functional.conv2d(y, torch.ones(1, 1, 3, 1), stride=(2, 1), padding=(1, 0))
        return y.repeat(1, 2, 1, 1).permute(0, 2, 3, 1)[:, :, 0].cumsum(1)

    with pytest.warns(UserWarning, match=r"right only where \(\(w \+ 7\)//8\) == 1: torch takes the size"):
        onnxplug.to_onnx(model, (torch.randn(3, 8),), dynamic_shapes=({0: "b", 1: "w"},))
    program = onnxplug.to_onnx(model, (torch.randn(3, 9),), dynamic_shapes=({0: "b", 1: "w"},))
    for width in (30, 8, 17):
        x = torch.randn(2, width)
        torch.testing.assert_close(program(x)[0], model(x))


def test_sizes_taken_for_equal_keep_their_names() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        if operator.ne(x.shape[0], x.shape[1]):
            factor: int | None = None
        else:
            factor = 3
        if factor is None:
            raise ValueError("refused")
        return x * factor

    with pytest.warns(UserWarning, match="right only where n == b:"):
        program = onnxplug.to_onnx(model, (torch.randn(3, 3),), dynamic_shapes=({0: "b", 1: "n"},))
    assert program.captured is not None
    assert [condition.text(program.captured.dim_names) for condition in program.captured.conditions] == ["n == b"]


def test_a_size_that_is_one_in_the_example_is_no_bound() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.conv1d(x[:, None], torch.ones(1, 1, 3), stride=8, padding=1)
        return (y.flatten(1) * 2).sum(1) + x.sum(1)

    program = onnxplug.to_onnx(model, (torch.randn(3, 8),), dynamic_shapes=({0: "b", 1: "w"},))
    assert program.captured is not None
    assert program.captured.bounds == []
    x = torch.randn(2, 40)
    torch.testing.assert_close(program(x)[0], model(x))


@pytest.mark.parametrize("strict", [False, True])
def test_a_torch_check_becomes_a_range_without_a_warning(strict: bool) -> None:
    def stated(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] < 9)
        return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(stated, (torch.randn(5, 4),), dynamic_shapes=({0: "b"},), strict=strict)
    assert program.model.graph.metadata_props["onnxplug.dimensions"] == '{"b": {"min": 0, "max": 8}}'


def test_a_lower_bound_is_a_range() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x * 100 if 2 * x.shape[0] > 7 else x

    with pytest.warns(UserWarning, match="right only where b >= 4:"):
        program = onnxplug.to_onnx(model, (torch.randn(5, 4),), dynamic_shapes=({0: "b"},))
    assert program.model.graph.metadata_props["onnxplug.dimensions"] == '{"b": {"min": 4}}'
    assert min(case.sizes["b"] for case in program.verify(seeds=range(6)).cases) >= 4


def test_bounds_of_installed_packages_are_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxplug.capture import size_guards

    def model(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 8 or x.shape[1] > 16:
            raise ValueError("too long")
        return x + 1

    monkeypatch.setattr(size_guards, "_INSTALLED", re.compile(re.escape(__file__)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        onnxplug.to_onnx(model, (torch.randn(5, 4),), dynamic_shapes=({0: "b", 1: "n"},))
    assert [str(w.message).partition(":")[0] for w in caught] == [
        "the exported model is right only where b <= 8 and n <= 16"
    ]


def test_an_input_whose_name_ends_in_a_digit() -> None:
    def model(x1: torch.Tensor) -> torch.Tensor:
        return x1 * 2 if x1.shape[0] * 1.5 != 30 else x1

    with pytest.warns(UserWarning, match=r"right only where \(1\.5\*float\(x1\.shape\[0\]\)\) != 30\.0"):
        onnxplug.to_onnx(model, (torch.randn(5, 4),), dynamic_shapes=({0: Dim.DYNAMIC},))


def test_bounds_of_an_exported_program_are_reported() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 100 if x.shape[0] < 9 else x

    exported_program = torch.export.export(Model(), (torch.randn(5, 4),), dynamic_shapes=({0: Dim.DYNAMIC},))
    with pytest.warns(UserWarning, match="right only where x.shape.0. <= 8:"):
        onnxplug.to_onnx(exported_program)

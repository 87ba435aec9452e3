"""Dynamic sizes in a model's Python code: right at every size, refused, or limited with a warning."""

from __future__ import annotations

import logging
import math
import operator
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.export import Dim

import onnxplug
from onnxplug import CaptureError, FixedDimensionError

Model = Callable[[torch.Tensor], torch.Tensor]

B, N = 5, 6
SIZES = ((2, 2), (3, 7), (5, 8), (2, 13), (9, 4), (4, 24))


def raising(x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] > 512 or x.shape[1] % 2:
        raise ValueError("an even size of at most 512")
    assert x.shape[1] // 2 > 1
    torch._check(x.shape[1] < 400)
    return x * 2


def reaches(x: torch.Tensor) -> torch.Tensor:
    while x.shape[1] > 5:
        x = x[:, 2:]
    return x


RIGHT: dict[str, Model] = {
    "int of a product": lambda x: x.new_zeros(int(x.shape[1] * 1.5)),
    "int of a root": lambda x: x[:, : int(x.shape[1] ** 0.5)],
    "int of a quotient": lambda x: x[:, : int(x.shape[1] / 2)],
    "int of two sizes": lambda x: x.new_zeros(int(x.shape[0] * x.shape[1] * 0.3)),
    "int of round": lambda x: x[:, : int(round(x.shape[1] / 4))],  # noqa: RUF046
    "int of ceil": lambda x: x[:, : int(math.ceil(x.shape[1] / 4))],  # noqa: RUF046
    "int": lambda x: x.new_ones(int(x.shape[1])),
    "sym_int": lambda x: x.new_zeros(torch.sym_int(x.shape[1] * 1.5)),
    "floor": lambda x: x[:, : math.floor(x.shape[1] * 0.7)],
    "ceil": lambda x: x[:, : math.ceil(x.shape[1] * 0.7)],
    "round": lambda x: x[:, : round(x.shape[1] * 0.7)],
    "half": lambda x: x[:, : x.shape[1] // 2],
    "shift": lambda x: x[:, : x.shape[1] >> 1],
    "min": lambda x: x[:, : min(x.shape[1], 8)],
    "max": lambda x: x.new_ones(max(x.shape[1], 4)),
    "len": lambda x: x * len(x[0]),
    "float": lambda x: x * float(x.shape[1]),
    "square root": lambda x: x / math.sqrt(x.shape[1]),
    "true quotient": lambda x: x * (x.shape[1] / 2),
    "power": lambda x: x * (x.shape[1] ** -0.5),
    "product": lambda x: x * math.prod(x.shape),
    "numel": lambda x: x * x.shape.numel(),
    "divides": lambda x: x * (x.shape[1] % 4 == 0),
    "tensor": lambda x: x * torch.tensor(x.shape[1]),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=1.7, mode="linear", recompute_scale_factor=True),
    "holds always": lambda x: x * 2 if x.shape[1] * 4 % 2 == 0 and x.shape[1] // 2 <= x.shape[1] else x,
}

REFUSED: dict[str, Model] = {
    "range": lambda x: sum((x[:, i] for i in range(x.shape[1])), x[:, 0]),
    "range of a quotient": lambda x: sum((x[:, i] for i in range(x.shape[1] // 2)), x[:, 0]),
    "a list of a quotient": lambda x: sum([x[:, i] for i in list(range(x.shape[1] // 2))]),
    "a quotient is a number": lambda x: x * 2 if x.shape[1] // 4 == 1 else x,
    "a size is a number": lambda x: x * 2 if x.shape[1] == 6 else x,
    "bits": lambda x: x * x.shape[1].bit_length(),
    "a key": lambda x: x * {6: 2}.get(x.shape[1], 3),
    "whole root": lambda x: x * math.isqrt(x.shape[1]),
    "an index of a product": lambda x: x.new_zeros(operator.index(int(x.shape[1] * 1.5))),
    "an index of two sizes": lambda x: x.new_zeros(operator.index(int(x.shape[0] * x.shape[1] * 0.3))),
    "an index of round": lambda x: x[:, : operator.index(round(x.shape[1] / 4))],
    "digits": lambda x: x * int(f"{x.shape[1]}"),
    # Arguments that torch takes as plain numbers.
    "a kernel": lambda x: F.avg_pool1d(x[:, ::2], x[:, ::2].shape[1]),
    "a kernel of torch's function": lambda x: F.max_pool1d(x[:, ::2], x[:, ::2].shape[1]),
    "an adaptive pool": lambda x: F.adaptive_avg_pool1d(x, [x.shape[1] // 2]),
    "an adaptive max pool": lambda x: F.adaptive_max_pool2d(x[None], (2, x.shape[1] // 2)),
    "unfold": lambda x: x.unfold(1, x.shape[1] // 2, 1),
    "a diagonal": lambda x: x.diagonal(x.shape[1] // 4),
    "turns": lambda x: x.rot90(x.shape[1] // 2),
    "bins": lambda x: torch.histc(x, x.shape[1] // 2),
    "a float": lambda x: x.quantile(1 / (x.shape[1] // 2), 1),
    # Lists of as many tensors as with the example.
    "split": lambda x: torch.cat([piece * 2 for piece in x.split(4, 1)], 1),
    "unsafe_split": lambda x: x.unsafe_split(4, 1)[-1],
    "chunk": lambda x: x.chunk(4, 1)[-1],
    "a number of chunks": lambda x: x.chunk(x.shape[1] // 2, 1)[0],
    "tensor_split": lambda x: x.tensor_split(x.shape[1] // 2, 1)[0],
    "unbind": lambda x: torch.stack([row * 2 for row in x[:, ::2].unbind(1)]),
    "iteration": lambda x: sum(iter(x.t()[::2]), x[:, 0]),
    "in a branch": lambda x: torch.cond(x.sum() > 0, lambda x: x.split(4, 1)[-1].sum(1), lambda x: x[:, 0], (x,)),
}

#: Each with the condition that the warning names, and sizes (b, n) for which it holds.
LIMITED: dict[str, tuple[Model, str, list[tuple[int, int]]]] = {
    "greater": (lambda x: x * 2 if x.shape[1] > 4 else x, "n >= 5", [(2, 5), (3, 30)]),
    "less": (lambda x: x * 2 if x.shape[1] < 100 else x, "n <= 99", [(2, 2), (3, 99)]),
    "even": (lambda x: x * 2 if x.shape[1] % 2 == 0 else x, "(n % 2) == 0", [(2, 4), (3, 32)]),
    "odd": (lambda x: x * 2 if x.shape[1] % 4 == 2 else x, "(n % 4) == 2", [(2, 2), (3, 10)]),
    "another number": (lambda x: x * 2 if x.shape[1] != 7 else x, "n != 7", [(2, 6), (3, 8)]),
    "a product": (lambda x: x * 2 if x.numel() > 10 else x, "b*n > 10", [(4, 3), (3, 9)]),
    "not the other": (lambda x: x * 2 if x.shape[0] == x.shape[1] else x, "b != n", [(4, 3), (3, 9)]),
    "one more": (lambda x: x * 2 if x.shape[1] - x.shape[0] == 1 else x, "n", [(4, 5), (9, 10)]),
    "one of two": (lambda x: x * 2 if x.shape[1] in (4, 6) else x, "n == 4 or n == 6", [(4, 4), (3, 6)]),
    "sorted": (lambda x: x * sorted([x.shape[1], 4])[0], "n", [(4, 6), (3, 9)]),
    "padded": (lambda x: F.pad(x, (0, 4 - x.shape[1] % 4)) if x.shape[1] % 4 else x, "n % 4", [(4, 5), (3, 10)]),
    "loop": (reaches, "n", [(3, 6), (2, 7)]),
    "chunks": (lambda x: torch.cat([c.sum(1) for c in x.chunk(3, 1)]), "== 3", [(2, 7), (3, 8), (2, 3)]),
    "pieces": (lambda x: torch.cat([c.sum(1) for c in x.split(x.shape[1] // 2, 1)]), "== 2", [(2, 4), (3, 8)]),
    "two chunks": (lambda x: x.chunk(2, 1)[-1].sum(1), "== 2", [(2, 2), (3, 5), (3, 8)]),
    "two columns": (lambda x: x[:, :2].split(1, 1)[-1], "== 2", [(2, 2), (3, 5)]),
    "a part twice": (lambda x: torch.cat([*x.chunk(2, 1), x.chunk(2, 1)[1]], 1), "== 2", [(2, 2), (3, 5)]),
    "another axis": (lambda x: torch.cat(x[:, :2].split(1, 1)), "== 2", [(2, 2), (3, 5)]),
    "a window of at most 2": (lambda x: x.unfold(1, min(x.shape[1], 2), 1), "== 2", [(2, 2), (3, 5)]),
    "a turn of at most 2": (lambda x: x.rot90(min(x.shape[1], 2)), "== 2", [(2, 2), (3, 5)]),
    "rooted": (lambda x: x * 2 if math.sqrt(x.shape[1]) < 9 else x, "n", [(3, 6), (2, 7)]),
}


def exported(model: Model, **options: Any) -> tuple[onnxplug.OnnxProgram, list[str]]:
    """The program, and the warnings about its sizes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = onnxplug.to_onnx(model, (torch.randn(B, N),), dynamic_shapes=({0: "b", 1: "n"},), **options)
    return program, [str(w.message) for w in caught if "is right only where" in str(w.message)]


def same(model: Model, program: onnxplug.OnnxProgram, b: int, n: int) -> None:
    x = torch.randn(b, n)
    torch.testing.assert_close(program(x)[0], model(x))


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("name", RIGHT)
def test_right_at_every_size(name: str, strict: bool | None) -> None:
    program, messages = exported(RIGHT[name], strict=strict)
    assert not messages
    assert program.captured.strategy.startswith("strict" if strict else "non-strict")
    for b, n in SIZES:
        same(RIGHT[name], program, b, n)


@pytest.mark.parametrize("strict", [None, False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, strict: bool | None) -> None:
    with pytest.raises(CaptureError):
        exported(REFUSED[name], strict=strict)


def test_int_of_a_size() -> None:
    """The non-strict mode keeps the size in the graph; Dynamo makes it a constant."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return x[0, 0] + torch.linspace(0, 1, int(x.shape[1] * 2))

    program, messages = exported(model)
    assert not messages
    for b, n in SIZES:
        same(model, program, b, n)
    with pytest.raises(CaptureError):
        exported(model, strict=True)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["a kernel", "a kernel of torch's function", "split", "a quotient is a number"])
def test_the_line_is_named_whole(name: str, strict: bool) -> None:
    with pytest.raises(FixedDimensionError, match=rf"the model's code at {re.escape(__file__)}:\d+ fixes it"):
        exported(REFUSED[name], strict=strict)


@pytest.mark.parametrize("name", ["an index of a product", "an index of two sizes", "an index of round"])
def test_a_plain_number_is_refused_where_it_is_a_constant(name: str) -> None:
    with pytest.raises(
        FixedDimensionError, match=r"\('[bn]'\) was declared dynamic.*test_guards\.py:\d+ fixes it"
    ) as caught:
        exported(REFUSED[name], strict=False)
    assert "math.floor" in str(caught.value)


def test_the_expression_is_written_in_the_users_names() -> None:
    with pytest.raises(FixedDimensionError, match=r"makes math\.trunc\(1\.5\*float\(n\)\) == 9 a constant"):
        exported(REFUSED["an index of a product"], strict=False)
    with pytest.raises(FixedDimensionError, match=r"makes \(n // 4\) == 1 a constant"):
        exported(REFUSED["a quotient is a number"])


@pytest.mark.parametrize("name", LIMITED)
def test_limited_with_a_warning(name: str) -> None:
    model, condition, sizes = LIMITED[name]
    program, messages = exported(model)
    conditions = [text.removeprefix("the exported model is right only where ").partition(": ")[0] for text in messages]
    assert any(condition in text for text in conditions), messages
    assert ["test_guards.py:" in text for text in messages] == [True] * len(messages)
    for b, n in sizes:
        same(model, program, b, n)
    report = program.verify()
    assert len({tuple(case.sizes.values()) for case in report.cases}) > 1
    assert not report.skipped


def test_equal_sizes_that_a_branch_depends_on_are_named() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] == y.shape[0] else x

    with pytest.warns(UserWarning, match=r"right only where (a == b|b == a): "):
        onnxplug.to_onnx(model, (torch.ones(3), torch.ones(3)), dynamic_shapes=({0: "a"}, {0: "b"}))


def test_questions_of_a_check_that_raises_are_reported() -> None:
    program, messages = exported(raising)
    conditions = {text.removeprefix("the exported model is right only where ").partition(": ")[0] for text in messages}
    assert conditions == {"n >= 4", "(n % 2) == 0"}
    assert program.captured is not None
    assert "n <= 399" in [bound.text(program.captured.dim_names) for bound in program.captured.bounds]
    same(raising, program, 2, 8)


def test_a_declared_range_is_no_surprise() -> None:
    model = LIMITED["greater"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(model, (torch.randn(B, N),), dynamic_shapes=({1: Dim("n", min=5)},), verify=True)
    same(model, program, B, 9)


@pytest.mark.parametrize("name", ["a quotient is a number", "range of a quotient"])
def test_an_automatic_dimension_is_static(name: str) -> None:
    program = onnxplug.to_onnx(
        REFUSED[name], (torch.randn(B, N),), dynamic_shapes=({0: "b", 1: Dim.AUTO},), verify=True
    )
    assert program.model.graph.inputs[0].shape[1] == N
    same(REFUSED[name], program, 2, N)


def test_an_exported_program_gives_a_warning() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(int(x.shape[1] * 1.5))

    exported_program = torch.export.export(Model(), (torch.randn(B, N),), dynamic_shapes=({1: Dim.DYNAMIC},))
    with pytest.warns(UserWarning, match=r"right only where .* == 9: "):
        onnxplug.to_onnx(exported_program)


def test_inputs_of_an_exported_program_tell_which_sizes_are_1() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.mse_loss(x, y)

    batch = Dim("batch")
    inputs = torch.randn(B, N), torch.randn(B, N)
    exported_program = torch.export.export(Model(), inputs, dynamic_shapes=({0: batch}, {0: batch}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        program = onnxplug.to_onnx(exported_program)
    assert len({value.shape[0].value for value in program.model.graph.inputs}) == 1
    torch.testing.assert_close(program(2 * inputs[1], inputs[0])[0], Model()(2 * inputs[1], inputs[0]))


def test_guards_of_operators_are_no_limit() -> None:
    """PyTorch itself refuses the other sizes."""
    weights = torch.randn(4, 3)
    for model in (
        lambda x: x.reshape(x.shape[0], 2, -1),
        lambda x: x + x[:, : x.shape[1] // 2].repeat(1, 2),
        lambda x: torch.einsum("ab,cb->ac", x[:, : x.shape[1] // 2].repeat(1, 2)[:, :3], weights),
        lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    ):
        program, messages = exported(model)
        assert not messages
        same(model, program, 3, 8)
        assert program.verify().cases


def test_a_list_that_is_unpacked_is_no_limit() -> None:
    """PyTorch itself refuses lists of other lengths."""

    def model(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, 1)
        return left.sum(1) - right.sum(1)

    program, messages = exported(model)
    assert not messages
    for n in (2, 3, 8):
        same(model, program, 3, n)


def test_parts_that_are_joined_again_may_be_empty() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(x.chunk(2, 1)[::-1], 1) + torch.cat(x[:, :2].split(1, 1), -1).sum()

    program, messages = exported(model)
    assert not messages
    for n in (1, 2, 9):
        same(model, program, 3, n)


TEXTS: dict[str, Model] = {
    "str": lambda x: x * len(str(x.shape[1])),
    "repr": lambda x: x * len(repr(x.shape[1])),
    "in a list": lambda x: [names := [], names.append(str(x.shape[1])), x * len(names[0])][-1],
    "f-string": lambda x: x * len(f"{x.shape[1]}"),
    "of a shape": lambda x: x * len(str(x.shape)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_size_is_a_warning(name: str) -> None:
    with pytest.warns(UserWarning, match=r"test_guards\.py:\d+ takes the text of a dynamic size"):
        onnxplug.to_onnx(TEXTS[name], (torch.randn(B, N),), dynamic_shapes=({1: "n"},))


def printing(x: torch.Tensor) -> torch.Tensor:
    print("shape", x.shape)
    logging.getLogger(__name__).debug("%s", x.shape[1])
    return x * 2


def test_a_text_that_is_only_printed_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(printing, (torch.randn(B, N),), dynamic_shapes=({1: "n"},))
    same(printing, program, B, 9)


@pytest.mark.parametrize("strict", [None, True])
def test_a_branch_narrows_the_range_of_a_named_dimension(strict: bool | None) -> None:
    """torch refuses ``Dim("n", min=2, max=64)`` where the code asks for more; here a warning names the bound."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 3 else x

    shapes = ({0: Dim("n", min=2, max=64)},)
    with pytest.warns(UserWarning, match="right only where n >= 4"):
        program = onnxplug.to_onnx(model, (torch.randn(8, 2),), dynamic_shapes=shapes, strict=strict)
    x = torch.randn(5, 2)
    assert torch.equal(program(x)[0], model(x))
    assert min(case.sizes["n"] for case in program.verify().cases) >= 4


def in_fours(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] % 4 != 0:
        raise ValueError("rows come by fours")
    return x.reshape(-1, 4) + 1


@pytest.mark.parametrize("factor", [4, 8])
def test_a_condition_that_a_declared_multiple_fulfils(factor: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(in_fours, (torch.randn(24),), dynamic_shapes=({0: factor * Dim("n")},), verify=True)
    assert not program.captured.conditions


@pytest.mark.parametrize("size", [6 * Dim("n"), "4*n"], ids=str)
def test_a_condition_that_a_declared_multiple_does_not_fulfil(size: Any) -> None:
    """A string that names no other dimensions is a name, and declares nothing."""
    with pytest.warns(UserWarning, match=r"right only where .*% 4\) == "):
        onnxplug.to_onnx(in_fours, (torch.randn(24),), dynamic_shapes=({0: size},))

"""Branches on tensors' values become selections where that is the same model, and stay an error elsewhere."""

from __future__ import annotations

import importlib.util
import random
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import onnxplug
from onnxplug import CaptureError
from tests.support.vision import define_vision_schemas

Function = Callable[[torch.Tensor], Any]
COUNTS: list[int] = []
INPUTS = [
    torch.tensor([[0.5, -0.25, 2.0], [1.5, 0.5, -3.0]]),
    torch.full((4, 3), -2.0),
    torch.full((1, 3), 3.0),
    torch.tensor([[float("inf"), 1.0, 2.0]] * 3),
    torch.full((2, 3), float("nan")),
    torch.zeros(5, 3),
]


def clamped(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float32 and not torch.isfinite(x).all():
        limit = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-limit, max=limit)
    return x * 2


def two_sides(x: torch.Tensor) -> torch.Tensor:
    steps = 0
    if x.sum() > 0:
        steps += 0
        y, z = x + 1, x
    else:
        y, z = x - 1, x.abs()
    return y * z + steps


def a_chain(x: torch.Tensor) -> torch.Tensor:
    if x.dim() > 2:
        y = x
    elif x.sum() > 3:
        y = x + 1
        if (x > 2).any():
            y = functional.relu(y) * 3
    elif x.sum() < -3:
        y = x.new_ones(3) - x
    else:
        y = x * 5
    return y * 2


def by_numbers(x: torch.Tensor) -> torch.Tensor:
    """A tensor with one element is true where it is not 0; NaN is not 0."""
    count = (x == 3).sum().reshape(1)
    if count:
        x = x + 1
    if x.mean():
        x = x * 2
    return x


def in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for step in range(3):
        if x.abs().max() > 1:
            x = x / (step + 2)
    return x


def masked(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    mask = x > 1
    if mask.any():
        y[mask] = float("-inf")
    rows = (x < -1).all(1)
    if torch.any(rows):
        y[rows] = x.new_ones(3) * 7
    return y


def masked_under_a_view(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    first, mask = y[:1], y > 1
    if mask.any():
        y[mask] = 0.5
    return first + 1, y


def written_before(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y.mul_(2)
    if y.sum() > 0:
        y = y * 3
    return y


def that_returns(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x + 1
    x = x * 2
    if x.sum() < -20:
        y = x - 1
        return y
    elif x.dim() == 2:
        return x.abs()
    return x


def returned_by_both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not (x > 0).any():
        return x, x * 2
    else:
        return x * 3, x.abs()


def in_an_expression(x: torch.Tensor) -> torch.Tensor:
    x = x / 4 if x.max() > 1 else x * 2
    return x + 1 if (x < 0).any() else x - 1


def returned_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for step in range(2):
        with torch.no_grad():
            try:
                if x.sum() > 0:
                    x = x - step - 1
            finally:
                x = x * 2
    return x


def that_writes_its_condition(x: torch.Tensor) -> torch.Tensor:
    mask = x[:1, 2] > 1
    some = mask.any()
    y = x
    if some:
        some.view(1)[mask] = False
        y = x * 2
    return y


def with_a_closure(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if x.sum() > 0:
        y = x * 3
    return (lambda: y + 1)()


SELECTED: dict[str, Function] = {
    f.__name__: f
    for f in (
        *(clamped, two_sides, a_chain, by_numbers, in_a_loop, masked, masked_under_a_view, written_before),
        *(
            that_returns,
            returned_by_both,
            in_an_expression,
            returned_in_a_loop,
            that_writes_its_condition,
            with_a_closure,
        ),
    )
}


def called(function: Function) -> nn.Module:
    """A module that calls a function."""

    class Calling(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return function(x)

    return Calling()


def exported(function: Function, x: torch.Tensor = INPUTS[0]) -> onnxplug.OnnxProgram:
    """The program, for any number of rows."""
    return onnxplug.to_onnx(called(function), (x,), dynamic_shapes=({0: "rows"},))


def check(program: onnxplug.OnnxProgram, function: Function, *inputs: torch.Tensor) -> None:
    """Compares with eager PyTorch."""
    for x in inputs or INPUTS:
        expected = function(x.clone())
        expected = expected if isinstance(expected, tuple) else (expected,)
        for result, right in zip(program(x), expected, strict=True):
            torch.testing.assert_close(torch.as_tensor(result), right, equal_nan=True, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SELECTED)
def test_both_sides_are_computed_and_one_is_selected(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        program = exported(SELECTED[name])
    check(program, SELECTED[name])
    assert "If" not in program.statistics.operators


def test_a_selection_has_the_line_of_the_branch() -> None:
    program = exported(clamped)
    (select,) = (node for node in program.model.graph if node.op_type == "Where")
    line = clamped.__code__.co_firstlineno + 1
    assert f"test_branches.py:{line}" in select.metadata_props["pkg.onnxplug.source"]


# -- sides that stay an error ------------------------------------------------------------------------------------------


def with_an_effect(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        COUNTS.append(1)
        x = x + 1
    return x


def with_an_item(x: torch.Tensor) -> torch.Tensor:
    results = {"y": x}
    if x.sum() > 0:
        results["y"] = x * 2
    return results["y"]


def with_a_list(x: torch.Tensor) -> torch.Tensor:
    results = [x]
    if x.sum() > 0:
        results += [x * 2]
    return results[-1]


def count(x: torch.Tensor) -> torch.Tensor:
    COUNTS.append(1)
    return x + 1


def by_a_call(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        x = count(x)
    return x


def of_marked_tensors(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y.factor = 3  # type: ignore[attr-defined]
    if x.sum() > 0:
        y = y * 2
    return y * getattr(y, "factor", 1)


def compared_as_objects(x: torch.Tensor) -> torch.Tensor:
    y = x
    if x.sum() > 0:
        y = y * 2
    return y * 3 if y is x else y


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    if x.sum() > 0:
        y += 1
    return y


def written_afterwards(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both results are written only where the first side is not taken."""
    y = x + 1
    z = y
    if x.sum() > 0:
        z = y * 2
    z.add_(1)
    return z, y


def read_through_an_alias(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    z = y
    if x.sum() > 0:
        z = y * 2
    y.add_(1)
    return z


def without_a_value(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > -1e9:
        y = x + 1
    return y


def of_other_sizes(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        x = torch.cat([x, x])
    return x


def of_another_type(x: torch.Tensor) -> torch.Tensor:
    try:
        if x.sum() > 0:
            x = x.double()
    except Exception:
        x = x * 0
    return x


def of_numbers(x: torch.Tensor) -> torch.Tensor:
    factor = 1
    if x.sum() > 0:
        factor = 2
    return x * factor


def divided_by_zero(x: torch.Tensor) -> torch.Tensor:
    whole = x.nan_to_num(0.0, 0.0, 0.0).long()
    if (whole != 0).all():
        whole = 6 // whole
    return whole


def at_places(x: torch.Tensor) -> torch.Tensor:
    places = x.nan_to_num(0.0, 0.0, 0.0).long().abs()[:, 0]
    if (places < x.shape[0]).all():
        x = x[places]
    return x


def drawn(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        x = torch.rand_like(x)
    return x * 0


def under_another_mask(x: torch.Tensor) -> torch.Tensor:
    y, mask, other = x * 2, x > 1, x < 1
    if mask.any():
        y[other] = 0.0
    return y


def where_there_is_no_mask(x: torch.Tensor) -> torch.Tensor:
    y, mask = x * 2, x > 1
    if mask.any():
        y = y + 0
    else:
        y[mask] = 0.0
    return y


def under_a_mask_that_is_written(x: torch.Tensor) -> torch.Tensor:
    y, mask = x * 2, x > 1
    other = mask.view(-1)
    some = mask.any()
    other.fill_(True)
    if some:
        y[mask] = 0.0
    return y


def that_returns_from_a_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        if x.sum() > 0:
            return x
        x = x + 1
    return x * 2


def rows_of_a_mask(x: torch.Tensor) -> torch.Tensor:
    """PyTorch has no error where the mask is false; the write of two rows has one."""
    y, mask = x * 2, x[:, 0] > 1
    if mask.any():
        y[mask] = torch.ones(2, 3)
    return y


REFUSED: dict[str, Function] = {
    f.__name__: f
    for f in (
        *(
            with_an_effect,
            with_an_item,
            with_a_list,
            by_a_call,
            of_marked_tensors,
            compared_as_objects,
            in_place,
            written_afterwards,
            read_through_an_alias,
        ),
        *(without_a_value, of_other_sizes, of_another_type, of_numbers, divided_by_zero, at_places, drawn),
        *(under_another_mask, where_there_is_no_mask, under_a_mask_that_is_written, rows_of_a_mask),
        that_returns_from_a_loop,
        that_returns_from_a_loop,
    )
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_sides_are_an_error_with_the_line(name: str) -> None:
    function = REFUSED[name]
    COUNTS.clear()
    codes = function.__code__, count.__code__
    with pytest.raises(CaptureError) as caught:
        exported(function)
    lines = [int(line) for line in re.findall(r"test_branches\.py:(\d+)", str(caught.value))]
    assert lines, str(caught.value)
    assert function.__code__.co_firstlineno < lines[0] <= max(n for *_, n in function.__code__.co_lines() if n)
    assert (function.__code__, count.__code__) == codes
    assert not COUNTS


def test_the_code_of_the_model_is_restored() -> None:
    code = clamped.__code__
    exported(clamped)
    assert clamped.__code__ is code


def test_another_thread_runs_the_model_meanwhile() -> None:
    """The function's code has selections for a while, which decide as Python does where there is no capture."""
    stop, wrong = threading.Event(), []

    def run() -> None:
        while not stop.is_set():
            for x in INPUTS:
                result = two_sides(x)
                expected = (x + 1) * x if x.sum() > 0 else (x - 1) * x.abs()
                if not torch.equal(result.nan_to_num(), expected.nan_to_num()):
                    wrong.append(x)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(3):
            exported(two_sides)
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_a_file_that_changed_since_it_was_imported(tmp_path: Path) -> None:
    """The source is not that of the code: torch's error stays."""
    file = tmp_path / "changed.py"
    text = "def function(x):\n    if x.sum() > 0:\n        x = x + 1\n    return x\n"
    function = loaded(file, text)
    file.write_text(text.replace("x + 1", "x + 2"), encoding="utf-8")
    with pytest.raises(CaptureError, match=r"changed\.py:2"):
        exported(function)


def loaded(file: Path, text: str) -> Function:
    """The function ``function`` of a new module."""
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Function = module.function
    return function


def test_half_precision_of_a_library() -> None:
    """transformers clamps where a layer of float16 gives an infinity."""
    define_vision_schemas()
    transformers = pytest.importorskip("transformers")
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(
        vocab_size=99, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, use_cache=False, **sizes
    )
    torch.manual_seed(0)
    model = transformers.BartModel(config).eval().half()
    ids = torch.randint(3, 99, (2, 7))
    shapes = {"input_ids": {0: "batch", 1: "length"}}
    program = onnxplug.to_onnx(model, (), kwargs={"input_ids": ids}, dynamic_shapes=shapes)
    program.verify()
    assert program.statistics.operators["Clip"] == 2


# -- the adversary -----------------------------------------------------------------------------------------------------

_CONDITIONS = (
    "{a}.sum() > 0",
    "({a} > 1).any()",
    "not ({a} > -1).all()",
    "flag and {a}.mean() > {b}.mean()",
    "not flag or {a}.sum() < {b}.sum()",
    "flag",
    "x.shape[0] > 0",
)
_PURE = (
    *(
        "{a} = {b} + 1",
        "{a} = {b} * {c}",
        "{a} = {b}",
        "{a} = {b}[:]",
        "{a} = torch.relu({b})",
        "{a} = {b}.clamp(-1, 1)",
    ),
    *(
        "{a} = {b}.view_as({c})",
        "{a}, {b} = {b}, {a}",
        "{a} = -{b} if flag else {c}",
        "{a} = {b} * 2 if {c}.sum() > 1 else {a}",
        "{a} = {b} / 2",
    ),
)
_IMPURE = (
    "{a}.add_(1)",
    "{a} += {b}",
    "{a}[0:1] = {b}[0:1]",
    "{a}[{b} > 0] = 0.5",
    "{a} = {b}.double()",
    "kept.append({a})",
    "kept += [{a}]",
)


def written(seed: int) -> str:
    """The text of a function that assigns, aliases and writes its variables, in branches and outside."""
    draw = random.Random(seed)

    def filled(text: str) -> str:
        return text.format(**{name: draw.choice("pqr") for name in "abc"})

    def block(depth: int, inside: bool) -> list[str]:
        lines: list[str] = []
        for _ in range(draw.randint(1, 3)):
            kind = draw.random()
            if kind < 0.03:
                lines += [
                    f"if {filled(draw.choice(_CONDITIONS))}:",
                    filled("    return {a}, {b}, r, torch.tensor(len(kept))"),
                ]
            elif kind < 0.35 and depth < 3:
                mask = draw.random() < 0.15
                if mask:
                    lines += [filled("mask = {a} > 0"), "if mask.any():", filled("    {a}[mask] = 0.25")]
                    continue
                lines.append(f"if {filled(draw.choice(_CONDITIONS))}:")
                lines += [f"    {line}" for line in block(depth + 1, True)]
                if draw.random() < 0.5:
                    lines += ["else:", *(f"    {line}" for line in block(depth + 1, True))]
            elif kind < (0.94 if inside else 0.88):
                lines.append(filled(draw.choice(_PURE)))
            else:
                lines.append(filled(draw.choice(_IMPURE)))
        return lines

    body = ["flag, kept = True, []", "p, q, r = x * 1, x + 1, x - 1", *block(0, False), *block(0, False)]
    lines = [*body, "return p, q, r, torch.tensor(len(kept))"]
    return "import torch\n\n\ndef function(x):\n" + "".join(f"    {line}\n" for line in lines)


def is_right(file: Path, seed: int) -> bool:
    """Whether the function of a seed is exported, and then computes PyTorch's numbers; ``False``: it is refused."""
    function = loaded(file / f"drawn{seed}.py", written(seed))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = exported(function)
    except CaptureError:
        return False
    check(program, function, *(x for x in INPUTS if torch.isfinite(x).all()))
    return True


def test_drawn_functions(tmp_path: Path) -> None:
    assert sum(is_right(tmp_path, seed) for seed in range(24)) >= 8


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_many_drawn_functions(tmp_path: Path, part: int) -> None:
    assert sum(is_right(tmp_path, seed) for seed in range(100 + part * 100, 200 + part * 100)) >= 30

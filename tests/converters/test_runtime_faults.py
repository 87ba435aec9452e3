"""Each fault of ONNX Runtime that a rule works around, shown with the plain form; the rule's form is right.

If a plain form is right, ONNX Runtime was corrected: the fault's row in ``helpers/runtimes.py`` can be removed or
limited to a version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onnxplug
from onnxplug.converters.helpers import runtimes
from onnxplug.run.session import from_ort_value, make_session, to_ort_value
from tests.support.check import Call, check


class ByteWeights(torch.nn.Module):
    """A product with weights of bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("weight", torch.randint(-128, 128, (64, 256)).to(torch.int8))
        self.register_buffer("scales", torch.rand(64))

    def forward(self, x: torch.Tensor) -> Any:
        return torch._weight_int8pack_mm(x, self.weight, self.scales)


def spectrum(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.fft.rfft(x))


def pool(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x, 2, 4, 0, 5, ceil_mode=True)


def resized(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, size=(200, 190), mode="bilinear", antialias=True)


def attended(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, mask)


def sampled(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def run(
    model: Callable[..., Any], args: tuple[torch.Tensor, ...], target: str | None, opset: int | None = None
) -> torch.Tensor:
    """The first result of ONNX Runtime, whatever the target."""
    module = model if isinstance(model, torch.nn.Module) else Call(model)
    program = onnxplug.to_onnx(module, args, target=target, opset_version=opset)
    session = make_session(program.model_proto.SerializeToString())
    names = [i.name for i in session.get_inputs()]
    feed = {name: to_ort_value(x) for name, x in zip(names, args, strict=True)}
    return from_ort_value(session.run_with_ort_values(None, feed)[0])


def off(model: Callable[..., Any], args: tuple[torch.Tensor, ...], target: str | None) -> float:
    """The greatest difference from PyTorch in double, as a share of the greatest element."""
    module = model if isinstance(model, torch.nn.Module) else Call(model)
    exact = isinstance(model, torch.nn.Module)
    expected = module(*args) if exact else module(*(x.double() if x.is_floating_point() else x for x in args))
    return float((run(model, args, target) - expected).abs().max() / expected.abs().max())


HUGE = torch.tensor([[2**53, 1]])
IMAGE = noise(1, 3, 64, 65)
FAR = torch.tensor([[3e6, 0.1], [-5e6, 0.2]]).reshape(1, 1, 2, 2)
LEAST = torch.full((4, 4), torch.finfo(torch.float32).min)
LONG = torch.tensor([2**32 - 1, 2**31, 5, -1] * 8)
FAULTS: dict[str, tuple[runtimes.Fault, Callable[[str | None], bool]]] = {
    "sums": (
        runtimes.INTEGERS_THROUGH_DOUBLE,
        lambda target: run(lambda x: x.sum(1), (HUGE,), target).item() != 2**53 + 1,
    ),
    "long sums": (
        runtimes.LONG_SUMS_LOSE_DIGITS,
        lambda target: off(lambda x: x.mean(0), (noise(4_000_000, 2) + 100,), target) > 1e-3,
    ),
    "dropout": (
        runtimes.DROPOUT_IS_REMOVED,
        lambda target: bool(run(lambda x: F.dropout(x.mT, 0.5).mT, (torch.ones(20, 30),), target).all()),
    ),
    "random": (runtimes.RANDOM_ENDS_AT_21, lambda target: _has_no_kernel(target)),
    "weights": (runtimes.ACTIVATIONS_ARE_ROUNDED, lambda target: off(ByteWeights(), (noise(4, 256),), target) > 1e-4),
    "spectrum": (runtimes.FLOAT_TRANSFORMS_ARE_INEXACT, lambda target: off(spectrum, (noise(4, 127),), target) > 1e-6),
    "float8": (
        runtimes.INFINITY_IS_LOST,
        lambda target: bool(
            run(lambda x: x.to(torch.float8_e5m2).float(), (torch.tensor([61440.0, 1.0]),), target).isnan().any()
        ),
    ),
    "resize": (
        runtimes.RESIZE_ROUNDS_OTHERWISE,
        lambda target: bool((run(resized, (IMAGE,), target) - resized(IMAGE)).abs().max() > 5e-6),
    ),
    "scan": (runtimes.EMPTY_SCANS_END_THE_PROCESS, lambda target: _refuses_no_slices(target)),
    "no rows": (runtimes.FUSED_PRODUCTS_STAY_UNWRITTEN, lambda target: _leaves_unwritten(target)),
    "pool": (runtimes.PADDING_IS_NARROW, lambda target: _refuses(pool, (noise(1, 1, 8, 8),), target)),
    "far places": (
        runtimes.FAR_PLACES_OVERFLOW,
        lambda target: bool((run(sampled, (IMAGE, FAR), target) - sampled(IMAGE, FAR)).abs().max() > 1e-3),
    ),
    "low halves": (
        runtimes.LOW_HALVES_ARE_SIGNED,
        lambda target: bool(
            (run(lambda x: x.maximum(x.new_tensor(471)), (LONG,), target) != LONG.clamp(min=471)).any()
        ),
    ),
    "hidden": (
        runtimes.LEAST_BIAS_HIDES,
        lambda target: bool(run(attended, (IMAGE[:, :, :4], LEAST), target, opset=23).abs().max() == 0),
    ),
}


def _refuses(model: Callable[..., Any], args: tuple[torch.Tensor, ...], target: str | None) -> bool:
    try:
        return off(model, args, target) > 1e-6
    except Exception as error:
        return "Pad should be smaller than kernel" in str(error)


def _refuses_no_slices(target: str | None) -> bool:
    """Whether a Scan of a dynamic number of slices is refused where there are none; without elements in them the process ends."""
    program = onnxplug.to_onnx(
        lambda x: x.cumprod(0), (noise(4, 3),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), target=target
    )
    try:
        return program(noise(0, 3))[0].shape != (0, 3)
    except onnxplug.VerificationError as error:
        return "Dimension 0 is 0" in str(error)


def _leaves_unwritten(target: str | None) -> bool:
    """Whether a product without rows to add has the numbers of memory that an earlier run used."""
    rows = {1: torch.export.Dim.DYNAMIC}
    program = onnxplug.to_onnx(
        lambda x, y: torch.einsum("bij,bik->bjk", x, y),
        (noise(16, 4, 16), noise(16, 4, 16)),
        dynamic_shapes=(rows, rows),
        target=target,
    )
    results = [program(noise(16, n, 16), noise(16, n, 16))[0] for n in (4, 0) * 8]
    return any(bool(result.any()) for result in results[1::2])


def _has_no_kernel(target: str | None) -> bool:
    """Whether random numbers of opset 22 can't be drawn."""
    try:
        run(torch.rand_like, (noise(4),), target, opset=22)
    except Exception as error:
        return "Could not find an implementation for RandomUniformLike" in str(error)
    return False


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_faults(name: str) -> None:
    _, is_wrong = FAULTS[name]
    assert is_wrong(None)
    assert not is_wrong("onnxruntime")


def test_every_fault_is_shown() -> None:
    assert {id(fault) for fault, _ in FAULTS.values()} == {id(fault) for fault in runtimes.FAULTS}


#: Operators with a rule for ONNX Runtime that avoids a wrong number.
RULES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "clamp": (lambda x: x.clamp(min=0.0), (torch.tensor([float("inf"), -1.0]),)),
    "addmm": (lambda x, a, b: torch.addmm(x, a, b, beta=2), (noise(2, 3), torch.zeros(2, 0), torch.zeros(0, 3))),
    "log_softmax": (
        lambda x: x.log_softmax(1),
        (torch.tensor([[float("inf"), 1.0], [float("-inf")] * 2], dtype=torch.float64),),
    ),
    "fmod": (lambda x: torch.fmod(x, 7), (HUGE + 1,)),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_for_wrong_numbers(name: str) -> None:
    function, args = RULES[name]
    expected = function(*args)
    assert not torch.allclose(run(function, args, None), expected, equal_nan=True)
    torch.testing.assert_close(run(function, args, "onnxruntime"), expected, equal_nan=True)


@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_a_dynamic_summed_axis_of_size_0(beta: float) -> None:
    dynamic = ({0: "rows", 1: "columns"}, {0: "rows", 1: "summed"}, {0: "summed", 1: "columns"})
    first, other = ((noise(m, n), noise(m, k), noise(k, n)) for m, k, n in ((2, 4, 3), (5, 0, 6)))
    check(lambda x, a, b: torch.addmm(x, a, b, beta=beta, alpha=2), *first, dynamic=dynamic, others=[other])

"""Functions of torch that take a size as a plain number, or ask for one that follows from data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from tests.support.check import check

WINDOW = torch.hann_window(16)


def _spectrum(x: torch.Tensor, center: bool) -> torch.Tensor:
    return torch.stft(x, 16, 4, window=WINDOW + (not center), center=center, return_complex=True)


def _signal(length: Callable[[torch.Tensor], int], center: bool = True) -> Callable[[torch.Tensor], torch.Tensor]:
    def model(x: torch.Tensor) -> torch.Tensor:
        spectrum, window = _spectrum(x, center), WINDOW + (not center)
        return torch.istft(spectrum, 16, 4, window=window, center=center, length=length(x))

    return model


@pytest.mark.long
@pytest.mark.parametrize(
    ("length", "center"),
    [
        pytest.param(lambda x: x.shape[1], True, marks=pytest.mark.long),
        (lambda x: x.shape[1], False),
        (lambda x: x.shape[1] // 2, True),
        (lambda x: 40, True),
    ],
)
def test_istft_of_a_dynamic_length(length: Callable[[torch.Tensor], int], center: bool, seeded: None) -> None:
    inputs = [(torch.randn(*shape),) for shape in ((2, 64), (3, 96), (1, 43))]
    args, *others = inputs if center else inputs[:2]  # frames of a window of zeros at the ends are refused by eager
    check(_signal(length, center), *args, others=others, dynamic=({0: "batch", 1: "time"},), atol=1e-5)


@pytest.mark.parametrize("length", [39, 40])
def test_istft_of_a_static_length(length: int, seeded: None) -> None:
    """A signal that is shorter when the model runs is followed by zeros, as eager's."""
    others = [(torch.randn(3, 96),), (torch.randn(1, 17),)]
    check(_signal(lambda x: length), torch.randn(2, 64), others=others, dynamic=({0: "batch", 1: "time"},), atol=1e-5)


@pytest.mark.long
def test_istft_longer_than_the_signal(seeded: None) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(x, 16, 4, window=torch.ones(16), return_complex=True)
        return torch.istft(spectrum, 16, 4, window=torch.ones(16), length=2 * x.shape[1])

    others = [(torch.randn(3, 96),), (torch.randn(1, 43),)]
    check(model, torch.randn(2, 64), others=others, dynamic=({0: "batch", 1: "time"},), atol=1e-5)


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("ends", [(0, 1), (-1.5, 3), (2, -7.25)])
def test_linspace_of_a_dynamic_number_of_steps(ends: tuple[float, float], dtype: torch.dtype | None) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.linspace(*ends, steps=x.shape[0], dtype=dtype)

    others = [(torch.zeros(n),) for n in (1, 2, 9, 33)]
    check(model, torch.zeros(8), others=others, dynamic=({0: "n"},))


def test_linspace_between_tensors() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.linspace(x[0], x[-1], x.shape[0])

    others = [(torch.tensor([-2.0]),), (torch.tensor([3.0, 1.0, 0.25]),)]
    check(model, torch.arange(5.0), others=others, dynamic=({0: "n"},))


_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "instance_norm": lambda: nn.InstanceNorm1d(3),
    "instance_norm_affine": lambda: nn.InstanceNorm1d(3, affine=True),
    "instance_norm_running": lambda: nn.InstanceNorm1d(3, track_running_stats=True),
    "batch_norm": lambda: nn.BatchNorm1d(3),
}


class _Chosen(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x[:, :, torch.nonzero(x[0, 0] > 0)[:, 0]])
        return y


class _Head(_Chosen):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x[:, :, : int((x[0, 0] > 0).sum().item())])
        return y


@pytest.mark.parametrize("form", [_Chosen, _Head])
@pytest.mark.parametrize("name", _LAYERS)
def test_normalization_of_a_length_that_follows_from_data(name: str, form: type[_Chosen], seeded: None) -> None:
    others = [(torch.randn(3, 3, 50),), (torch.randn(1, 3, 20),)]
    check(
        form(_LAYERS[name]()).eval(),
        torch.randn(2, 3, 20),
        others=others,
        dynamic=({0: "batch", 2: "n"},),
        atol=1e-5,
    )


def test_normalization_of_one_element_is_refused() -> None:
    with pytest.raises(onnxplug.CaptureError, match="more than 1 spatial element"):
        onnxplug.to_onnx(nn.InstanceNorm1d(3), (torch.randn(2, 3, 1),))


class Selected(nn.Module):
    """A function of elements that a mask selects along an axis."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], axis: int = 0) -> None:
        super().__init__()
        self.function, self.axis = function, axis

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.function(x.index_select(self.axis, mask.nonzero().squeeze(1)))


FIRST, FEWER, NONE = (torch.tensor([float(i < n) for i in range(4)]) for n in (3, 2, 0))
ASKING_FOR_ELEMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "local_response_norm": lambda x: nn.functional.local_response_norm(x, 3, alpha=0.3, beta=0.6, k=1.5),
    "LocalResponseNorm": nn.LocalResponseNorm(2, alpha=2.0),
    "channel_shuffle": lambda x: nn.functional.channel_shuffle(x, 2),
    "roll": lambda x: x.roll((1, 2), (0, 2)),
    "logsumexp": lambda x: x.logsumexp(0),
    "cdist": lambda x: torch.cdist(x.flatten(1), x.flatten(1) + 1),
}


@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("name", ["local_response_norm", "LocalResponseNorm"])
def test_local_response_norm_of_a_size_that_follows_from_data(name: str, axis: int, rank: int, seeded: None) -> None:
    x = torch.randn(4, 5, *[4] * (rank - 2))
    check(Selected(ASKING_FOR_ELEMENTS[name], axis % rank), x, FIRST, others=[(x * 2, FEWER), (x, NONE)])


@pytest.mark.parametrize("name", [name for name in ASKING_FOR_ELEMENTS if "esponse" not in name])
def test_operators_that_ask_for_elements(name: str, seeded: None) -> None:
    x = torch.randn(4, 6, 8)
    check(Selected(ASKING_FOR_ELEMENTS[name]), x, FIRST, others=[(x * 2, FEWER), (x, NONE)])


PLAIN_SIZES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(stable=True, dim=-1), -1),
    "take_along_dim of rows": lambda x: x.take_along_dim(x[:2].long() * 0, 0),
    "take_along_dim of all": lambda x: torch.take_along_dim(x, (x > 0).long()),
    "cov": lambda x: torch.cov(x.t()),
    "cov of rows": lambda x: x.cov(correction=0),
    "cov of a row": lambda x: torch.cov(x[:, 0]),
    "cov of integers": lambda x: torch.cov((x.t() * 10).long()),
    "corrcoef": lambda x: torch.corrcoef(x.t()),
    "corrcoef of rows": torch.corrcoef,
    "corrcoef of a row": lambda x: x[:, 1].corrcoef(),
}


@pytest.mark.parametrize("name", PLAIN_SIZES)
def test_functions_that_need_plain_sizes(name: str, seeded: None) -> None:
    x = torch.randn(4, 6)
    check(Selected(PLAIN_SIZES[name]), x, FIRST, others=[(x * 2, FEWER)], atol=1e-5)
    check(PLAIN_SIZES[name], x, others=[(x * 2 - 1,)], atol=1e-5)


@pytest.mark.parametrize("first", [(2, 5), (1, 5), (2, 5, 4)], ids=str)
def test_take_along_dim_of_dynamic_sizes(first: tuple[int, ...], seeded: None) -> None:
    """Sizes beside the axis are equal, or one is broadcast; a wrong rank is refused as in PyTorch."""

    def inputs(rows: int, columns: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = [first[0] if first[0] == 1 else rows, columns, *first[2:]]
        return torch.randn(shape), torch.randint(0, columns, [rows, count, *[1] * (len(first) - 2)])

    dynamic = ({1: "columns"} if first[0] == 1 else {0: "rows", 1: "columns"}, {0: "rows", 1: "count"})
    others = [inputs(3, 7, 4), inputs(4, 2, 9)]
    program = check(lambda x, places: x.take_along_dim(places, 1), *inputs(2, 5, 3), dynamic=dynamic, others=others)
    assert len(first) > 2 or first[0] == 1 or [node.op_type for node in program.model.graph] == ["GatherElements"]
    with pytest.raises(onnxplug.CaptureError, match="same number of dimensions"):
        onnxplug.to_onnx(lambda x, places: x.take_along_dim(places[0], 1), inputs(2, 5, 3), dynamic_shapes=dynamic)


#: Functions whose kernels in torch read every size as a plain number.
READING_SIZES: dict[str, tuple[Callable[..., Any], int]] = {
    "kron": (lambda x, y: torch.kron(x, y), 2),
    "kron of a row": (lambda x, y: x[0].kron(y[None]), 2),
    "multi_dot": (lambda x, y: torch.linalg.multi_dot([x, y, y.mT, y]), 2),
    "multi_dot of rows": (lambda x, y: torch.linalg.multi_dot([x[0], y, y[-1]]), 2),
    "chain_matmul": (lambda x, y: torch.chain_matmul(x, y, y.mT), 2),
    "columns": (lambda x: torch.linalg.matrix_norm(x, 1), 1),
    "smallest row": (lambda x: torch.linalg.matrix_norm(x, -math.inf, keepdim=True), 1),
    "rows of a batch": (lambda x: torch.linalg.norm(x[:, None] * x[0], math.inf, (0, 2)), 1),
    "smallest column": (lambda x: torch.linalg.norm(x, -1, dtype=torch.float64), 1),
    "gradient": (torch.gradient, 1),
    "gradient of rows": (lambda x: torch.gradient(x, spacing=0.5, dim=-1, edge_order=2)[0], 1),
    "gradient by two spacings": (lambda x: torch.gradient(x, spacing=(2, 0.5), dim=(1, 0)), 1),
}


@pytest.mark.parametrize("name", READING_SIZES)
def test_functions_whose_kernels_read_sizes(name: str, seeded: None) -> None:
    function, count = READING_SIZES[name]
    dynamic = ({0: "rows", 1: "middle"}, {0: "middle", 1: "columns"})[:count]
    sizes = ((4, 5, 3), (6, 3, 4), (3, 7, 8))
    first, *others = ((torch.randn(r, m), torch.randn(m, c))[:count] for r, m, c in sizes)
    check(function, *first, dynamic=dynamic, others=others)
    check(function, *first)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.take_along_dim(x.long(), 2), "Dimension out of range|dim 2 out of bounds"),
        (lambda x: x.take_along_dim(x.int(), 1), "should be Long"),
        (lambda x: torch.chain_matmul(x[0], x.mT), "expected 2"),
        (lambda x: torch.gradient(x, dim=(0, -2)), "multiple times"),
        (lambda x: torch.linalg.matrix_norm(x, 1, (0, -2)), "must be different"),
        (lambda x: torch.linalg.multi_dot([x, x[None], x]), "must be 2D"),
        (lambda x: torch.linalg.matrix_norm(x[0], 1), "at least 2 dimensions"),
        (lambda x: torch.gradient(x, edge_order=3), "edge_order"),
    ],
)
def test_wrong_arguments_of_functions_whose_kernels_read_sizes(function: Callable[..., Any], reason: str) -> None:
    """The errors are in torch's words."""
    with pytest.raises(onnxplug.CaptureError, match=reason):
        onnxplug.to_onnx(function, (torch.randn(4, 5),), dynamic_shapes=({0: "rows", 1: "columns"},))


def test_norms_of_complex_matrices(seeded: None) -> None:
    """Their sizes become constants, as in other functions that are decomposed by torch's kernel."""
    check(lambda x: torch.linalg.norm(x, 1), torch.randn(4, 5, dtype=torch.complex64), dynamic=True)


def test_correlations_of_complex_numbers(seeded: None) -> None:
    x, y = torch.randn(4, 6, dtype=torch.complex64), torch.randn(4, 9, dtype=torch.complex64)
    check(torch.corrcoef, x, dynamic=({1: "columns"},), others=[(y,), (x.roll(1, 0) * 2,)])


def test_a_number_of_elements_that_is_said_to_be_a_size(seeded: None) -> None:
    """The model's check of a mask bounds nothing; torch's bound of numbers was rounded and refused."""

    def model(x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._check(x[mask].numel() == y.numel())
        return x.masked_scatter(mask, y)

    cases = []
    for rows, length, count in ((2, 5, 6), (3, 7, 2), (1, 4, 1)):
        mask = (torch.randperm(rows * length) < count).view(rows, length, 1).expand(-1, -1, 32)
        cases.append((torch.randn(rows, length, 32), mask, torch.randn(count, 32)))
    text = {0: "rows", 1: "length"}
    check(model, *cases[0], others=cases[1:], dynamic=(text, text, {0: "count"}))


@pytest.mark.parametrize("is_batched", [True, False])
def test_adaptive_softmax(is_batched: bool, seeded: None) -> None:
    """Clusters with targets and without."""
    layer = nn.AdaptiveLogSoftmaxWithLoss(6, 12, [3, 7]).eval()

    def model(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, loss = layer(x, target)
        return output, loss, layer.predict(x if is_batched else x[None])

    batches = [(torch.randn(n, 6), torch.tensor(t)) for n, t in ((4, [0, 8, 2, 11]), (3, [1, 2, 1]), (1, [9]))]
    (args, *others) = batches if is_batched else [(x[0], target[0]) for x, target in batches]
    check(model, *args, others=others, dynamic=({0: "n"}, {0: "n"}) if is_batched else None, atol=1e-5)


def test_an_operator_that_computes_otherwise_without_elements_is_refused() -> None:
    with pytest.raises(onnxplug.MissingRuleError, match="trapezoid"):
        onnxplug.to_onnx(Selected(lambda x: torch.trapezoid(x, dim=0)), (torch.randn(4, 6), FIRST))


def test_a_refusal_of_no_elements_that_the_model_handles() -> None:
    def pooled(x: torch.Tensor) -> torch.Tensor:
        try:
            return nn.functional.adaptive_max_pool1d(x, 2)
        except (RuntimeError, IndexError):
            return x.new_ones(4, 6, 2)

    with pytest.raises(onnxplug.CaptureError):
        onnxplug.to_onnx(Selected(pooled, 2), (torch.randn(4, 6, 4), FIRST))


def test_code_that_asks_for_elements_is_refused() -> None:
    for function in (
        lambda x: x * 2 if x.numel() else x.new_ones(1, 6, 4),
        lambda x: x.new_ones(1, 6, 4) if x.shape[0] == 0 else x * 2,
        lambda x: x * 2 if x.shape[0] > 0 else x.new_ones(1, 6, 4),
    ):
        with pytest.raises(onnxplug.CaptureError):
            onnxplug.to_onnx(Selected(function), (torch.randn(4, 6, 4), FIRST))


@pytest.mark.xfail(strict=True, reason="ReduceMean of no elements is 0 in ONNX Runtime, and NaN in PyTorch")
def test_the_mean_of_a_selection_without_elements() -> None:
    x = torch.rand(4)
    program = onnxplug.to_onnx(Selected(lambda y: y.mean()), (x, FIRST))
    torch.testing.assert_close(program(x, NONE)[0], x[:0].mean(), equal_nan=True)


@torch.library.custom_op("onnxplug_test_sizes::kept", mutates_args=())
def _kept(x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(x > 0.5)[:, 0]


@_kept.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.library.get_ctx().create_unbacked_symint(), dtype=torch.int64)


@pytest.mark.parametrize("limit", [1, 2])
def test_a_custom_operator_may_have_no_result_or_a_single_result(limit: int) -> None:
    """torch takes 2 for the least number, as torchvision's nms asks it to, and decides the model's branch by that."""

    def model(x: torch.Tensor) -> torch.Tensor:
        kept = _kept(x)
        return x[kept] * 2 if len(kept) >= limit else x

    with pytest.raises(onnxplug.CaptureError, match=r"can't capture the model at .*test_sizes\.py:\d+"):
        onnxplug.to_onnx(model, (torch.rand(8),))

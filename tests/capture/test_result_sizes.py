"""Sizes of the results of operators, read as numbers: an operator's formula must hold for every size of its operand.

Torch's shape functions ask questions of sizes. Their guards are left out where they choose between equal results, and a shape for
which the answer matters would be right for the example alone: here each size is compared at many others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onnxplug

WINDOWS = [
    (2, 2, 0, 1),
    (3, 2, 1, 1),
    (3, 3, 1, 1),
    (2, 3, 1, 1),
    (3, 2, 1, 2),
    (4, 3, 2, 1),
    (2, 2, 1, 1),
    (5, 4, 2, 1),
]
W = torch.ones(3, 2, 5)
SLICES = [(None, None, 2), (1, None, 3), (-4, None, 1), (None, -2, 1), (-5, -1, 1), (2, 4, 1), (-100, 3, 1), (3, -1, 2)]
SPLITS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{f"tensor_split {n}": lambda x, n=n: x.tensor_split(n, 2) for n in (2, 3, 4, 5)},
    **{f"max_pool1d {a}": lambda x, a=a: F.max_pool1d(x, *a, ceil_mode=True) for a in WINDOWS},
    "max_pool3d": lambda x: F.max_pool3d(x[:, None, None], (1, 1, 2), (1, 1, 3), (0, 0, 1), ceil_mode=True),
    "avg_pool2d": lambda x: F.avg_pool2d(x[:, None], (1, 2), (1, 3), (0, 1), ceil_mode=True),
    "lp_pool1d": lambda x: F.lp_pool1d(x, 2.0, 2, 3, ceil_mode=True),
}
OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{f"slice {a}": lambda x, a=a: x[:, :, slice(*a)] for a in SLICES},
    **{f"unfold {w} {s}": lambda x, w=w, s=s: x.unfold(2, w, s) for w, s in ((2, 3), (3, 2))},
    **{f"interpolate {s}": lambda x, s=s: F.interpolate(x, scale_factor=s) for s in (0.3, 0.75, 1.5, 2.7)},
    **{f"conv1d {a}": lambda x, a=a: F.conv1d(x, W.transpose(0, 1)[:, :, : a[0]], None, *a[1:]) for a in WINDOWS},
    **{
        f"conv_transpose1d {s}": lambda x, s=s: F.conv_transpose1d(x, W, stride=s, padding=1, output_padding=s - 1)
        for s in (1, 3)
    },
    "dsplit": lambda x: torch.dsplit(x, [3]),
    "fold": lambda x: F.fold(x.repeat(1, 2, 1)[:, :4], (1, x.shape[2] + 1), (1, 2)),
    "unfold 2d": lambda x: F.unfold(x[:, None], (1, 2), stride=(1, 2), padding=(0, 1)),
    "diagonal": lambda x: (x[0].diagonal(1), x[0].diagonal(-1), (x[0].t() @ x[0]).diagonal(2), torch.diag_embed(x, 2)),
    "indices of triangles": lambda x: (torch.tril_indices(x.shape[2], 3, 1), torch.triu_indices(4, x.shape[2], -1)),
    "fft": lambda x: (
        torch.fft.rfft(x).abs(),
        torch.fft.irfft(x),
        torch.fft.ihfft(x).abs(),
        torch.fft.rfft(x, n=6).abs(),
    ),
    "stft": lambda x: torch.stft(x[0], 4, 3, return_complex=True, window=torch.ones(4)).abs(),
    "arange": lambda x: (
        torch.arange(1, x.shape[2], 3),
        torch.arange(x.shape[2], 0, -2),
        torch.arange(0, x.shape[2], 0.7),
    ),
    "products": lambda x: (torch.combinations(x[0, 0]), torch.cartesian_prod(x[0, 0], x[0, 1]), torch.kron(x[0], x[0])),
    "differences": lambda x: (torch.diff(x, n=2), torch.cumulative_trapezoid(x), F.pdist(x[0].t().contiguous())),
    "padding": lambda x: (F.pad(x, (-1, -1)), F.pad(x, (0, (-x.shape[2]) % 4)), F.pad(x, (1, 1), mode="reflect")),
    "matrices": lambda x: (torch.linalg.qr(x[0])[0], torch.linalg.svdvals(x[0]), torch.linalg.pinv(x[0])),
    "views": lambda x: (x.repeat(1, 1, 4).view(2, 3, 4, -1), x.mT.reshape(-1, 3), x.repeat_interleave(3, 2)),
}


class Sizes(torch.nn.Module):
    """The sizes of a function's results, as numbers and as the sizes of other tensors."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        result = self.function(x)
        results = result if isinstance(result, tuple | list) else [result]
        return [y.new_ones(y.shape) for y in results], [sum(y.shape) for y in results]


def compare(function: Callable[[torch.Tensor], Any]) -> None:
    model = Sizes(function)
    program = onnxplug.to_onnx(model, (torch.randn(2, 3, 7),), dynamic_shapes=({2: "n"},))
    for size in (7, 2, 3, 4, 5, 6, 8, 9, 10, 12):
        x = torch.randn(2, 3, size)
        try:
            expected = torch.utils._pytree.tree_leaves(model(x))
        except RuntimeError:  # eager refuses a window that is larger than the operand
            continue
        results = [torch.as_tensor(result) for result in program(x)]
        assert [r.shape for r in results] == [torch.as_tensor(e).shape for e in expected], size
        assert [int(r.sum()) for r in results] == [int(torch.as_tensor(e).sum()) for e in expected], size


@pytest.mark.parametrize("name", SPLITS)
def test_sizes_of_parts_and_windows(name: str) -> None:
    compare(SPLITS[name])


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_sizes_of_other_results(name: str) -> None:
    compare(OTHERS[name])

"""Backward operators: gradients as eager's autograd computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.check import check
from tests.support.tolerances import looser

_ATEN = torch.ops.aten
Image = tuple[int, ...]
DYNAMIC = torch.export.Dim.DYNAMIC


def image(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


#: stride, padding, dilation, transposed, output padding, groups; image size; kernel size.
CONVOLUTIONS: dict[str, tuple[list[int], list[int], list[int], bool, list[int], int, Image, Image]] = {
    "plain": ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, (2, 4, 7, 8), (6, 4, 3, 2)),
    "strides that leave places": ([2, 3], [1, 0], [1, 1], False, [0, 0], 1, (2, 4, 8, 9), (6, 4, 3, 2)),
    "dilated": ([2, 1], [2, 3], [2, 3], False, [0, 0], 1, (2, 4, 9, 8), (6, 4, 3, 2)),
    "groups": ([2, 2], [1, 1], [1, 1], False, [0, 0], 2, (2, 4, 7, 8), (6, 2, 3, 3)),
    "depthwise": ([1, 1], [1, 1], [1, 1], False, [0, 0], 4, (2, 4, 7, 8), (4, 1, 3, 3)),
    "one axis": ([2], [1], [1], False, [0], 1, (2, 4, 9), (6, 4, 3)),
    "three axes": ([2, 1, 2], [1, 0, 1], [1, 1, 1], False, [0, 0, 0], 1, (1, 2, 5, 4, 6), (3, 2, 3, 2, 3)),
    "transposed": ([2, 2], [1, 1], [1, 1], True, [1, 0], 1, (2, 4, 5, 6), (4, 3, 3, 3)),
    "transposed groups": ([2, 1], [0, 1], [1, 2], True, [0, 0], 2, (2, 4, 5, 6), (4, 3, 3, 2)),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_backward(name: str, dynamic: bool) -> None:
    stride, padding, dilation, transposed, out_padding, groups, size, kernel = CONVOLUTIONS[name]
    rest = (stride, padding, dilation, transposed, out_padding, groups)

    def backward(x: torch.Tensor, weight: torch.Tensor) -> Any:
        grad = torch.sin(_ATEN.convolution.default(x, weight, None, *rest))
        bias = [weight.shape[1] * groups if transposed else weight.shape[0]]
        return _ATEN.convolution_backward.default(grad, x, weight, bias, *rest, [True, True, True])

    x, weight = image(*size), image(*kernel, seed=1)
    larger = image(size[0] + 1, size[1], *(n + 3 for n in size[2:]), seed=2)
    shapes = ({0: DYNAMIC, **dict.fromkeys(range(2, x.dim()), DYNAMIC)}, None) if dynamic else None
    check(
        backward,
        x,
        weight,
        others=[(larger, weight) if dynamic else (-x, weight)],
        dynamic=shapes,
        **looser("weight gradients"),
    )


FORWARD: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Image]] = {
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), (2, 3, 8, 9)),
    "avg_pool2d ceil": (lambda x: F.avg_pool2d(x, (3, 2), (2, 3), (1, 0), ceil_mode=True), (2, 3, 8, 9)),
    "avg_pool2d without padding": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        (2, 3, 8, 8),
    ),
    "avg_pool2d divisor": (lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=7), (3, 8, 9)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2, 2, 1), (1, 2, 4, 5, 6)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 3, 8, 9)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2, 1), (1, 2, 4, 5, 6)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), (2, 3, 8, 9)),
    "adaptive_avg_pool2d to 1": (lambda x: F.adaptive_avg_pool2d(x, 1), (2, 3, 8, 9)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, (3, 2)), (2, 3, 8, 9)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2.0), (2, 3, 4, 5)),
    "nearest exact": (lambda x: F.interpolate(x, size=(7, 3), mode="nearest-exact"), (2, 3, 4, 5)),
    "bilinear": (lambda x: F.interpolate(x, size=(7, 3), mode="bilinear"), (2, 3, 4, 5)),
    "bilinear corners": (lambda x: F.interpolate(x, (7, 3), mode="bilinear", align_corners=True), (2, 3, 4, 5)),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"), (2, 3, 4, 5)),
    "linear": (lambda x: F.interpolate(x, scale_factor=1.7, mode="linear"), (2, 3, 5)),
    "trilinear": (lambda x: F.interpolate(x, size=(3, 5, 4), mode="trilinear"), (1, 2, 2, 4, 3)),
    "replicate": (lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"), (2, 3, 4, 5)),
    "reflect": (lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"), (2, 3, 4, 5)),
    "hardshrink": (lambda x: F.hardshrink(x, 0.4), (3, 4)),
    "softshrink": (lambda x: F.softshrink(x, 0.4), (3, 4)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x * 2, x.sin()), (2, 2, 5, 8)),
    "causal attention": (lambda x: F.scaled_dot_product_attention(x, x * 2, x.sin(), is_causal=True), (2, 2, 5, 8)),
    "scaled attention": (lambda x: F.scaled_dot_product_attention(x, x, x, scale=0.3), (2, 2, 5, 8)),
    "layer_norm": (lambda x: F.layer_norm(x, [8]), (2, 5, 8)),
    "group_norm": (lambda x: F.group_norm(x, 2), (2, 4, 5)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (4, 3, 5)),
    "softmax": (lambda x: x.softmax(-1), (3, 4)),
    "log_softmax": (lambda x: x.log_softmax(-1), (3, 4)),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([0, 2, 1]), label_smoothing=0.1), (3, 4)),
    "embedding": (lambda x: F.embedding(torch.tensor([1, 0, 1, 3]), x, padding_idx=3), (5, 4)),
    "gelu": (lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"), (3, 4)),
    "activations": (lambda x: F.silu(x) + F.elu(x) + F.hardswish(x) + F.mish(x) + F.leaky_relu(x), (3, 4)),
    "more activations": (
        lambda x: F.softplus(x) + F.logsigmoid(x) + F.relu6(x) + F.hardsigmoid(x) + F.glu(torch.cat([x, x], 1)),
        (3, 4),
    ),
    "amax": (lambda x: x.amax(1) + x.max(1).values + x.median(1).values, (3, 4)),
    "sort": (lambda x: x.sort(1).values * torch.arange(4), (3, 4)),
    "gather": (lambda x: x.gather(1, torch.tensor([[0, 1], [1, 1], [3, 0]])), (3, 4)),
    "norm": (lambda x: x.norm(dim=1) + torch.linalg.vector_norm(x, 3, 1), (3, 4)),
    "cumsum": (lambda x: x.cumsum(1) * x.cumprod(1), (3, 4)),
    "einsum": (lambda x: torch.einsum("ij,kj->ik", x, x), (3, 4)),
}


@pytest.mark.parametrize(("forward", "size"), list(FORWARD.values()), ids=list(FORWARD))
def test_gradients_by_the_backend(forward: Callable[[torch.Tensor], torch.Tensor], size: Image) -> None:
    """torch.compile's backward graphs, which contain the operators of training."""
    torch._dynamo.reset()
    compiled = torch.compile(forward, backend="onnxplug", options={"fallback": False})
    for seed in (0, 1):
        mine = image(*size, seed=seed).requires_grad_()
        theirs = mine.detach().clone().requires_grad_()
        for x, run in ((mine, compiled), (theirs, forward)):
            run(x).cos().sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad, **looser("gradients"))


GRIDS = [
    (2, "bilinear", "zeros", False),
    (2, "bilinear", "border", True),
    (2, "bilinear", "reflection", False),
    (2, "bilinear", "reflection", True),
    (2, "nearest", "border", False),
    (2, "bicubic", "zeros", True),
    (2, "bicubic", "reflection", False),
    (3, "bilinear", "reflection", True),
    (3, "nearest", "zeros", False),
]


@pytest.mark.parametrize(("axes", "mode", "padding", "corners"), GRIDS)
def test_gradients_of_grid_sample(axes: int, mode: str, padding: str, corners: bool) -> None:
    """Gradients of image and grid, with static, then dynamic sizes; a third of the points lies outside the image."""

    def forward(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, grid, mode, padding, corners)

    torch._dynamo.reset()
    compiled = torch.compile(forward, backend="onnxplug", options={"fallback": False})
    for n in (0, 1):
        x = image(2, 3, *(4 + n, 5, 3)[:axes], seed=n)
        grid = image(2, *(3, 4 + n, 2)[:axes], axes, seed=7) * 1.3
        gradients = []
        for run in (compiled, forward):
            leaves = [x.clone().requires_grad_(), grid.clone().requires_grad_()]
            run(*leaves).cos().sum().backward()
            gradients.append([leaf.grad for leaf in leaves])
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs, **looser("images, grids"))


class Net(nn.Module):
    """A CNN: convolutions, batch norm, pooling, resizing and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.SiLU()
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.body(x), 2)
        result: torch.Tensor = self.head(F.interpolate(x, scale_factor=2.0, mode="bilinear").mean((2, 3)))
        return result


def test_a_cnn_trains_as_in_eager() -> None:
    torch._dynamo.reset()
    losses: dict[str, list[float]] = {}
    for backend in ("eager", "onnxplug"):
        torch.manual_seed(0)
        model = Net()
        run = torch.compile(model, backend=backend, **({} if backend == "eager" else {"options": {"fallback": False}}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(50):
            x = torch.randn(4, 3, 16, 16)
            loss = F.cross_entropy(run(x), (x.mean((1, 2, 3)) > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.setdefault(backend, []).append(loss.item())
    torch.testing.assert_close(
        torch.tensor(losses["onnxplug"]), torch.tensor(losses["eager"]), **looser("training, convolutions")
    )


_PLANES = {0: DYNAMIC, 2: DYNAMIC, 3: DYNAMIC}


def of_pool(kernel: int, stride: int, padding: int, dilation: int = 1, ceil: bool = False) -> Callable[..., Any]:
    def backward(grad: torch.Tensor, x: torch.Tensor) -> Any:
        rest = ([kernel] * 2, [stride] * 2, [padding] * 2, [dilation] * 2, ceil)
        _, indices = _ATEN.max_pool2d_with_indices(x, *rest)
        return _ATEN.max_pool2d_with_indices_backward(grad, x, *rest, indices)

    return backward


#: The operator's arguments after the tensors, and pairs of sizes: of the images, and of the gradient's axes.
POOLS = {
    "apart": (of_pool(2, 2, 0), [((2, 3, 8, 10), (4, 5)), ((1, 3, 6, 4), (3, 2)), ((3, 3, 2, 2), (1, 1))]),
    "overlapping": (of_pool(3, 2, 1), [((2, 3, 8, 10), (4, 5)), ((1, 3, 5, 4), (3, 2))]),
    "dilated": (of_pool(2, 1, 1, 2), [((2, 3, 8, 10), (8, 10)), ((1, 3, 5, 4), (5, 4))]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("opset", [15, 21])
@pytest.mark.parametrize("name", POOLS)
def test_max_pools_of_dynamic_sizes(name: str, opset: int, dtype: torch.dtype) -> None:
    backward, sizes = POOLS[name]
    args = [(image(*size[:2], *out, seed=1).to(dtype), image(*size).to(dtype)) for size, out in sizes]
    check(backward, *args[0], others=args[1:], dynamic=(_PLANES, _PLANES), opset=opset)
    single = [tuple(x[0] for x in pair) for pair in args]
    check(backward, *single[0], others=single[1:], dynamic=({1: DYNAMIC, 2: DYNAMIC},) * 2, opset=opset)


#: Sizes of gradient, image and kernel at the export, then other sizes; the dynamic axes of images and of kernel.
CONVOLVED = {
    "kernel": (((2, 5, 6, 7), (2, 3, 8, 9), (5, 3, 3, 3)), ((1, 5, 5, 7), (1, 3, 6, 8), (5, 3, 2, 2)), (0, 2, 3), (2, 3)),
    "channels": (((2, 5, 6, 7), (2, 3, 8, 9), (5, 3, 3, 3)), ((1, 4, 4, 3), (1, 2, 6, 5), (4, 2, 3, 3)), (0, 1, 2, 3), (0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLVED)
def test_convolutions_of_dynamic_kernels(name: str) -> None:
    first, second, of_images, of_kernel = CONVOLVED[name]

    def backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        return _ATEN.convolution_backward(
            grad, x, weight, [weight.shape[0]], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
        )

    args = [tuple(image(*size, seed=i) for i, size in enumerate(sizes)) for sizes in (first, second)]
    shapes = (*(dict.fromkeys(of_images, DYNAMIC),) * 2, dict.fromkeys(of_kernel, DYNAMIC))
    check(backward, *args[0], others=args[1:], dynamic=shapes, **looser("weight gradients"))


def resized(name: str, scale: float, *rest: Any, dynamic: bool) -> Callable[..., Any]:
    def backward(grad: torch.Tensor, x: torch.Tensor) -> Any:
        sizes = [int(s * scale) for s in x.shape[2:]] if not dynamic else [s * int(scale) for s in x.shape[2:]]
        return getattr(_ATEN, f"{name}_backward")(grad, sizes, list(x.shape), *rest)

    return backward


RESIZED = [
    ("upsample_nearest1d", (None,), 1), ("upsample_nearest2d", (None, None), 2), ("upsample_nearest3d", (None,) * 3, 3),
    ("_upsample_nearest_exact1d", (None,), 1), ("_upsample_nearest_exact2d", (None, None), 2),
    ("upsample_linear1d", (False, None), 1), ("upsample_linear1d", (True, None), 1),
    ("upsample_bilinear2d", (False, None, None), 2), ("upsample_bilinear2d", (True, None, None), 2),
    ("upsample_trilinear3d", (False, None, None, None), 3), ("upsample_trilinear3d", (True, None, None, None), 3),
    ("upsample_bicubic2d", (False, None, None), 2), ("upsample_bicubic2d", (True, None, None), 2),
    ("_upsample_bilinear2d_aa", (False, None, None), 2), ("_upsample_bilinear2d_aa", (True, None, None), 2),
    ("_upsample_bicubic2d_aa", (False, None, None), 2), ("_upsample_bicubic2d_aa", (True, None, None), 2),
    ("_upsample_lanczos2d_aa", (False, None, None), 2), ("_upsample_lanczos2d_aa", (True, None, None), 2),
    ("upsample_bilinear2d", (False, 2.3, 0.7), 2), ("upsample_nearest2d", (2.3, 0.7), 2),
    ("upsample_bicubic2d", (False, 2.3, 0.7), 2), ("_upsample_nearest_exact2d", (2.3, 0.7), 2),
]  # fmt: skip


@pytest.mark.parametrize("scale", [2.5, 0.4, 1.0])
@pytest.mark.parametrize(("name", "rest", "axes"), RESIZED, ids=lambda x: str(x))
def test_interpolations(name: str, rest: tuple[Any, ...], axes: int, scale: float) -> None:
    x = image(2, 3, *(5, 7, 6)[:axes])
    grad = image(2, 3, *(int(s * scale) for s in x.shape[2:]), seed=1)
    check(resized(name, scale, *rest, dynamic=False), grad, x, others=[(grad.flip(-1) * 2, x)], **looser("gradients"))


@pytest.mark.parametrize(("name", "rest", "axes"), [row for row in RESIZED if 2.3 not in row[1]], ids=str)
def test_interpolations_of_dynamic_sizes(name: str, rest: tuple[Any, ...], axes: int) -> None:
    """torch itself takes symbolic sizes of two of the operators alone."""
    pairs = [
        (image(n, 3, *(3 * size for size in sizes[:axes]), seed=1), image(n, 3, *sizes[:axes]))
        for n, sizes in ((2, (3, 4, 2)), (1, (5, 2, 3)), (3, (1, 1, 1)))
    ]
    dynamic = dict.fromkeys((0, *range(2, 2 + axes)), DYNAMIC)
    check(
        resized(name, 3, *rest, dynamic=True),
        *pairs[0],
        others=pairs[1:],
        dynamic=(dynamic, dynamic),
        **looser("gradients"),
    )


@pytest.mark.parametrize("batch", [(2,), ()], ids=["images", "one image"])
@pytest.mark.parametrize("ceil", [False, True])
def test_average_pools_of_dynamic_sizes(ceil: bool, batch: Image) -> None:
    def model(x: torch.Tensor, volume: torch.Tensor) -> Any:
        flat, deep = ([3, 2], [], [1, 1], ceil, False, None), ([3, 2, 2], [3, 4, 2], [1, 0, 1], ceil, True, 5)
        return (
            _ATEN.avg_pool2d_backward(_ATEN.avg_pool2d(x, *flat).sin(), x, *flat),
            _ATEN.avg_pool3d_backward(_ATEN.avg_pool3d(volume, *deep).sin(), volume, *deep),
        )

    def inputs(*sizes: int) -> tuple[torch.Tensor, ...]:
        return image(*batch, 3, *sizes[:2]), image(*batch, 3, *sizes, seed=1)

    dynamic = [dict.fromkeys(range(len(batch) + 1, len(batch) + 1 + axes), DYNAMIC) for axes in (2, 3)]
    check(model, *inputs(5, 7, 6), others=[inputs(6, 8, 5), inputs(9, 4, 4)], dynamic=dynamic)

"""Reductions, layers and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onnxplug
from tests.support.check import Call, check
from tests.support.tolerances import looser

AUTO = torch.export.Dim.AUTO


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "sum_dim": lambda x: x.sum(-1),
    "sum_dims": lambda x: x.sum((0, 2), keepdim=True),
    "sum_int": lambda x: (x > 0).sum(1),
    "sum_int32": lambda x: x.int().sum(),
    "mean": lambda x: x.mean(),
    "mean_dim": lambda x: x.mean((1, -1)),
    "prod": lambda x: x.prod(1),
    "amax": lambda x: x.amax((1, 2)),
    "amin": lambda x: x.amin(0, keepdim=True),
    "max": lambda x: x.max(),
    "max_dim": lambda x: x.max(1),
    "min_dim": lambda x: x.min(-1, keepdim=True),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "argmax": lambda x: x.argmax(1),
    "argmax_all": lambda x: x.argmax(),
    "argmin_keepdim": lambda x: x.argmin(2, keepdim=True),
    "any": lambda x: (x > 1).any(1),
    "all": lambda x: (x > -1).all(),
    "any_dims": lambda x: (x > 1).any((0, 1)),
    "var": lambda x: x.var(),
    "var_dim": lambda x: x.var(1, unbiased=False),
    "std": lambda x: x.std((0, 2), keepdim=True),
    "std_correction": lambda x: torch.std(x, 2, correction=2),
    "var_mean": lambda x: torch.var_mean(x, 2),
    "norm": lambda x: x.norm(dim=1),
    "norm_1": lambda x: torch.linalg.vector_norm(x, 1, dim=(1, 2)),
    "norm_inf": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "norm_3": lambda x: torch.linalg.vector_norm(x, 3, dim=-1, keepdim=True),
    "logsumexp": lambda x: x.logsumexp(1),
    "cumsum": lambda x: x.cumsum(1),
    "cumsum_int": lambda x: (x > 0).cumsum(-1),
    "count_nonzero": lambda x: torch.count_nonzero(x > 0, 1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "rms_norm": lambda x: F.rms_norm(x, (6,)),
    "mse_loss": lambda x: F.mse_loss(x, x * 2),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x + 1, dim=-1),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name: str) -> None:
    check(REDUCTIONS[name], tensor(3, 4, 6), others=[(tensor(5, 7, 6, seed=1),), (tensor(1, 2, 6, seed=2),)],
          dynamic=[{0: AUTO, 1: AUTO}])  # fmt: skip


@pytest.mark.parametrize("opset", [13, 17, 18, 23])
@pytest.mark.parametrize("name", ["sum_dims", "mean_dim", "amax", "layer_norm", "logsumexp", "norm_1"])
def test_reduction_opsets(name: str, opset: int) -> None:
    check(
        REDUCTIONS[name],
        tensor(3, 4, 6),
        others=[(tensor(5, 7, 6, seed=1),)],
        dynamic=[{0: AUTO, 1: AUTO}],
        opset=opset,
    )


#: Normalisation over axes of dynamic sizes.
OVER_DYNAMIC_AXES = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "layer_norm, two axes": lambda x: F.layer_norm(x, x.shape[-2:]),
    "layer_norm, all axes": lambda x: F.layer_norm(x, x.shape),
    "layer_norm, bias alone": lambda x: F.layer_norm(x, x.shape[-1:], None, x[0, 0]),
    "layer_norm, weight and bias": lambda x: F.layer_norm(x, x.shape[-1:], x[0, 0], x[0, 1]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
}


@pytest.mark.parametrize("opset", [13, 17, 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("name", OVER_DYNAMIC_AXES)
def test_norms_over_dynamic_axes(name: str, dtype: torch.dtype, opset: int) -> None:
    inputs = [tensor(*shape, seed=i).to(dtype) for i, shape in enumerate([(2, 3, 5), (4, 3, 9), (1, 3, 2)])]
    check(
        OVER_DYNAMIC_AXES[name], inputs[0], others=[(x,) for x in inputs[1:]], dynamic=[{0: AUTO, 2: AUTO}], opset=opset
    )


@pytest.mark.parametrize("name", ["sum", "mean", "max", "argmax_all", "amax_all", "var", "all"])
def test_reduction_of_a_0dim_tensor(name: str) -> None:
    functions = {**REDUCTIONS, "amax_all": lambda x: x.amax()}
    check(functions[name], torch.tensor(2.0), others=[(torch.tensor(-3.0),)])


def test_reductions_see_nan_and_infinity() -> None:
    row = torch.tensor([[1.0, float("nan"), 2.0], [float("-inf")] * 3, [float("inf"), 1.0, 0.0]])
    check(lambda x: (x.sum(1), x.mean(0), x.isnan().any(1)), row, others=[(row.flip(0),)])
    finite = row.nan_to_num(nan=0.5)
    check(lambda x: (x.amax(1), x.argmin(1), x.logsumexp(1)), finite, others=[(finite.flip(0),)])


def test_extrema_see_nan() -> None:
    row = torch.tensor([[1.0, float("nan"), 2.0], [float("-inf"), 3.0, float("inf")]])
    functions = (
        lambda x: (x.amax(1), x.amin(0), x.max(), x.aminmax(dim=1)),
        lambda x: (x.max(1), x.min(0), x.argmax(1), x.argmin(), torch.linalg.vector_norm(x, float("inf"), 1)),
        lambda x: (x.sort(1), x.sort(1, descending=True), x.topk(2, 1), x.topk(2, 1, largest=False)),
    )
    for function in functions:
        check(function, row, others=[(row.flip(1),), (row.flip(0),)], exact=True)


LAYERS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, torch.Tensor, Any]] = {
    "linear_2d": (lambda: nn.Linear(4, 3), tensor(2, 4), tensor(5, 4), {0: AUTO}),
    "linear_3d": (lambda: nn.Linear(4, 3), tensor(2, 5, 4), tensor(3, 7, 4), {0: AUTO, 1: AUTO}),
    "linear_no_bias": (lambda: nn.Linear(4, 3, bias=False), tensor(2, 4), tensor(1, 4), {0: AUTO}),
    "linear_1d": (lambda: nn.Linear(4, 3), tensor(4), tensor(4, seed=1), None),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, stride=2), tensor(2, 4, 9), tensor(3, 4, 9), {0: AUTO}),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=(1, 0), dilation=2), tensor(2, 4, 9, 8), tensor(1, 4, 9, 8), {0: AUTO}),
    "conv2d_groups": (lambda: nn.Conv2d(4, 4, 3, groups=4), tensor(2, 4, 9, 8), tensor(3, 4, 9, 8), {0: AUTO}),
    "conv2d_same": (lambda: nn.Conv2d(4, 2, (4, 3), padding="same"), tensor(2, 4, 9, 8), tensor(3, 4, 9, 8), {0: AUTO}),
    "conv2d_dynamic_size": (lambda: nn.Conv2d(4, 2, 3, stride=2), tensor(2, 4, 9, 8), tensor(2, 4, 13, 11), {2: AUTO, 3: AUTO}),
    "conv2d_single": (lambda: nn.Conv2d(4, 6, 3), tensor(4, 9, 8), tensor(4, 9, 8, seed=1), None),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), tensor(2, 2, 4, 5, 6), tensor(1, 2, 4, 5, 6), {0: AUTO}),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 2, 3, stride=2), tensor(2, 4, 5), tensor(3, 4, 5), {0: AUTO}),
    "conv_transpose2d": (
        lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1, groups=2),
        tensor(2, 4, 5, 6),
        tensor(3, 4, 5, 6),
        {0: AUTO},
    ),
    "max_pool": (lambda: nn.MaxPool2d(3, 2, 1), tensor(2, 3, 8, 9), tensor(1, 3, 8, 9), {0: AUTO}),
    "max_pool_ceil": (lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), tensor(2, 3, 8, 10), tensor(1, 3, 8, 10), {0: AUTO}),
    "max_pool_dilated": (lambda: nn.MaxPool1d(2, 1, dilation=2), tensor(2, 3, 8), tensor(1, 3, 8), {0: AUTO}),
    "max_pool_indices": (lambda: nn.MaxPool2d(2, return_indices=True), tensor(2, 3, 8, 9), tensor(3, 3, 8, 9), {0: AUTO}),
    "avg_pool": (lambda: nn.AvgPool2d(3, 2, 1), tensor(2, 3, 8, 9), tensor(1, 3, 8, 9), {0: AUTO}),
    "avg_pool_not_counted": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), tensor(2, 3, 8, 9), tensor(1, 3, 8, 9), {0: AUTO}),
    "avg_pool_ceil": (lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True), tensor(2, 3, 8, 10), tensor(1, 3, 8, 10), {0: AUTO}),
    "avg_pool_divisor": (lambda: nn.AvgPool2d(3, 2, 1, divisor_override=2), tensor(2, 3, 8, 9), tensor(1, 3, 8, 9), {0: AUTO}),
    "adaptive_1": (lambda: nn.AdaptiveAvgPool2d(1), tensor(2, 3, 8, 9), tensor(1, 3, 5, 4), {0: AUTO, 2: AUTO, 3: AUTO}),
    "adaptive_even": (lambda: nn.AdaptiveAvgPool2d((4, 3)), tensor(2, 3, 8, 9), tensor(1, 3, 8, 9), {0: AUTO}),
    "adaptive_uneven": (lambda: nn.AdaptiveAvgPool2d((5, 4)), tensor(2, 3, 8, 9), tensor(1, 3, 8, 9), {0: AUTO}),
    "adaptive_max": (lambda: nn.AdaptiveMaxPool2d((4, 3)), tensor(2, 3, 8, 9), tensor(1, 3, 8, 9), {0: AUTO}),
    "batch_norm": (lambda: nn.BatchNorm2d(3), tensor(2, 3, 4, 5), tensor(1, 3, 4, 5), {0: AUTO}),
    "batch_norm_1d": (lambda: nn.BatchNorm1d(3, affine=False), tensor(2, 3), tensor(4, 3), {0: AUTO}),
    "group_norm": (lambda: nn.GroupNorm(2, 4), tensor(2, 4, 5), tensor(3, 4, 5), {0: AUTO}),
    "instance_norm": (lambda: nn.InstanceNorm2d(3, affine=True), tensor(2, 3, 4, 5), tensor(3, 3, 4, 5), {0: AUTO}),
    "layer_norm": (lambda: nn.LayerNorm((4, 5)), tensor(2, 3, 4, 5), tensor(1, 3, 4, 5), {0: AUTO}),
    "rms_norm": (lambda: nn.RMSNorm(5, eps=1e-6), tensor(2, 3, 5), tensor(4, 7, 5), {0: AUTO, 1: AUTO}),
    "multi_head": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), tensor(2, 5, 8), tensor(3, 5, 8), {0: AUTO}),
    "upsample_nearest": (lambda: nn.Upsample(scale_factor=2), tensor(2, 3, 4, 5), tensor(1, 3, 4, 5), {0: AUTO}),
    "upsample_size": (lambda: nn.Upsample(size=(7, 3)), tensor(2, 3, 4, 5), tensor(1, 3, 4, 5), {0: AUTO}),
    "upsample_bilinear": (lambda: nn.Upsample(size=(7, 3), mode="bilinear"), tensor(2, 3, 4, 5), tensor(1, 3, 4, 5), {0: AUTO}),
    "upsample_corners": (lambda: nn.Upsample(scale_factor=2.5, mode="bilinear", align_corners=True), tensor(2, 3, 4, 6), tensor(1, 3, 4, 6), {0: AUTO}),
    "upsample_factor": (lambda: nn.Upsample(scale_factor=1.7, mode="bilinear"), tensor(2, 3, 4, 5), tensor(1, 3, 4, 5), {0: AUTO}),
    "upsample_to_1": (lambda: nn.Upsample(size=(1, 1), mode="bilinear"), tensor(2, 3, 4, 5), tensor(1, 3, 4, 5), {0: AUTO}),
    "upsample_bicubic": (lambda: nn.Upsample(scale_factor=2, mode="bicubic"), tensor(2, 3, 4, 5), tensor(1, 3, 4, 5), {0: AUTO}),
    "upsample_exact": (lambda: nn.Upsample(size=(7, 3), mode="nearest-exact"), tensor(2, 3, 4, 5), tensor(1, 3, 4, 5), {0: AUTO}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    make, first, second, dynamic = LAYERS[name]
    torch.manual_seed(0)
    module = make().eval()
    for parameter in (*module.parameters(), *module.buffers()):
        if parameter.is_floating_point() and parameter.dim() == 1:
            parameter.data = torch.rand(parameter.shape) + 0.5
    check(module, first, others=[(second,)], dynamic=None if dynamic is None else [dynamic])


@pytest.mark.parametrize("opset", [13, 17, 20, 23])
@pytest.mark.parametrize(
    "name", ["conv2d", "max_pool_ceil", "avg_pool_ceil", "group_norm", "layer_norm", "upsample_bilinear"]
)
def test_layer_opsets(name: str, opset: int) -> None:
    make, first, second, dynamic = LAYERS[name]
    torch.manual_seed(0)
    check(make().eval(), first, others=[(second,)], dynamic=[dynamic], opset=opset)


def test_batch_norm_in_training_mode_returns_its_new_statistics() -> None:
    module = nn.BatchNorm2d(3).train()
    with pytest.warns(UserWarning, match="training mode"):
        program = onnxplug.to_onnx(module, (tensor(4, 3, 5, 5),), dynamic_shapes=({0: "batch"},))
    names = [v.name for v in program.model.graph.outputs]
    assert names == ["output", "running_mean_out", "running_var_out", "num_batches_tracked_out"]
    assert program.verify().cases


PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {
    "matmul_batched": (torch.matmul, (tensor(2, 3, 4), tensor(4, 5)), (tensor(6, 3, 4), tensor(4, 5))),
    "matmul_vector": (torch.matmul, (tensor(3, 4), tensor(4)), (tensor(7, 4), tensor(4))),
    "bmm": (torch.bmm, (tensor(2, 3, 4), tensor(2, 4, 5)), (tensor(3, 3, 4), tensor(3, 4, 5))),
    "dot": (torch.dot, (tensor(4), tensor(4)), (tensor(4, seed=1), tensor(4))),
    "outer": (torch.outer, (tensor(4), tensor(3)), (tensor(4), tensor(3, seed=1))),
    "int_matmul": (torch.matmul, (tensor(3, 4).long(), tensor(4, 5).long()), (tensor(2, 4).long() * 9, tensor(4, 5).long())),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), (tensor(5), tensor(3, 4), tensor(4, 5)), (tensor(5), tensor(6, 4), tensor(4, 5))),
    "addmm_beta_0": (lambda b, x, y: torch.addmm(b, x, y, beta=0), (tensor(5) / 0, tensor(3, 4), tensor(4, 5)), (tensor(5), tensor(3, 4), tensor(4, 5))),
    "baddbmm": (lambda b, x, y: torch.baddbmm(b, x, y, alpha=2), (tensor(2, 3, 5), tensor(2, 3, 4), tensor(2, 4, 5)), (tensor(2, 3, 5), tensor(2, 3, 4), tensor(2, 4, 5))),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), (tensor(2, 3, 4), tensor(2, 4, 5)), (tensor(3, 3, 4), tensor(3, 4, 5))),
    "bilinear": (F.bilinear, (tensor(2, 3), tensor(2, 4), tensor(5, 3, 4)), (tensor(2, 3, seed=1), tensor(2, 4), tensor(5, 3, 4))),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name: str) -> None:
    function, first, second = PRODUCTS[name]
    dynamic = [
        {axis: AUTO for axis, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if a != b} or None
        for x, y in zip(first, second, strict=True)
    ]
    check(function, *first, others=[second], dynamic=dynamic)


HIDDEN = torch.tensor([[True, False, True, True, False], [False] * 5, [True] * 5])
FLOAT_MASK = torch.zeros(3, 5).masked_fill(~HIDDEN, float("-inf"))
ATTENTION: dict[str, Callable[..., Any]] = {
    "plain": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "bool_mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, HIDDEN),
    "float_mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, FLOAT_MASK),
    "finite_mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, FLOAT_MASK.clamp(min=-3.0)),
    "broadcast_mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, HIDDEN[None, None, :, :]),
}


@pytest.mark.parametrize("opset", [13, 21, 23])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, opset: int) -> None:
    first = (tensor(2, 4, 3, 8), tensor(2, 4, 5, 8, seed=1), tensor(2, 4, 5, 6, seed=2))
    second = (tensor(1, 4, 3, 8, seed=3), tensor(1, 4, 5, 8, seed=4), tensor(1, 4, 5, 6, seed=5))
    check(ATTENTION[name], *first, others=[second], dynamic=[{0: AUTO}] * 3, opset=opset, **looser("attention"))


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (2, 1, 3, 5), (2, 1, 1, 5), (3, 5), (1, 5), (3, 1)])
def test_attention_of_masks(shape: tuple[int, ...], kind: str) -> None:
    """Masks that are inputs: some rows see no key, and two layers share a mask."""

    def inputs(seed: int) -> tuple[torch.Tensor, ...]:
        seen = tensor(*shape, seed=seed) > 0.2
        seen[..., 0, :] = seed != 1
        mask = seen if kind == "bool" else tensor(*shape, seed=seed + 9).masked_fill(~seen, float("-inf"))
        return (*(tensor(2, 4, size, 8, seed=seed + size) for size in (3, 5)), tensor(2, 4, 5, 8, seed=seed), mask)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        first = F.scaled_dot_product_attention(q, k, v, mask)
        return F.scaled_dot_product_attention(first, k, v, mask)

    check(model, *inputs(0), others=[inputs(1), inputs(2)], **looser("attention"))


#: Batches and heads of queries, keys and values, and the scale, which ONNX's Attention does not take.
NOT_ATTENTION: dict[str, tuple[tuple[int, int, int], tuple[int, int, int], float | None]] = {
    "batch of queries": ((1, 2, 2), (4, 4, 4), None),
    "batch of keys": ((2, 1, 1), (4, 4, 4), None),
    "batch of values": ((2, 2, 1), (4, 2, 2), None),
    "heads of queries": ((2, 2, 2), (1, 4, 4), None),
    "heads of values": ((2, 2, 2), (4, 4, 1), None),
    "zero": ((2, 2, 2), (4, 4, 4), 0.0),
    "negative": ((2, 2, 2), (4, 4, 4), -0.3),
}


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_attention_that_is_not_onnxs(name: str) -> None:
    batches, heads, scale = NOT_ATTENTION[name]

    def inputs(queries: int, keys: int) -> tuple[torch.Tensor, ...]:
        sizes = zip(batches, heads, (queries, keys, keys), strict=True)
        return tuple(tensor(batch, count, length, 8, seed=i + keys) for i, (batch, count, length) in enumerate(sizes))

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=heads == (4, 2, 2))

    dynamic = [{2: AUTO}] * 3
    check(model, *inputs(3, 5), others=[inputs(1, 4), inputs(6, 1)], dynamic=dynamic, opset=23, **looser("attention"))


@pytest.mark.parametrize("opset", [21, 23])
def test_attention_of_rows_hidden_by_the_least_number(opset: int) -> None:
    """As transformers hides keys: where all of a row's keys are hidden, they weigh alike."""

    def inputs(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        mask = torch.zeros(batch, 1, length, length)
        mask[..., -1] = mask[:, :, 0] = torch.finfo(torch.float32).min
        mask[:, :, -1] = float("-inf")
        return (*(tensor(batch, 2, length, 8, seed=i) for i in range(3)), mask)

    check(
        F.scaled_dot_product_attention,
        *inputs(2, 5),
        others=[inputs(1, 3), inputs(3, 2)],
        dynamic=[{0: "batch", 2: "length"}] * 3 + [{0: "batch", 2: "length", 3: "length"}],
        opset=opset,
        **looser("attention"),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_dynamic_lengths(causal: bool) -> None:
    def sizes(batch: int, queries: int, keys: int) -> tuple[torch.Tensor, ...]:
        return tensor(batch, 2, queries, 8), tensor(batch, 2, keys, 8, seed=1), tensor(batch, 2, keys, 8, seed=2)

    check(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        *sizes(2, 3, 5),
        others=[sizes(3, 6, 4), sizes(1, 1, 1)],
        dynamic=[{0: AUTO, 2: AUTO}] * 3,
        **looser("attention"),
    )


def test_grouped_query_attention() -> None:
    def sizes(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        return tensor(batch, 6, length, 8), tensor(batch, 2, length, 8, seed=1), tensor(batch, 2, length, 8, seed=2)

    check(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        *sizes(2, 5),
        others=[sizes(3, 7), sizes(1, 1)],
        dynamic=[{0: AUTO, 2: AUTO}] * 3,
        **looser("attention"),
    )


FLASH: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": FLOAT_MASK},
    "mask_of_rows": {"attn_mask": FLOAT_MASK[:, :1]},
    "mask_of_heads": {"attn_mask": torch.stack([FLOAT_MASK, FLOAT_MASK.clamp(min=-2.0)] * 2)[None]},
    "causal_mask": {"attn_mask": FLOAT_MASK, "is_causal": True},
}


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("name", FLASH)
def test_flash_attention_for_cpu(name: str, heads: int) -> None:
    """The operator of a decomposed program: its result, and the logarithms of the sums of its weights."""

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **FLASH[name])

    def sizes(batch: int, seed: int) -> tuple[torch.Tensor, ...]:
        return tensor(batch, 4, 3, 8, seed=seed), *(tensor(batch, heads, 5, 8, seed=seed + i) for i in (1, 2))

    check(model, *sizes(2, 0), others=[sizes(1, 3), sizes(3, 6)], dynamic=[{0: AUTO}] * 3, **looser("attention"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_flash_attention_of_other_dtypes(dtype: torch.dtype) -> None:
    """torch rounds the weights to a half type; the ONNX model computes in float, and rounds once."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    inputs = [tensor(1, 2, size, 8, seed=size).to(dtype) for size in (3, 5, 5)]
    program = onnxplug.to_onnx(Call(lambda q, k, v: flash(q, k, v)), tuple(inputs))
    for operands in (inputs, [x * 0.5 for x in inputs]):
        wide = dtype if dtype == torch.float64 else torch.float32
        output, logarithms = flash(*(x.to(wide) for x in operands))
        torch.testing.assert_close(program(*operands), (output.to(dtype), logarithms))


def test_attention_without_batch() -> None:
    inputs = (tensor(4, 3, 8), tensor(4, 5, 8), tensor(4, 5, 8))
    check(ATTENTION["plain"], *inputs, others=[tuple(x * 2 for x in inputs)], **looser("attention"))


@pytest.mark.parametrize("pad", [0, 2])
def test_convolution_of_time_first(pad: int) -> None:
    weight, bias = torch.randn(3, 4, 5), torch.randn(5)
    # torch.export itself fixes the sizes.
    for shape in [(7, 2, 4), (3, 1, 4)]:
        check(lambda x: torch.conv_tbc(x, weight, bias, pad), torch.randn(shape), others=[(torch.randn(shape) * 9,)])

"""Checkpoints of GPTQ, AWQ and torchao: linear layers whose weights are stored in few bits, and stay so.

A weight is ``(level - zero) * scale``, with a scale and a zero point for each group of inputs. GPTQ and AWQ have levels and zero
points in int32, eight in each: GPTQ ``qweight`` [in / 8, out] and ``qzeros`` [groups, out / 8], AWQ ``qweight`` [in, out / 8] and
the same ``qzeros``, the columns of an int32 in another order. ``scales`` are [groups, out].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from onnxplug import OnnxplugError, UsageError
from onnxplug_transformers.folders import read_json
from onnxplug_transformers.four_bits import BLOCK_SIZES, FourBitLinear, joint_layers, place
from onnxplug_transformers.models import method_of
from onnxplug_transformers.rounding import together, zero_bytes
from onnxplug_transformers.weightless import LoadingQuantizer

_METHOD = "onnxplug_packed"
#: The column of each of the eight numbers in an AWQ int32, the low half byte first.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)

#: torchao's tensors of integers, and the attributes that they have where activations are changed too.
_OF_TORCHAO = {
    "IntxUnpackedToInt8Tensor": ("activation_quantization",),
    "Int8Tensor": ("act_quant_kwargs", "act_pre_scale"),
}


def take_packed(config: Any, folder: Path) -> bool:
    """Lets transformers load a checkpoint of GPTQ or AWQ without widening it.

    Args:
        config: The configuration of the folder, which is changed.

    Returns:
        Whether the checkpoint is of GPTQ or AWQ.
    """
    if method_of(config) not in ("gptq", "awq"):
        return False
    about = config.quantization_config
    method, bits, size = about["quant_method"], about.get("bits", 4), about.get("group_size", 128)
    version = str(about.get("version", about.get("checkpoint_format", ""))).lower()
    if bits != 4 or (size != -1 and size not in BLOCK_SIZES) or (method == "awq" and version not in ("", "gemm")):
        raise UsageError(
            f"{folder} has weights of {method} of {bits} bits in groups of {size}{version and f' ({version})'}",
            hint=f"What is taken: 4 bits, groups of {', '.join(map(str, BLOCK_SIZES))} or -1; of AWQ the version gemm.",
        )
    config.quantization_config = {
        "quant_method": _METHOD,
        "method": method,
        "size": size,
        "first_zero": 1 if method == "gptq" and version != "gptq_v2" else 0,
        "layers": _packed_layers(folder),
    }
    return True


def _packed_layers(folder: Path) -> list[str]:
    """Names of the modules whose weights are packed."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = list(read_json(index)["weight_map"])
    else:
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            names = list(file.keys())
    return [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]


@register_quantization_config(_METHOD)
class _Config(QuantizationConfigMixin):
    def __init__(self, method: str, size: int, first_zero: int, layers: list[str], **_: Any) -> None:
        self.quant_method: Any = _METHOD
        self.method, self.size, self.first_zero, self.layers = method, size, first_zero, layers


@register_quantizer(_METHOD)
class _Quantizer(LoadingQuantizer):
    """Puts :class:`_Packed` in the place of linear layers before transformers loads the checkpoint."""

    quantization_config: Any

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        for name in self.quantization_config.layers:
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            setattr(module, attribute, _Packed(getattr(module, attribute), self.quantization_config))
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        _place(model, {name: model.get_submodule(name).unpacked(name) for name in self.quantization_config.layers})
        return model


class _Packed(nn.Module):
    """The tensors of a linear layer in a checkpoint."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    g_idx: torch.Tensor

    def __init__(self, linear: nn.Linear, about: Any) -> None:
        super().__init__()
        columns, rows = linear.in_features, linear.out_features
        self.size = columns if about.size == -1 else about.size
        self.about = about
        groups = -(-columns // self.size)
        gptq = about.method == "gptq"
        shape = (columns // 8, rows) if gptq else (columns, rows // 8)
        self.register_buffer("qweight", torch.empty(shape, dtype=torch.int32, device="meta"))
        self.register_buffer("qzeros", torch.empty((groups, rows // 8), dtype=torch.int32, device="meta"))
        self.register_buffer("scales", torch.empty((groups, rows), dtype=linear.weight.dtype, device="meta"))
        if gptq:
            self.register_buffer("g_idx", torch.empty(columns, dtype=torch.int32, device="meta"))
        self.bias = linear.bias

    def unpacked(self, name: str) -> FourBitLinear:
        """The layer as ``MatMulNBits`` has it."""
        zeros, order = _numbers(self.qzeros), None
        if self.about.method == "gptq":
            levels = _numbers(self.qweight.t())
            levels, order = _in_groups(levels, self.g_idx.long(), self.size, name)
        else:
            columns = torch.tensor(_AWQ_COLUMNS).argsort()
            levels, zeros = (x.unflatten(1, (-1, 8))[:, :, columns].flatten(1) for x in (_numbers(self.qweight), zeros))
            levels = levels.t()
        zeros = zeros.t() + self.about.first_zero
        if zeros.max() > 15:
            raise OnnxplugError(f"{name} has the zero point 16, which 4 bits don't hold")
        return _in_blocks(name, levels, self.scales.t(), zeros, self.size, self.bias, order=order)


def take_torchao(model: Any) -> None:
    """Puts layers of few bits in the place of the layers whose weights torchao has in integers."""
    layers = {}
    for name, module in model.named_modules():
        for key, weight in module.named_parameters(recurse=False):
            kind = type(weight).__name__
            if not type(weight).__module__.startswith("torchao."):
                continue
            if type(module) is not nn.Linear or key != "weight" or kind not in _OF_TORCHAO:
                raise UsageError(
                    f"{name}.{key} is a {kind} of torchao in a {type(module).__name__}, which is not taken",
                    hint="Linear layers of IntxWeightOnlyConfig and Int8WeightOnlyConfig are.",
                )
            if any(getattr(weight, attribute) is not None for attribute in _OF_TORCHAO[kind]):
                raise UsageError(
                    f"{name} changes its activations too ({', '.join(_OF_TORCHAO[kind])}), which is not taken"
                )
            layers[name] = _of_integers(name, weight, module.bias)
    _place(model, layers)


def _of_integers(name: str, weight: Any, bias: torch.Tensor | None) -> FourBitLinear:
    """A linear layer of torchao's integers, [N, K] bytes with scales and zero points [N, groups]."""
    numbers = weight.qdata.to(torch.int16)
    points = weight.zero_point if weight.zero_point is not None else torch.zeros_like(weight.scale, dtype=torch.int8)
    zeros = points.to(torch.int16)
    bits = 4 if all(x.min() >= -8 and x.max() < 8 for x in (numbers, zeros)) else 8
    if not torch.equal(zeros.to(points.dtype), points) or (bits == 8 and bool(zeros.any())):
        raise OnnxplugError(f"{name} has zero points that are no integers of 4 bits")
    numbers, zeros = ((x + (1 << (bits - 1))).to(torch.uint8) for x in (numbers, zeros))
    return _in_blocks(name, numbers, weight.scale.float(), zeros, weight.block_size[1], bias, bits=bits)


def _in_blocks(
    name: str,
    levels: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    size: int,
    bias: torch.Tensor | None,
    *,
    order: torch.Tensor | None = None,
    bits: int = 4,
) -> FourBitLinear:
    """A layer of levels [N, K], scales and zero points [N, groups], in the largest blocks of the kernel that divide a group."""
    block = next((s for s in reversed(BLOCK_SIZES) if size % s == 0), None)
    if block is None or levels.shape[1] % block:
        raise OnnxplugError(
            f"{name} has groups of {size} inputs, of {levels.shape[1]}, which are no blocks of {BLOCK_SIZES}"
        )
    scales, zeros = (x.repeat_interleave(size // block, 1) for x in (scales, zeros))
    blocks = levels.unflatten(1, (-1, block))
    return FourBitLinear(
        together(blocks) if bits == 4 else blocks,
        scales.contiguous(),
        bias,
        zeros=zero_bytes(zeros) if bits == 4 else None,
        order=order,
        bits=bits,
    )


def _place(model: Any, layers: dict[str, FourBitLinear]) -> None:
    """Puts layers into a model, projections of one attention as one."""
    for names in joint_layers({name: _kind_of(layer) for name, layer in layers.items()}):
        parts = [layers[name] for name in names]
        place(model, names, parts[0] if len(parts) == 1 else FourBitLinear.joined(parts))


def _kind_of(layer: FourBitLinear) -> Any:
    """The properties that layers must share to be joined; ``None`` for a layer that reorders its inputs."""
    if layer.order is not None:
        return None
    return layer.bits, layer.levels.shape[1:], layer.scales.dtype, layer.bias is None


def _numbers(packed: torch.Tensor) -> torch.Tensor:
    """[rows, 8 * columns] of [rows, columns]: the numbers of each int32, the low half byte first, as bytes."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & 15).flatten(1).to(torch.uint8)


def _in_groups(
    levels: torch.Tensor, groups: torch.Tensor, size: int, name: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Columns ordered by their groups, and the order; ``None`` where they are in order already."""
    if (groups[1:] >= groups[:-1]).all():
        order = None
    else:
        order = groups.argsort(stable=True)
        levels, groups = levels[:, order], groups[order]
    if not torch.equal(groups, torch.arange(len(groups)) // size):
        raise OnnxplugError(f"{name} has groups that are not of {size} inputs each")
    return levels, order


class _Halves(nn.Module):
    """A linear layer or an embedding whose weight is stored in float16, and widened where it is used."""

    def __init__(self, module: nn.Linear | nn.Embedding) -> None:
        super().__init__()
        self.register_buffer("weight", module.weight.detach().half())
        self.bias = getattr(module, "bias", None)
        self.embeds, self.dtype = isinstance(module, nn.Embedding), module.weight.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result of the module."""
        weight: Any = self.weight
        if self.embeds:
            return nn.functional.embedding(x, weight).to(self.dtype)
        return nn.functional.linear(x, weight.to(self.dtype), self.bias)


def store_halves(model: Any) -> None:
    """Stores float32 weights of linear layers and embeddings in float16 where it holds them without loss."""
    shared: dict[int, bool] = {}
    for name, module in list(model.named_modules()):
        if type(module) not in (nn.Linear, nn.Embedding) or module.weight.dtype != torch.float32:
            continue
        weight = module.weight.detach()
        key = weight.data_ptr()
        if key not in shared:
            shared[key] = bool((weight.half().float() == weight).all())
        if shared[key]:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, _Halves(module))

"""Products with weights of four bits, by MatMulNBits: at every opset, with activations in float.

The operator takes rows of output features in blocks, two numbers in a byte, unsigned; its zero point is 8 unless given.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxplug import Decline, UsageError

_DOMAIN = "com.microsoft"
_KERNELS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16})
_TORCH = {ir.DataType.FLOAT: torch.float32, ir.DataType.FLOAT16: torch.float16}
#: The sizes of blocks of the CPU's kernel.
_SIZES = (16, 32, 64, 128, 256)
#: The precision to which ONNX Runtime may round the activations: 1 is float, 4 is bytes.
_ACCURACY = 1


def of_restored_nibbles(node: Any) -> bool:
    """Whether torchao restores a linear's weight from at most four bits."""
    weight = node.fx.args[1] if len(node.fx.args) > 1 else None
    if not isinstance(weight, torch.fx.Node) or str(weight.target) != "torchao.dequantize_affine.default":
        return False
    low, high = (_argument(weight, name) for name in ("quant_min", "quant_max"))
    return isinstance(low, int) and isinstance(high, int) and (-8 <= low <= high <= 7 or 0 <= low <= high <= 15)


def linear(g: Any, node: Any) -> Any:
    """linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor

    The weight is a result of torchao's dequantize_affine, with scales for rows or for groups within a row.
    """
    x, _, bias = node.args
    weight = node.fx.args[1]
    names = ("input", "scale", "zero_point")
    levels, scale, zero = (g.interpreter.value_of(_argument(weight, name)) for name in names)
    block = _argument(weight, "block_size")
    stored = [g.stored(v) for v in (levels, scale) if v is not None]
    if x.dtype not in _KERNELS or node.dtype != x.dtype or scale.dtype != x.dtype:
        raise Decline("the kernels are for float and float16")
    if any(t is None for t in stored) or (zero is not None and g.stored(zero) is None):
        raise Decline("the weight is not a parameter of the model")
    if len(block) != 2 or block[0] != 1 or levels.shape is None or len(levels.shape) != 2:
        raise Decline("the scales are neither for rows nor for groups within a row")
    rows, columns = levels.shape
    size, repeats = _blocks(block[1], columns)
    # Four bits unsigned, the zero point in the middle where the levels are signed.
    shift = 8 if _argument(weight, "quant_min") < 0 else 0
    if not all(_fits(g.stored(v), shift) for v in (levels, zero) if v is not None):
        raise Decline("a level or a zero point does not fit into four bits")
    zeros = None
    if zero is not None:
        zeros = g.derive(
            zero, lambda t: _in_row(_spread(t, rows, repeats), shift), ("nbits zeros", shift, repeats), form="packed"
        )
    elif shift == 0:
        zeros = g.const(torch.zeros(rows, (columns // block[1] * repeats + 1) // 2, dtype=torch.uint8))
    kind = _TORCH[x.dtype]
    result = _product(
        g,
        x,
        g.derive(levels, lambda t: _in_blocks(t, size, shift), ("nbits", size, shift), form="packed"),
        g.derive(scale, lambda t: _spread(t.to(kind), rows, repeats), ("nbits scales", kind, repeats), form="spread"),
        zeros,
        (columns, rows, size),
    )
    return result if bias is None else g.op.Add(result, bias)


def packed(g: Any, node: Any) -> Any:
    """_weight_int4pack_mm_for_cpu(Tensor self, Tensor mat2, int qGroupSize, Tensor qScaleAndZeros) -> Tensor

    ``(q - 8) * scale + zero``: the zero point is the fraction ``8 - zero / scale``.
    """
    from onnxplug.converters.weight_only import unpacked

    x, weight, size, parameters = node.args
    if g.stored(weight) is None or g.stored(parameters) is None:
        raise Decline("the weight is not a parameter of the model")
    if size not in _SIZES:
        raise Decline(f"blocks of {size}")
    if not _divisible(g.stored(parameters)):
        raise Decline("scales of zero")
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    result = _product(
        g,
        g.cast(x, ir.DataType.FLOAT),
        g.derive(
            weight, lambda t: _in_blocks(unpacked(t).to(torch.int16), size, 0), ("nbits of packed", size), form="packed"
        ),
        g.derive(parameters, lambda t: t[:, :, 0].t().float().contiguous(), "nbits scales of packed", form="scales"),
        g.derive(parameters, _fractions, "nbits zeros of packed", form="zero_points"),
        (columns, rows, size),
    )
    return g.cast(result, node.dtype)


def _product(g: Any, x: Any, levels: Any, scales: Any, zeros: Any, sizes: tuple[int, int, int]) -> Any:
    columns, rows, size = sizes
    result = g.domain(_DOMAIN).MatMulNBits(
        x, levels, scales, zeros, K=columns, N=rows, bits=4, block_size=size, accuracy_level=_ACCURACY
    )
    result.type = ir.TensorType(x.dtype)
    result.shape = ir.Shape([*x.shape[:-1], rows])
    return result


def _argument(fx: torch.fx.Node, name: str) -> Any:
    """An argument of a call by its name in the schema."""
    for position, argument in enumerate(fx.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            if position < len(fx.args):
                return fx.args[position]
            return fx.kwargs.get(name, argument.default_value if argument.has_default_value() else None)
    raise KeyError(name)


def _blocks(group: int, columns: int) -> tuple[int, int]:
    """The operator's block size, and the number of its blocks that share a scale of torch."""
    if group in _SIZES and columns % group == 0:
        return group, 1
    if group != columns:
        raise Decline(f"groups of {group}")
    # A scale for a whole row: the largest blocks, of which the last may be shorter.
    size = next((s for s in _SIZES if s >= columns), _SIZES[-1])
    return size, -(-columns // size)


def _fits(tensor: torch.Tensor, shift: int) -> bool:
    if tensor.is_floating_point():
        return False
    return not tensor.numel() or (int(tensor.min()) >= -shift and int(tensor.max()) <= 15 - shift)


def _checked(tensor: torch.Tensor, shift: int) -> torch.Tensor:
    """Levels as unsigned numbers of four bits.

    Raises:
        UsageError: A level doesn't fit.
    """
    if not _fits(tensor, shift):
        raise UsageError(
            f"the model stores this weight in 4 bits, {-shift} to {15 - shift}; the new one is {tensor.dtype} or goes beyond",
            hint="Export the model again, with the new weights.",
        )
    return (tensor.to(torch.int16) + shift).to(torch.uint8)


def _in_row(tensor: torch.Tensor, shift: int) -> torch.Tensor:
    """Pairs of neighbours of a row in a byte, the first in its low half."""
    levels = _checked(tensor, shift)
    if levels.shape[-1] % 2:
        levels = torch.nn.functional.pad(levels, (0, 1))
    return levels[..., 0::2] | (levels[..., 1::2] << 4)


def _in_blocks(tensor: torch.Tensor, size: int, shift: int) -> torch.Tensor:
    """[out, blocks, size / 2]: each row in blocks of ``size``, the last block padded."""
    rows, columns = tensor.shape
    missing = -columns % size
    filled = torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
    return _in_row(filled.reshape(rows, -1, size), shift)


def _spread(tensor: torch.Tensor, rows: int, repeats: int) -> torch.Tensor:
    """[out, blocks]: a parameter for each block."""
    return tensor.reshape(rows, -1).repeat_interleave(repeats, 1).contiguous()


def _divisible(parameters: torch.Tensor) -> bool:
    return bool((parameters[:, :, 0] != 0).all())


def _fractions(parameters: torch.Tensor) -> torch.Tensor:
    if not _divisible(parameters):
        raise UsageError("a scale of the new weight is zero", hint="Export the model again, with the new weights.")
    scale, zero = parameters.double().unbind(-1)
    return (8 - zero / scale).t().float().contiguous()

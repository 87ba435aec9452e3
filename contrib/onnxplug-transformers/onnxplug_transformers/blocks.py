"""Matrices in blocks of few bits, as in checkpoints: stored in as many bytes, and multiplied by ``MatMulNBits``.

A weight is ``scale * number + least``, with a scale, and with a least weight where the format has one, for each block of a row.
Scales may be a float for several blocks times a small integer for each. Levels of 4 or 8 bits, scales and offsets in floats are
computed from these by nodes that read nothing but weights: ONNX Runtime evaluates them once, as it loads the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from onnxplug_transformers.four_bits import matmul_nbits
from onnxplug_transformers.rounding import together


@torch.library.custom_op("onnxplug_transformers::fields", mutates_args=())
def fields(low: torch.Tensor, high: torch.Tensor | None, widths: list[int], pairs: bool) -> torch.Tensor:
    """Unpacks numbers of few bits: to a byte for each number, or a byte for two.

    Args:
        low: [N, bytes]; the lowest fields of all bytes of a row have its first numbers, the next fields the next, and
            so on.
        high: The upper bits of the same numbers, packed in the same way; ``None`` where ``low`` has all bits.
        widths: Bits of a field, of ``low`` and of ``high``.
        pairs: Whether two numbers share a byte of the result: its low half is from the first half of a row, its high
            half from the second.

    Returns:
        [N, numbers], or half as many.
    """
    numbers = _fields(low, widths[0])
    if high is not None:
        numbers = numbers | (_fields(high, widths[1]) << widths[0])
    if not pairs:
        return numbers
    first, second = numbers.chunk(2, 1)
    return first | (second << 4)


def _fields(packed: torch.Tensor, width: int) -> torch.Tensor:
    return torch.cat([(packed >> place) & ((1 << width) - 1) for place in range(0, 8, width)], 1)


@fields.register_fake
def _(low: torch.Tensor, high: torch.Tensor | None, widths: list[int], pairs: bool) -> torch.Tensor:
    return low.new_empty(low.shape[0], low.shape[1] * 8 // widths[0] // (2 if pairs else 1))


def convert_fields(g: Any, node: Any) -> Any:
    """Emits shifts by one number and masks, which ONNX Runtime computes fast, of whole rows."""
    low, high, widths, pairs = node.args
    numbers = _emit_fields(g, low, widths[0])
    if high is not None:
        numbers = g.op.BitwiseOr(numbers, _emit_shift(g, _emit_fields(g, high, widths[1]), widths[0], "LEFT"))
    if not pairs:
        return numbers
    first, second = g.op.Split(numbers, num_outputs=2, axis=1, _outputs=2)
    return g.op.BitwiseOr(first, _emit_shift(g, second, 4, "LEFT"))


def _emit_fields(g: Any, packed: Any, width: int) -> Any:
    mask = g.const(torch.tensor((1 << width) - 1, dtype=torch.uint8))
    shifted = [_emit_shift(g, packed, place, "RIGHT") for place in range(0, 8, width)]
    return g.op.Concat(*[g.op.BitwiseAnd(part, mask) for part in shifted[:-1]], shifted[-1], axis=1)


def _emit_shift(g: Any, value: Any, places: int, direction: str) -> Any:
    if places == 0:
        return value
    return g.op.BitShift(value, g.const(torch.tensor(places, dtype=torch.uint8)), direction=direction)


@torch.library.custom_op("onnxplug_transformers::filled", mutates_args=())
def filled(rows: int, columns: int, value: int) -> torch.Tensor:
    """[rows, columns] equal bytes."""
    return torch.full((rows, columns), value, dtype=torch.uint8)


@filled.register_fake
def _(rows: int, columns: int, value: int) -> torch.Tensor:
    return torch.empty((rows, columns), dtype=torch.uint8)


def convert_filled(g: Any, node: Any) -> Any:
    """Emits an Expand: a constant would have all the bytes in the file."""
    rows, columns, value = node.args
    return g.op.Expand(g.const(torch.tensor([[value]], dtype=torch.uint8)), g.const([rows, columns]))


@dataclass(frozen=True)
class Form:
    """The form that matrices must share to be put together.

    Attributes:
        zero: The number that stands for a weight of zero; ``None``: blocks have a least weight instead.
        table: The integers from -128 to 127 that the numbers stand for; ``None``: they stand for themselves.
        pairs: Whether the two integers of a block have 4 bits each, and are stored in one byte.
    """

    size: int
    bits: int
    zero: int | None = None
    table: tuple[int, ...] | None = None
    pairs: bool = False

    @property
    def wide(self) -> int:
        """Bits of a level, as the product takes it."""
        return 4 if self.bits <= 4 and self.table is None else 8

    @property
    def middle(self) -> int:
        """The level that stands for zero, before an offset is added. Offsets are no larger than they must be."""
        if self.table is not None:
            return 128
        return 1 << (self.bits - 1) if self.zero is None else self.zero

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of the fields that numbers are stored in; none where they are stored as levels."""
        if self.bits == self.wide:
            return ()
        return tuple(width for width in (4, 2, 1) if self.bits & width)


class Blocks(NamedTuple):
    """A matrix in blocks.

    Attributes:
        tensors: ``numbers``, [N, blocks, size] bytes; ``scales``, floats, [N, blocks], or fewer where several blocks
            share a scale, which is multiplied by each block's integer in ``scale_steps``, [N, blocks]; ``least`` and
            ``least_steps``, the same for the least weight, which is added; or ``zeros`` [N, blocks], the numbers that
            stand for zero, where these are no integers.
    """

    form: Form
    tensors: Mapping[str, torch.Tensor]

    def rows(self, order: torch.Tensor) -> Blocks:
        """The same rows in another order."""
        return self._replace(tensors={name: tensor[order] for name, tensor in self.tensors.items()})

    def restored(self) -> torch.Tensor:
        """The weights, [N, K] floats."""
        return _weights(self.form, *_parts(self.form, _stored(self)))


def _stored(blocks: Blocks) -> dict[str, torch.Tensor]:
    """The tensors, with numbers of few bits together in bytes."""
    form, numbers = blocks.form, blocks.tensors["numbers"]
    stored = {name: tensor.contiguous() for name, tensor in blocks.tensors.items() if name != "numbers"}
    if form.pairs:
        stored["steps"] = stored.pop("scale_steps") | (stored.pop("least_steps") << 4)
    if not form.widths:
        return {"levels": together(numbers) if form.bits == 4 else numbers, **stored}
    rows = numbers.flatten(1)
    if form.wide == 4:
        rows = torch.cat([rows[:, 0::2], rows[:, 1::2]], 1)
    first, *rest = form.widths
    stored["levels"] = _together(rows & ((1 << first) - 1), first)
    for width in rest:
        stored["high"] = _together(rows >> first, width)
    return stored


def _together(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Numbers in fields of bytes, as :func:`fields` takes them."""
    places = torch.arange(0, 8, width, dtype=torch.uint8)
    return (rows.unflatten(1, (len(places), -1)) << places[:, None]).sum(1).to(torch.uint8)


def _parts(form: Form, stored: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Levels as ``MatMulNBits`` takes them, scales and offsets [N, blocks] in float32."""
    if form.pairs:
        steps = fields(stored["steps"], None, [4], False).chunk(2, 1)
        stored = {**stored, "scale_steps": steps[0], "least_steps": steps[1]}
    scales, offsets = _floats(stored, "scales", "scale_steps"), None
    if "zeros" in stored:
        offsets = (form.middle - stored["zeros"].float()) * scales
    elif form.zero is None:
        offsets = _floats(stored, "least", "least_steps") + form.middle * scales
    levels = stored["levels"]
    if form.widths:
        levels = fields(levels, stored.get("high"), list(form.widths), form.wide == 4)
        levels = levels.unflatten(1, (-1, form.size * form.wide // 8))
    if form.table is not None:
        table = torch.tensor([level + 128 for level in form.table], dtype=torch.uint8)
        levels = table[levels.int()]
    return levels, scales, offsets


def _floats(stored: Mapping[str, torch.Tensor], name: str, steps: str) -> torch.Tensor:
    """The scales or the least weights of all blocks, [N, blocks] in float32."""
    values = stored[name].float()
    if steps not in stored:
        return values
    return (values[..., None] * stored[steps].unflatten(1, (values.shape[1], -1)).float()).flatten(1)


def _weights(form: Form, levels: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """The weights, [N, K] floats."""
    numbers = levels
    if form.wide == 4:
        numbers = fields(levels.flatten(1), None, [4], False).unflatten(1, (2, -1)).transpose(1, 2)
        numbers = numbers.reshape(*levels.shape[:2], form.size)
    weights = (numbers.float() - form.middle) * scales[..., None]
    return (weights if offsets is None else weights + offsets[..., None]).flatten(1)


class BlockLinear(nn.Module):
    """A linear layer, or several with the same input, whose weights are in blocks of one form."""

    bias: Any

    def __init__(self, parts: Sequence[Blocks], biases: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        self.form = parts[0].form
        stored = [_stored(part) for part in parts]
        self.names = tuple(stored[0])
        for name in self.names:
            self.register_buffer(name, torch.cat([tensors[name] for tensors in stored]))
        self.widths = [len(part.tensors["numbers"]) for part in parts]
        values = [torch.zeros(n) if b is None else b.detach() for b, n in zip(biases, self.widths, strict=True)]
        self.register_buffer("bias", torch.cat(values) if any(bias is not None for bias in biases) else None)
        self.step = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        levels, scales, offsets = _parts(self.form, {name: getattr(self, name) for name in self.names})
        bias, wide, zeros = None if self.bias is None else self.bias.to(x.dtype), self.form.wide, None
        if self.form.middle != 1 << (wide - 1):
            columns = levels.shape[1] if wide == 8 else (levels.shape[1] + 1) // 2
            zeros = filled(levels.shape[0], columns, self.form.middle * (1 if wide == 8 else 17))
        result: torch.Tensor = matmul_nbits(x, levels, scales.to(x.dtype), zeros, bias, wide, self.step)
        if offsets is None:
            return result
        sums = x.unflatten(-1, (-1, self.form.size)).sum(-1)
        return result + nn.functional.linear(sums, offsets.to(x.dtype))


class BlockEmbedding(nn.Embedding):
    """An embedding whose rows are in blocks; :func:`embed_blocks` makes it of another embedding."""

    form: Form
    names: tuple[str, ...]
    dtype: torch.dtype

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """An empty tensor of the results' dtype: code that reads more of it than the dtype fails."""
        return torch.empty(0, dtype=self.dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of tokens, [..., width]."""
        rows = {name: getattr(self, name)[tokens.flatten()] for name in self.names}
        return _weights(self.form, *_parts(self.form, rows)).to(self.dtype).unflatten(0, tokens.shape)


def embed_blocks(embedding: Any, blocks: Blocks, dtype: torch.dtype, shared: BlockLinear | None = None) -> None:
    """Gives an embedding its rows in blocks, in place; a subclass that scales rows stays the first base class.

    Args:
        embedding: An ``nn.Embedding``, with or without a weight.
        shared: The layer of the logits, where its weight is the embedding's.
    """
    kind = type(embedding)
    embedding._parameters = {}
    bases = (BlockEmbedding,) if kind is nn.Embedding else (kind, BlockEmbedding)
    stored = _stored(blocks) if shared is None else {name: getattr(shared, name) for name in shared.names}
    for name, tensor in stored.items():
        embedding.register_buffer(name, tensor)
    embedding.form, embedding.names, embedding.dtype = blocks.form, tuple(stored), dtype
    embedding.__class__ = type(f"Block{kind.__name__}", bases, {})


class Numbers(nn.Module):
    """A linear layer whose numbers are in groups that no operator multiplies; the file stores them in their few bits.

    Args:
        numbers: [rows, columns] bytes, which hold the matrix row by row.
        scales, zeros: A float for each column, or for each row: the weight is ``(number - zero) * scale``.
    """

    numbers: torch.Tensor
    high: torch.Tensor | None
    scales: torch.Tensor
    zeros: torch.Tensor
    bias: Any

    def __init__(
        self,
        numbers: torch.Tensor,
        bits: int,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        shape: tuple[int, int],
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self.rows, self.shape = numbers.shape[0], tuple(shape)
        self.fields = [width for width in (4, 2, 1) if bits & width]
        flat = numbers.reshape(1, -1)
        first, high = (self.fields or [8])[0], self.fields[1:]
        self.register_buffer("numbers", _together(flat & ((1 << first) - 1), first))
        self.register_buffer("high", _together(flat >> first, high[0]) if high else None)
        self.register_buffer("scales", scales.clone())
        self.register_buffer("zeros", zeros.clone())
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        flat = fields(self.numbers, self.high, self.fields, False) if self.fields else self.numbers
        steps = flat.view(self.rows, -1).float() - self.zeros.float()
        weight = (steps * self.scales.float()).reshape(self.shape)
        return nn.functional.linear(x, weight.to(x.dtype), self.bias)

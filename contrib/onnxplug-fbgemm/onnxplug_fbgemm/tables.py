"""Table-batched embeddings: converters.

The tables of all features lie one after the other in one axis, of bytes or of floats. Each feature's table becomes an
initializer: [rows, bytes of a row] of a quantised table, [rows, width] of float16 and float32. Rows are taken before
they are restored. A quantised row begins with its factor and its offset, both float16; its levels follow, the first in
the lowest bits of a byte.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import torch

from onnxplug import Unsupported
from onnxplug.converters.helpers.scattering import run_of_each, scatter_rows

_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64
_MEAN, _NONE = 1, 2
#: fbgemm's numbers of element types: the bits of a level, and the dtypes of rows that aren't quantised.
_BITS = {2: 8, 3: 4, 4: 2}
_DTYPES = {0: torch.float32, 1: torch.float16}
_OUTPUTS = {0: ir.DataType.FLOAT, 1: ir.DataType.FLOAT16, 5: ir.DataType.BFLOAT16}
#: By float16's sign and exponent, the value of a unit in the last place, and the summand of the hidden bit.
_UNITS = np.array([sign * 2.0 ** (max(e, 1) - 25) if e < 31 else sign * np.inf for sign in (1, -1) for e in range(32)])
_HIDDEN = np.array([0 if e == 0 else 1024 for e in range(32)] * 2)


class Table(NamedTuple):
    """A feature's table: the number of its element type, its width, and its part of the tensor that holds them all."""

    kind: int
    width: int
    first: int
    last: int

    def row_bytes(self, alignment: int) -> int:
        """The number of bytes of a row, unused bytes at its end included."""
        if self.kind in _BITS:
            used = 4 + -(-self.width * _BITS[self.kind] // 8)
        else:
            used = self.width * _DTYPES[self.kind].itemsize
        return -(-used // alignment) * alignment


def int_nbit_split_embedding_codegen_lookup_function(g: Any, node: Any) -> Any:
    """int_nbit_split_embedding_codegen_lookup_function(Tensor dev_weights, Tensor uvm_weights, Tensor weights_placements, Tensor weights_offsets, Tensor weights_tys, Tensor D_offsets, SymInt total_D, int max_int2_D, int max_int4_D, int max_int8_D, int max_float16_D, int max_float32_D, Tensor indices, Tensor offsets, int pooling_mode, Tensor? indice_weights, int output_dtype=1, Tensor? lxu_cache_weights=None, Tensor? lxu_cache_locations=None, int? row_alignment=None, int? max_float8_D=0, int? fp8_exponent_bits=-1, int? fp8_exponent_bias=-1) -> Tensor"""  # noqa: E501
    weights, alignment = node.arg("dev_weights"), node.arg("row_alignment") or 1
    firsts, kinds, columns = _known(g, node, weights, "weights_offsets", "weights_tys", "D_offsets")
    if unknown := set(kinds) - _BITS.keys() - _DTYPES.keys():
        raise Unsupported(f"tables of fbgemm's element type {unknown.pop()}: 8, 4 and 2 bits, float16 and float32 are")
    tables = _tables(g, weights, firsts, kinds, _widths(columns))
    rows = [_bytes(g, weights, table, alignment) for table in tables]
    return _looked_up(g, node, tables, rows, node.arg("pooling_mode"), node.arg("indice_weights"))


def split_embedding_codegen_forward_cpu(g: Any, node: Any) -> Any:
    """split_embedding_codegen_forward_cpu(Tensor weights, Tensor weights_offsets, Tensor D_offsets, SymInt total_D, Tensor hash_size_cumsum, Tensor indices, Tensor offsets, int pooling_mode, Tensor indice_weights, int output_dtype) -> Tensor"""  # noqa: E501
    weights, factors = node.arg("weights"), node.arg("indice_weights")
    firsts, columns = _known(g, node, weights, "weights_offsets", "D_offsets")
    tables = _tables(g, weights, firsts, [-1] * len(firsts), _widths(columns))
    if node.meta("indice_weights").shape[0] == 0:
        factors = None
    return _looked_up(g, node, tables, [_numbers(g, weights, t) for t in tables], node.arg("pooling_mode"), factors)


def split_embedding_nobag_codegen_forward_cpu(g: Any, node: Any) -> Any:
    """split_embedding_nobag_codegen_forward_cpu(Tensor weights, Tensor weights_offsets, int D, Tensor hash_size_cumsum, Tensor indices, Tensor offsets, int output_dtype) -> Tensor"""  # noqa: E501
    weights = node.arg("weights")
    (firsts,) = _known(g, node, weights, "weights_offsets")
    tables = _tables(g, weights, firsts, [-1] * len(firsts), [node.arg("D")] * len(firsts))
    return _looked_up(g, node, tables, [_numbers(g, weights, t) for t in tables], _NONE, None)


def _known(g: Any, node: Any, weights: Any, *names: str) -> list[list[int]]:
    """The values of the arguments that describe where the tables lie.

    Raises:
        Unsupported: An argument, or the tables, are known at run time only, or the element type of the result isn't
            translated.
    """
    if node.arg("output_dtype") not in _OUTPUTS:
        raise Unsupported(
            f"results of fbgemm's element type {node.arg('output_dtype')}: float32, float16, bfloat16 are"
        )
    stored = [g.stored(node.arg(name)) for name in names]
    if not (g.is_weight(weights) or g.stored(weights) is not None) or any(tensor is None for tensor in stored):
        raise Unsupported(f"tables, or {', '.join(names)}, that are known at run time only")
    return [tensor.tolist() for tensor in stored]


def _widths(columns: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(columns)]


def _tables(g: Any, weights: Any, firsts: list[int], kinds: list[int], widths: list[int]) -> list[Table]:
    """The table of each feature; a table ends where the next begins, or at the end of all tables."""
    ends = sorted({*firsts, g.concrete_shape(weights, "tables")[0]})
    return [
        Table(kind, width, first, ends[ends.index(first) + 1])
        for kind, width, first in zip(kinds, widths, firsts, strict=True)
    ]


def _bytes(g: Any, weights: Any, table: Table, alignment: int) -> Any:
    """The rows of a table of bytes as an initializer."""
    row = table.row_bytes(alignment)

    def part(tensor: torch.Tensor) -> torch.Tensor:
        count = (table.last - table.first) // row
        rows = tensor[table.first : table.first + count * row].reshape(count, row)
        if table.kind in _BITS:
            return rows.clone()
        return rows.clone().view(_DTYPES[table.kind])[:, : table.width].contiguous()

    return g.derive(weights, part, (table, row), form=f"table_{table.first}")


def _numbers(g: Any, weights: Any, table: Table) -> Any:
    """The rows of a table of floats as an initializer."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        count = (table.last - table.first) // table.width
        return tensor[table.first : table.first + count * table.width].reshape(count, table.width).clone()

    return g.derive(weights, part, table, form=f"table_{table.first}")


def _looked_up(g: Any, node: Any, tables: list[Table], rows: list[Any], mode: int, factors: Any) -> Any:
    """The pooled rows of all features side by side, [samples, widths]; without pooling the rows one after the other."""
    indices, offsets = node.arg("indices"), g.cast(node.arg("offsets"), _INT64)
    count = g.op.Sub(g.as_scalar(g.dim(offsets, 0)), g.const(1))
    samples = g.as_vector(g.op.Div(count, g.const(len(tables))))
    parts = []
    for number, (table, stored) in enumerate(zip(tables, rows, strict=True)):
        begin = g.op.Mul(samples, g.const([number]))
        bounds = g.op.Slice(offsets, begin, g.op.Add(g.op.Add(begin, samples), g.const([1])), g.const([0]))
        first, last = g.op.Gather(bounds, g.const([0])), g.op.Gather(bounds, g.const([-1]))
        index, factor = (None if x is None else g.op.Slice(x, first, last, g.const([0])) for x in (indices, factors))
        taken = _rows(g, stored, g.cast(index, _INT64), table)
        starts = g.op.Slice(g.op.Sub(bounds, first), g.const([0]), g.const([-1]), g.const([0]))
        parts.append(taken if mode == _NONE else _pooled(g, taken, starts, factor, mode == _MEAN))
    together = parts[0] if len(parts) == 1 else g.op.Concat(*parts, axis=0 if mode == _NONE else 1)
    return g.cast(together, node.dtype)


def _rows(g: Any, rows: Any, index: Any, table: Table) -> Any:
    """[n, width] in float; an index of -1 stands for a pruned row, which is 0."""
    there = g.op.Unsqueeze(g.op.GreaterOrEqual(index, g.const(0)), g.const([1]))
    taken = g.op.Gather(rows, g.op.Max(index, g.const(0)), axis=0)
    if table.kind not in _BITS:
        restored = g.cast(taken, _FLOAT)
    else:
        numbers = g.cast(taken, ir.DataType.INT32)
        factor, offset = (_half(g, numbers, first) for first in (0, 2))
        levels = g.op.Slice(numbers, g.const([4]), g.const([table.row_bytes(1)]), g.const([1]))
        levels = _levels(g, levels, _BITS[table.kind], table.width)
        restored = g.op.Add(g.op.Mul(g.cast(levels, _FLOAT), factor), offset)
    return g.op.Where(there, restored, g.const(0.0, _FLOAT))


def _half(g: Any, numbers: Any, first: int) -> Any:
    """[n, 1]: the float16 of two bytes, which are int32."""
    low, high = (g.op.Gather(numbers, g.const([place]), axis=1) for place in (first, first + 1))
    kind = g.op.Div(high, g.const(4, ir.DataType.INT32))
    rest = g.op.Sub(high, g.op.Mul(kind, g.const(4, ir.DataType.INT32)))
    mantissa = g.op.Add(low, g.op.Mul(rest, g.const(256, ir.DataType.INT32)))
    whole = g.op.Add(mantissa, g.op.Gather(g.const(_HIDDEN.astype(np.int32)), kind))
    return g.op.Mul(g.cast(whole, _FLOAT), g.op.Gather(g.const(_UNITS.astype(np.float32)), kind))


def _levels(g: Any, numbers: Any, bits: int, width: int) -> Any:
    """[n, width]: the levels in bytes, which are int32."""
    if bits == 8:
        return numbers
    base, parts = g.const(2**bits, ir.DataType.INT32), []
    for _ in range(8 // bits - 1):
        rest = g.op.Div(numbers, base)
        parts.append(g.op.Sub(numbers, g.op.Mul(rest, base)))
        numbers = rest
    columns = [g.op.Unsqueeze(part, g.const([2])) for part in (*parts, numbers)]
    levels = g.op.Flatten(g.op.Concat(*columns, axis=2), axis=1)
    return g.op.Slice(levels, g.const([0]), g.const([width]), g.const([1]))


def _pooled(g: Any, rows: Any, starts: Any, factors: Any, is_mean: bool) -> Any:
    """The sum or the mean of the rows of each bag, 0 for an empty bag."""
    count = g.dim(rows, 0)
    bag, bags = run_of_each(g, starts, count), g.as_scalar(g.dim(starts, 0))
    if factors is not None:
        rows = g.op.Mul(rows, g.op.Unsqueeze(g.cast(factors, _FLOAT), g.const([1])))
    total = scatter_rows(g, rows, bag, bags, "sum", _FLOAT)
    if not is_mean:
        return total
    ones = g.op.Expand(g.const(1.0, _FLOAT), g.op.Shape(bag))
    sizes = scatter_rows(g, ones, bag, bags, "sum", _FLOAT)
    return g.op.Div(total, g.op.Unsqueeze(g.op.Max(sizes, g.const(1.0, _FLOAT)), g.const([1])))

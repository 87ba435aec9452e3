"""flash_attn's two operators for inference, by ATen operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onnxplug import Unsupported
from onnxplug_flash_attn.attention import Lengths, Terms, attend

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Results:
    """``_flash_attn_forward``: [batch, L, heads, E], the logarithms, and the results that only dropout sets."""
    _check(dropout_p, return_softmax)
    terms = Terms.of(
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, reach=k.shape[1]
    )
    return _results(*attend(q, k, v, terms, Lengths()))


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> Results:
    """``_flash_attn_varlen_forward``: attention of sequences one after the other, [rows, heads, E].

    Keys may also be in pages, [pages, size, heads, E]. The sequences are padded to the longest sequence at run time, as
    ``max_seqlen_q`` and ``max_seqlen_k`` may be constants of an example. Rows outside of the sequences, which
    flash_attn leaves unset, are 0.
    """
    _check(dropout_p, return_softmax)
    batch = _count(cu_seqlens_q)
    starts_q, starts_k = (x.narrow(0, 0, batch).long() for x in (cu_seqlens_q, cu_seqlens_k))
    queries = cu_seqlens_q.narrow(0, 1, batch).long() - starts_q
    keys = cu_seqlens_k.narrow(0, 1, batch) - starts_k if seqused_k is None else seqused_k.narrow(0, 0, batch).long()
    first = None if leftpad_k is None else leftpad_k.narrow(0, 0, batch)
    rows_q, rows_k = _numbers(queries), _numbers(keys)
    places = starts_q.unsqueeze(1) + rows_q
    if block_table is None:
        places_k = starts_k.unsqueeze(1) + rows_k
    else:
        size = k.shape[1]
        places_k = block_table.narrow(0, 0, batch).long()[:, rows_k // size] * size + rows_k % size
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    terms = Terms.of(
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, reach=max_seqlen_k
    )
    q_padded, k_padded, v_padded = (
        _taken(q, places, queries, rows_q),
        _taken(k, places_k, keys, rows_k),
        _taken(v, places_k, keys, rows_k),
    )
    output, total = attend(q_padded, k_padded, v_padded, terms, Lengths(queries, keys, first))
    back = _back(starts_q, queries, q.shape[0], rows_q.shape[0])
    rows, logarithms = output.flatten(0, 1), total.permute(1, 0, 2).flatten(1, 2)
    rows = torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])[back]
    logarithms = torch.cat([logarithms, logarithms.new_zeros((logarithms.shape[0], 1))], 1)[:, back]
    return _results(rows, logarithms)


def _check(dropout: float, return_softmax: bool) -> None:
    if dropout:
        raise Unsupported(
            "flash_attn's dropout draws its own random numbers, which ONNX has no operator for",
            hint="Export the model in evaluation mode, with dropout_p=0.0.",
        )
    if return_softmax:
        raise Unsupported("flash_attn returns the weights (return_softmax) with dropout alone")


def _results(output: Tensor, logarithms: Tensor) -> Results:
    """The four results: without dropout the weights are empty, and the unset state of random numbers is 0."""
    return output, logarithms, output.new_zeros((0,)), output.new_zeros((2,), dtype=torch.int64)


def _count(offsets: Tensor) -> Any:
    """The number of sequences, counted at run time, as torch compares a size that derives from another size with 1."""
    count: Any = (torch.ones_like(offsets, dtype=torch.int64).sum() - 1).item()  # torch 2.9 compares sums, too
    torch._check(count >= 0)
    return count


def _numbers(lengths: Tensor) -> Tensor:
    """The numbers 0, 1, … of the longest sequence's rows."""
    longest: Any = lengths.max().item()
    torch._check(longest >= 0)
    return torch.arange(longest, device=lengths.device)


def _taken(x: Tensor, places: Tensor, lengths: Tensor, numbers: Tensor) -> Tensor:
    """The rows of each sequence, [batch, longest, heads, E]; behind its end is the first row, which a mask hides."""
    inside = numbers < lengths.unsqueeze(1)
    return x[torch.where(inside, places, 0)]


def _back(starts: Tensor, lengths: Tensor, count: Any, longest: Any) -> Tensor:
    """The place of each of ``count`` rows in the padded sequences; behind their end for rows outside of them."""
    batch, ends = starts.shape[0], starts + lengths
    ended = ends.new_zeros((count + 1,)).scatter_add(0, ends, torch.ones_like(ends)).cumsum(0)[:count]
    start = torch.cat([starts, starts.new_zeros((1,))])[ended]
    row = torch.arange(count, device=starts.device)
    return torch.where((ended < batch) & (row >= start), ended * longest + row - start, batch * longest)

"""Sequences one after the other, against the formula of each sequence."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_flash_attn import functions as flash_attn
from torch import Tensor

_spec = importlib.util.spec_from_file_location("onnxplug_flash_formula", Path(__file__).with_name("test_attention.py"))
assert _spec is not None
assert _spec.loader is not None
attention = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(attention)

ROWS, KEYS, OFFSETS = {0: "rows"}, {0: "keys"}, {0: "offsets"}


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def drawn(queries: list[int], keys: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    q, (k, v) = torch.randn(sum(queries), 4, 8), torch.randn(2, sum(keys), 2, 8)
    return q.to(dtype), k.to(dtype), v.to(dtype), offsets_of(queries), offsets_of(keys)


def of_sequences(q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    results, logarithms = torch.zeros(q.shape), torch.zeros(q.shape[1], q.shape[0])
    for b in range(len(q_at) - 1):
        rows, columns = slice(q_at[b], q_at[b + 1]), slice(k_at[b], k_at[b + 1])
        results[rows], logarithms[:, rows] = attention.formula(q[rows], k[columns], v[columns], **options)
    return results, logarithms


LENGTHS = (([3, 1], [4, 2]), ([2], [5]), ([1, 0, 4], [3, 2, 0]), ([0, 0], [0, 1]), ([1], [1]))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.long
def test_packed(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Sequences of other lengths than the model's constants of the longest; some without a query or a key."""

    def model(q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor) -> Any:
        return flash_attn.flash_attn_varlen_func(q, k, v, q_at, k_at, 3, 4, return_attn_probs=True, **options)[:2]

    inputs = [drawn(*lengths, dtype) for lengths in LENGTHS]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    attention.check(
        model,
        lambda *args: of_sequences(*args, **options),
        inputs,
        (ROWS, KEYS, KEYS, OFFSETS, OFFSETS),
        (16, 23),
        tolerance,
    )


@pytest.mark.long
def test_longest_found_in_the_model() -> None:
    """The length of the longest sequence comes from a tensor, as in transformers; a window in each sequence."""

    def model(qkv: Tensor, at: Tensor) -> Any:
        longest = (at[1:] - at[:-1]).max().item()
        return (flash_attn.flash_attn_varlen_qkvpacked_func(qkv, at, longest, window_size=(1, 0)),)

    def expected(qkv: Tensor, at: Tensor) -> Any:
        return of_sequences(*qkv.unbind(1), at, at, window=(1, 0))[:1]

    inputs = [(torch.randn(sum(n), 3, 2, 8), offsets_of(n)) for n in ([3, 5], [1], [2, 0, 7, 1])]
    attention.check(model, expected, inputs, (ROWS, OFFSETS), (18,))


@pytest.mark.long
def test_rows_in_no_sequence() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor) -> Any:
        return (flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), q_at, k_at, 4, 4),)

    q, k, v, q_at, k_at = drawn([3, 2], [2, 4])
    inputs = [(q, k, v, q_at, k_at), (q, k, v, torch.tensor([1, 3, 4]).int(), torch.tensor([2, 3, 5]).int())]
    attention.check(model, lambda *x: of_sequences(*x)[:1], inputs, (ROWS, KEYS, KEYS, OFFSETS, OFFSETS), (18,))


@pytest.mark.long
def test_pages_and_used_keys() -> None:
    """Keys in pages that a table names, of which some are used, and keys with a first key (``leftpad_k``)."""
    op = torch.ops.flash_attn._flash_attn_varlen_forward

    def pages(q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor, table: Tensor, used: Tensor) -> Any:
        return op(q, k, v, q_at, k_at, 4, 8, 0.0, 0.3, True, block_table=table, seqused_k=used)[:2]

    def of_pages(q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, _: Tensor, table: Tensor, used: Tensor) -> Any:
        every = [torch.cat([x[t] for t in row])[:n] for x in (k, v) for row, n in zip(table, used, strict=True)]
        keys, values = torch.cat(every[: len(table)]), torch.cat(every[len(table) :])
        return of_sequences(q, keys, values, q_at, offsets_of(used.tolist()), scale=0.3, causal=True)

    inputs = []
    for queries, used in (([3, 1], [5, 2]), ([1], [3]), ([2, 1, 4], [8, 1, 2])):
        table = torch.randint(0, 6, (len(used), 2), dtype=torch.int32)
        q, *kv = torch.randn(sum(queries), 4, 8), *torch.randn(2, 6, 4, 2, 8)
        inputs.append((q, *kv, offsets_of(queries), offsets_of(used), table, torch.tensor(used).int()))
    shapes = (ROWS, None, None, OFFSETS, OFFSETS, {0: "sequences"}, {0: "sequences"})
    sequences = torch.export.Dim("sequences")
    shapes = (ROWS, None, None, {0: sequences + 1}, {0: sequences + 1}, {0: sequences}, {0: sequences})
    attention.check(pages, of_pages, inputs, shapes, (18,))

    def padded(q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor, first: Tensor) -> Any:
        return op(q, k, v, q_at, k_at, 4, 8, 0.0, 0.3, True, leftpad_k=first)[:2]

    def of_padded(q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor, first: Tensor) -> Any:
        kept = torch.cat([torch.arange(k_at[b] + first[b], k_at[b + 1]) for b in range(len(first))])
        lengths = (k_at.diff() - first).tolist()
        return of_sequences(q, k[kept], v[kept], q_at, offsets_of(lengths), scale=0.3, causal=True)

    more = [(*drawn(*n), torch.tensor(f).int()) for *n, f in (([3, 1], [4, 2], [1, 0]), ([2], [5], [5]))]
    attention.check(
        padded, of_padded, more, (ROWS, KEYS, KEYS, {0: sequences + 1}, {0: sequences + 1}, {0: sequences}), (18,)
    )

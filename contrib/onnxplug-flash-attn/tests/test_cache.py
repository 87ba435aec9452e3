"""A cache of keys and values in a decoding step, against the formula; the functions under flash_attn's own name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_flash_attn import functions as flash_attn
from torch import Tensor

import onnxplug

#: Tolerances looser than torch.testing's own, with their reasons.
LOOSER: dict[str, tuple[dict[str, float], str]] = {
    "attention": (
        {"rtol": 1e-5, "atol": 1e-5},
        "ONNX Runtime's operator adds up products in another order than the formula",
    ),
}
_spec = importlib.util.spec_from_file_location("onnxplug_flash_formula", Path(__file__).with_name("test_attention.py"))
assert _spec is not None
assert _spec.loader is not None
attention = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(attention)


def turned(x: Tensor, cos: Tensor, sin: Tensor, first: int, interleaved: bool) -> Tensor:
    """Rotary embeddings of [L, heads, E], element by element."""
    result, half = x.clone(), cos.shape[1]
    for i in range(x.shape[0]):
        for d in range(half):
            a, b = (2 * d, 2 * d + 1) if interleaved else (d, d + half)
            c, s = cos[first + i, d], sin[first + i, d]
            result[i, :, a] = x[i, :, a] * c - x[i, :, b] * s
            result[i, :, b] = x[i, :, a] * s + x[i, :, b] * c
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.long
def test_step(interleaved: bool) -> None:
    """New keys are rotated and written behind the keys of each element; the caches come out changed."""
    cos, sin = torch.rand(12, 4), torch.rand(12, 4)

    def model(q: Tensor, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Any:
        keys, values = keys.clone(), values.clone()
        result = flash_attn.flash_attn_with_kvcache(
            q, keys, values, k, v, cos, sin, used, causal=True, rotary_interleaved=interleaved, return_softmax_lse=True
        )
        return *result, keys, values

    def expected(q: Tensor, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Any:
        keys, values, results = keys.clone(), values.clone(), []
        for b, n in enumerate(used.tolist()):
            end = n + k.shape[1]
            keys[b, n:end], values[b, n:end] = turned(k[b], cos, sin, n, interleaved), v[b]
            query = turned(q[b], cos, sin, n, interleaved)
            results.append(attention.formula(query, keys[b, :end], values[b, :end], causal=True))
        result, total = (torch.stack(x) for x in zip(*results, strict=True))
        return result, total, keys, values

    inputs = []
    for used, rows in (([3, 1], 2), ([0], 1), ([5, 2, 0], 4)):
        batch = len(used)
        caches = torch.randn(2, batch, 12, 2, 8).unbind(0)
        new = torch.randn(2, batch, rows, 2, 8).unbind(0)
        inputs.append((torch.randn(batch, rows, 4, 8), *caches, *new, torch.tensor(used, dtype=torch.int32)))
    batch, step = {0: "batch"}, {0: "batch", 1: "rows"}
    attention.check(model, expected, inputs, (step, batch, batch, step, step, batch), (16, 18))


def in_numbers(program: Any) -> int:
    return sum(node.op_type == "GroupQueryAttention" for node in program.model.graph)


@pytest.mark.parametrize("turned_too", [False, True])
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"causal": True, "window_size": (3, -1), "softcap": 4.0}])
@pytest.mark.parametrize("one", ["query", "element"])
@pytest.mark.long
def test_one_operator_of_onnx_runtime(one: str, options: dict[str, Any], turned_too: bool) -> None:
    """One query of any batch, or any queries of one element, with random lengths: GroupQueryAttention."""
    cos, sin = (torch.rand(20, 4), torch.rand(20, 4)) if turned_too else (None, None)

    def model(x: Tensor, keys: Tensor, values: Tensor, used: Tensor) -> Any:
        (q, k, v), keys, values = x.unflatten(2, (8, 8)).split([4, 2, 2], dim=2), keys.clone(), values.clone()
        return flash_attn.flash_attn_with_kvcache(q, keys, values, k, v, cos, sin, used, **options), keys, values

    inputs = []
    for size in (12, 20, 9):
        several = int(torch.randint(2, 6, ()))
        batch, rows = (several, 1) if one == "query" else (1, several)
        used = torch.randint(0, size - rows + 1, (batch,), dtype=torch.int32)
        inputs.append((torch.randn(batch, rows, 64), *torch.randn(2, batch, size, 2, 8).unbind(0), used))
    inputs.append((*inputs[0][:3], torch.zeros_like(inputs[0][3])))
    batch = {0: "batch"} if one == "query" else {}
    cache = {**batch, 1: "size"}
    shapes = (batch or {1: "rows"}, cache, cache, batch)
    is_used = one == "query" or "causal" in options
    for target, opset, count in (("onnxruntime", 16, is_used), ("onnxruntime", 23, is_used), (None, 23, 0)):
        program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=shapes, opset_version=opset, target=target)
        assert in_numbers(program) == count
        for args in inputs:
            for result, wanted in zip(program(*args), model(*args), strict=True):
                torch.testing.assert_close(result, wanted, **LOOSER["attention"][0])


def test_calls_beyond_the_operator() -> None:
    """Several queries of several elements, and half precision: calls that GroupQueryAttention doesn't compute."""

    def model(q: Tensor, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Tensor:
        return flash_attn.flash_attn_with_kvcache(
            q, keys.clone(), values.clone(), k, v, cache_seqlens=used, causal=True
        )

    for rows, dtype in ((3, torch.float32), (1, torch.float16)):
        q, kv, new = torch.randn(2, rows, 4, 8), torch.randn(2, 2, 9, 2, 8), torch.randn(2, 2, rows, 2, 8)
        args = (*(x.to(dtype) for x in (q, *kv, *new)), torch.tensor([4, 0], dtype=torch.int32))
        program = onnxplug.to_onnx(model, args)
        assert in_numbers(program) == 0
        torch.testing.assert_close(program(*args)[0], model(*args))


def test_cache_as_a_buffer() -> None:
    """A model that keeps its cache in buffers, and writes it in place."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(1, 6, 2, 8))
            self.register_buffer("values", torch.zeros(1, 6, 2, 8))

        def forward(self, q: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Any:
            return flash_attn.flash_attn_with_kvcache(q, self.keys, self.values, k, v, cache_seqlens=used, causal=True)

    args = (
        torch.randn(1, 2, 4, 8),
        torch.randn(1, 2, 2, 8),
        torch.randn(1, 2, 2, 8),
        torch.zeros(1, dtype=torch.int32),
    )
    program = onnxplug.to_onnx(Model(), args)
    wanted = attention.of_batch(*args[:3], causal=True)[0]
    torch.testing.assert_close(program(*args)[0], wanted)


@pytest.mark.long
def test_chosen_elements_and_pages() -> None:
    """Caches with more elements than the batch, chosen by an index, with a first key; pages by a table."""

    def chosen(q: Tensor, keys: Tensor, values: Tensor, used: Tensor, which: Tensor, first: Tensor) -> Any:
        return (
            flash_attn.flash_attn_with_kvcache(
                q, keys, values, cache_seqlens=used, cache_batch_idx=which, cache_leftpad=first, window_size=(2, 1)
            ),
        )

    def of_chosen(q: Tensor, keys: Tensor, values: Tensor, used: Tensor, which: Tensor, first: Tensor) -> Any:
        rows = [slice(a, b) for a, b in zip(first.tolist(), used.tolist(), strict=True)]
        every = zip(q, keys[which.long()], values[which.long()], rows, strict=True)
        return (torch.stack([attention.formula(q, k[r], v[r], window=(2, 1))[0] for q, k, v, r in every]),)

    def paged(q: Tensor, keys: Tensor, values: Tensor, used: Tensor, table: Tensor) -> Any:
        return (flash_attn.flash_attn_with_kvcache(q, keys, values, cache_seqlens=used, block_table=table),)

    def of_pages(q: Tensor, keys: Tensor, values: Tensor, used: Tensor, table: Tensor) -> Any:
        k, v = (x[table.long()].flatten(1, 2) for x in (keys, values))
        return (torch.stack([attention.formula(q[b], k[b, :n], v[b, :n])[0] for b, n in enumerate(used.tolist())]),)

    inputs, pages = [], []
    for used, first in (([5, 3], [1, 0]), ([6], [2]), ([4, 4, 5], [0, 0, 2])):
        batch = len(used)
        q, caches = torch.randn(batch, 2, 4, 8), torch.randn(2, 4, 6, 2, 8).unbind(0)
        numbers = [torch.tensor(n, dtype=torch.int32) for n in (used, torch.randperm(4)[:batch].tolist(), first)]
        inputs.append((q, *caches, *numbers))
        table = torch.randint(0, 4, (batch, 2), dtype=torch.int32)
        pages.append((q, *torch.randn(2, 4, 3, 2, 8).unbind(0), numbers[0], table))
    batch = {0: "batch"}
    attention.check(chosen, of_chosen, inputs, (batch, None, None, batch, batch, batch), (18, 23))
    attention.check(paged, of_pages, pages, (batch, None, None, batch, batch), (18, 23))


@pytest.mark.long
def test_imported_by_its_name() -> None:
    code = (
        "import onnxplug, onnxplug_flash_attn, torch; onnxplug_flash_attn.stand_in(); onnxplug_flash_attn.stand_in()\n"
        "from flash_attn import flash_attn_func\nimport flash_attn.flash_attn_interface as i\n"
        "assert i.flash_attn_func is flash_attn_func\nx = torch.randn(1, 3, 2, 8)\nprint(flash_attn_func(x, x, x).shape)"
    )
    paths = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=paths, check=False)
    assert "torch.Size([1, 3, 2, 8])" in done.stdout, done.stderr

"""natten's functions and modules, against its own backend for the CPU, which computes every score of all queries and keys."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from onnxplug_natten import FUNCTIONS, attention
from torch import Tensor

import onnxplug

natten = pytest.importorskip("natten")
pytestmark = [
    pytest.mark.filterwarnings("ignore:return_lse is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]
#: Tolerances looser than torch.testing's own, with their reasons.
LOOSER = {
    "halves": (
        {"rtol": 1e-2, "atol": 1e-2},
        "natten's backend for the CPU computes in float16, the package in float32",
    ),
}
PLAIN = {"rtol": 1.3e-6, "atol": 2e-6}
SIZES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((13,), (12,), (20,)),
    2: ((9, 7), (6, 11), (12, 8)),
    3: ((5, 6, 4), (4, 4, 7), (6, 5, 4)),
}


def check(
    model: Callable[..., Any], inputs: Sequence[tuple[Tensor, ...]], shapes: Any, tolerance: Any = PLAIN, **options: Any
) -> onnxplug.OnnxProgram:
    """Exports with the first inputs; the file gives the library's results for all inputs."""
    program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=shapes, **options)
    for args in inputs:
        with torch.no_grad():
            wanted = model(*args)
        for result, value in zip(program(*args), [wanted] if isinstance(wanted, Tensor) else wanted, strict=True):
            torch.testing.assert_close(result, value, **tolerance)
    return program


def drawn(batch: int, size: tuple[int, ...], shared: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Queries of 4 heads, keys and values of 4 or fewer."""
    return tuple(torch.randn(batch, *size, heads, 8, dtype=dtype) for heads in (4, shared, shared))


def dynamic(*least: int) -> Any:
    """Dynamic shapes of queries, keys and values of any batch, and of sizes of at least ``least``."""
    return ({0: "batch", **{n + 1: torch.export.Dim(f"size{n}", min=size) for n, size in enumerate(least)}},) * 3


CASES = [
    (1, 3, 1, 1, False),
    (1, 4, 2, 1, True),
    (1, 5, 3, 2, False),
    (1, 12, 1, 1, False),
    (2, 2, 1, 2, False),
    (2, (3, 4), 2, 1, True),
    (2, 5, 4, 1, False),
    (2, 3, 2, 2, True),
    (3, 2, 1, 2, True),
    (3, (3, 4, 2), 2, 1, False),
]


@pytest.mark.parametrize(("axes", "kernel", "stride", "dilation", "causal"), CASES)
def test_attention(axes: int, kernel: Any, stride: int, dilation: int, causal: bool) -> None:
    """Keys that heads share; some sizes equal the window, some are no multiples of the dilation."""
    function = getattr(natten, f"na{axes}d")
    is_causal = (causal, *(False,) * (axes - 1))

    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return function(q, k, v, kernel, stride, dilation, is_causal, return_lse=True)

    least = tuple(m * dilation for m in ((kernel,) * axes if isinstance(kernel, int) else kernel))
    sizes = [size for size in SIZES[axes] if all(s >= m for s, m in zip(size, least, strict=True))]
    inputs = [drawn(batch, size, 2) for batch, size in zip((2, 1, 3), sizes, strict=False)]
    assert len(inputs) > 1
    check(model, inputs, dynamic(*least))


@pytest.mark.parametrize("opset", [13, 18, 23])
def test_opsets(opset: int) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return natten.na2d(q, k, v, 3, scale=0.2)

    check(model, [drawn(2, (9, 7)), drawn(1, (5, 6))], dynamic(3, 3), opset_version=opset)


@pytest.mark.parametrize("causal", [True, False])
def test_additional_keys(causal: bool) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, more: Tensor, last: Tensor) -> Any:
        options = {"additional_keys": more, "additional_values": last, "is_causal": causal, "return_lse": True}
        return natten.na1d(q, k, v, 4, **options)

    inputs = [(*drawn(b, (n,), 2), *(torch.randn(b, m, 2, 8) for _ in range(2))) for b, n, m in ((2, 9, 3), (1, 6, 5))]
    more = {0: "batch", 1: "more"}
    check(model, inputs, (*dynamic(4), more, more))


def test_halves() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return natten.na2d(q, k, v, 3)

    inputs = [drawn(b, size, 4, torch.float16) for b, size in ((2, (9, 7)), (1, (5, 6)))]
    check(model, inputs, dynamic(3, 3), LOOSER["halves"][0])


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_modules(axes: int) -> None:
    module = getattr(natten, f"NeighborhoodAttention{axes}D")(embed_dim=32, num_heads=4, kernel_size=3).eval()
    inputs = [(torch.randn(batch, *size, 32),) for batch, size in zip((2, 1, 3), SIZES[axes], strict=True)]
    check(module, inputs, dynamic(*(3,) * axes)[:1], {"rtol": 1e-5, "atol": 1e-5})


def test_plain_attention() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return natten.attention(q, k, v, scale=0.3, return_lse=True)

    inputs = [(drawn(b, (n,))[0], *drawn(b, (m,), 2)[1:]) for b, n, m in ((2, 5, 7), (1, 6, 3))]
    check(model, inputs, ({0: "batch", 1: "queries"}, {0: "batch", 1: "keys"}, {0: "batch", 1: "keys"}))


def by_the_formula(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """PyTorch's attention, whose causal mask begins in the upper left corner, too."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("opset", [13, 21])
def test_causal_attention(opset: int) -> None:
    """Causal attention, for which natten has only CUTLASS kernels for GPUs: the mask is their ``CausalFromTopLeft``."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return natten.attention(q, k, v, True, 0.3)

    inputs = [(drawn(b, (n,))[0], *drawn(b, (m,), 2)[1:]) for b, n, m in ((2, 5, 7), (1, 6, 3), (3, 4, 4))]
    keys = {0: "batch", 1: "keys"}
    shapes = ({0: "batch", 1: "queries"}, keys, keys)
    program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=shapes, opset_version=opset)
    for args in inputs:
        torch.testing.assert_close(program(*args)[0], by_the_formula(*args, causal=True), **PLAIN)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("as_lengths", [True, False])
def test_packed_sequences(causal: bool, as_lengths: bool) -> None:
    """Packed sequences of any number and lengths, for which natten has kernels for GPUs alone."""

    def model(q: Tensor, k: Tensor, v: Tensor, of_queries: Tensor, of_keys: Tensor) -> Any:
        if as_lengths:
            return natten.attention(q, k, v, causal, 0.3, of_queries, of_keys, return_lse=True)
        ends = {"cumulative_seqlen_Q": of_queries, "cumulative_seqlen_KV": of_keys}
        return natten.attention(q, k, v, causal, 0.3, **ends, max_seqlen_Q=5, max_seqlen_KV=4, return_lse=True)

    def drawn_sequences(queries: list[int], keys: list[int]) -> tuple[Tensor, ...]:
        lengths = [torch.tensor(x, dtype=torch.int32) for x in (queries, keys)]
        if not as_lengths:
            lengths = [torch.cat([x.new_zeros(1), x.cumsum(0)]).int() for x in lengths]
        return (drawn(1, (sum(queries),))[0], *drawn(1, (sum(keys),), 2)[1:], *lengths)

    cases = [([3, 5], [4, 3]), ([2, 1, 6], [2, 7, 1]), ([4], [9])]
    inputs = [drawn_sequences(*case) for case in cases]
    keys, of = {1: "keys"}, {0: torch.export.Dim("sequences", min=1 if as_lengths else 2)}
    program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=({1: "queries"}, keys, keys, of, of))
    for (queries, counts), args in zip(cases, inputs, strict=True):
        result, totals = program(*args)
        parts = zip(*(x.split(n, 1) for x, n in zip(args[:3], (queries, counts, counts), strict=True)), strict=True)
        torch.testing.assert_close(result, torch.cat([by_the_formula(*p, causal=causal) for p in parts], 1), **PLAIN)
        assert totals.shape == (1, sum(queries), 4)
        # The logarithms of the first sequence's first head, score by score.
        scores = args[0][0, : queries[0], 0] @ args[1][0, : counts[0], 0].t() * 0.3
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        torch.testing.assert_close(totals[0, : queries[0], 0], scores.logsumexp(-1), **PLAIN)


def test_merged_attention() -> None:
    """Merged attention to three sets of keys, against the library."""

    def model(q: Tensor, *sets: Tensor) -> Any:
        parts = [natten.attention(q, x, x, scale=0.3, return_lse=True) for x in sets]
        options = {"torch_compile": False, "use_autograd_fix": False}
        return natten.merge_attentions([p[0] for p in parts], [p[1] for p in parts], **options)

    inputs = [(drawn(2, (n,))[0], *(drawn(2, (m,))[0] for m in (4, 7, 2))) for n in (5, 3)]
    check(model, inputs, ({1: "queries"}, (None, None, None)))


def test_every_neighbour_by_hand() -> None:
    """The windows of two axes, as natten's documentation draws them."""
    places, seen = attention._window(7, torch.device("cpu"), 3, 1, 1, False)
    assert seen.all()
    assert places.tolist() == [[0, 1, 2], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [4, 5, 6]]
    places, seen = attention._window(7, torch.device("cpu"), 2, 1, 3, True)
    own = [[p for p, s in zip(*row, strict=True) if s] for row in zip(places.tolist(), seen.tolist(), strict=True)]
    assert own == [[0], [1], [2], [0, 3], [1, 4], [2, 5], [3, 6]]


def test_refusals() -> None:
    q, k, v = drawn(2, (6,))
    lengths = torch.tensor([2, 4], dtype=torch.int32)
    for options, match in (
        ({"seqlens_Q": lengths}, "or neither"),
        ({"seqlens_Q": lengths, "seqlens_KV": lengths}, "batch of 1"),
    ):
        with pytest.raises(onnxplug.OnnxplugError, match=match):
            onnxplug.to_onnx(lambda q, k, v, o=options: natten.attention(q, k, v, **o), (q, k, v))


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    args = drawn(1, (6,))
    monkeypatch.setattr(natten, "__version__", "0.17.5")
    onnxplug.to_onnx(torch.nn.ReLU(), args[:1])
    with pytest.raises(onnxplug.OnnxplugError, match=r"natten>=0.21.5,<0.22 are translated; 0.17.5 is installed"):
        onnxplug.to_onnx(lambda q, k, v: natten.na1d(q, k, v, 3), args)


def test_functions_of_the_library() -> None:
    places = FUNCTIONS.places()
    assert {name for _, name, _ in places} == {place.partition(":")[2] for place in FUNCTIONS.functions}
    for name in ("neighborhood_attention_generic", "attention", "merge_attentions"):
        theirs, ours = getattr(natten.functional, name), getattr(attention, name)
        assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters)
    holders = {module.__name__ for module, name, _ in places if name == "neighborhood_attention_generic"}
    assert {"natten.functional", "natten.modules"} <= holders


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(block, {"__name__": "readme"})


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Any:
    """natten's operators, registered as where its kernels are compiled; a program with them runs on a GPU alone."""
    compiled = ModuleType("natten.libnatten")
    compiled.__getattr__ = lambda name: None if not name.startswith("__") else _absent(name)  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, compiled.__name__, compiled)
    importlib.import_module("natten._libnatten.torch_wrappers")
    return torch.ops.natten


def _absent(name: str) -> None:
    raise AttributeError(name)


def captured(model: Callable[..., Any], inputs: Sequence[Tensor], shapes: Any) -> torch.export.ExportedProgram:
    """A program with natten's operators, whose shapes torch knows."""

    class Model(torch.nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return model(*args)

    named = {size: torch.export.Dim(size) for shape in shapes for size in shape.values() if isinstance(size, str)}
    shapes = tuple({n: named.get(size, size) for n, size in shape.items()} for shape in shapes)
    program = torch.export.export(Model(), tuple(inputs), dynamic_shapes=(shapes,))
    assert any(str(node.target).startswith("natten.") for node in program.graph.nodes)
    return program


@pytest.mark.parametrize(("axes", "kernel", "stride", "dilation", "causal"), CASES)
def test_operators(axes: int, kernel: Any, stride: int, dilation: int, causal: bool, operators: Any) -> None:
    """Operators of neighbourhood attention in a program that was captured elsewhere."""
    of_axes = [kernel] * axes if isinstance(kernel, int) else list(kernel)
    causals = [causal, *(False,) * (axes - 1)]
    op, function = getattr(operators, f"na{axes}d_forward"), getattr(natten, f"na{axes}d")

    def model(*args: Tensor) -> Any:
        return op(*args, of_axes, [stride] * axes, [dilation] * axes, causals, 0.3, [4] * axes, [4] * axes)

    least = [size * dilation for size in of_axes]
    inputs = [drawn(batch, size) for batch, size in zip((2, 1, 3), SIZES[axes], strict=True)]
    program = onnxplug.to_onnx(captured(model, inputs[0], dynamic(*least)))
    for args in inputs:
        wanted = function(
            *args, kernel_size=tuple(of_axes), stride=stride, dilation=dilation, is_causal=tuple(causals), scale=0.3,
            return_lse=True,
        )  # fmt: skip
        for result, value in zip(program(*args), wanted, strict=True):
            torch.testing.assert_close(result, value, **PLAIN)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["fmha_forward", "hopper_fmha_forward", "blackwell_fmha_forward"])
def test_operators_of_plain_attention(name: str, causal: bool, operators: Any) -> None:
    """Operators of plain attention, and of packed sequences, whose ends are inputs."""
    more = {"hopper_fmha_forward": [0], "blackwell_fmha_forward": [True]}.get(name, [])

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return getattr(operators, name)(query, key, value, causal, 0.3, 64, 64, *more, None, None, 0, 0)

    def packed(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Any:
        return getattr(operators, name)(query, key, value, causal, 0.3, 64, 64, *more, ends, ends, 9, 9)

    program = onnxplug.to_onnx(captured(dense, drawn(2, (9,)), dynamic(1)))
    for args in (drawn(2, (9,)), drawn(3, (5,)), drawn(1, (1,))):
        out, total = program(*args)
        wanted = expected(*args, causal)
        torch.testing.assert_close(out, wanted[0], **PLAIN)
        torch.testing.assert_close(total, wanted[1], **PLAIN)
    shapes = (*dynamic(1), {0: "ends"})
    shapes = tuple({n: size for n, size in shape.items() if size != "batch"} for shape in shapes)
    cases = [(drawn(1, (9,)), [0, 4, 9]), (drawn(1, (14,)), [0, 1, 6, 13]), (drawn(1, (5,)), [0, 5])]
    program = onnxplug.to_onnx(captured(packed, (*cases[0][0], torch.tensor(cases[0][1], dtype=torch.int32)), shapes))
    for args, ends in cases:
        out, total = program(*args, torch.tensor(ends, dtype=torch.int32))
        for start, end in itertools.pairwise(ends):
            wanted = expected(*(x[:, start:end] for x in args), causal)
            torch.testing.assert_close(out[:, start:end], wanted[0], **PLAIN)
            torch.testing.assert_close(total[:, start:end], wanted[1], **PLAIN)
        assert not out[:, ends[-1] :].any()
        assert not total[:, ends[-1] :].any()


def expected(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of one sequence, and the logarithms of its sums."""
    scores = torch.einsum("bqhd,bkhd->bqhk", query, key) * 0.3
    if causal:
        seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
    return torch.einsum("bqhk,bkhv->bqhv", scores.softmax(-1), value), scores.logsumexp(-1)

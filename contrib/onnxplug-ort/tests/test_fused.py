"""Every fused operator against the plain form and against eager PyTorch, both by ONNX Runtime."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

AUTO = torch.export.Dim.AUTO


ROWS = {0: AUTO, 1: AUTO}
CUDA = {"target": "onnxruntime:cuda"}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 2


@pytest.mark.parametrize("opset", [13, 19, 20, 21])
def test_gelu(opset: int, fused: Any) -> None:
    x = draw(2, 3, 8)
    others = [(draw(1, 1, 8) * 10,), (torch.zeros(3, 2, 8),), (torch.full((1, 2, 8), float("nan")),)]
    exact = fused(lambda x: gelu(x), x, others=others, dynamic=(ROWS,), opset=opset)
    assert exact == ({} if opset >= 20 else {"Gelu": 1})
    assert fused(lambda x: gelu(x, approximate="tanh"), x, others=others, dynamic=(ROWS,), opset=opset) == {
        "FastGelu": 1
    }


def test_gelu_of_one_number(fused: Any) -> None:
    """FastGelu takes no tensor without axes."""
    assert fused(lambda x: gelu(x, approximate="tanh"), torch.tensor(1.0)) == {}
    assert fused(lambda x: gelu(x), torch.tensor(1.0), opset=19) == {"Gelu": 1}


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize(("approximate", "op"), [("none", "BiasGelu"), ("tanh", "FastGelu")])
@pytest.mark.long
def test_bias_gelu(approximate: str, op: str, opset: int, fused: Any) -> None:
    layer = nn.Linear(5, 8)
    x, others = draw(2, 3, 5), [(draw(1, 1, 5),), (draw(4, 2, 5) * 5,)]

    def model(x: torch.Tensor) -> torch.Tensor:
        return gelu(layer(x), approximate=approximate)

    assert fused(model, x, others=others, dynamic=(ROWS,), opset=opset) == {op: 1}
    # The sum has another reader, or the addend is no vector: the plain sum stays.
    both = fused(lambda x: (lambda y: gelu(y, approximate=approximate) + y)(layer(x)), x)
    assert both["BiasGelu"] == 0
    assert fused(lambda x, y: gelu(x + y, approximate=approximate), x, draw(3, 5))["BiasGelu"] == 0


@pytest.mark.long
def test_fused_matmul(fused: Any) -> None:
    a, b = draw(2, 3, 4), draw(2, 5, 4)
    other = [(draw(1, 1, 4), draw(1, 7, 4))]
    assert fused(lambda a, b: a @ b.mT, a, b, others=other, dynamic=(ROWS, ROWS)) == {"FusedMatMul": 1}
    assert fused(lambda a, b: a.mT @ b, draw(2, 4, 3), draw(2, 4, 5)) == {"FusedMatMul": 1}
    assert fused(lambda a, b: a.mT @ b.mT, draw(2, 4, 3), draw(2, 5, 4)) == {"FusedMatMul": 1}
    assert fused(lambda a, b: (a @ b.mT) * 0.5, a, b, others=other, dynamic=(ROWS, ROWS)) == {"FusedMatMul": 1}
    assert fused(lambda a, b: 3.0 * (a @ b), a, draw(2, 4, 5)) == {"FusedMatMul": 1}
    assert fused(lambda a, b: (a @ b.mT) / 8.0, a, b) == {"FusedMatMul": 1}
    assert fused(lambda a, b: ((a @ b.mT) / 8.0) * 2.0, a, b) == {"FusedMatMul": 1}
    # No Transpose, other dtypes, other permutations, products with two readers.
    assert fused(lambda a, b: a @ b, a, draw(2, 4, 5)) == {}
    assert fused(lambda a, b: a.double() @ b.double().mT, a, b) == {}
    assert fused(lambda a, b: a @ b.permute(2, 1, 0), draw(2, 3, 4), draw(5, 4, 2)) == {}
    assert fused(lambda a, b: (lambda y: y * 2.0 + y)(a @ b), a, draw(2, 4, 5)) == {}


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.long
def test_skip_layer_normalization(opset: int, fused: Any) -> None:
    norm = nn.LayerNorm(8, eps=1e-3)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x, y = draw(2, 3, 8), draw(2, 3, 8)
    others = [(draw(1, 1, 8), draw(1, 1, 8)), (draw(4, 5, 8), torch.zeros(4, 5, 8))]

    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        return norm(x + y)

    def residual(x: torch.Tensor, y: torch.Tensor) -> Any:
        total = x * 2 + y
        early = total.sin()
        return norm(total) + early, total

    for function in (model, residual):
        assert fused(function, x, y, others=others, dynamic=(ROWS, ROWS), opset=opset, **CUDA) == {
            "SkipLayerNormalization": 1
        }
    assert fused(lambda x, y: layer_norm(x + y, (8,)), x, y, **CUDA)["SkipLayerNormalization"] <= 1
    # Sums that broadcast, and norms over two axes.
    assert fused(model, x, draw(3, 8), opset=opset, **CUDA) == {}
    assert fused(lambda x, y: layer_norm(x + y, (3, 8)), x, y, opset=opset, **CUDA) == {}


class Rms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3))


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.long
def test_skip_simplified_layer_normalization(opset: int, fused: Any) -> None:
    norm = Rms()
    x, y = draw(2, 3, 8), draw(2, 3, 8)
    others = [(draw(1, 1, 8), draw(1, 1, 8)), (draw(4, 5, 8), torch.zeros(4, 5, 8))]
    name = "SkipSimplifiedLayerNormalization"

    def residual(x: torch.Tensor, y: torch.Tensor) -> Any:
        total = x * 2 + y
        early = total.sin()
        return norm(total) + early, total

    for function in (lambda x, y: norm(x + y), residual):
        assert fused(function, x, y, others=others, dynamic=(ROWS, ROWS), opset=opset, **CUDA) == {name: 1}
    built_in = nn.RMSNorm(8, eps=1e-3)
    nn.init.normal_(built_in.weight)
    assert fused(lambda x, y: built_in(x + y), x, y, opset=opset, **CUDA)[name] == 1
    assert fused(lambda x, y: norm(x + y), x, draw(3, 8), opset=opset, **CUDA) == {}


def test_mean_and_deviation_have_no_name(fused: Any) -> None:
    """Unread outputs have no name: ONNX Runtime allocates memory for each output with a name."""
    layer_norm, x = nn.LayerNorm(8).eval(), draw(2, 3, 8)
    for norm in (layer_norm, Rms()):
        assert sum(fused(lambda x, y, norm=norm: norm(x + y), x, x, **CUDA).values()) == 1
        (node,) = [node for node in fused.program.model.graph if node.domain]
        assert [output.name == "" for output in node.outputs] == [False, True, True, False]


def test_norms_in_branches(fused: Any) -> None:
    """A node replaces the sum and the norm only where one graph has both."""
    layer_norm, simplified, last = nn.LayerNorm(8).eval(), Rms(), torch.nn.Parameter(torch.randn(8))
    x, y = draw(2, 3, 8), draw(2, 3, 8)

    def branched(norm: Any, before: Any = None) -> Any:
        def model(x: torch.Tensor, y: torch.Tensor) -> Any:
            total = x + y
            inner = total if before is None else before(total)
            return torch.cond(x.sum() > 0, norm, lambda h: h * 2, (inner,)), total

        return model

    def within(norm: Any) -> Any:
        return lambda x, y: torch.cond(x.sum() > 0, lambda x, y: norm(x + y), lambda x, y: x * y, (x, y))

    others = [(x.abs(), y), (-x.abs(), y)]
    scaled = branched(lambda h: last * h, lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3))
    for function in (branched(layer_norm), branched(simplified), scaled):
        assert fused(function, x, y, others=others, **CUDA) == {}
    for norm, name in ((layer_norm, "SkipLayerNormalization"), (simplified, "SkipSimplifiedLayerNormalization")):
        assert fused(within(norm), x, y, others=others, **CUDA) == {name: 1}


def test_sums_and_norms_stay_apart_on_the_cpu(fused: Any) -> None:
    for norm in (nn.LayerNorm(8), Rms()):
        assert fused(lambda x, y, norm=norm: norm(x + y), draw(2, 3, 8), draw(2, 3, 8)) == {}


def rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


@pytest.mark.long
def test_rotary_embedding(fused: Any) -> None:
    frequencies = torch.rand(4)

    def model(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[2])[None, :, None] * frequencies
        angles = torch.cat([angles, angles], -1)
        return x * angles.cos()[:, None] + rotated(x) * angles.sin()[:, None]

    def own(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, :, None] * frequencies
        angles = torch.cat([angles, angles], -1)
        return x * angles.cos()[:, None] + rotated(x) * angles.sin()[:, None]

    def unequal(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[2])[None, :, None] * frequencies
        angles = torch.cat([angles, angles * 2], -1)
        return x * angles.cos()[:, None] + rotated(x) * angles.sin()[:, None]

    x = draw(2, 3, 5, 8)
    others, dynamic = [(draw(1, 3, 1, 8),), (draw(3, 3, 9, 8),)], ({0: AUTO, 2: AUTO},)
    assert fused(model, x, others=others, dynamic=dynamic) == {"RotaryEmbedding": 1}
    # Each row has positions of its own.
    others = [(draw(1, 3, 1, 8), torch.tensor([[4]])), (draw(3, 3, 9, 8), torch.randint(0, 40, (3, 9)))]
    dynamic = ({0: AUTO, 2: AUTO}, {0: AUTO, 1: AUTO})
    positions = torch.randint(0, 9, (2, 5))
    assert fused(own, x, positions, others=others, dynamic=dynamic) == {"RotaryEmbedding": 1}
    assert fused(own, x, positions) == {"RotaryEmbedding": 1}
    # Angles whose halves differ.
    assert fused(unequal, x) == {}


def test_rotary_tables_of_another_length(fused: Any) -> None:
    """One angle for all tokens, and one token at the angles of several: the operator has an angle for each token."""

    def model(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        return x * cosine + rotated(x) * sine

    def tables(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.cat([torch.arange(1, length + 1)[None, None, :, None] * torch.rand(4)] * 2, -1)
        return angles.cos(), angles.sin()

    for length in (1, 5):
        cosine, sine = tables(length)
        for tokens in (1, 5):
            expected = {"RotaryEmbedding": 1} if tokens == length else {}
            assert fused(lambda x, c=cosine, s=sine: model(x, c, s), draw(2, 3, tokens, 8)) == expected
    cosine, sine = tables(1)
    others = [(draw(2, 3, 7, 8),)]
    assert fused(lambda x: model(x, cosine, sine), draw(2, 3, 5, 8), others=others, dynamic=({2: AUTO},)) == {}


@pytest.mark.parametrize("positions", ["counted", "known"])
@pytest.mark.long
def test_rotary_embedding_before_the_heads_are_taken_apart(positions: str, fused: Any) -> None:
    frequencies = torch.rand(3)
    known = torch.cat([torch.arange(5)[None, :, None] * frequencies] * 2, -1)
    norm = nn.RMSNorm(6)
    nn.init.normal_(norm.weight)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        counted = torch.arange(x.shape[2])[None, :, None] * frequencies
        angles = known if positions == "known" else torch.cat([counted, counted], -1)
        return x * angles.cos()[:, None] + rotated(x) * angles.sin()[:, None]

    def model(x: torch.Tensor) -> torch.Tensor:
        return rotate(x.view(*x.shape[:2], -1, 6).transpose(1, 2))

    def normal(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The heads are normed, as in Qwen3, and have a second reader."""
        heads = norm(x.view(*x.shape[:2], -1, 6)).transpose(1, 2)
        return rotate(heads), heads.sum(2)

    def other(x: torch.Tensor) -> torch.Tensor:
        """Queries with another order of axes: [S, B, H, E] to [B, H, S, E]."""
        return rotate(x.permute(1, 2, 0, 3))

    rows = {0: AUTO} if positions == "known" else ROWS
    sizes = (5, 5) if positions == "known" else (1, 9)
    others = [(draw(1, sizes[0], 24),), (draw(3, sizes[1], 24),)]
    for function in (model, normal):
        program = fused(function, draw(2, 5, 24), others=others, dynamic=(rows,))
        assert program["RotaryEmbedding"] == 1
        (node,) = (n for n in fused.program.model.graph if n.op_type == "RotaryEmbedding")
        assert len(node.inputs[0].shape) == 3
        assert node.attributes["num_heads"].value == 4
    assert fused(other, draw(5, 2, 4, 6)) == {"RotaryEmbedding": 1}
    (node,) = (n for n in fused.program.model.graph if n.op_type == "RotaryEmbedding")
    assert len(node.inputs[0].shape) == 4


HEADS = ({0: AUTO, 2: AUTO},) * 3


def heads(batch: int, queries: int, keys: int, count: int = 4, shared: int = 4) -> tuple[torch.Tensor, ...]:
    return draw(batch, count, queries, 8), draw(batch, shared, keys, 8), draw(batch, shared, keys, 8)


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_multi_head_attention(scale: float | None, opset: int, fused: Any) -> None:
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, scale=scale)

    others = [heads(1, 1, 1), heads(3, 2, 9)]
    assert fused(model, *heads(2, 5, 7), others=others, dynamic=HEADS, opset=opset) == {"MultiHeadAttention": 1}


def test_causal_attention(fused: Any) -> None:
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    length = torch.export.Dim("length")
    dynamic = ({0: AUTO, 2: length},) * 3
    others = [heads(1, 1, 1), heads(3, 9, 9)]
    assert fused(model, *heads(2, 5, 5), others=others, dynamic=dynamic) == {"MultiHeadAttention": 1}
    # torch's first query sees only the first key, ONNX Runtime's sees several.
    assert not ATTENTION & fused(model, *heads(2, 3, 7)).keys()


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(2, 1), (1, 1), (2, 4), (1, 4)])
def test_masked_attention(kind: str, shape: tuple[int, int], fused: Any) -> None:
    """Masks, some with rows that see no key, which are zero in torch."""

    def masked(batch: int, queries: int, keys: int) -> tuple[torch.Tensor, ...]:
        seen = torch.rand(shape[0] if shape[0] == 1 else batch, shape[1], queries, keys) > 0.4
        seen[0, 0, 0] = False
        if kind == "bool":
            return *heads(batch, queries, keys), seen
        return *heads(batch, queries, keys), torch.randn(seen.shape).masked_fill(~seen, float("-inf"))

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=m)

    batch, queries, keys = (torch.export.Dim(n) for n in ("batch", "queries", "keys"))
    mask = {2: queries, 3: keys} | ({} if shape[0] == 1 else {0: batch})
    dynamic = ({0: batch, 2: queries}, {0: batch, 2: keys}, {0: batch, 2: keys}, mask)
    # Sizes of at least 2: torch.export takes a mask of batch 1 for a broadcast mask.
    others = [masked(2, 2, 2), masked(3, 2, 9), masked(2, 3, 0)]
    assert fused(model, *masked(2, 5, 7), others=others, dynamic=dynamic) == {"MultiHeadAttention": 1}


ATTENTION = {"MultiHeadAttention", "GroupQueryAttention"}


def repeated(x: torch.Tensor) -> torch.Tensor:
    """Each head twice, as transformers repeats heads."""
    wide = x[:, :, None].expand(x.shape[0], x.shape[1], 2, *x.shape[2:])
    return wide.reshape(x.shape[0], 2 * x.shape[1], *x.shape[2:])


@pytest.mark.long
def test_attention_that_stays_plain(fused: Any) -> None:
    q, k, v = heads(2, 5, 7)
    attention = scaled_dot_product_attention
    cases: list[tuple[Any, ...]] = [
        (lambda q, k, v: attention(q.double(), k.double(), v.double()), q, k, v),
        (attention, q[0], k[0], v[0]),
        (attention, q, k, draw(2, 4, 7, 6)),
        (attention, q, k, v, torch.rand(5, 7)),
        (attention, q, k, v, torch.rand(2, 1, 1, 7) > 0.3),
        (lambda q, k, v: attention(q, k, v, enable_gqa=True), *heads(2, 5, 7, 4, 2)),
        # A scale of 0 stands for 1/√E in ONNX Runtime.
        (lambda q, k, v: attention(q, k, v, scale=0.0), q, k, v),
        # Heads that share keys: the plain form doesn't copy them.
        (lambda q, k, v: attention(q, repeated(k), repeated(v)), *heads(2, 5, 7, 4, 2)),
    ]
    for case in cases:
        assert not ATTENTION & fused(*case).keys()


def test_group_query_attention(fused: Any) -> None:
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    length = torch.export.Dim("length")
    dynamic = ({0: AUTO, 2: length},) * 3
    others = [heads(1, 1, 1, 4, 2), heads(3, 9, 9, 4, 2)]
    assert fused(model, *heads(2, 5, 5, 4, 2), others=others, dynamic=dynamic) == {"GroupQueryAttention": 1}


@pytest.mark.parametrize("size", [1, 4, 12, 16])
def test_group_query_attention_of_other_head_sizes(size: int, fused: Any) -> None:
    """ONNX Runtime refuses head sizes that are no multiple of 8."""

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    operators = fused(model, draw(2, 4, 5, size), draw(2, 2, 5, size), draw(2, 2, 5, size))
    assert operators["GroupQueryAttention"] == (size % 8 == 0)

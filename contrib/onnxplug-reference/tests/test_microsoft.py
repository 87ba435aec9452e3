"""Operators of com.microsoft against ONNX Runtime's own kernels."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from onnxplug_reference import ExtendedReferenceEvaluator

from onnxplug.errors import EvaluationError
from tests.support.onnxruntime_judge import agree, node_model
from tests.support.tolerances import looser


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> Any:
    """A function that draws random numbers of a shape, different for each test."""
    numbers = np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))

    def run(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (numbers.standard_normal(shape) * scale).astype(np.float32)

    return run


SPECIAL = np.array([0.0, -0.0, 1e-30, 5, -5, 30, -30, np.inf, -np.inf, np.nan], np.float32)


@pytest.mark.parametrize("op", ["Gelu", "FastGelu", "QuickGelu"])
def test_activations(op: str, draw: Any) -> None:
    agree(op, [draw(2, 3, 8, scale=3)])
    agree(op, [draw(0, 4)])
    agree(op, [SPECIAL[:-3]])


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.702, -2.0])
def test_quick_gelu(alpha: float, draw: Any) -> None:
    agree("QuickGelu", [draw(3, 7, scale=4)], alpha=alpha)


def test_gelus_with_bias(draw: Any) -> None:
    agree("BiasGelu", [draw(2, 5, 8), draw(8)])
    agree("FastGelu", [draw(2, 5, 8), draw(8)])


@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("batch", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_fused_matmul(transposed: tuple[int, int], batch: tuple[int, int], draw: Any) -> None:
    def shaped(rows: int, columns: int, swapped: int, moved: int) -> np.ndarray:
        inner = (columns, rows) if swapped else (rows, columns)
        return draw(inner[0], 2, 3, inner[1]) if moved else draw(2, 3, *inner)

    inputs = [shaped(4, 5, transposed[0], batch[0]), shaped(5, 6, transposed[1], batch[1])]
    agree(
        "FusedMatMul",
        inputs,
        alpha=-0.75,
        transA=transposed[0],
        transB=transposed[1],
        transBatchA=batch[0],
        transBatchB=batch[1],
    )


def test_products_of_fewer_axes(draw: Any) -> None:
    agree("FusedMatMul", [draw(4, 5), draw(2, 5, 3)], alpha=2.0)
    agree("FusedMatMul", [draw(5), draw(5, 3)])
    agree("FusedMatMul", [draw(4, 5), draw(5)])
    agree("TransposeMatMul", [draw(5, 4), draw(5, 3)], transA=1, alpha=0.5)


@pytest.mark.parametrize(
    "activation",
    [
        {"activation": "Relu"},
        {"activation": "Tanh"},
        {"activation": "Sigmoid"},
        {"activation": "LeakyRelu", "activation_alpha": 0.2},
        {"activation": "HardSigmoid", "activation_alpha": 0.3, "activation_beta": 0.1},
    ],
)
def test_fused_gemm(activation: dict[str, Any], draw: Any) -> None:
    agree("FusedGemm", [draw(4, 5), draw(5, 3), draw(3)], alpha=0.5, beta=2.0, **activation)
    agree("FusedGemm", [draw(5, 4), draw(3, 5)], transA=1, transB=1, **activation)


@pytest.mark.parametrize(
    "activation",
    [
        {"activation": "Relu"},
        {"activation": "LeakyRelu", "activation_params": [0.1]},
        {"activation": "Clip", "activation_params": [-0.5, 0.5]},
        {"activation": "HardSigmoid", "activation_params": [0.3, 0.1]},
    ],
)
def test_fused_conv(activation: dict[str, Any], draw: Any) -> None:
    x, w, b = draw(2, 4, 7, 6), draw(6, 2, 3, 3), draw(6)
    agree("FusedConv", [x, w, b], group=2, pads=[1, 0, 1, 2], strides=[2, 1], **activation)
    agree("FusedConv", [x, w, b, draw(2, 6, 5, 4)], group=2, **activation)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ["none", "packed", "float"])
@pytest.mark.parametrize(("k", "block"), [(64, 16), (48, 32), (40, 16)])
def test_matmul_nbits(bits: int, zeros: str, k: int, block: int, draw: Any) -> None:
    n, blocks = 6, -(-k // block)
    numbers = np.random.default_rng(bits + k)
    weight = numbers.integers(0, 256, (n, blocks, block * bits // 8)).astype(np.uint8)
    scales = np.abs(draw(n, blocks)) + 0.1
    zero: Any = None
    if zeros == "packed":
        zero = numbers.integers(0, 256, (n, -(-blocks * bits // 8))).astype(np.uint8)
    elif zeros == "float":
        zero = numbers.integers(0, 2**bits, (n, blocks)).astype(np.float32)
    options = {"K": k, "N": n, "block_size": block, "bits": bits}
    if zeros == "float" and bits == 8:  # ONNX Runtime takes only bytes: the same numbers as bytes
        x = draw(3, k)
        (model, feeds), (other, bytes_) = (
            node_model("MatMulNBits", [x, weight, scales, z], ["float32"], **options)
            for z in (zero, zero.astype(np.uint8))
        )
        got, expected = (
            ExtendedReferenceEvaluator(model).run(None, feeds),
            ExtendedReferenceEvaluator(other).run(None, bytes_),
        )
        np.testing.assert_array_equal(got[0], expected[0])
        return
    # ONNX Runtime quantises A to bytes in some kernels unless accuracy_level is 1.
    agree("MatMulNBits", [draw(3, k), weight, scales, zero], accuracy_level=1, **looser("four-bit products"), **options)
    agree(
        "MatMulNBits",
        [draw(2, 2, k), weight, scales, zero, None, draw(n)],
        accuracy_level=1,
        **looser("four-bit products"),
        **options,
    )


def test_other_quantised_products(draw: Any) -> None:
    numbers = np.random.default_rng(5)
    a, b = numbers.integers(0, 256, (3, 8)).astype(np.uint8), numbers.integers(-128, 128, (8, 5)).astype(np.int8)
    scale, each = np.float32(0.02), np.abs(draw(5)) + 0.01
    zero, zeros = np.array(120, np.uint8), numbers.integers(-9, 9, 5).astype(np.int8)
    agree("MatMulIntegerToFloat", [a, b, np.array(scale), each, zero, zeros, draw(5)])
    agree("MatMulIntegerToFloat", [a, b, np.array(scale), np.array(scale)])
    agree(
        "DynamicQuantizeMatMul",
        [draw(3, 8), b, np.array(scale), np.array(3, np.int8), draw(5)],
        **looser("quantised at run time"),
    )
    agree("DynamicQuantizeMatMul", [np.abs(draw(3, 8)), b, each], **looser("quantised at run time"))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_gather_block_quantized(bits: int, zeros: bool, draw: Any) -> None:
    numbers = np.random.default_rng(bits)
    data = numbers.integers(0, 256, (7, 64 * bits // 8)).astype(np.uint8)
    zero = numbers.integers(0, 256, (7, -(-4 * bits // 8))).astype(np.uint8) if zeros else None
    indices = np.array([[0, 6], [-1, 3]], np.int64)
    agree("GatherBlockQuantized", [data, indices, np.abs(draw(7, 4)), zero], bits=bits, block_size=16)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("skip", [(2, 3, 8), (1, 3, 8), (3, 8)])
@pytest.mark.parametrize("beta", [False, True])
def test_skip_layer_normalization(bias: bool, skip: tuple[int, ...], beta: bool, draw: Any) -> None:
    inputs = [draw(2, 3, 8), draw(*skip), draw(8), draw(8) if beta else None, draw(8) if bias else None]
    agree("SkipLayerNormalization", inputs, ["float32", None, None, "float32"], epsilon=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_skip_simplified_layer_normalization(bias: bool, draw: Any) -> None:
    inputs = [draw(2, 3, 8), draw(2, 3, 8), draw(8), draw(8) if bias else None]
    agree("SkipSimplifiedLayerNormalization", inputs, ["float32", None, None, "float32"], epsilon=1e-6)
    agree("SkipSimplifiedLayerNormalization", [v if v is None or v.ndim < 3 else v[0] for v in inputs])


def test_simplified_layer_normalization(draw: Any) -> None:
    agree("SimplifiedLayerNormalization", [draw(2, 3, 8), draw(8)], domain="", epsilon=1e-4, axis=-1)


def test_embed_layer_normalization(draw: Any) -> None:
    numbers = np.random.default_rng(0)
    words, segments = numbers.integers(0, 9, (2, 4)).astype(np.int32), numbers.integers(0, 2, (2, 4)).astype(np.int32)
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)
    tables = [draw(9, 8), draw(5, 8), draw(2, 8), draw(8), draw(8)]
    agree("EmbedLayerNormalization", [words, segments, *tables, mask], ["float32", "int32", "float32"])
    agree("EmbedLayerNormalization", [words, None, *tables[:2], None, *tables[3:]], ["float32", "int32"])
    places = np.array([[3, 2, 1, 0]], np.int32)
    agree("EmbedLayerNormalization", [words, segments, *tables, None, places], ["float32", "int32"])


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("offset", [False, True])
def test_rotary_embedding(interleaved: int, rank: int, offset: bool, draw: Any) -> None:
    angles = draw(20, 4, scale=3)
    x = draw(2, 5, 24) if rank == 3 else draw(2, 3, 5, 8)
    places = np.array([4], np.int64) if offset else np.array([[0, 1, 2, 3, 4], [9, 8, 17, 3, 3]], np.int64)
    agree("RotaryEmbedding", [x, places, np.cos(angles), np.sin(angles)], interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding_of_a_part(interleaved: int, draw: Any) -> None:
    angles = draw(20, 2, scale=3)
    agree(
        "RotaryEmbedding",
        [draw(2, 5, 24), np.array([2], np.int64), np.cos(angles), np.sin(angles)],
        interleaved=interleaved,
        num_heads=3,
        rotary_embedding_dim=4,
    )


MASKS = {
    "none": None,
    "lengths": np.array([3, 6], np.int32),
    "keys": np.array([[1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1]], np.int32),
    "queries": (np.arange(2 * 4 * 6).reshape(2, 4, 6) % 3 > 0).astype(np.int32),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("added", [None, (2, 3), (1, 3), (2, 1), (1, 1)])
def test_multi_head_attention(mask: str, bias: bool, added: Any, draw: Any) -> None:
    inputs = [draw(2, 4, 24), draw(2, 6, 24), draw(2, 6, 12)]
    inputs += [draw(60) if bias else None, MASKS[mask], draw(*added, 4, 6) if added else None]
    agree("MultiHeadAttention", inputs, num_heads=3)
    agree("MultiHeadAttention", inputs, num_heads=3, scale=0.3, mask_filter_value=-3.0)


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_multi_head_attention_with_past(past: int, causal: int, bias: bool, draw: Any) -> None:
    inputs = [draw(2, 4, 24), draw(2, 4, 24), draw(2, 4, 24), draw(72) if bias else None, None, None]
    if past:
        inputs += [draw(2, 3, past, 8), draw(2, 3, past, 8)]
    agree("MultiHeadAttention", inputs, ["float32"] * 3, num_heads=3, unidirectional=causal)


def test_multi_head_attention_of_ready_keys(draw: Any) -> None:
    agree("MultiHeadAttention", [draw(2, 4, 24), draw(2, 3, 6, 8), draw(2, 3, 6, 8)], num_heads=3)
    agree("MultiHeadAttention", [draw(2, 4, 24), draw(2, 3, 6, 8), draw(2, 3, 6, 8), draw(72)], num_heads=3)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("mask", ["none", "lengths", "both", "keys", "queries"])
def test_attention(causal: int, mask: str, draw: Any) -> None:
    masks = {
        "none": None,
        "lengths": np.array([2, 4], np.int32),
        "both": np.array([3, 4, 1, 0], np.int32),
        "keys": np.array([[1, 1, 0, 1], [1, 1, 1, 1]], np.int32),
        "queries": (np.arange(32).reshape(2, 4, 4) % 3 > 0).astype(np.int32),
    }
    inputs = [draw(2, 4, 10), draw(10, 36), draw(36), masks[mask]]
    agree("Attention", inputs, num_heads=3, unidirectional=causal, mask_filter_value=-1000.0)
    agree("Attention", [*inputs, None, draw(1, 3, 4, 4)], num_heads=3, unidirectional=causal)


def test_attention_with_past(draw: Any) -> None:
    past = draw(2, 2, 3, 5, 4)
    agree("Attention", [draw(2, 4, 10), draw(10, 36), draw(36), None, past], ["float32"] * 2, num_heads=3)
    agree(
        "Attention",
        [draw(2, 1, 10), draw(10, 36), draw(36), None, past],
        ["float32"] * 2,
        num_heads=3,
        unidirectional=1,
    )
    inputs = [draw(2, 4, 10), draw(10, 30), draw(30)]
    agree("Attention", inputs, num_heads=3, qkv_hidden_sizes=[12, 12, 6])


ROTARY = [{}, {"do_rotary": 1}, {"do_rotary": 1, "rotary_interleaved": 1}]
#: Further options of GroupQueryAttention, each with every kind of input.
GROUPED = {
    "plain": {},
    "scale": {"scale": 0.2},
    "softcap": {"softcap": 2.0},
    "window": {"local_window_size": 2},
    "smooth": {"smooth_softmax": 1},
    "all": {"softcap": 3.0, "local_window_size": 3, "smooth_softmax": 1, "scale": 0.5},
}


def grouped(
    draw: Any,
    rows: int,
    past: int,
    lengths: list[int],
    packed: bool,
    options: dict[str, Any],
    rotary: dict[str, Any],
    **more: Any,
) -> None:
    """GroupQueryAttention with 4 heads of size 16 in 2 groups. ``lengths``: the number of keys of each batch row."""
    batch = len(lengths)
    q, k, v = draw(batch, rows, 64), draw(batch, rows, 32), draw(batch, rows, 32)
    inputs = [np.concatenate([q, k, v], -1), None, None] if packed else [q, k, v]
    inputs += [draw(batch, 2, past, 16), draw(batch, 2, past, 16)] if past else [None, None]
    inputs += [np.array(lengths, np.int32) - 1, np.array(max(lengths), np.int32)]
    angles = draw(32, 8, scale=3)
    inputs += [np.cos(angles), np.sin(angles)] if rotary else [None, None]
    inputs += [more.get("position_ids"), more.get("bias"), more.get("sink")]
    agree("GroupQueryAttention", inputs, ["float32"] * 3, num_heads=4, kv_num_heads=2, **options, **rotary)


@pytest.mark.parametrize("rotary", ROTARY, ids=str)
@pytest.mark.parametrize("options", GROUPED)
@pytest.mark.parametrize("packed", [False, True])
def test_group_query_attention(rotary: dict[str, Any], options: str, packed: bool, draw: Any) -> None:
    chosen = GROUPED[options]
    grouped(draw, 5, 0, [5, 5], packed, chosen, rotary)
    grouped(draw, 1, 6, [7, 7], packed, chosen, rotary)
    grouped(draw, 1, 6, [7, 4], packed, chosen, rotary)  # rows of the batch with different pasts
    grouped(draw, 1, 12, [8, 3], packed, chosen, rotary)  # a cache with room
    grouped(draw, 3, 4, [7], packed, chosen, rotary)  # several new tokens after a past


def test_group_query_attention_with_bias_and_sinks(draw: Any) -> None:
    for past, rows in ((0, 5), (4, 1)):
        total = past + rows
        for shape in ((2, 4), (1, 4), (2, 1), (1, 1)):
            grouped(draw, rows, past, [total, total], False, {}, {}, bias=draw(*shape, rows, total))
        grouped(draw, rows, past, [total, total], False, {"softcap": 2.0}, {}, bias=draw(1, 1, rows, total))
        grouped(draw, rows, past, [total, total], False, {}, {}, sink=draw(4, scale=2))


def test_group_query_attention_in_both_directions(draw: Any) -> None:
    grouped(draw, 5, 0, [5, 5], False, {"causal": 0}, {})


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("normalise", [0, 1])
def test_moe_with_swiglu(k: int, normalise: int, draw: Any) -> None:
    inputs = [draw(6, 8), draw(6, 4), draw(4, 20, 8), draw(4, 20), draw(4, 8, 10), draw(4, 8)]
    options: dict[str, Any] = {"activation_type": "swiglu", "k": k, "normalize_routing_weights": normalise}
    agree("MoE", inputs, activation_alpha=1.5, activation_beta=0.5, swiglu_fusion=1, **options)
    agree("MoE", inputs, swiglu_limit=0.7, swiglu_fusion=1, **options)


def test_the_other_forms_of_swiglu(draw: Any) -> None:
    """ONNX Runtime's CPU kernel has only the interleaved form: other forms have the same numbers in another order."""
    x, router, both, bias, second = draw(6, 8), draw(6, 4), draw(4, 20, 8), draw(4, 20), draw(4, 8, 10)
    options: dict[str, Any] = {"activation_type": "swiglu", "k": 2, "activation_alpha": 1.5, "swiglu_limit": 0.9}

    def run(*inputs: Any, **form: int) -> np.ndarray:
        model, feeds = node_model("MoE", inputs, ["float32"], **options, **form)
        return ExtendedReferenceEvaluator(model).run(None, feeds)[0]

    interleaved = run(x, router, both, bias, second, swiglu_fusion=1)
    halves = [np.concatenate([v[:, 0::2], v[:, 1::2]], 1) for v in (both, bias)]
    np.testing.assert_allclose(run(x, router, *halves, second, swiglu_fusion=2), interleaved, rtol=1e-6)
    apart = run(x, router, both[:, 0::2], bias[:, 0::2], second, None, both[:, 1::2], bias[:, 1::2], swiglu_fusion=0)
    np.testing.assert_allclose(apart, interleaved, rtol=1e-6)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity"])
def test_moe(activation: str, draw: Any) -> None:
    inputs = [draw(2, 3, 8), draw(6, 4), draw(4, 10, 8), draw(4, 10), draw(4, 8, 10), draw(4, 8)]
    agree("MoE", inputs, activation_type=activation, k=2)
    agree("MoE", [*inputs[:3], None, inputs[4]], activation_type=activation, k=1)


def test_operators_of_onnxruntime_alone(draw: Any) -> None:
    model, feeds = node_model(
        "MoE",
        [draw(2, 8), draw(2, 4), draw(4, 10, 8), None, draw(4, 8, 10)],
        ["float32"],
        use_sparse_mixer=1,
    )
    with pytest.raises(EvaluationError, match="use_sparse_mixer"):
        ExtendedReferenceEvaluator(model).run(None, feeds)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_computed_in_float(dtype: str, draw: Any) -> None:
    """ONNX Runtime has only float kernels on the CPU: its results for the same numbers are rounded once."""
    import ml_dtypes  # noqa: F401

    from tests.support.onnxruntime_judge import by_onnxruntime

    kind = np.dtype(dtype)
    for op, inputs, options in (
        ("FastGelu", [draw(3, 8), draw(8)], {}),
        ("MultiHeadAttention", [draw(2, 4, 24), draw(2, 6, 24), draw(2, 6, 24)], {"num_heads": 3}),
        ("SkipLayerNormalization", [draw(2, 3, 8), draw(2, 3, 8), draw(8), draw(8)], {"epsilon": 1e-5}),
    ):
        narrow = [x.astype(kind) for x in inputs]
        model, feeds = node_model(op, narrow, [dtype], **options)
        (got,) = ExtendedReferenceEvaluator(model).run(None, feeds)
        assert got.dtype == kind
        wide, floats = node_model(op, [x.astype(np.float32) for x in narrow], ["float32"], **options)
        (expected,) = by_onnxruntime(wide, floats)
        rounding = 2**-10 if dtype == "float16" else 2**-7
        np.testing.assert_allclose(got.astype(np.float32), expected, rtol=rounding, atol=rounding / 8)

"""The state spaces, convolutions and norms against formulas written out token by token, in models of any batch and length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from onnxplug_mamba import convolution, norms, scans
from torch import Tensor
from torch.nn import functional

import onnxplug

#: Tolerances looser than torch.testing's own, with their reasons.
LOOSER = {
    "sums": (
        {"rtol": 2e-5, "atol": 2e-5},
        "sums over tokens in another order than the formula's, which goes token by token",
    ),
    "logarithms": (
        {"rtol": 1e-4, "atol": 1e-4},
        "the formula's softplus is of a logarithm that is computed in float32",
    ),
    "float16": ({"rtol": 2e-3, "atol": 2e-3}, "results are rounded to float16"),
    "bfloat16": ({"rtol": 2e-2, "atol": 2e-2}, "results are rounded to bfloat16"),
}
OPSETS = (13, 18, 23)
#: Batch and length; 64 tokens are a chunk.
SIZES = ((2, 5), (1, 1), (3, 66))


@pytest.mark.onnxplug("mamba")
@pytest.mark.long
def test_sample(onnx_sample: Any) -> None:
    onnx_sample.check()


def check(
    model: Callable[..., Any],
    expected: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...]],
    shapes: Any,
    opsets: Sequence[int] = OPSETS,
    tolerance: dict[str, float] = LOOSER["sums"][0],
) -> None:
    """Exports with the first inputs; the model and the file give the expected results for all inputs."""
    for opset in opsets:
        program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=shapes, opset_version=opset)
        for args in inputs:
            wanted = expected(*args)
            for results in (program(*(clone(a) for a in args)), model(*(clone(a) for a in args))):
                for result, value in zip(results, wanted, strict=True):
                    assert result.dtype == value.dtype
                    torch.testing.assert_close(result.float(), value.float(), **tolerance)


def clone(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def tokens_of(*widths: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, ...]]:
    """[batch, width, length] for each width and size."""
    return [tuple(torch.randn(batch, width, length).to(dtype) for width in widths) for batch, length in SIZES]


# -- Mamba -------------------------------------------------------------------------------------------------------------

CHANNELS, N = 6, 4
A, D, BIAS = -torch.rand(CHANNELS, N) - 0.2, torch.randn(CHANNELS), torch.randn(CHANNELS)
CONSTANT = torch.randn(CHANNELS, N)


def selective(u: Tensor, delta: Tensor, b: Tensor, c: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mamba's state space with the parameters above; b and c are [batch, groups, N, L] or [channels, N]."""
    batch, _, length = u.shape
    result, state = torch.zeros(u.shape), torch.zeros(batch, CHANNELS, N)
    for t in range(length):
        for i in range(CHANNELS):
            now = [x[i].expand(batch, N) if x.dim() == 2 else x[:, i // (CHANNELS // x.shape[1]), :, t] for x in (b, c)]
            b_now, c_now = (x.float() for x in now)
            dt = (1 + (delta[:, i, t].float() + BIAS[i]).exp()).log()
            state[:, i] = (dt[:, None] * A[i]).exp() * state[:, i] + (dt * u[:, i, t].float())[:, None] * b_now
            result[:, i, t] = (state[:, i] * c_now).sum(-1) + D[i] * u[:, i, t].float()
    if z is not None:
        result = result * z.float() * z.float().sigmoid()
    return result.to(u.dtype), state


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_selective_scan(groups: int, gated: bool) -> None:
    def model(u: Tensor, delta: Tensor, b: Tensor, c: Tensor, z: Tensor) -> Any:
        b, c = b.unflatten(1, (groups, N)), c.unflatten(1, (groups, N))
        out, last, *rest = scans.selective(u, delta, A, b, c, D, z if gated else None, BIAS, True)
        return (rest or [out])[0], last[:, :, -1, 1::2]

    def expected(u: Tensor, delta: Tensor, b: Tensor, c: Tensor, z: Tensor) -> Any:
        return selective(u, delta, b.unflatten(1, (groups, N)), c.unflatten(1, (groups, N)), z if gated else None)

    rows = ({0: "batch", 2: "length"},) * 5
    check(model, expected, tokens_of(CHANNELS, CHANNELS, groups * N, groups * N, CHANNELS), rows, (16, 23))


@pytest.mark.parametrize("constant", ["b", "c", "bc"])
@pytest.mark.long
def test_selective_scan_with_constant_parts(constant: str) -> None:
    """B or C that are the same for all tokens, without a skip connection, a bias or softplus."""
    options: dict[str, Tensor | None] = dict.fromkeys(constant, CONSTANT)

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        def model(u: Tensor, delta: Tensor, other: Tensor) -> Any:
            b, c = (options[name] if name in options else other.unsqueeze(1) for name in "bc")
            return (function(u, delta, b, c),)

        return model

    def plain(u: Tensor, delta: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return scans.selective(u, delta.exp(), A, b, c, None, None, None, False)[0]

    def formula(u: Tensor, delta: Tensor, b: Tensor, c: Tensor) -> Tensor:
        exact = torch.expm1(delta.exp()).log() - BIAS[:, None]  # softplus of exact + BIAS is exp(delta)
        return selective(u, exact, b, c, None)[0] - D[:, None] * u

    check(
        of(plain),
        of(formula),
        tokens_of(CHANNELS, CHANNELS, N),
        ({0: "batch", 2: "length"},) * 3,
        (18,),
        LOOSER["logarithms"][0],
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float16, LOOSER["float16"][0]), (torch.bfloat16, LOOSER["bfloat16"][0])],
    ids=["float16", "bfloat16"],
)
def test_selective_scan_in_halves(dtype: torch.dtype, tolerance: dict[str, float]) -> None:
    def model(u: Tensor, delta: Tensor, b: Tensor, c: Tensor, z: Tensor) -> Any:
        _, last, result = scans.selective(u, delta, A, b.unsqueeze(1), c.unsqueeze(1), D, z, BIAS, True)
        return result, last[:, :, -1, 1::2]

    def expected(u: Tensor, delta: Tensor, b: Tensor, c: Tensor, z: Tensor) -> Any:
        return selective(u, delta, b.unsqueeze(1), c.unsqueeze(1), z)

    inputs = tokens_of(CHANNELS, CHANNELS, N, N, CHANNELS, dtype=dtype)
    check(model, expected, inputs, ({0: "batch", 2: "length"},) * 5, (18,), tolerance)


def test_a_complex_state_is_refused() -> None:
    def model(u: Tensor, delta: Tensor, b: Tensor) -> Any:
        return scans.selective(u, delta, torch.complex(A, A), b[:, None], b[:, None], None, None, None, True)[0]

    with pytest.raises(onnxplug.OnnxplugError, match="complex A"):
        onnxplug.to_onnx(model, tokens_of(CHANNELS, CHANNELS, N)[0])


# -- Mamba-2 -----------------------------------------------------------------------------------------------------------

HEADS, GROUPS, P = 4, 2, 3
DECAY, SKIP, SKIPS, STEPS = -torch.rand(HEADS) - 0.2, torch.randn(HEADS), torch.randn(HEADS, P), torch.randn(HEADS)
LIMITS = {"softplus": (True, (0.0, math.inf)), "limited": (True, (0.3, 0.9)), "plain": (False, (0.0, math.inf))}


def chunked(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    z: Tensor | None,
    limits: str,
    state: Tensor,
    ids: Tensor | None,
    d: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's state space, [batch, L, heads, P]: token by token, with a state of zeros where another sequence begins."""
    softplus, (least, most) = LIMITS[limits]
    result, state = torch.zeros(x.shape), state.clone()
    for t in range(x.shape[1]):
        for h in range(HEADS):
            if ids is not None:
                same = ids[:, t] == (ids[:, t - 1] if t else 0)
                state[:, h] = torch.where(same[:, None, None], state[:, h], 0.0)
            g, step = h // (HEADS // GROUPS), dt[:, t, h] + STEPS[h]
            step = ((1 + step.exp()).log() if softplus else step).clamp(least, most)[:, None, None]
            state[:, h] = (step * DECAY[h]).exp() * state[:, h] + step * x[:, t, h, :, None] * b[:, t, g, None, :]
            result[:, t, h] = (state[:, h] * c[:, t, g, None, :]).sum(-1) + d[h] * x[:, t, h]
    if z is not None:
        result = result * z * z.sigmoid()
    return result, state


def of_heads(batch: int, length: int) -> tuple[Tensor, ...]:
    sizes = ((HEADS, P), (HEADS,), (GROUPS, N), (GROUPS, N), (HEADS, P))
    return tuple(torch.randn(batch, length, *size) for size in sizes)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("chunk", [4, 256])
@pytest.mark.long
def test_chunk_scan(chunk: int, gated: bool, limits: str) -> None:
    skip = SKIPS if gated else SKIP

    def model(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, z: Tensor) -> Any:
        softplus, limit = LIMITS[limits]
        options = {"D": skip, "z": z if gated else None, "dt_bias": STEPS, "dt_softplus": softplus, "dt_limit": limit}
        result, *_, last = scans.chunked(x, dt, DECAY, b, c, chunk, **options)
        return result, last

    def expected(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, z: Tensor) -> Any:
        zeros = torch.zeros(x.shape[0], HEADS, P, N)
        return chunked(x, dt, b, c, z if gated else None, limits, zeros, None, skip)

    check(model, expected, [of_heads(*size) for size in SIZES], ({0: "batch", 1: "length"},) * 5, (16, 23))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.long
def test_chunk_scan_from_a_state(packed: bool) -> None:
    """An initial state, which only a first sequence with number 0 goes on from, and sequences one after the other."""

    def model(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, z: Tensor, state: Tensor, ids: Tensor) -> Any:
        options = {"initial_states": state, "seq_idx": ids if packed else None, "dt_bias": STEPS, "dt_softplus": True}
        result, before, *_, last = scans.chunked(x, dt, DECAY, b, c, 4, D=SKIP, z=z, **options)
        return result, last, before

    def expected(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, z: Tensor, state: Tensor, ids: Tensor) -> Any:
        options = ("softplus", state, ids if packed else None, SKIP)
        return *chunked(x, dt, b, c, z, *options), chunked(x, dt, b, c, None, *options)[0]

    inputs = []
    for batch, length in SIZES:
        ids = torch.arange(length, dtype=torch.int32) // 3 + torch.arange(batch, dtype=torch.int32)[:, None]
        inputs.append((*of_heads(batch, length), torch.randn(batch, HEADS, P, N), ids))
    rows = {0: "batch", 1: "length"}
    check(model, expected, inputs, (*(rows,) * 5, {0: "batch"}, rows), (18,))


# -- a token -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.long
def test_state_update(chosen: bool) -> None:
    """One token with a state, which is written; with indices elements choose their state, or none."""
    decay, skip, bias = -torch.rand(HEADS, P, N), torch.randn(HEADS, P), torch.randn(HEADS, P)

    def model(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, z: Tensor, which: Tensor) -> Any:
        state = state.clone()
        options = {"dt_softplus": True, "state_batch_indices": which if chosen else None}
        return scans.state_update(state, x, dt, decay, b, c, skip, z, bias, **options), state

    def expected(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, z: Tensor, which: Tensor) -> Any:
        state, result = state.clone(), torch.zeros(x.shape)
        for i, place in enumerate(which.tolist() if chosen else range(len(which))):
            if place < 0:
                continue
            for h in range(HEADS):
                g, step = h // (HEADS // GROUPS), (1 + (dt[i, h] + bias[h]).exp()).log()[:, None]
                state[place, h] = (step * decay[h]).exp() * state[place, h] + step * x[i, h, :, None] * b[i, g]
                result[i, h] = (state[place, h] @ c[i, g] + skip[h] * x[i, h]) * z[i, h] * z[i, h].sigmoid()
        return result, state

    inputs = []
    for batch in (2, 1, 3):
        sizes = ((HEADS, P), (HEADS, P), (GROUPS, N), (GROUPS, N), (HEADS, P))
        which = torch.arange(batch, 0, -1, dtype=torch.int32)
        which[1:2] = -1
        state = torch.randn(batch + 1 if chosen else batch, HEADS, P, N)
        inputs.append((state, *(torch.randn(batch, *size) for size in sizes), which))
    states = {0: "states"} if chosen else {0: "batch"}
    check(model, expected, inputs, (states, *({0: "batch"},) * 6))


@pytest.mark.long
def test_state_update_without_heads() -> None:
    def model(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Any:
        state = state.clone()
        return scans.state_update(state, x, dt, A, b, c), state

    def expected(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Any:
        state = (dt[..., None] * A).exp() * state + (dt * x)[..., None] * b[:, None]
        return (state * c[:, None]).sum(-1), state

    sizes = ((CHANNELS, N), (CHANNELS,), (CHANNELS,), (N,), (N,))
    inputs = [tuple(torch.randn(batch, *size) for size in sizes) for batch in (2, 1, 5)]
    check(model, expected, inputs, ({0: "batch"},) * 5)


@pytest.mark.parametrize("ring", [False, True])
def test_single_tokens_of_a_convolution(ring: bool) -> None:
    """Updates with some tokens each give the convolution of all tokens; the state may be longer, and a ring."""
    weight, bias, sizes = torch.randn(8, 4), torch.randn(8), (3, 1, 5, 2)

    def model(x: Tensor) -> Any:
        state, used, results = x.new_zeros(x.shape[0], 8, 7), torch.zeros(x.shape[0], dtype=torch.int32), []
        for part in x.split(sizes, 2):
            state, out = convolution.update(part, state, weight, bias, part, True, used if ring else None, None)
            used, results = used + part.shape[2], [*results, out]
        return (torch.cat(results, 2),)

    def expected(x: Tensor) -> Any:
        return (functional.silu(functional.conv1d(functional.pad(x, (3, 0)), weight[:, None], bias, groups=8)),)

    check(model, expected, [(torch.randn(batch, 8, 11),) for batch in (2, 1, 3)], ({0: "batch"},), (18,))


# -- norms -------------------------------------------------------------------------------------------------------------


def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, rms: bool) -> Tensor:
    x = x if rms else x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return (x if weight is None else x * weight) + (0.0 if bias is None else bias)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("group", [None, 4])
def test_gated_norm(group: int | None, before: bool, rms: bool) -> None:
    weight, bias = torch.randn(8), torch.randn(8)

    def model(x: Tensor, z: Tensor) -> Any:
        result = norms.gated(x, weight, bias, 1e-5, z, None, group, before, rms)[0]
        written = torch.zeros_like(x)
        norms.gated(x, weight, None, 1e-5, None, written[:, :8], group, before, rms)
        return result, written

    def expected(x: Tensor, z: Tensor) -> Any:
        def of_groups(x: Tensor, bias: Tensor | None) -> Tensor:
            return normed(x.unflatten(1, (-1, group or 8)), None, None, rms).flatten(1) * weight + (
                0.0 if bias is None else bias
            )

        gate = z * z.sigmoid()
        return of_groups(x, bias) * gate if before else of_groups(x * gate, bias), of_groups(x, None)

    check(model, expected, [(torch.randn(n, 8), torch.randn(n, 8)) for n in (3, 1, 7)], ({0: "rows"},) * 2, (13, 23))


@pytest.mark.parametrize("rms", [False, True])
def test_norm_of_a_sum(rms: bool) -> None:
    weights = torch.randn(4, 8)

    def model(x: Tensor, residual: Tensor, other: Tensor, scale: Tensor) -> Any:
        first, second, _, _, total, *_ = norms.layer(
            x, weights[0], weights[1], 1e-5, residual, other, weights[2], weights[3], is_rms_norm=rms
        )
        scaled, _, _, _, kept, *_ = norms.layer(x, weights[0], None, 1e-5, rowscale=scale, is_rms_norm=rms)
        wide = norms.layer(x.half(), weights[0], None, 1e-5, residual_dtype=torch.float32, is_rms_norm=rms)[4]
        return first, second, total, scaled, kept, wide, norms.swiglu(x)

    def expected(x: Tensor, residual: Tensor, other: Tensor, scale: Tensor) -> Any:
        total, kept = x + residual + other, x * scale[:, None]
        both = [normed(total, *pair, rms) for pair in (weights[:2], weights[2:])]
        gate = x[:, :4] * x[:, :4].sigmoid() * x[:, 4:]
        return *both, total, normed(kept, weights[0], None, rms), kept, x.half().float(), gate

    inputs = [(*torch.randn(3, n, 8), torch.rand(n)) for n in (3, 1, 7)]
    check(model, expected, inputs, ({0: "rows"},) * 4, (13, 23))


def test_dropout_is_refused() -> None:
    def model(x: Tensor) -> Any:
        return norms.layer(x, torch.ones(8), None, 1e-5, dropout_p=0.1)[0]

    with pytest.raises(onnxplug.OnnxplugError, match="dropout"):
        onnxplug.to_onnx(model, (torch.randn(2, 8),))

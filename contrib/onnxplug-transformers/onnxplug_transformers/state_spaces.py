"""Mamba's state spaces while a model is captured: as scans, from any state, whatever the number of tokens."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug.capture.patching import patched
from onnxplug.errors import CaptureError
from onnxplug.patches.scans import laid_out, scanned
from onnxplug_transformers.chunks import by_chunks, left_by
from onnxplug_transformers.exchanged import arguments_of, parameters

#: The least and the greatest time step of a state space that has no limits.
NO_LIMIT = (0.0, float("inf"))
#: Classes that begin from zeros when they are called with several tokens, whatever the cache has.
_FROM_ZERO = ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer")


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **options: Any,
) -> Any:
    """Mamba's state space: ``h = exp(dt A) h + dt B x`` for each token, whose result is ``C h + D x``.

    Args:
        hidden_states: x, [batch, channels, sequence]
        dt: [batch, channels, sequence]
        A: [channels, N]
        B: [batch, N, sequence]
        C: [batch, N, sequence]
        D: [channels]
        z: [batch, channels, sequence], a gate of the results.
        delta_bias: [channels], added to ``dt``.
        delta_softplus: Whether ``dt`` passes through softplus.
        return_last_state: Whether the last state is returned too.
        options: ``states``, the first states [batch, channels, N] of calls in turn; without it they are zeros.

    Returns:
        [batch, channels, sequence], and the last state, [batch, channels, N], if asked for.
    """
    dtype = hidden_states.dtype
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = functional.softplus(dt)

    def step(state: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        x, dt, b, c = token
        state = torch.exp(A * dt[..., None]) * state + dt[..., None] * b[:, None, :].float() * x[..., None].float()
        return state, torch.matmul(state.to(dtype), c[..., None]).squeeze(-1)

    wide = functools.reduce(torch.promote_types, (A.dtype, dt.dtype), torch.float32)
    if (states := options.get("states")) is None:
        state = torch.zeros(*hidden_states.shape[:2], A.shape[-1], dtype=wide, device=A.device)
    else:
        state = laid_out(next(states).to(wide))
    state, results = scanned(step, state, tuple(x.permute(2, 0, 1) for x in (hidden_states, dt, B, C)))
    result = results.permute(1, 2, 0)
    if D is not None:
        result = result + hidden_states * D[None, :, None]
    if z is not None:
        result = result * functional.silu(z)
    return (result, state) if return_last_state else result


def chunked_state_space(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """Mamba 2's state space: ``S = exp(dt A) S + dt x Bᵀ`` for each token and head, whose result is ``S C + D x``.

    Args:
        hidden_states: x, [batch, sequence, heads, P]
        dt: [batch, sequence, heads]
        A: [heads]
        B: [batch, sequence, groups, N]; a group serves ``heads // groups`` heads.
        C: [batch, sequence, groups, N]
        chunk_size: The number of tokens whose results are one product of matrices; it changes the time alone.
        D: [heads]
        dt_bias: [heads], added to ``dt``.
        initial_states: [batch, heads, P, N], or zeros.
        dt_softplus: Whether ``dt`` passes through softplus.
        dt_limit: The least and the greatest ``dt``.
        return_final_states: Whether the last state is returned too.

    Returns:
        [batch, sequence, heads, P] in float32, and the last state, if asked for.
    """
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = functional.softplus(dt)
    dt = _limited(dt, *dt_limit).float().unsqueeze(-1)
    x, each = hidden_states.float(), hidden_states.shape[2] // B.shape[2]
    b, c = (y.float().repeat_interleave(each, dim=2) for y in (B, C))

    def step(state: Tensor, tokens: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        x, decay, b, c = tokens
        since = decay.cumsum(-2)
        last = since[..., -1:, :]
        result = (c * since.exp()) @ state + (c @ b.mT * left_by(since)) @ x
        return state * last.exp() + (b * (last - since).exp()).mT @ x, result

    if initial_states is None:
        state = x.new_zeros(x.shape[0], x.shape[2], b.shape[-1], x.shape[-1])
    else:
        state = initial_states.float().mT
    state, result = by_chunks(step, state, (x * dt, dt * A.float()[:, None], b, c), min(chunk_size, 64))
    if D is not None:
        result = result + x * D[:, None]
    return (laid_out(result), state.mT) if return_final_states else laid_out(result)


def _limited(dt: Tensor, least: float, greatest: float) -> Tensor:
    """``dt`` [batch, sequence, heads] within its limits, except a single token after others, which has none."""
    limited = dt.clamp(least, greatest)
    if not _pasts or (least, greatest) == NO_LIMIT:
        return limited
    first, several = 1 - torch.sym_min(_pasts[-1], 1), torch.sym_min(dt.shape[1] - 1, 1)
    return torch.where(torch.full((), torch.sym_max(first, several)) > 0, limited, dt)


# -- from which state --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def checked_state_spaces() -> Iterator[None]:
    """Holds while a model is captured: a number of tokens that isn't known to be 1 is refused where a cache has a state."""
    with _mixers_changed(lambda _, before: _checked(before)):
        yield


#: For each decoder that is being called, the number of tokens that came before.
_pasts: list[Any] = []


@contextlib.contextmanager
def state_spaces_go_on(past: Any) -> Iterator[None]:
    """Holds while a decoder is called, captured or not: any number of tokens goes on from the state in the cache.

    Args:
        past: The number of tokens that came before.
    """
    _pasts.append(past)
    try:
        with _mixers_changed(_going_on):
            yield
    finally:
        _pasts.pop()


@contextlib.contextmanager
def _mixers_changed(change: Callable[[Any, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Holds with another ``forward`` of the classes in use, which ``change`` makes of module and ``forward``."""
    before: dict[Any, Any] = {}
    try:  # the capture can't know that an ExitStack suppresses no errors
        for path, module in list(sys.modules.items()):
            for name in _FROM_ZERO if path.startswith("transformers.models.") else ():
                owner = vars(module).get(name)
                if owner is not None and owner not in before and parameters(owner.forward) == parameters(_mixer):
                    before[owner] = vars(owner).get("forward")
                    owner.forward = change(module, owner.forward)
        yield
    finally:
        for owner, forward in before.items():
            if forward is None:
                del owner.forward
            else:
                owner.forward = forward


def _going_on(module: Any, before: Callable[..., Any]) -> Callable[..., Any]:
    whole = inspect.unwrap(before)  # without the check that refuses several tokens

    def goes_on(self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **options: Any) -> Any:
        state = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        if state is None:
            return whole(self, hidden_states, cache, attention_mask, **options)
        states = iter(state.unbind(1) if state.dim() == 4 else [state])  # Zamba has a scan for each head
        with patched(module, "mamba_selective_scan", functools.partial(selective_scan, states=states)):
            return whole(self, hidden_states, cache, attention_mask, **options)

    @functools.wraps(goes_on)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return goes_on(*args, **arguments_of(kwargs))

    return forward


def _checked(before: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _mixer(*args, **arguments_of(kwargs))
        return before(*args, **kwargs)

    return checked


def _mixer(self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **_: Any) -> None:
    """Refuses a number of tokens that isn't known to be 1 after others: transformers' state spaces don't compute it."""
    if cache is None or isinstance(hidden_states.shape[1], int):
        return
    if cache.get_recurrent_state(self.layer_idx) is not None:
        raise CaptureError(
            f"{type(self).__name__} takes one token after those that its cache has seen; of several, transformers computes the "
            "state from zeros",
            hint="Export the steps with one token, a static size, and the prompt without a past as another model.",
        )

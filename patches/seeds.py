"""Random numbers that a model draws after it has set a seed: the same at each call of the model, and so constants of it.

An example: ``torch.manual_seed(0); noise = torch.randn(4); return x + noise``. Traced, ``torch.randn`` is an operator that draws
anew at each run. Here its numbers are drawn for real, once, and are a constant of the graph.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import sys
from collections.abc import Iterator
from typing import Any

import torch

from onnxplug.capture.patching import patched
from onnxplug.capture.questions import place_of
from onnxplug.patches.state import state_of
from onnxplug.plugin_api import CaptureRequest
from onnxplug.torch_private import OpOverload, disable_current_modes, proxies, pytree, torch_c

_ATEN = torch.ops.aten
#: Operators whose numbers depend on no values of tensors, where a tensor is at most written, or gives sizes and dtype.
_READS_NOTHING = frozenset(
    (
        *("rand", "randn", "randint", "randperm", "normal", "rand_like", "randn_like", "randint_like"),
        *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"),
    )
)


class Draws:
    """The calls of random operators of one trace.

    A generator that existed before the trace gets a state of its own that no seed gives. Where a call finds another state, the
    model's code has set one.

    Args:
        original: torch's function that traces a call.
        generators: Each generator that existed before.

    Attributes:
        warnings: What the exported model does otherwise, and which numbers are constants.
    """

    def __init__(self, original: Any, generators: list[torch.Generator]) -> None:
        self.warnings: dict[str, None] = {}
        self._original = original
        # The states in which the trace left generators without a seed: the graph's calls give other Python objects for them.
        self._left = {_unseeded(generator) for generator in generators}
        self._drawn: set[bytes] = set()
        self._mode: Any = None

    def call(self, mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        """Replaces torch's ``proxy_call``: a call of a random operator after a seed gives a constant."""
        if self._mode is None and pre_dispatch:
            self._mode = mode
        if not is_random(func):
            return self._original(mode, func, pre_dispatch, args, kwargs)
        generator = kwargs.get("generator") or torch.default_generator
        place = place_of(sys._getframe(1))
        with torch_c.DisableTorchFunction(), disable_current_modes():
            is_seeded = self._is_seeded(generator, place)
            # The numbers of branches and loops have traces of their own, and depend on how often these run.
            numbers = _numbers(func, args, kwargs) if is_seeded and mode is self._mode else None
            if is_seeded and numbers is None:
                # How far the call advances the generator is unknown: so are its next numbers.
                self._left.add(_unseeded(generator))
                self._warn(
                    place,
                    "sets a seed, and draws random numbers that depend on inputs or on dynamic sizes: the exported model draws "
                    "other numbers, anew at each run",
                )
        if numbers is None:
            # torch before 2.10 has no place for a generator in a graph, and no rule reads one.
            kwargs = {name: None if name == "generator" else value for name, value in kwargs.items()}
            return self._original(mode, func, pre_dispatch, args, kwargs)
        self._warn(place, "draws random numbers after it has set a seed: they are constants of the exported model")
        lifted = self._original(mode, _ATEN.lift_fresh.default, pre_dispatch, (numbers,), {})
        # As of torch.tensor(...): torch before 2.10 fails at a constant that no operator uses without it.
        constant = self._original(mode, _ATEN.detach_.default, pre_dispatch, (lifted,), {})
        if not func._schema.is_mutable:
            return constant
        self._original(mode, _ATEN.copy_.default, pre_dispatch, (args[0], constant), {})
        return args[0]

    def _is_seeded(self, generator: torch.Generator, place: str | None) -> bool:
        before = _state(generator)
        if before in self._left:
            self._left.remove(before)
            self._drawn.add(before)
            torch.rand(1, generator=generator)
            self._left.add(_state(generator))
            return False
        if before in self._drawn:
            self._warn(
                place,
                "sets a random generator back, and draws the same numbers again: the exported model draws other numbers, anew at "
                "each run",
            )
            return False
        return True

    def _warn(self, place: str | None, text: str) -> None:
        self.warnings[f"the model's code{f' at {place}' if place else ''} {text}."] = None


@contextlib.contextmanager
def seeds_kept(request: CaptureRequest) -> Iterator[None]:
    """While it holds, random numbers after a seed that the model sets are constants; adds warnings to the request's."""
    kept = [kept for kept in state_of(request).kept if isinstance(kept.item, torch.Generator)]
    draws = Draws(proxies.proxy_call, [k.item for k in kept if k.item.device.type == "cpu"])
    try:
        with patched(proxies, "proxy_call", draws.call):
            yield
    finally:
        for item in kept:
            item.kind.write(item.item, item.before)
    request.warnings.extend(draws.warnings)


def is_needed(request: CaptureRequest) -> bool:
    """Whether an attempt is in the non-strict mode, of a torch that traces calls by this function."""
    return not request.strict and hasattr(proxies, "proxy_call")


@functools.lru_cache(maxsize=4096)
def is_random(func: Any) -> bool:
    """Whether an operator draws random numbers."""
    return isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags


def _unseeded(generator: torch.Generator) -> bytes:
    """Gives a generator a state of its own; returns it."""
    return _state(generator.manual_seed(secrets.randbits(63)))


def _state(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _numbers(func: OpOverload, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The numbers that a call draws, and that its generator advances by; ``None`` where they are not the same at each call."""
    name = func._schema.name.partition("::")[2]
    tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
    others = pytree.tree_leaves((args[tensor is not None :], kwargs))
    sizes = (*tensor.shape, *tensor.stride()) if tensor is not None else ()
    symbolic = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    if name not in _READS_NOTHING or any(isinstance(leaf, symbolic) for leaf in (*others, *sizes)):
        return None
    devices = [leaf for leaf in others if isinstance(leaf, torch.device)] + (
        [tensor.device] if tensor is not None else []
    )
    if any(device.type != "cpu" for device in devices):
        return None
    if tensor is None:
        return func(*args, **kwargs)
    if not name.endswith(("_", "_like")):  # torch.normal reads means
        return None
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return func(like, *args[1:], **kwargs)

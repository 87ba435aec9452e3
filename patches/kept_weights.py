"""Weights that the model's code also finds outside of ``module.weight``: in a list, in a closure, as the key of a dict.

torch.export replaces the parameters and buffers of modules by traced tensors while it runs the model. In every other place the code
would find the weight itself, which is another tensor: ``self.kept[0] is self.weight`` would be false.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch

from onnxplug.capture.patching import patched
from onnxplug.patches.state import Kept, state_of
from onnxplug.plugin_api import CaptureRequest


@contextlib.contextmanager
def weights_replaced_everywhere(request: CaptureRequest) -> Iterator[None]:
    """While it holds, weights that torch.export replaces in modules are replaced wherever the model's code finds them."""
    places = list(_places(request))
    if not places:
        yield
        return
    stateless: Any = torch.nn.utils.stateless
    with patched(stateless, "_reparametrize_module", _replacing(stateless._reparametrize_module, places)):
        yield


def _places(request: CaptureRequest) -> Iterator[Kept]:
    """The containers with a weight that no module has registered there."""
    module = request.module
    weights = {id(tensor) for tensor in _weights(module).values()}
    of_modules = {id(registered) for m in module.modules() for registered in (m._parameters, m._buffers)}
    for kept in state_of(request).kept:
        if isinstance(kept.before, dict | list | set) and kept.before and id(kept.item) not in of_modules:
            keys = kept.before if isinstance(kept.before, dict) else ()
            if any(_have(values, weights) for values in (kept.kind.values(kept.before), keys)):
                yield kept


def _have(items: Iterable[Any], weights: Set[int]) -> bool:
    """Whether a weight is among items, or in tuples among them."""
    if not weights.isdisjoint(map(id, items)):
        return True
    return any(_have(item, weights) for item in items if isinstance(item, tuple))


def _weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _replacing(original: Callable[..., Any], places: list[Kept]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def reparametrize_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Iterator[None]:
        """As torch's; the weights are replaced in all places."""
        before = _weights(module)
        with original(module, *args, **kwargs):
            after = _weights(module)
            pairs = [(tensor, after[name]) for name, tensor in before.items()]
            _replace(places, {id(old): new for old, new in pairs})
            try:
                yield
            finally:
                _replace(places, {id(new): old for old, new in pairs})

    return reparametrize_module


def _replace(places: list[Kept], new: Mapping[int, torch.Tensor]) -> None:
    for kept in places:
        content = kept.kind.read(kept.item)
        if isinstance(content, dict):
            kept.kind.write(kept.item, {_replaced(key, new): _replaced(value, new) for key, value in content.items()})
        else:
            kept.kind.write(kept.item, type(content)(_replaced(value, new) for value in content))


def _replaced(item: Any, new: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(item, tuple) and _have(item, new.keys()):
        values = [_replaced(value, new) for value in item]
        return type(item)._make(values) if hasattr(item, "_make") else tuple(values)
    return new.get(id(item), item)

"""Modules that a model repeats are traced once: the later ones are copies of the first one's FX nodes.

torch.export takes some milliseconds for each operator that it traces, and a copy of an FX node some microseconds. A module
stands for another where the trace can't differ but for inputs, weights and the path: same classes and children, arguments
alike, and equal attributes as far as the first one's code reads them (:mod:`onnxplug.capture.sameness`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from onnxplug.capture.block_calls import Site, flat_arguments, site_of
from onnxplug.capture.block_traces import FEWEST_NODES, Recording, Template
from onnxplug.capture.patching import patched
from onnxplug.capture.sameness import Structures, attributes_noted
from onnxplug.capture.timing import note_copied
from onnxplug.capture.tracing import ONE_AT_A_TIME
from onnxplug.errors import Unsupported
from onnxplug.torch_private import ModuleStackTracer, current_proxy_mode, has_global_hooks, pytree

#: How many traces of one class and structure are kept; each stands for arguments of another kind.
_MOST_TEMPLATES = 12


@contextlib.contextmanager
def each_block_once(module: nn.Module) -> Iterator[Mapping[str, int]]:
    """While it holds, torch.export (in its non-strict mode) traces modules that the model repeats once.

    Args:
        module: The model.

    Yields:
        Class to how many of its instances are copies of another one's trace, as it grows.
    """
    structures = Structures(module)
    classes = structures.classes()
    if not classes or has_global_hooks():
        yield {}
        return
    blocks = _Blocks(structures)
    with ONE_AT_A_TIME:
        original = ModuleStackTracer.call_module

        def call_module(
            tracer: Any, called: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            return blocks.call(original, tracer, called, forward, args, kwargs)

        with patched(ModuleStackTracer, "call_module", call_module), attributes_noted(classes, blocks.note):
            yield blocks.copied


class _Blocks:
    """The traces so far, by structure."""

    def __init__(self, structures: Structures) -> None:
        self.copied: Counter[str] = Counter()
        self._structures = structures
        self._templates: dict[Any, list[Template]] = {}
        self._not_worth: set[Any] = set()
        self._recordings: list[Recording] = []
        self._calls: list[str] = []
        self._tracer: Any = None

    def note(self, attributes: dict[str, Any], name: str) -> None:
        for recording in self._recordings:
            recording.reads.note(attributes, name)

    def call(self, original: Any, tracer: Any, called: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a module, or copies what a like one has traced."""
        if self._tracer is None:
            self._tracer = tracer
        mode = current_proxy_mode()
        if tracer is not self._tracer or mode is None or mode.tracer is not tracer:
            return original(tracer, called, forward, args, kwargs)  # within a branch of torch.cond
        module = called.get_base() if hasattr(type(called), "get_base") else called
        try:
            path = tracer.path_of_module(called)
        except Exception:  # a module that is not one of the model's
            return original(tracer, called, forward, args, kwargs)
        self._calls.append(path)
        key = self._structures.key(module)
        if not module._modules and self._recordings:
            return self._leaf(original, tracer, called, module, forward, args, kwargs)
        if key is None or key in self._not_worth:
            return original(tracer, called, forward, args, kwargs)
        site = site_of(tracer, module, self._structures.tree(module), path, args, kwargs)
        if site is None:
            return original(tracer, called, forward, args, kwargs)
        known = self._templates.setdefault(key, [])
        for template in known:
            if template.stands_for(site):
                self.copied[type(module).__name__] += 1
                return original(tracer, called, partial(self._copied, template, site), args, kwargs)
        if len(known) >= _MOST_TEMPLATES:
            return original(tracer, called, forward, args, kwargs)

        return original(tracer, called, partial(self._traced, key, site, forward), args, kwargs)

    def _leaf(
        self,
        original: Any,
        tracer: Any,
        called: Any,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Calls a module without children, and notes whether it only passes its argument on."""
        last = next(reversed(tracer.graph.nodes))
        result = original(tracer, called, forward, args, kwargs)
        passes = len(args) == 1 and not kwargs and result is args[0] and next(reversed(tracer.graph.nodes)) is last
        for recording in self._recordings:
            recording.passed.setdefault(id(module), []).append(args[0] if passes else None)
        return result

    def _copied(self, template: Template, site: Site, *_: Any, **__: Any) -> Any:
        note_copied()
        return template.copied(site, self._calls)

    def _traced(self, key: Any, site: Site, forward: Callable[..., Any], *_: Any, **__: Any) -> Any:
        """Traces a module; keeps the trace if others may be copies of it."""
        recording = Recording(site, self._calls)
        self._recordings.append(recording)
        try:
            args, kwargs = pytree.tree_unflatten(recording.leaves, site.spec)
            result = forward(*args, **kwargs)
            leaves, spec = flat_arguments(args, kwargs)
            if spec != site.spec or any(a is not b for a, b in zip(leaves, recording.leaves, strict=True)):
                # It was done to a list of ours: the capture is made again without blocks.
                raise Unsupported(f"{site.path} changes a list or dict that it is given")
        except BaseException:
            recording.finish()
            raise
        finally:
            self._recordings.remove(recording)
        result, template = recording.template(result)
        if recording.size < FEWEST_NODES:
            self._not_worth.add(key)
        elif template is not None:
            self._templates[key].append(template)
        return result

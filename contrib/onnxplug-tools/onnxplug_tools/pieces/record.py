"""Runs of a model in which the calls of chosen submodules are recorded, with the source of each of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from onnxplug.capture.eager import copied, run_eagerly
from onnxplug.patches.unchanged import unchanged
from onnxplug.torch_private import pytree


class Source(NamedTuple):
    """Where a tensor comes from.

    Attributes:
        kind: ``"input"`` of the model, ``"result"`` of a call, or ``"state"`` (a parameter or buffer).
        call: The number of the call; 0 for an input or state.
        place: The number of the leaf among the inputs or results, or the name of the parameter or buffer.
    """

    kind: str
    call: int
    place: int | str


@dataclass(eq=False)
class RecordedCall:
    """One call of a submodule.

    Attributes:
        args, kwargs: Its inputs, copied before it ran.
        sources: For each leaf of the inputs the source of the tensor; ``None`` for a tensor that is computed between
            the calls, and for a leaf that is no tensor.
        results, structure: Its results, flattened, and their structure.
    """

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sources: list[Source | None]
    results: list[Any] = field(default_factory=list)
    structure: Any = None

    def result(self) -> Any:
        """What the submodule returned; ``None`` where it raised an error."""
        return pytree.tree_unflatten(self.results, self.structure) if self.structure is not None else None


@dataclass(eq=False)
class Run:
    """A run of the model.

    Attributes:
        outputs, structure: The model's outputs, flattened, and their structure.
        sources: For each output its source, as in :class:`RecordedCall`.
    """

    leaves: list[Any]
    sizes: dict[str, int]
    calls: list[RecordedCall]
    outputs: list[Any]
    structure: Any
    sources: list[Source | None]

    def wiring(self) -> list[Any]:
        """A value that is equal for runs with the same calls of submodules, in the same order on the same values."""
        calls = [
            (call.path, call.sources, _forms((call.args, call.kwargs)), _forms(call.result())) for call in self.calls
        ]
        return [calls, self.sources, _forms(pytree.tree_unflatten(self.outputs, self.structure))]


def form_of(leaf: Any) -> str:
    """The value of a leaf that is no tensor, and its type; of a tensor that it is one."""
    return (
        "a tensor"
        if isinstance(leaf, torch.Tensor)
        else f"{type(leaf).__name__} {leaf!r}"
        if leaf is not None
        else "None"
    )


def _forms(tree: Any) -> Any:
    """The structure of inputs or results, and every value in them that is no tensor."""
    leaves, structure = pytree.tree_flatten(tree)
    return str(structure), [form_of(leaf) for leaf in leaves]


class _Known:
    """The tensors of a run whose origin is known. All are kept, so that no address is used twice."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._sources: dict[Any, tuple[Source, torch.Tensor, int]] = {}

    def add(self, tensor: Any, source: Source) -> None:
        if isinstance(tensor, torch.Tensor):
            self._kept.append(tensor)
            self._sources[_key(tensor)] = source, tensor, tensor._version

    def source(self, tensor: Any) -> Source | None:
        """The origin of a tensor that nothing has written since."""
        if not isinstance(tensor, torch.Tensor):
            return None
        source = self._sources.get(_key(tensor))
        return source[0] if source is not None and source[1]._version == source[2] else None


def _key(tensor: torch.Tensor) -> Any:
    """A key that is equal for tensors of the same elements in the same memory; an empty tensor has a key of its own."""
    if not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def record(
    model: torch.nn.Module,
    submodules: Mapping[str, torch.nn.Module],
    leaves: Sequence[Any],
    spec: Any,
    sizes: Mapping[str, int],
) -> Run:
    """Runs a model eagerly and records the calls of submodules. Its state and the random generators stay as they were.

    Args:
        leaves, spec: The model's inputs, flattened, and their structure; they stay as they were.
    """
    known = _Known()
    calls: list[RecordedCall] = []
    inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, tensor in (*model.named_parameters(), *buffers.items()):
        known.add(tensor, Source("state", 0, name))
    for position, leaf in enumerate(inputs):
        known.add(leaf, Source("input", 0, position))

    def before(path: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            call_inputs = tuple(args), dict(kwargs)
            sources = [known.source(leaf) for leaf in pytree.tree_leaves(call_inputs)]
            positional, named = copied(call_inputs)
            calls.append(RecordedCall(path, positional, named, sources))

        return hook

    def after(module: torch.nn.Module, args: Any, result: Any) -> None:
        call = next(call for call in reversed(calls) if submodules[call.path] is module)
        call.results, call.structure = pytree.tree_flatten(result)
        for position, leaf in enumerate(call.results):
            known.add(leaf, Source("result", calls.index(call), position))

    with unchanged(model, alone=True), ExitStack() as stack:
        for path, module in submodules.items():
            # Before hooks of the module's own, which the exported piece has too.
            stack.callback(module.register_forward_pre_hook(before(path), with_kwargs=True, prepend=True).remove)
            stack.callback(module.register_forward_hook(after).remove)
        positional, named = pytree.tree_unflatten(inputs, spec)
        returned = run_eagerly(model, positional, named, buffers)
    outputs, structure = pytree.tree_flatten(returned)
    return Run(list(leaves), dict(sizes), calls, outputs, structure, [known.source(leaf) for leaf in outputs])

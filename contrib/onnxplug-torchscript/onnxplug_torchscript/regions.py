"""Blocks of a step that become graphs of their own: their operands from outside, and their results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from onnxplug.errors import CaptureError
from onnxplug.torch_private import detect_fake_mode, is_alias_of
from onnxplug_torchscript.graphs import Block, ScriptGraph, Step
from onnxplug_torchscript.interpreter import Attribute, Interpreter, Shared, Values
from onnxplug_torchscript.numbers import truth_tensor
from onnxplug_torchscript.values import (
    UNINITIALIZED,
    ScalarTensor,
    is_number,
    is_symbolic,
    leaves,
    mapped,
    scalar,
    structure,
    tensors_in,
)

_ZEROS = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}


class ContainerChanged(Exception):
    """A branch or body changes a list or dict that is made outside of it."""


class Region:
    """The blocks of a step that become graphs of their own: the values that they use of the outside are operands.

    Attributes:
        attributes: The attributes of modules that they may read or set, with their values before the step.
        mutated: The positions of the operands that they write in place, found by running the blocks on copies.
    """

    def __init__(self, interpreter: Interpreter, step: Step, values: Values) -> None:
        self.interpreter = interpreter
        self.step = step
        taken = dict.fromkeys(number for block in step.blocks for number in block.taken())
        taken.update(dict.fromkeys(step.inputs[2:]))
        self._all = values
        self._values: Values = {number: values[number] for number in taken}
        read, written = _attributes(interpreter, step, values)
        self.attributes: dict[Attribute, Any] = {
            key: interpreter.attributes[key] if key in interpreter.attributes else key[0].attribute(key[1])
            for key in [*read, *written]
        }
        # A list or dict may be changed where it is.
        self._containers = {key: value for key, value in self.attributes.items() if isinstance(value, list | dict)}
        self._set = set(written)
        self.written = list(dict.fromkeys([*written, *self._containers]))
        flat = [leaf for value in [*self._values.values(), *self.attributes.values()] for leaf in leaves(value)]
        self._position: dict[int, int] = {}
        self.operands: list[Any] = []
        for leaf in flat:
            if (isinstance(leaf, torch.Tensor) or is_symbolic(leaf)) and id(leaf) not in self._position:
                self._position[id(leaf)] = len(self.operands)
                self.operands.append(_as_operand(leaf))
        self._kept = flat  # keeps the leaves alive, so that no id is used again
        self.mutated: list[int] = []
        self._leaves = {position: leaf for leaf in flat if (position := self._position.get(id(leaf))) is not None}
        self._same: dict[int, tuple[Any, int]] = {}  # results that are operands
        self._aliased: dict[
            int, tuple[torch.Tensor, int]
        ] = {}  # tensors of tries, each with the operand whose memory it shares

    @property
    def outer(self) -> list[Any]:
        """The values that the blocks may change: attributes that may be set, and operands that are written in place."""
        return [*(self.attributes[key] for key in self.written), *(self.operands[i] for i in self.mutated)]

    def function(
        self, block: Block, inputs: Sequence[Any] = (), outer: Sequence[Any] | None = None
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """A block as a function of the operands: its outputs, then the values of :attr:`outer` after it.

        Args:
            inputs: The inputs of the block.
            outer: The values of :attr:`outer` before it, where they differ from the operands and attributes.
        """

        def run(operands: Sequence[Any]) -> list[Any]:
            operands = list(operands)
            count = len(self.written)
            for i, position in enumerate(self.mutated):
                now = operands[position] if outer is None else outer[count + i]
                operands[position] = now.clone()

            def inside(leaf: Any) -> Any:
                position = self._position.get(id(leaf))
                if position is None:
                    return leaf
                return operands[position].item() if isinstance(leaf, torch.SymFloat) else operands[position]

            values = {number: mapped(value, inside) for number, value in self._values.items()}
            attributes = {key: mapped(value, inside) for key, value in self.attributes.items()}
            if outer is not None:
                attributes.update(zip(self.written, [mapped(value, inside) for value in outer[:count]], strict=True))
            values.update(zip(block.inputs, [mapped(value, inside) for value in inputs], strict=True))
            contents = list(values.values())
            before = [(structure(value), [id(leaf) for leaf in leaves(value)]) for value in contents]
            alive = [list(leaves(value)) for value in contents]  # so that no id is used again
            with self.interpreter.scope(attributes, contents) as attributes:
                results = self.interpreter.run(block, values)
                results += [attributes[key] for key in self.written]
            if [(structure(value), [id(leaf) for leaf in leaves(value)]) for value in contents] != before:
                raise ContainerChanged
            del alive
            here = {id(operand): i for i, operand in enumerate(operands) if isinstance(operand, torch.Tensor)}
            for leaf in leaves(results):
                if id(leaf) in here:
                    self._same[id(leaf)] = (leaf, here[id(leaf)])
            return results + [operands[position].clone() for position in self.mutated]

        return run

    def tried(self, run: Callable[[Sequence[Any]], Any]) -> Any:
        """The result of a function for copies of the operands, without a trace in the graph.

        Notes the operands that the function writes in place, and the results that share memory with operands.

        Raises:
            CaptureError: The function writes to an operand that shares memory with another operand.
        """
        with _untraced():
            copies = [o.clone() if isinstance(o, torch.Tensor) else o for o in self.operands]
            versions = [o._version if isinstance(o, torch.Tensor) else 0 for o in copies]
            result = run(copies)
            self._aliased.update(
                (id(leaf), (leaf, position))
                for leaf in leaves(result)
                for position, copy in enumerate(copies)
                if isinstance(leaf, torch.Tensor) and isinstance(copy, torch.Tensor) and is_alias_of(leaf, copy)
            )
        written = [i for i, o in enumerate(copies) if isinstance(o, torch.Tensor) and o._version != versions[i]]
        self.mutated += written
        for position in written:
            tensor = self.operands[position]
            others = [o for o in self.operands if isinstance(o, torch.Tensor) and o is not tensor]
            if any(is_alias_of(tensor, other) for other in others):
                raise CaptureError(
                    f"the code at {self.step.place} depends on a tensor's values, and writes in place to a tensor that shares "
                    "its memory with another one that it uses",
                    hint="Write to a copy (.clone()), or take the other tensor from it in the same branch.",
                )
        return self.tried(run) if written else result

    def operand(self, *results: Any) -> Any:
        """The tensor of the outside that every one of the results is; ``None`` where they are no single tensor."""
        positions = {self._same.get(id(result), (None, -1))[1] for result in results}
        return self._leaves.get(positions.pop()) if len(positions) == 1 else None

    def remember(self, results: Sequence[Any], *tried: Sequence[Any]) -> None:
        """Notes the results of the operator that share memory with another result in a try, or with a tensor used later.

        Args:
            tried: The results of each try, and those without one: a loop that ends at once gives what it began with.
        """
        for leaves_of_try in tried:
            for index, (result, leaf) in enumerate(zip(results, leaves_of_try, strict=True)):
                if not isinstance(leaf, torch.Tensor):
                    continue
                _, position = self._aliased.get(id(leaf), (None, -1))
                other = self.operands[position] if position >= 0 else leaf
                if self._is_used_later(other):
                    self._share(result, other)
                for other, earlier in zip(results[:index], leaves_of_try, strict=False):
                    if isinstance(earlier, torch.Tensor) and is_alias_of(leaf, earlier):
                        self._share(result, other)

    def _is_used_later(self, tensor: torch.Tensor) -> bool:
        """Whether the steps after this one, or what called them, may read or write the memory of a tensor."""
        block = self.interpreter.block
        after = block.steps[block.steps.index(self.step) + 1 :]
        used = {*block.outputs, *(n for s in after for n in (*s.inputs, *(v for b in s.blocks for v in b.taken())))}
        used.update(self._all.keys() - {number for s in block.steps for number in s.outputs})  # of an enclosing block
        now = {key: value for key, value in self.interpreter.attributes.items() if key not in self._set}
        replaced = {id(owner.attribute(name)) for owner, name in (*now, *self._set)}
        root = self.interpreter.root
        held = [value for value in (*root.buffers(), *root.parameters()) if id(value) not in replaced]
        held += tensors_in([*now.values(), *(self._all[number] for number in used & self._all.keys())])
        return any(is_alias_of(tensor, other) for other in held)

    def _share(self, result: torch.Tensor, other: torch.Tensor) -> None:
        shared = Shared(self.step, (result, other), (result._version, other._version))
        self.interpreter.shared.append(shared)

    def accepted(self, results: list[Any]) -> list[Any]:
        """The outputs of the blocks; applies their changes to attributes and operands."""
        count = len(results) - len(self.written) - len(self.mutated)
        changed = results[count + len(self.written) :]
        for position, value in zip(self.mutated, changed, strict=True):
            self.step.place.call(self.operands[position].copy_, value)
        for key, value in zip(self.written, results[count : count + len(self.written)], strict=True):
            held = self._containers.get(key)
            if key not in self._set and isinstance(held, list):
                held[:] = value  # it stays the same object, which other variables may hold
                value = held
            elif key not in self._set and isinstance(held, dict):
                held.clear()
                held.update(value)
                value = held
            self.interpreter.attributes[key] = value
            self.interpreter.written[key] = self.step
        return results[:count]


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    mode = detect_fake_mode()
    with contextlib.ExitStack() as stack:
        stack.enter_context(disable_proxy_modes_tracing())
        if mode is not None and mode.shape_env is not None:
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        yield


def _attributes(
    interpreter: Interpreter, step: Step, values: Values
) -> tuple[dict[Attribute, None], dict[Attribute, None]]:
    """The attributes that the blocks of a step may read, except modules, and the attributes that they may set."""
    taken = {number for block in step.blocks for number in block.taken()}
    by_type: dict[str, dict[Any, None]] = {}
    for number in taken:
        owner = values[number]
        for module in owner.modules() if isinstance(owner, torch.nn.Module) else ():
            by_type.setdefault(getattr(module, "type_name", ""), {})[module] = None
    read: dict[Attribute, None] = {}
    written: dict[Attribute, None] = {}
    constants: dict[Step, Attribute] = interpreter.root.own.constants
    for inner in _reached(step.blocks, by_type):
        if inner in constants:
            read[constants[inner]] = None
        elif inner.kind in ("prim::GetAttr", "prim::SetAttr"):
            for module in by_type.get(inner.type_of_input(), ()):
                key = (module, inner.node.s("name"))
                if inner.kind == "prim::SetAttr":
                    written[key] = None
                elif not isinstance(module.attribute(key[1]), torch.nn.Module):
                    read[key] = None
    return read, written


def _reached(blocks: Iterable[Block], by_type: dict[str, dict[Any, None]]) -> Iterator[Step]:
    """The steps of blocks and of the methods that they call, on every module of a type."""
    every = [module for group in by_type.values() for module in group]
    remaining, seen = list(blocks), set[ScriptGraph]()
    while remaining:
        for step in remaining.pop().nested():
            yield step
            if step.kind != "prim::CallMethod":
                continue
            name = step.node.s("name")
            # A module behind an interface may be of any type.
            called = by_type.get(step.type_of_input()) or every
            graphs = {module.graph_of(name) for module in called if module.has_method(name)} - seen
            seen |= graphs
            remaining += [graph.body for graph in graphs]


def _as_operand(leaf: Any) -> Any:
    """A tensor or symbolic number as an operand of operators with graphs."""
    if isinstance(leaf, torch.SymFloat):
        return scalar(leaf, torch.float64)
    return truth_tensor(leaf) if isinstance(leaf, torch.SymBool) else leaf


# -- the leaves of results of blocks -----------------------------------------------------------------------------------


def filled(value: Any, other: Any) -> Any:
    """A value with the structure of another value wherever it is not set."""
    if value is UNINITIALIZED:
        return mapped(other, lambda _: UNINITIALIZED)
    if isinstance(value, tuple | list) and type(value) is type(other) and len(value) == len(other):
        items = [filled(a, b) for a, b in zip(value, other, strict=True)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict) and isinstance(other, dict) and list(value) == list(other):
        return {key: filled(item, other[key]) for key, item in value.items()}
    return value


def is_computed(value: Any) -> bool:
    return isinstance(value, torch.Tensor | ScalarTensor) or is_number(value)


def same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is float and type(b) is float:
        return repr(a) == repr(b)  # -0.0 is another number than 0.0, and NaN is one number
    return type(a) is type(b) and not is_symbolic(a) and not isinstance(a, torch.Tensor) and bool(a == b)


def as_results(values: Sequence[Any], likes: Sequence[Any], operands: Sequence[Any]) -> list[torch.Tensor]:
    """Leaves as results of an operator with graphs: tensors that share no memory with operands or each other."""
    results: list[torch.Tensor] = []
    taken = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    for value, like in zip(values, likes, strict=True):
        result = _as_tensor(value, like)
        if any(is_alias_of(result, other) for other in (*taken, *results)):
            result = result.clone()
        results.append(result)
    return results


def _as_tensor(value: Any, like: Any) -> torch.Tensor:
    if value is UNINITIALIZED:
        if isinstance(like, torch.Tensor | ScalarTensor):
            return torch.zeros(like.shape, dtype=like.dtype)
        value = _ZEROS.get(type(like), like)
    if isinstance(value, ScalarTensor):
        return value.tensor()
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, bool | torch.SymBool):
        return truth_tensor(value)
    return scalar(value, torch.float64 if isinstance(value, float | torch.SymFloat) else torch.int64)


def as_before(result: Any, like: Any) -> Any:
    """The reverse of :func:`as_results`: a number where the script has a number; a truth value stays a tensor."""
    if isinstance(like, torch.Tensor | ScalarTensor | bool | torch.SymBool):
        return result
    return result.item()


def unknown(leaf: Any) -> Any:
    """A leaf as a later iteration has it: a number of the same kind that is known only when the model runs."""
    if isinstance(leaf, torch.Tensor) or not is_computed(leaf):
        return leaf
    return as_before(_as_tensor(leaf, leaf), leaf)


def kinds(value: Any) -> str:
    flat = list(leaves(value))
    names = ["a tensor" if isinstance(leaf, torch.Tensor | ScalarTensor) else repr(leaf) for leaf in flat]
    return ", ".join(names) or "nothing"

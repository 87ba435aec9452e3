"""Blocks of a step that become graphs of their own: what they take from outside, and what they give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from onnxplug.capture.torchscript.graphs import Block, ScriptGraph, Step
from onnxplug.capture.torchscript.interpreter import Attribute, Interpreter, Values
from onnxplug.capture.torchscript.numbers import truth_tensor
from onnxplug.capture.torchscript.values import (
    UNINITIALIZED,
    ScalarTensor,
    is_number,
    is_symbolic,
    leaves,
    mapped,
    scalar,
    structure,
)
from onnxplug.torch_private import detect_fake_mode, is_alias_of

_ZEROS = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}


class ContainerChanged(Exception):
    """A branch or body changes a list or dict that is made outside of it."""


class Region:
    """The blocks of a step that become graphs of their own: what they use of the outside is given to them.

    Attributes:
        operands: The tensors and symbolic numbers that they use.
        attributes: The attributes of modules that they may read or set, with what those hold before.
        written: Those that they may set.
    """

    def __init__(self, interpreter: Interpreter, step: Step, values: Values) -> None:
        self.interpreter = interpreter
        self.step = step
        taken = dict.fromkeys(number for block in step.blocks for number in block.taken())
        taken.update(dict.fromkeys(step.inputs[2:]))
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
        self._kept = flat  # so that no other leaf takes the place of one in memory

    def function(
        self, block: Block, inputs: Sequence[Any] = (), written: Sequence[Any] | None = None
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """A block as a function of the operands: its outputs, then what the attributes hold that may be set."""

        def run(operands: Sequence[Any]) -> list[Any]:
            def inside(leaf: Any) -> Any:
                position = self._position.get(id(leaf))
                if position is None:
                    return leaf
                return operands[position].item() if isinstance(leaf, torch.SymFloat) else operands[position]

            values = {number: mapped(value, inside) for number, value in self._values.items()}
            attributes = {key: mapped(value, inside) for key, value in self.attributes.items()}
            if written is not None:
                attributes.update(zip(self.written, written, strict=True))
            values.update(zip(block.inputs, [mapped(value, inside) for value in inputs], strict=True))
            given = list(values.values())
            before = [(structure(value), [id(leaf) for leaf in leaves(value)]) for value in given]
            alive = [list(leaves(value)) for value in given]  # no other leaf takes the place of one in memory
            with self.interpreter.scope(attributes) as attributes:
                results = self.interpreter.run(block, values)
                results += [attributes[key] for key in self.written]
            if [(structure(value), [id(leaf) for leaf in leaves(value)]) for value in given] != before:
                raise ContainerChanged
            del alive
            return results

        return run

    def tried(self, run: Callable[[Sequence[Any]], Any]) -> Any:
        """What a function gives for the operands, without a trace in the graph."""
        with _untraced():
            return run(self.operands)

    def accepted(self, results: list[Any]) -> list[Any]:
        """The outputs of the blocks; the attributes that were set are set outside."""
        count = len(results) - len(self.written)
        for key, value in zip(self.written, results[count:], strict=True):
            held = self._containers.get(key)
            if key not in self._set and isinstance(held, list):
                held[:] = value  # it stays the object that others may hold too
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
    """The attributes that the blocks of a step may read, modules aside, and those that they may set."""
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
    """The steps of blocks and of the methods that they call, of whatever module of a type."""
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
    """A tensor or symbolic number as operators with graphs take it."""
    if isinstance(leaf, torch.SymFloat):
        return scalar(leaf, torch.float64)
    return truth_tensor(leaf) if isinstance(leaf, torch.SymBool) else leaf


# -- the leaves of what blocks give --------------------------------------------------------------------------------------


def filled(value: Any, other: Any) -> Any:
    """A value with the structure of another one wherever it is not set."""
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
    return type(a) is type(b) and not is_symbolic(a) and not isinstance(a, torch.Tensor) and bool(a == b)


def as_result(value: Any, like: Any, operands: Sequence[Any]) -> Any:
    """A leaf as the operator takes it: a tensor of its own, or an integer."""
    if value is UNINITIALIZED:
        if isinstance(like, torch.Tensor | ScalarTensor):
            return torch.zeros(like.shape, dtype=like.dtype)
        value = _ZEROS.get(type(like), like)
    if isinstance(value, ScalarTensor):
        return value.tensor()
    if isinstance(value, torch.Tensor):
        value = value if not is_number(like) or not isinstance(like, float) else value.to(torch.float64)
        own = not any(isinstance(o, torch.Tensor) and is_alias_of(value, o) for o in operands)
        return value if own else value.clone()
    if isinstance(value, bool | torch.SymBool):
        return truth_tensor(value)
    if isinstance(value, float | torch.SymFloat):
        return scalar(value, torch.float64)
    return scalar(value, torch.int64)


def as_before(result: Any, like: Any) -> Any:
    """The reverse: a number where the script has a number; a truth value stays a tensor."""
    if isinstance(like, torch.Tensor | ScalarTensor | bool | torch.SymBool):
        return result
    return result.item()


def kinds(value: Any) -> str:
    flat = list(leaves(value))
    names = ["a tensor" if isinstance(leaf, torch.Tensor | ScalarTensor) else repr(leaf) for leaf in flat]
    return ", ".join(names) or "nothing"

"""The sides of a branch on a tensor's value while they are traced, and the selection among the tensors that they assign.

See :mod:`onnxplug.capture.branches`, whose code calls :class:`Sides`.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
import sys
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, ClassVar

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from onnxplug.capture.locations import is_core_file
from onnxplug.torch_private import FakeTensor, OpOverload, OpOverloadPacket, proxies, torch_c

#: Python's functions that only compute.
_COMPUTING: tuple[Any, ...] = (
    *(int, float, bool, complex, len, abs, min, max, round, tuple),
    *(torch.finfo, torch.iinfo, torch.Size, torch.tensor),
)
#: Modules of torch whose functions written in Python call operators.
_MODULES = ("torch.nn.functional", "torch.functional", "torch._tensor")
#: The owners of torch's functions written in C++ that call operators.
_OWNERS = ("_VariableFunctions", "_nn", "_special", "_linalg")
#: Classes of values that are equal if their texts are.
_PLAIN = (int, float, complex, str, bool, torch.dtype, torch.device, type(None))
#: Operators, no views, that have a result for all operands of fitting shapes, beside the operators that compute element by element.
_TOTAL = frozenset(
    f"aten::{name}"
    for name in (
        "sum mean any all where clone contiguous to _to_copy type_as float double half bfloat16 reshape flatten expand_as "
        "lift_fresh_copy full full_like zeros zeros_like ones ones_like scalar_tensor new_full new_zeros new_ones"
    ).split()
)
#: Operators that compute element by element and have a result for all integers, which division does not.
_TOTAL_OF_INTEGERS = frozenset(
    f"aten::{name}"
    for name in (
        "add sub rsub mul neg abs sign square clamp clamp_min clamp_max clip minimum maximum masked_fill relu "
        "bitwise_and bitwise_or bitwise_xor bitwise_not __and__ __or__ __xor__"
    ).split()
)
#: Attributes that torch and onnxplug set on tensors.
_MARKS = re.compile("_dynamo|_specialize_on|_is_param|_onnxplug")
_PARTIAL = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Unselectable(Exception):
    """The sides of a branch are no operands of a selection."""


@functools.cache  # which keeps the library alive: its operators go with it
def _library() -> torch.library.Library:
    """The operator of selections: ``torch.where``, whose result may share memory with its operands, as a variable's value does."""
    library = torch.library.Library("onnxplug", "FRAGMENT")
    library.define("selected(Tensor condition, Tensor(a) first, Tensor(a) second) -> Tensor(a)")
    library.impl("selected", torch.where, "CompositeExplicitAutograd")
    return library


def selects(target: Any) -> bool:
    """Whether an operator is the selection between the sides of a branch."""
    return isinstance(target, OpOverload) and target._schema.name == "onnxplug::selected"


class Sides:
    """One run of a branch.

    Args:
        value: The condition's value.
        names: The variables that the sides assign.
        variables: The function's variables.
        position: The line and the column of the ``if``.

    Attributes:
        undecided: Whether the value depends on the model's inputs, so that both sides are traced.
        values: The values of the variables for the code that follows.
    """

    #: Branches of which a side is traced now.
    opened: ClassVar[list[Sides]] = []
    #: Code and positions of branches after which a variable has no value, as one side does not assign it.
    dropped: ClassVar[dict[tuple[Any, tuple[int, int]], None]] = {}

    def __init__(
        self, value: Any, names: tuple[str, ...], variables: Mapping[str, Any], position: tuple[int, int]
    ) -> None:
        self.value = value
        self.undecided = self.waits(value)
        if self.undecided:
            self.code, self.position = sys._getframe(1).f_code, position
            self._names = names
            self._mask = _mask_of(value)
            # A copy, where a side may write the condition itself.
            self._condition = _truth(value) if self._mask is None else _truth(value).clone()
            self.values = self._before = self._own(variables)
            self._first: dict[str, Any] | None = None
            self._nodes = proxies.get_proxy_mode().tracer.graph.nodes
            self._count = len(self._nodes)
            self.opened.append(self)

    @classmethod
    def forget(cls) -> None:
        """Forgets the branches of an earlier trace."""
        cls.opened.clear()
        cls.dropped.clear()

    @staticmethod
    def waits(value: Any) -> bool:
        """Whether a value is a tensor with one element that is known only when the model runs."""
        if not isinstance(value, FakeTensor) or value.constant is not None:
            return False
        mode = proxies.get_proxy_mode()
        is_single = all(type(size) is int for size in value.shape) and math.prod(value.shape) == 1
        return is_single and mode is not None and proxies.get_proxy_slot(value, mode.tracer, None) is not None

    @staticmethod
    def negated(value: torch.Tensor) -> torch.Tensor:
        """The negation of a tensor's truth."""
        return _truth(value).logical_not()

    def called(self, function: Any) -> Any:
        """A function that a side calls.

        Raises:
            Unselectable: It may have an effect.
        """
        if self.undecided and not _only_computes(function):
            raise Unselectable(f"a side calls {getattr(function, '__qualname__', function)}")
        return function

    def written(self, target: Any) -> Any:
        """An object of which a side assigns an item.

        Raises:
            Unselectable: It is no tensor.
        """
        if self.undecided and not isinstance(target, torch.Tensor):
            raise Unselectable(f"a side writes {type(target).__name__}")
        return target

    def number(self, value: Any) -> Any:
        """The value of a variable that a side changes by ``+=`` or the like.

        Raises:
            Unselectable: It may be changed in place.
        """
        if self.undecided and not isinstance(value, (*_PLAIN, torch.SymInt, torch.SymFloat)):
            raise Unselectable(f"a side changes {type(value).__name__} in place")
        return value

    def end(self, variables: Mapping[str, Any]) -> None:
        """Ends a side. After the first one, the values are the values before the branch; after the second one, the selected values.

        Raises:
            Unselectable: The side is none of a selection.
        """
        nodes = iter(reversed(self._nodes))
        for _ in range(len(self._nodes) - self._count):
            node = next(nodes)
            if not _is_total(node) and not self._writes_nothing(node):
                raise Unselectable(f"a side calls {node.target}")
        now = self._own(variables)
        if self._first is None:
            self._first, self.values = now, self._before
        else:
            self.values = {name: self._merged(self._first[name], now[name]) for name in self._first if name in now}
            if self._first.keys() != now.keys():
                self.dropped[self.code, self.position] = None
            assert self.opened.pop() is self
        self._count = len(self._nodes)

    def _writes_nothing(self, node: Any) -> bool:
        """Whether a node writes a tensor where the mask is true, and has one value for all these places.

        It writes nothing where the branch is not taken, whose condition is that the mask is true somewhere.
        """
        if self._mask is None or self._first is not None or len(node.args) != 3 or node.kwargs:
            return False
        target, places, value = node.args
        if node.target is torch.ops.aten.masked_fill_.Scalar:  # of a number, from torch 2.15
            return places is self._mask
        if node.target is not torch.ops.aten.index_put_.default or list(places) != [self._mask]:
            return False
        written, of_mask, of_value = (n.meta["val"].dim() for n in (target, self._mask, value))
        return bool(of_value <= written - of_mask)

    def binds(self, name: str) -> bool:
        """Whether a variable has a value."""
        return name in self.values

    def _own(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        return {name: variables[name] for name in self._names if name in variables}

    def _merged(self, first: Any, second: Any) -> Any:
        if first is second:
            return first
        tensors = [x for x in (first, second) if isinstance(x, torch.Tensor)]
        if any(name not in vars(self._condition) and not _MARKS.match(name) for x in tensors for name in vars(x)):
            raise Unselectable("a side assigns a tensor on which the model has set attributes")
        if len(tensors) == 2 and _form(first) == _form(second):
            _library()
            result = torch.ops.onnxplug.selected.default(self._condition, first, second)
            node = _node_of(result)
            frame = f'  File "{self.code.co_filename}", line {self.position[0]}, in {self.code.co_name}\n'
            node.stack_trace = (node.stack_trace or "") + frame  # torch keeps the lines of `forward` alone
            return result
        if type(first) is type(second) and isinstance(first, _PLAIN) and repr(first) == repr(second):
            return first
        if type(first) is tuple and type(second) is tuple and len(first) == len(second):
            return tuple(map(self._merged, first, second))
        raise Unselectable("the sides assign a variable values of different kinds")


def _mask_of(value: torch.Tensor) -> torch.fx.Node | None:
    """The node of the mask of bools, if a value is whether the mask is true somewhere, and nothing was written since."""
    node = _node_of(value)
    if node.target is not torch.ops.aten.any.default:
        return None
    since = itertools.takewhile(lambda later: later is not node, reversed(node.graph.nodes))
    mask: Any = node.args[0]
    return mask if mask.meta["val"].dtype is torch.bool and not any(map(_may_write, since)) else None


def _node_of(value: torch.Tensor) -> torch.fx.Node:
    node: torch.fx.Node = proxies.get_proxy_slot(value, proxies.get_proxy_mode().tracer).proxy.node
    return node


def _truth(value: torch.Tensor) -> torch.Tensor:
    value = value.reshape(()) if value.dim() else value
    return value if value.dtype is torch.bool else value != 0


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The properties that two tensors have in common where code can't tell them apart but by their elements."""
    layout = (str(tensor.shape), str(tensor.stride())) if tensor.layout is torch.strided else (object(),)
    return type(tensor), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg(), *layout


def _only_computes(function: Any) -> bool:
    if isinstance(function, OpOverload | OpOverloadPacket) or any(function is known for known in _COMPUTING):
        return True
    if getattr(function, "__name__", "_").endswith("_") and not getattr(function, "__name__", "").endswith("__"):
        return False  # in place
    if isinstance(function, BuiltinFunctionType):  # a method too
        owned = (getattr(getattr(torch_c, owner), function.__name__, None) for owner in _OWNERS)
        return isinstance(function.__self__, torch.Tensor) or any(function == other for other in owned)
    if isinstance(function, MethodType):
        return isinstance(function.__self__, torch.Tensor) and function.__func__.__module__ in _MODULES
    if not isinstance(function, FunctionType):
        return False
    return function.__module__ in _MODULES or is_core_file(function.__code__.co_filename)  # in place of one of these


def _may_write(node: torch.fx.Node) -> bool:
    """Whether a node may write an operand."""
    if node.op != "call_function" or isinstance(node.target, BuiltinFunctionType):  # of Python, on numbers
        return False
    if not isinstance(node.target, OpOverload):
        return True
    return any(a.alias_info is not None and a.alias_info.is_write for a in node.target._schema.arguments)


def _is_total(node: torch.fx.Node) -> bool:
    """Whether a node has a result for all operands, and no effect."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    target: Any = node.target
    if _may_write(node) or any(tag in getattr(target, "tags", ()) for tag in _PARTIAL):
        return False
    if target is torch.ops.aten._assert_tensor_metadata.default:
        return True  # of properties that the tensor has
    numbers = [n.meta.get("val") for n in node.all_input_nodes]
    if any(free_unbacked_symbols(n) for n in numbers if isinstance(n, torch.SymInt | torch.SymFloat | torch.SymBool)):
        return False  # a place that data decide may be none of the tensor
    val = node.meta.get("val")
    if isinstance(val, torch.SymInt | torch.SymFloat | torch.SymBool | int | float):
        return not free_unbacked_symbols(val)  # computed from sizes
    if not isinstance(target, OpOverload):
        return False
    schema = target._schema
    if selects(target) or schema.name in _TOTAL or any(r.alias_info is not None for r in schema.returns):
        return True
    if torch.Tag.pointwise not in target.tags or not isinstance(val, torch.Tensor):
        return False
    is_of_integers = not (val.dtype.is_floating_point or val.dtype.is_complex or val.dtype is torch.bool)
    return not is_of_integers or schema.name in _TOTAL_OF_INTEGERS

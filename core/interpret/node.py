"""FxNode: one call of an operator as a converter sees it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
from torch.fx.immutable_collections import immutable_list

from onnxplug.build.complexes import COMPLEX_PREFIX, PART_DTYPE, Complex
from onnxplug.build.dtypes import to_onnx_dtype
from onnxplug.build.quantized import QUANTIZED_PREFIX, Quantized
from onnxplug.interpret.symbols import Dim, SymbolNames
from onnxplug.registry.names import find_overload, qualified_name
from onnxplug.registry.rule import Rule
from onnxplug.torch_private import OpOverload

#: The location of a call for which torch recorded none.
UNKNOWN_SOURCE = "unknown source"


class OutputSpec(NamedTuple):
    """Dtype and shape that torch computed for one result.

    Attributes:
        dtype: ONNX element type.
        shape: Static sizes as ints, dynamic sizes as named dimensions.
    """

    dtype: ir.DataType
    shape: tuple[Dim, ...]


class Parameter(NamedTuple):
    """One parameter of an operator's schema."""

    name: str
    default: Any


@functools.cache
def schema_parameters(target: OpOverload) -> tuple[Parameter, ...]:
    """The parameters of an operator in schema order."""
    return tuple(Parameter(a.name, frozen(a.default_value)) for a in target._schema.arguments)


def frozen(argument: Any) -> Any:
    """An argument whose lists can't be changed: a converter that declines leaves no change behind for the next converter."""
    return immutable_list(map(frozen, argument)) if isinstance(argument, list | tuple) else argument


@dataclass(frozen=True, slots=True, eq=False)
class FxNode:
    """One call of an operator, its arguments bound to their values in ONNX. It can't be changed.

    Attributes:
        fx: The ``torch.fx.Node``.
        target: The operator or function called.
        op_name: Its qualified name, e.g. ``"aten::add.Tensor"``.
        args: The operator's arguments in schema order, defaults filled in. Tensors and dynamic sizes are
            ``onnx_ir.Value``, complex tensors ``Complex``, quantised tensors ``Quantized``; everything else stays Python.
        outputs: Dtype and shape of each result; ``None`` for a result that is not a tensor or number.
        location: The user's file and line, ``"unknown source"`` when torch recorded none.
        rules: The rules that are still to be tried; ``None`` for all that apply.
        derived: Whether a converter derived the call from another call. ``fx`` then computes something else, so that the
            call can't be decomposed.
    """

    fx: torch.fx.Node
    target: Any
    op_name: str
    args: tuple[Any, ...]
    outputs: tuple[OutputSpec | None, ...]
    location: str
    rules: Sequence[Rule] | None = None
    derived: bool = False

    @property
    def name(self) -> str:
        """The FX node's name."""
        return self.fx.name

    def arg(self, name: str) -> Any:
        """An argument by its name in the schema.

        Raises:
            KeyError: The operator has no such parameter.
        """
        for position, parameter in enumerate(self.parameters):
            if parameter.name == name:
                return self.args[position]
        raise KeyError(f"{self.op_name} has no parameter {name!r}")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The operator's parameters; none for a Python function."""
        return schema_parameters(self.target) if isinstance(self.target, OpOverload) else ()

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The arguments by name."""
        return dict(zip((p.name for p in self.parameters), self.args, strict=False))

    @property
    def dtype(self) -> ir.DataType:
        """The ONNX element type of the first result."""
        first = self.outputs[0]
        assert first is not None
        return first.dtype

    @property
    def shape(self) -> tuple[Dim, ...]:
        """The shape of the first result."""
        first = self.outputs[0]
        assert first is not None
        return first.shape

    def meta(self, argument: int | str) -> Any:
        """torch's value of an argument: its FakeTensor, symbolic number, or plain value (lists element by element)."""
        position = argument
        if isinstance(argument, str):
            names = [p.name for p in self.parameters]
            if argument in self.fx.kwargs:
                return meta_of(self.fx.kwargs[argument])
            position = names.index(argument)
        assert isinstance(position, int)
        if position < len(self.fx.args):
            return meta_of(self.fx.args[position])
        name = self.parameters[position].name
        return meta_of(self.fx.kwargs.get(name, self.parameters[position].default))

    # -- calls derived from this one -----------------------------------------------------------------------------------

    def with_rules(self, rules: Sequence[Rule]) -> FxNode:
        """The same call with only these rules left to try."""
        return FxNode(self.fx, self.target, self.op_name, self.args, self.outputs, self.location, rules, self.derived)

    def with_args(self, args: Iterable[Any]) -> FxNode:
        """A call of the same operator with other arguments, for which all rules are tried again; for ``g.convert``."""
        return FxNode(
            self.fx,
            self.target,
            self.op_name,
            tuple([frozen(a) for a in args]),
            self.outputs,
            self.location,
            derived=True,
        )

    def part(self, name: str) -> FxNode:
        """The same call on real numbers: every complex argument replaced by one of its parts, ``real`` or ``imag``.

        For operators that move elements about, or that are linear in their only complex argument; for ``g.convert``.
        """
        return FxNode(
            self.fx,
            self.target,
            self.op_name.removeprefix(COMPLEX_PREFIX),
            tuple([_part_of(a, name) for a in self.args]),
            tuple([spec and OutputSpec(PART_DTYPE.get(spec.dtype, spec.dtype), spec.shape) for spec in self.outputs]),
            self.location,
            derived=True,
        )

    def on_integers(self, *, results: bool = True) -> FxNode:
        """The same call on the integers of its quantised tensors; for ``g.convert``.

        For operators that move elements about, or read the shape alone.

        Args:
            results: Whether the tensors that it returns hold these integers too.
        """
        integers = next((a.integers.dtype for a in _leaves(self.args) if isinstance(a, Quantized)), None)
        outputs = self.outputs
        if results and integers is not None:
            outputs = tuple([spec and OutputSpec(integers, spec.shape) for spec in outputs])
        args = tuple([_integers_of(a) for a in self.args])
        name = self.op_name.removeprefix(QUANTIZED_PREFIX)
        return FxNode(self.fx, self.target, name, args, outputs, self.location, derived=True)

    def as_operator(self, op: str) -> FxNode:
        """A call of another overload that begins with the same parameters; its other parameters have their defaults.

        For ``g.convert``.

        Raises:
            KeyError: torch has no such overload.
        """
        target = find_overload(op)
        if target is None:
            raise KeyError(f"torch has no operator {op!r}")
        args = (*self.args, *(p.default for p in schema_parameters(target)[len(self.args) :]))
        return FxNode(self.fx, target, qualified_name(target), args, self.outputs, self.location, derived=True)

    def __str__(self) -> str:
        return f"{self.op_name} at {self.location}"


def _part_of(argument: Any, name: str) -> Any:
    if isinstance(argument, Complex):
        return getattr(argument, name)
    if isinstance(argument, list | tuple):
        return immutable_list(_part_of(a, name) for a in argument)
    return argument


def _integers_of(argument: Any) -> Any:
    if isinstance(argument, Quantized):
        return argument.integers
    if isinstance(argument, list | tuple):
        return immutable_list(map(_integers_of, argument))
    return argument


def _leaves(argument: Any) -> list[Any]:
    return [x for a in argument for x in _leaves(a)] if isinstance(argument, list | tuple) else [argument]


def meta_of(argument: Any) -> Any:
    """The recorded values of an FX argument, lists element by element."""
    if isinstance(argument, torch.fx.Node):
        return argument.meta.get("val")
    if isinstance(argument, list | tuple):
        return [meta_of(a) for a in argument]
    return argument


def output_specs(val: Any, symbols: SymbolNames) -> tuple[OutputSpec | None, ...]:
    """Dtype and shape of everything that an FX node returns."""
    if isinstance(val, torch.Tensor):
        return (OutputSpec(to_onnx_dtype(val.dtype), symbols.dims(val)),)
    if isinstance(val, list | tuple):
        return tuple([spec for item in val for spec in output_specs(item, symbols)])
    if isinstance(val, bool | torch.SymBool):
        return (OutputSpec(ir.DataType.BOOL, ()),)
    if isinstance(val, int | torch.SymInt):
        return (OutputSpec(ir.DataType.INT64, ()),)
    if isinstance(val, float | torch.SymFloat):
        return (OutputSpec(ir.DataType.DOUBLE, ()),)
    return (None,)


def are_empty(outputs: Sequence[OutputSpec | None]) -> bool:
    """Whether all results are known to hold no element."""
    for spec in outputs:
        if spec is None:
            return False
        for size in spec.shape:
            if type(size) is int and size == 0:
                break
        else:
            return False
    return bool(outputs)

"""FxNode: one call of the FX graph as a converter sees it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import onnx_ir as ir
import torch

from onnxplug.build.complexes import COMPLEX_PREFIX, PART_DTYPE, Complex
from onnxplug.build.dtypes import to_onnx_dtype
from onnxplug.capture.locations import source_location
from onnxplug.capture.regions import functional_inner
from onnxplug.interpret.symbols import Dim, SymbolNames

if TYPE_CHECKING:
    from onnxplug.interpret.interpreter import DynamoInterpreter
    from onnxplug.registry.rule import Rule


class OutputSpec(NamedTuple):
    """Dtype and shape that torch computed for one result.

    Attributes:
        dtype: ONNX element type.
        shape: Static sizes as ints, dynamic ones as named dimensions.
    """

    dtype: ir.DataType
    shape: tuple[Dim, ...]


class Parameter(NamedTuple):
    """One parameter of an operator's schema."""

    name: str
    has_default: bool
    default: Any


@functools.cache
def schema_parameters(target: torch._ops.OpOverload) -> tuple[Parameter, ...]:
    """The parameters of an operator in schema order."""
    return tuple(Parameter(a.name, a.has_default_value(), a.default_value) for a in target._schema.arguments)


class FxNode:
    """One call of the FX graph, its arguments bound to what they became in ONNX.

    Attributes:
        args: The operator's arguments in schema order, defaults filled in. Tensors and dynamic sizes are
            ``onnx_ir.Value``; everything else stays Python.
        fx: The ``torch.fx.Node``.
        target: The operator or function called.
        op_name: Its qualified name, e.g. ``"aten::add.Tensor"``.
    """

    __slots__ = ("_outputs", "_rest", "args", "fx", "interpreter", "op_name", "target")

    def __init__(self, fx: torch.fx.Node, op_name: str, args: list[Any], interpreter: DynamoInterpreter) -> None:
        self.fx = fx
        self.target: Any = fx.target
        self.op_name = op_name
        self.args = args
        self.interpreter = interpreter
        self._outputs: list[OutputSpec | None] | None = None
        self._rest: Sequence[Rule] = ()

    @property
    def name(self) -> str:
        """The FX node's name."""
        return self.fx.name

    @property
    def location(self) -> str:
        """The user's file and line, ``"unknown source"`` when torch recorded none."""
        return source_location(self.fx) or self.interpreter.outer_location or "unknown source"

    @property
    def symbols(self) -> SymbolNames:
        """The names of dynamic sizes."""
        return self.interpreter.symbols

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
        return schema_parameters(self.target) if isinstance(self.target, torch._ops.OpOverload) else ()

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The arguments by name."""
        return dict(zip((p.name for p in self.parameters), self.args, strict=False))

    @property
    def outputs(self) -> list[OutputSpec | None]:
        """Dtype and shape of each result; ``None`` for a result that is not a tensor or number."""
        if self._outputs is None:
            self._outputs = output_specs(self.fx.meta.get("val"), self.symbols)
        return self._outputs

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
        """What torch knows of an argument: its FakeTensor, symbolic number, or plain value (lists element by element)."""
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

    def call_next(self, g: Any) -> Any:
        """What the next rule for this node returns; its decomposition's result when there is no other rule."""
        return self.interpreter.call_next(self)

    def part(self, name: str) -> FxNode:
        """The same call on real numbers: every complex argument replaced by one of its parts, ``real`` or ``imag``.

        For operators that move elements about, or that are linear in their one complex argument.
        """
        args = [_part_of(a, name) for a in self.args]
        node = FxNode(self.fx, self.op_name.removeprefix(COMPLEX_PREFIX), args, self.interpreter)
        node._outputs = [
            spec if spec is None else OutputSpec(PART_DTYPE.get(spec.dtype, spec.dtype), spec.shape)
            for spec in self.outputs
        ]
        return node

    def interpret(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """Converts another graph (a branch, a loop's body) in place; returns what it returns."""
        return self.interpreter.inline(functional_inner(module.graph, str(self)), inputs, module)

    def __str__(self) -> str:
        return f"{self.op_name} at {self.location}"


def _part_of(argument: Any, name: str) -> Any:
    if isinstance(argument, Complex):
        return getattr(argument, name)
    if isinstance(argument, list | tuple):
        return [_part_of(a, name) for a in argument]
    return argument


def meta_of(argument: Any) -> Any:
    """The recorded values of an FX argument, lists element by element."""
    if isinstance(argument, torch.fx.Node):
        return argument.meta.get("val")
    if isinstance(argument, list | tuple):
        return [meta_of(a) for a in argument]
    return argument


def output_specs(val: Any, symbols: SymbolNames) -> list[OutputSpec | None]:
    """Dtype and shape of everything that an FX node returns."""
    if isinstance(val, list | tuple):
        return [spec for item in val for spec in output_specs(item, symbols)]
    if isinstance(val, torch.Tensor):
        return [OutputSpec(to_onnx_dtype(val.dtype), symbols.dims(val))]
    if isinstance(val, bool | torch.SymBool):
        return [OutputSpec(ir.DataType.BOOL, ())]
    if isinstance(val, int | torch.SymInt):
        return [OutputSpec(ir.DataType.INT64, ())]
    if isinstance(val, float | torch.SymFloat):
        return [OutputSpec(ir.DataType.DOUBLE, ())]
    return [None]

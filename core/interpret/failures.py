"""Failures with their place: errors of converters, and the operators that have no rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.build.complexes import PART_DTYPE, Complex
from onnxplug.build.quantized import QUANTIZED_PREFIX, Quantized
from onnxplug.capture.locations import raised_at
from onnxplug.errors import CaptureError, ConversionError, MissingRuleError, Unsupported
from onnxplug.interpret.node import FxNode, OutputSpec
from onnxplug.interpret.symbols import SymbolNames
from onnxplug.registry.names import qualified_name
from onnxplug.registry.rule import Rule
from onnxplug.text import counted, value_text
from onnxplug.torch_private import OpOverload

Explain = Callable[[str], "str | None"]


def place_of(call: FxNode, rule: Rule, opset: int) -> str:
    """The beginning of a converter's error: the operator, the user's line, the rule and its package."""
    shapes = ", ".join(_argument_text(a) for a in call.args)
    source = f" of {rule.source}" if rule.source else ""
    return f"cannot convert {call.op_name}({shapes}) at {call.location} (rule {rule.name}{source}, opset {opset})"


def defect(error: Exception, call: FxNode, rule: Rule, opset: int) -> ConversionError:
    """The error for an exception that a converter didn't raise on purpose.

    It is a defect of the rule, unless the call has a number of a size where the rule takes plain numbers.
    """
    conversion_error: ConversionError
    if numbers := _dynamic_numbers(call):
        conversion_error = Unsupported(
            f"{', '.join(numbers)} must be known when the model is exported, and is computed from sizes or inputs of the model "
            f"(the converter raised {type(error).__name__}: {error})",
            hint="Give a plain number, make the dimension static, or compute the operator by others: products, torch.where.",
        )
        conversion_error.add_place(place_of(call, rule, opset))
        conversion_error.place = call.location
        return conversion_error
    conversion_error = ConversionError(
        f"{place_of(call, rule, opset)}: the converter raised {type(error).__name__}: {error}"
        f"{raised_at(error, rule.resolve())}",
        hint=f"This is a defect of {rule.source or 'the rule'}; report it there with the lines above.",
    )
    conversion_error.located, conversion_error.place = True, call.location
    return conversion_error


def _dynamic_numbers(call: FxNode) -> list[str]:
    """The parameters of an operator that are numbers and get one that is known when the model runs."""
    parameters = call.target._schema.arguments if isinstance(call.target, OpOverload) else ()
    pairs = zip(parameters, call.args, strict=False)
    return [p.name for p, value in pairs if isinstance(value, ir.Value) and "Tensor" not in str(p.type)]


def refused(fx: torch.fx.Node, location: str, message: str, symbols: SymbolNames) -> CaptureError:
    """The error for a call that PyTorch refuses.

    Args:
        symbols: Names of dynamic sizes.
    """
    vals = [v for node in fx.all_input_nodes if isinstance(v := node.meta.get("val"), torch.Tensor)]
    operands = ", ".join(f"{str(v.dtype).removeprefix('torch.')}[{', '.join(map(str, symbols.dims(v)))}]" for v in vals)
    error = CaptureError(
        f"PyTorch itself refuses {qualified_name(fx.target)} of {operands} at {location}: {message}",
        hint="The model does not run in eager mode with inputs of these dtypes either: cast the input (x.to(weight.dtype)) or the "
        "module (module.to(x.dtype)), or give inputs of the dtypes that the model is run with.",
    )
    error.located, error.place = True, location
    return error


def quantized_argument(call: FxNode, reasons: Sequence[str]) -> ConversionError:
    """The error for an operator that is called on a quantised tensor and has no rule for it."""
    name = call.op_name.removeprefix(QUANTIZED_PREFIX)
    why = f" ({'; '.join(reasons)})" if reasons else ""
    error = ConversionError(
        f"{name} at {call.location} is called on a quantised tensor, for which no rule applies{why}",
        hint=f"Call dequantize() before it, install onnxplug-quantized, or pass a rule for {call.op_name!r}.",
    )
    error.located, error.place = True, call.location
    return error


def _argument_text(argument: Any) -> str:
    if isinstance(argument, ir.Value):
        return value_text(argument)
    if isinstance(argument, Quantized):
        return f"quantized {_argument_text(argument.integers)}"
    if isinstance(argument, list | tuple):
        return "[" + ", ".join(_argument_text(a) for a in argument) + "]"
    return repr(argument)


class MissingRules:
    """The operators met so far that have no rule.

    Args:
        explain: The reason why a namespace's plugin supplied no rule, if it is known.
    """

    def __init__(self, explain: Explain | None = None) -> None:
        self._explain = explain
        self._places: dict[str, list[str]] = {}

    def stand_ins(self, call: FxNode, decomposing: Sequence[str], reasons: Sequence[str]) -> Any:
        """Records an operator without a rule; returns values of its dtypes and shapes.

        The conversion goes on with them, so that an error lists all operators without a rule.
        """
        name, place = call.op_name, call.location
        if reasons:
            place = f"{place} ({'; '.join(reasons)})"
        if decomposing:
            name, place = decomposing[0], f"{place} (its decomposition needs {call.op_name})"
        self._places.setdefault(name, []).append(place)
        values = [_stand_in(spec) for spec in call.outputs]
        return values if isinstance(call.fx.meta.get("val"), list | tuple) else values[0]

    def raise_any(self) -> None:
        """Raises if operators without a rule were met.

        Raises:
            MissingRuleError: Lists all of them, each with its source lines and the package that could supply a rule.
        """
        if not self._places:
            return
        lines = []
        hints = []
        for name, places in self._places.items():
            where = ", ".join(dict.fromkeys(places[:3])) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
            lines.append(f"  {name}: {where}")
            explanation = self._explain(name.partition("::")[0]) if self._explain is not None else None
            if explanation and explanation not in hints:
                hints.append(explanation)
        count = len(self._places)
        raise MissingRuleError(
            f"{counted(count, 'operator')} {'has' if count == 1 else 'have'} no rule and no decomposition:\n"
            + "\n".join(lines),
            missing=self._places,
            hint="\n".join(
                [*hints, "Install a plugin that translates them, or pass rules=[Rule('namespace::op', converter)]."]
            ),
        )


def _stand_in(spec: OutputSpec | None) -> Any:
    """A value of the dtype and shape of a result."""
    if spec is None:
        return None
    dtype = PART_DTYPE.get(spec.dtype, spec.dtype)
    parts = [ir.Value(type=ir.TensorType(dtype), shape=ir.Shape(spec.shape)) for _ in range(2)]
    return Complex(*parts) if spec.dtype in PART_DTYPE else parts[0]

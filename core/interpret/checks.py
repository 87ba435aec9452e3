"""The check of a converter's results against torch's: count, dtype, rank and dimensions.

An example, ``torch.cat([a, b])`` of ``a`` ``[rows, 3]`` and ``b`` ``[2, 3]``, for which torch has ``float[rows + 2, 3]``. The
results of four rules, with their inferred shapes::

    g.op.Concat(a, b, axis=0)    [None, 3]    right: the unknown size gets torch's name, ``rows + 2``
    g.op.Concat(a, b, axis=1)    [rows, 6]    an error: 6 is not 3
    a                            [rows, 3]    an error: ``rows`` is not ``rows + 2``, for the example's sizes either
    g.cast(a, INT64)             [rows, 3]    an error: int64 is not float
"""

from __future__ import annotations

import operator
from typing import Any

import onnx_ir as ir
import sympy
import torch

from onnxplug.build.complexes import PART_DTYPE, Complex
from onnxplug.build.quantized import Quantized
from onnxplug.errors import OutputMismatchError
from onnxplug.interpret.node import FxNode, OutputSpec
from onnxplug.interpret.symbols import SymbolNames
from onnxplug.plugin_api import PROJECT_NAME
from onnxplug.registry.registry import RuleWarning
from onnxplug.registry.rule import Rule
from onnxplug.text import counted, type_with_article
from onnxplug.torch_private import backed_values
from onnxplug.warn import warn

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def checked(call: FxNode, rule: Rule, results: Any, symbols: SymbolNames) -> Any:
    """The results of a rule for a call in torch's structure: a value, or a list. Missing dtypes and dimensions are filled in.

    Args:
        symbols: The names of dynamic sizes.

    Raises:
        OutputMismatchError: They differ from torch's results.
    """
    val = call.fx.meta.get("val")
    if isinstance(val, torch.Tensor):
        if type(results) in (list, tuple) and len(results) == 1:
            results = results[0]
        _check_value(call, rule, results, call.outputs[0], 0, val, symbols)
        return results
    if isinstance(val, list | tuple):
        return _checked_list(call, rule, results, _leaves(val), symbols)
    if isinstance(val, _SYMBOLIC) and type(results) not in (int, float, bool):
        _check_value(call, rule, results, call.outputs[0], 0, val, symbols)
    return results


def _checked_list(call: FxNode, rule: Rule, results: Any, vals: list[Any], symbols: SymbolNames) -> list[Any]:
    specs = call.outputs
    if isinstance(results, ir.Value):
        results = [results]
    if not isinstance(results, list | tuple) or len(_leaves(results)) < _needed(call.fx, len(specs)):
        got = counted(len(results), "result") if isinstance(results, list | tuple) else repr(results)
        raise _mismatch(call, rule, f"returned {got} where torch has {counted(len(specs), 'result')}")
    if isinstance(results, list | tuple) and len(_leaves(results)) < len(specs) and rule.source != PROJECT_NAME:
        source = f" of {rule.source}" if rule.source else ""
        warn(
            f"rule {rule.name}{source} for {call.op_name} returned {counted(len(results), 'result')} where torch has "
            f"{len(specs)}; nothing here reads the others (at {call.location})",
            RuleWarning,
        )
    if len(results) > len(specs):
        raise _mismatch(call, rule, f"returned {counted(len(results), 'result')} where torch has {len(specs)}")
    if any(isinstance(result, list | tuple) for result in results):
        # A list among the results, (Tensor, Tensor[]): checked leaf by leaf.
        for leaf, spec, val in zip(_leaves(results), specs, vals, strict=False):
            _check_value(call, rule, leaf, spec, 0, val, symbols)
        return list(results)
    used = _used_indices(call.fx)
    for index, result in enumerate(results):
        if result is not None or used is None or index in used:
            _check_value(call, rule, result, specs[index], index, vals[index], symbols)
    return list(results)


def _check_value(
    call: FxNode, rule: Rule, value: Any, spec: OutputSpec | None, index: int, val: Any, symbols: SymbolNames
) -> None:
    if spec is None:
        return
    if type(value) is Complex and spec.dtype in PART_DTYPE:
        part = OutputSpec(PART_DTYPE[spec.dtype], spec.shape)
        _check_value(call, rule, value.real, part, index, val, symbols)
        _check_value(call, rule, value.imag, part, index, val, symbols)
        return
    if type(value) is Quantized and spec.dtype == ir.DataType.FLOAT and value.integers.dtype is not None:
        # torch.export records float32 for it; the rule returns integers of a scale.
        _check_value(call, rule, value.integers, OutputSpec(value.integers.dtype, spec.shape), index, val, symbols)
        return
    if type(value) is not ir.Value:
        returned = "None" if value is None else f"{type_with_article(value)} ({value!r})"
        raise _mismatch(call, rule, f"returned {returned} as result {index} where torch has {_text(spec)}")
    dtype, dims = spec
    if value.dtype is None:
        value.type = ir.TensorType(dtype)
    elif value.dtype != dtype:
        raise _mismatch(
            call, rule, f"returned {value.dtype.name.lower()} as result {index} where torch has {_text(spec)}"
        )
    shape = value.shape
    if shape is None:
        value.shape = ir.Shape(dims)
        return
    own = shape.dims
    if own != dims:
        _check_dims(call, rule, value, own, spec, index, val, symbols)


def _check_dims(
    call: FxNode, rule: Rule, value: ir.Value, own: Any, spec: OutputSpec, index: int, val: Any, symbols: SymbolNames
) -> None:
    """Compares sizes; where torch's name for a dynamic size differs, the value gets torch's."""
    dims = spec.shape
    text = f"[{', '.join(str(d) for d in own)}]"
    if len(own) != len(dims):
        raise _mismatch(
            call,
            rule,
            f"returned rank {len(own)} (shape {text}) as result {index} where torch has {_text(spec)}",
        )
    renamed = False
    for axis, (got, expected) in enumerate(zip(own, dims, strict=True)):
        if got is expected or got == expected:
            continue
        if _differs(got, expected, val.shape[axis], symbols):
            raise _mismatch(call, rule, f"returned the shape {text} as result {index} where torch has {_text(spec)}")
        renamed = renamed or not isinstance(got, int)
        if isinstance(expected, int):
            _warn_of_constant(call, got, expected, symbols)
    if renamed:
        value.shape = ir.Shape([g if isinstance(g, int) else e for g, e in zip(own, dims, strict=True)])


def _warn_of_constant(call: FxNode, got: Any, number: int, symbols: SymbolNames) -> None:
    """Warns where torch has fixed a size at its number in the example inputs and the rule still has its expression.

    Once an operator has asked about an expression (``1 >= (n - 1) // 64 + 1``), torch concludes its value from the answer.
    """
    if got.value not in symbols.expressions or (got.value, number) in symbols.constants:
        return
    symbols.constants.add((got.value, number))
    warn(
        f"the exported model is right only where {got.value} == {number}: torch takes the size for this number from "
        f"{call.location} on, as with the example inputs. Give example inputs of other sizes.",
        UserWarning,
    )


def _differs(got: Any, expected: Any, size: Any, symbols: SymbolNames) -> bool:
    """Whether a size differs from torch's: always, or for the example inputs."""
    if isinstance(expected, int):
        return isinstance(got, int)
    env, expr = size.node.shape_env, size.node.expr
    if isinstance(got, int):
        # A size that depends on data may be known here, from constants.
        from_data = any(env.is_unbacked_symint(symbol) for symbol in expr.free_symbols)
        range_ = env.bound_sympy(_with_known_numbers(expr, env))
        return not (got in range_ if from_data else range_.lower == range_.upper == got)
    other = symbols.originals.get(got.value)
    if other is None:
        return False
    values = [e.xreplace(backed_values(env)) for e in (expr, other)]
    return all(v.is_Integer for v in values) and values[0] != values[1]


def _with_known_numbers(expr: Any, env: Any) -> Any:
    """A size in which each part that the guards equate with a number is that number; torch does so for single symbols only."""
    guards = [guard.expr for guard in env.guards if isinstance(guard.expr, sympy.Eq)]
    return expr.xreplace({a: b for guard in guards for a, b in (guard.args, guard.args[::-1]) if b.is_Integer})


def _mismatch(call: FxNode, rule: Rule, difference: str) -> OutputMismatchError:
    source = f" of {rule.source}" if rule.source else ""
    error = OutputMismatchError(
        f"rule {rule.name}{source} for {call.op_name} {difference}; at {call.location}",
        hint="The converter is wrong, not the model: it must return what torch computes, in count, dtype and shape.",
    )
    error.place = call.location
    return error


def _used_indices(fx: torch.fx.Node) -> set[int] | None:
    """The indices of a node's results that are read, ``None`` when they are unknown."""
    used = set()
    for user in fx.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], int):
            return None
        if user.users:
            used.add(user.args[1])
    return used


def _needed(fx: torch.fx.Node, count: int) -> int:
    """The smallest number of results that a rule must return: up to the last result that is read."""
    used = _used_indices(fx)
    if used is None:
        return count
    return max(used, default=-1) + 1


def _leaves(results: Any) -> list[Any]:
    if isinstance(results, list | tuple):
        return [leaf for item in results for leaf in _leaves(item)]
    return [results]


def _text(spec: OutputSpec) -> str:
    dtype = spec.dtype.name.lower()
    return f"{'an' if dtype[0] in 'aeiou' and not dtype.startswith('u') else 'a'} {dtype}[{', '.join(map(str, spec.shape))}]"

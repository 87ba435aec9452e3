"""Operators that lack a kernel (or a schema) for an element type are computed in a wider type and cast back.

An example, ``torch.relu(x @ y)`` of bfloat16 for ``target="onnxruntime:cpu"``, which has neither kernel: ``g.op.MatMul`` emits
``Cast(x, FLOAT)``, ``Cast(y, FLOAT)``, ``MatMul`` and ``Cast(…, BFLOAT16)``, and remembers the unrounded operand of the last Cast.
``g.op.Relu`` reads that operand, the product in float32; the Cast between them has no reader and is removed, the Cast after
``Relu`` stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxplug.build.kernels import HALVES, Kernels
from onnxplug.build.opset import Emitter
from onnxplug.build.provenance import Provenances
from onnxplug.build.spec import OpSpec

Plan = dict[str, ir.DataType]
_FLOAT = ir.DataType.FLOAT

#: Operators whose result jumps where an input changes by one rounding: they read the rounded value, as in PyTorch.
_JUMPS = frozenset(
    """ArgMax ArgMin Cast CastLike Ceil Equal Floor Greater GreaterOrEqual Hardmax IsInf IsNaN Less LessOrEqual MaxRoiPool Mod
    NonZero OneHot QuantizeLinear Round Shrink Sign ThresholdedRelu TopK Unique""".split()
)
#: torch's operators of the same kind, whose converters cast by themselves.
_JUMPING_PACKETS = frozenset(
    """bucketize ceil floor floor_divide fmod frac heaviside histc remainder round searchsorted sign sgn sort special_entr
    special_xlog1py special_xlogy threshold trunc xlogy _to_copy to type_as convert_element_type""".split()
)
#: torch's operators that jump for some values of an argument.
_JUMPING_ARGUMENTS: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "div": ("rounding_mode", ("floor", "trunc")),
    "divide": ("rounding_mode", ("floor", "trunc")),
    "grid_sampler": ("interpolation_mode", (1,)),
    "grid_sampler_2d": ("interpolation_mode", (1,)),
    "grid_sampler_3d": ("interpolation_mode", (1,)),
    "linalg_vector_norm": ("ord", (0,)),
    "norm": ("p", (0,)),
}
#: Never computed in another type: Cast itself, and operators with subgraphs, whose values have types of their own.
_AS_THEY_ARE = frozenset({"Cast", "If", "Loop", "Scan", "SequenceMap"})


class Widening:
    """Emits operators in a wider element type where the runtime does not compute in the narrow type.

    A 16-bit float that was computed in float32 is remembered with its float32 value, which the next operator reads:
    nothing is rounded between operators, and there is no Cast, as long as no reader needs the rounded value. It is rounded
    before operators that jump (Floor, comparisons), before a Cast of the model itself, and everywhere when ``islands`` is
    false.

    Args:
        g: The builder that the nodes are emitted through.
        provenance: Knows the call under conversion.
        kernels: The runtime's kernels; ``None``: only element types that schemas exclude are widened.
        islands: Whether float32 values are handed on unrounded.
    """

    def __init__(self, g: Emitter, provenance: Provenances, kernels: Kernels | None, *, islands: bool) -> None:
        self._g = g
        self._provenance = provenance
        self._kernels = kernels
        self._islands = islands and kernels is not None
        self._plans: dict[Any, Plan | None] = {}
        self._wide: dict[ir.Value, tuple[ir.Value, Any]] = {}
        self._numbers: dict[ir.Value, ir.Value] = {}

    def emit(self, spec: OpSpec, values: Sequence[ir.Value | None], attributes: Mapping[str, Any], outputs: int) -> Any:
        """The operator in a wider element type; ``None`` where it is computed in the element type of its inputs."""
        if not spec.has_schema or spec.domain or spec.op_type in _AS_THEY_ARE:
            return None
        types: dict[str, ir.DataType] = {}
        for index, value in enumerate(values):
            if value is not None and value.dtype is not None and spec.only_dtype(index) is None:
                types.setdefault(spec.group_of(index), value.dtype)
        types.pop("", None)
        if not types:
            return None
        key = (spec, *types.items())
        if key not in self._plans:
            self._plans[key] = self._plan(spec, types)
        plan = self._plans[key]
        if plan is None:
            plan = self._handed_on(spec, values, types, outputs)
        if not plan:
            return None
        wide = [
            v if v is None else self._widen(v, plan.get(spec.group_of(i)), spec, outputs) for i, v in enumerate(values)
        ]
        results = self._g.emit(spec, wide, attributes, outputs)
        several = (results,) if outputs == 1 else results
        back = [self._narrow(v, _output_group(spec, i), plan, types) for i, v in enumerate(several)]
        return back[0] if outputs == 1 else tuple(back)

    def remember(self, narrow: ir.Value, wide: ir.Value) -> None:
        """Remembers a constant before it is rounded: PyTorch scales by the unrounded Python number."""
        self._numbers[narrow] = wide

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """A Cast by torch's operator under conversion, between float32 and the 16-bit float of its results.

        The float32 that ``x`` was rounded from serves as well as ``x``, where it is known.
        """
        node = self._provenance.call
        if not self._islands or node is None or not ({x.dtype, dtype} & HALVES and _FLOAT in (x.dtype, dtype)):
            return self._cast(x, dtype)
        half = x.dtype if dtype == _FLOAT else dtype
        if _call_jumps(node) or any(spec is None or spec.dtype != half for spec in node.outputs):
            return self._cast(x, dtype)
        if dtype == _FLOAT:
            return self._unrounded(x) or self._cast(x, dtype)
        result = self._cast(x, dtype)
        self._wide[result] = x, node
        return result

    def _unrounded(self, x: ir.Value) -> ir.Value | None:
        """The float32 value that ``x`` was rounded from; a call that jumps reads only its own results unrounded."""
        wide, call = self._wide.get(x, (None, None))
        now = self._provenance.call
        return None if wide is None or (call is not now and now is not None and _call_jumps(now)) else wide

    def _cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        return self._g.op.Cast(x, to=int(dtype))

    def _plan(self, spec: OpSpec, types: Plan) -> Plan | None:
        if self._kernels is not None:
            return self._kernels.wider(spec, types)
        excluded = [n for n, dtype in types.items() if dtype == ir.DataType.BFLOAT16 and n in spec.no_bfloat16]
        return dict.fromkeys(excluded, _FLOAT) or None

    def _handed_on(self, spec: OpSpec, values: Sequence[ir.Value | None], types: Plan, outputs: int) -> Plan | None:
        """The plan for an operator that has a 16-bit kernel but whose inputs are all held in float32."""
        if not self._wide or not spec.pure or _jumps(spec, outputs):
            return None
        halves = {name for name, dtype in types.items() if dtype in HALVES}
        read = [v for i, v in enumerate(values) if v is not None and spec.group_of(i) in halves]
        if not read or not all(v.const_value is not None or self._unrounded(v) is not None for v in read):
            return None
        if all(v.const_value is not None for v in read):
            return None
        return dict.fromkeys(halves, _FLOAT)

    def _widen(self, value: ir.Value, dtype: ir.DataType | None, spec: OpSpec, outputs: int) -> ir.Value:
        if dtype is None or value.dtype == dtype:
            return value
        if dtype == _FLOAT and spec.op_type in ("Mul", "Div") and value in self._numbers:
            return self._numbers[value]
        wide = None if _jumps(spec, outputs) else self._unrounded(value)
        if wide is not None and wide.dtype == dtype:
            return wide
        return self._cast(value, dtype)

    def _narrow(self, value: ir.Value, group: Any, plan: Plan, types: Plan) -> ir.Value:
        if group not in plan:
            return value
        result = self._cast(value, types[group])
        if self._islands and types[group] in HALVES and plan[group] == _FLOAT:
            self._wide[result] = value, self._provenance.call
        return result


def _jumps(spec: OpSpec, outputs: int) -> bool:
    """Whether an operator's result jumps; the second result of a MaxPool is the place of the maximum."""
    return spec.op_type in _JUMPS or (spec.op_type == "MaxPool" and outputs > 1)


def _call_jumps(call: Any) -> bool:
    """Whether the result of a call of torch's operator jumps."""
    packet = call.op_name.partition("::")[2].partition(".")[0]
    if packet in _JUMPING_PACKETS:
        return True
    name, values = _JUMPING_ARGUMENTS.get(packet, ("", ()))
    return bool(values) and call.kwargs.get(name) in values


def _output_group(spec: OpSpec, index: int) -> Any:
    groups = spec.output_groups
    if index < len(groups):
        return groups[index]
    return groups[-1] if groups and spec.variadic_output else None

"""Kernels: functions of arrays in tables, ``OpRun`` classes, and the choice among them.

A kernel of ours is a plain function, named after its operator: inputs are its positional parameters (``None`` for an
absent input), attributes its keyword parameters with ONNX's defaults, ``**others`` all other attributes of the
operator's schema; it returns the outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import onnx

from onnxplug.errors import EvaluationError

_TYPES = onnx.AttributeProto


@dataclass(frozen=True)
class Kernel:
    """A function that computes an operator.

    Attributes:
        op: The operator.
        function: The function: inputs by position, attributes by keyword. A parameter ``outputs`` gets the number of
            the node's outputs.
        since: The first version of the domain that the kernel is for; it holds until the next kernel's.
        until: The last version; onnx's own kernel is for later versions. ``None``: there is no last version.
        domain: The domain.
        widen: Whether to compute elements narrower than float32 (float16, bfloat16, 8-bit floats, 4-bit integers) in a
            wider type and round the results once.
    """

    op: str
    function: Callable[..., Any]
    since: int = 1
    domain: str = ""
    widen: bool = True
    until: int | None = None


#: A kernel of ONNX Runtime's own domain.
microsoft = partial(Kernel, domain="com.microsoft")


class KernelTable:
    """Kernels by operator and version.

    Args:
        kernels: The kernels.
    """

    def __init__(self, kernels: Iterable[Kernel]) -> None:
        self._kernels: dict[tuple[str, str], list[Kernel]] = {}
        for kernel in kernels:
            self._kernels.setdefault((kernel.domain, kernel.op), []).append(kernel)
        for versions in self._kernels.values():
            versions.sort(key=lambda kernel: kernel.since, reverse=True)

    def find(self, domain: str, op: str, version: int) -> Kernel | None:
        """The kernel of an operator at a version of its domain."""
        kernel = next((k for k in self._kernels.get((domain, op), ()) if k.since <= version), None)
        return kernel if kernel is None or kernel.until is None or version <= kernel.until else None

    def operators(self) -> list[tuple[str, str]]:
        """Domain and name of every operator."""
        return sorted(self._kernels)


def attribute_values(node: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes as Python values; tensors as arrays, text as ``str``."""
    values: dict[str, Any] = {}
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        if attribute.type == _TYPES.STRING:
            value = value.decode()
        elif attribute.type == _TYPES.STRINGS:
            value = [text.decode() for text in value]
        elif attribute.type == _TYPES.TENSOR:
            value = onnx.numpy_helper.to_array(value)
        elif attribute.type in (_TYPES.FLOATS, _TYPES.INTS):
            value = list(value)
        values[attribute.name] = value
    return values


@cache
def _parameters(function: Callable[..., Any]) -> tuple[frozenset[str], bool, int | None]:
    """Keyword parameters of a kernel, whether it takes all others, and the greatest number of its inputs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function in C, which has no signature
        return frozenset(), False, None
    keywords = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    inputs = [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    most = None if any(p.kind is p.VAR_POSITIONAL for p in inputs) else len(inputs)
    return keywords, any(p.kind is p.VAR_KEYWORD for p in parameters), most


def bound(
    kernel: Kernel, node: onnx.NodeProto, schema: onnx.defs.OpSchema | None
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A kernel with a node's attributes, and with the defaults of its schema that the kernel knows.

    Args:
        schema: ONNX's schema of the operator, if it has one.
    """
    known, takes_all, most = _parameters(kernel.function)
    if takes_all and schema is not None:
        known |= set(schema.attributes)
    offered = {"outputs": len(node.output)}
    attributes = attribute_values(node)
    unknown = sorted(set(attributes) - known | set(attributes) & set(offered))
    values = {k: v for k, v in (attribute_values(with_defaults(node, schema)) | offered).items() if k in known}
    what = f"{kernel.domain or 'ai.onnx'}::{kernel.op} of the node {node.name!r}"
    if unknown:
        raise EvaluationError(f"the kernel of {what} does not know {', '.join(unknown)}", hint=_ANOTHER)
    if most is not None and any(node.input[most:]):
        raise EvaluationError(f"the kernel of {what} takes {most} inputs at most, got {len(node.input)}", hint=_ANOTHER)
    function = kernel.function

    def compute(inputs: Sequence[Any]) -> Sequence[Any]:
        results = function(*inputs[:most], **values)
        return results if isinstance(results, tuple) else (results,)

    return compute


_ANOTHER = "Give a kernel of your own: new_ops=[…], or functions in kernels=[onnxplug_reference.Kernel(…)]."


# -- narrow element types ------------------------------------------------------------------------------------------------

#: Element type, by name, to the wider type of its computation: NumPy has no dtype for most of them.
_WIDER: Mapping[str, type] = {
    **dict.fromkeys(
        ("float16", "bfloat16", "float4_e2m1fn", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn"), np.float32
    ),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), np.float32),
    **dict.fromkeys(("int4", "int2"), np.int8),
    **dict.fromkeys(("uint4", "uint2"), np.uint8),
}
#: Operators of ai.onnx whose result depends on the element type of an input, or that only move elements.
EXACT_TYPES = frozenset(
    """BitCast Cast CastLike Concat ConcatFromSequence Constant ConstantOfShape DequantizeLinear DynamicQuantizeLinear EyeLike
    Expand Flatten Gather GatherElements GatherND Identity Optional OptionalGetElement OptionalHasElement QuantizeLinear
    RandomNormalLike RandomUniformLike Bernoulli Reshape SequenceAt SequenceConstruct SequenceEmpty SequenceErase
    SequenceInsert SequenceLength Shape Size Slice Split SplitToSequence Squeeze Transpose Unsqueeze""".split()
)


def wider(array: Any) -> type | None:
    """The type in which a narrow array is computed; ``None`` for other arrays."""
    return _WIDER.get(array.dtype.name) if isinstance(array, np.ndarray | np.generic) else None


def widened(
    compute: Callable[[Sequence[Any]], Sequence[Any]], schema: onnx.defs.OpSchema | None
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A kernel that computes narrow inputs in a wider type, and rounds results of a narrow input's type once.

    Args:
        schema: The schema, by which outputs share the types of inputs; without a schema every result of the wider type
            takes the type of the first narrow input.
    """

    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        types = [wider(value) for value in inputs]
        if not any(types):
            return compute(inputs)
        pairs = zip(inputs, types, strict=True)
        results = compute([v if t is None else v.astype(t) for v, t in pairs])
        return _rounded(results, inputs, schema)

    return run


def _rounded(results: Sequence[Any], inputs: Sequence[Any], schema: onnx.defs.OpSchema | None) -> list[Any]:
    narrow = [value.dtype if wider(value) is not None else None for value in inputs]
    if schema is None:
        first = next(dtype for dtype in narrow if dtype is not None)
        return [_cast(value, first) for value in results]
    first = next(dtype for dtype in narrow if dtype is not None)
    types: dict[str, Any] = {}
    for index, (value, dtype) in enumerate(zip(inputs, narrow, strict=True)):
        if value is not None:
            types.setdefault(schema.inputs[min(index, len(schema.inputs) - 1)].type_str, dtype)
    for absent in schema.inputs:
        types.setdefault(absent.type_str, first)
    outputs = schema.outputs
    return [
        _cast(value, types.get(outputs[min(index, len(outputs) - 1)].type_str)) for index, value in enumerate(results)
    ]


def _cast(value: Any, dtype: Any) -> Any:
    """A result of the wider type, cast to the narrow type."""
    if isinstance(value, list):
        return [_cast(v, dtype) for v in value]
    if dtype is None or value is None or np.asarray(value).dtype != _WIDER[dtype.name]:
        return value
    return np.asarray(value).astype(dtype)


@cache
def schema_of(op: str, version: int, domain: str = "") -> onnx.defs.OpSchema | None:
    """ONNX's schema of an operator at a version of its domain; ``None`` where ONNX has none."""
    try:
        return onnx.defs.get_schema(op, version, domain)
    except onnx.defs.SchemaError:
        return None


def with_defaults(node: onnx.NodeProto, schema: onnx.defs.OpSchema | None) -> onnx.NodeProto:
    """A node with the missing attributes of its schema at their defaults."""
    missing = [
        attribute.default_value
        for name, attribute in (schema.attributes.items() if schema is not None else ())
        if attribute.default_value.type and all(a.name != name for a in node.attribute)
    ]
    if not missing:
        return node
    result = onnx.NodeProto()
    result.CopyFrom(node)
    result.attribute.extend(missing)
    return result

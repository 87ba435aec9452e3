"""GraphBuilder: what a converter emits through."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxplug.build import fold as folding
from onnxplug.build.attributes import attribute_key, check_dtypes, check_node, make_attribute
from onnxplug.build.calls import CallMixin
from onnxplug.build.dtypes import as_array, to_onnx_dtype
from onnxplug.build.functions import FunctionMixin
from onnxplug.build.inference.dims import Constant, Result, text_tensor
from onnxplug.build.kernels import HALVES, Kernels
from onnxplug.build.nesting import NestingMixin
from onnxplug.build.opset import Input, Opset
from onnxplug.build.scope import Mark
from onnxplug.build.shapes import ShapeMixin
from onnxplug.build.spec import OpSpec
from onnxplug.build.stored import StoredMixin
from onnxplug.build.widening import Widening
from onnxplug.errors import ConversionError, OpsetError
from onnxplug.observers import Events
from onnxplug.registry.target import DEFAULT_RUNTIME

Value = ir.Value

_INT = {int}
_first = itemgetter(0)


class GraphBuilder(CallMixin, NestingMixin, ShapeMixin, StoredMixin, FunctionMixin):
    """Emits typed ONNX nodes and simplifies while it does.

    Args:
        opsets: Target version of each domain; ``""`` is ai.onnx.
        optimize: Fold constants, share equal pure nodes, drop nodes that do nothing. Without it, every node asked for is
            made.
        domains: Known versions of other domains, used when a converter names none.
        schemas: Domain to the ``OpSchema`` objects that plugins registered for it.
        runtime: The program that the model is made for; ``None`` is portable ONNX.
        kernels: The runtime's kernels; what none is for is computed in a wider element type. ``None``: not known.
        exact: Whether special values must be exact where that costs time.

    Attributes:
        op: The operators of ai.onnx at the target opset.
        opset: The target version of ai.onnx.
        opsets: Every domain that the graph imports, with its version.
    """

    def __init__(
        self,
        opsets: Mapping[str, int],
        *,
        optimize: bool = True,
        domains: Mapping[str, int] | None = None,
        schemas: Mapping[str, Sequence[Any]] | None = None,
        runtime: str | None = DEFAULT_RUNTIME,
        exact: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        self.opsets: dict[str, int] = dict(opsets)
        self.opset: int = self.opsets[""]
        self.optimize = optimize
        self.runtime = runtime
        self.exact = exact
        self._has_kernels = kernels is not None
        self._widening = Widening(self, kernels, islands=optimize and not exact)
        self.schemas: dict[str, Sequence[Any]] = dict(schemas or {})
        self.op = Opset(self, "", self.opset)
        self._declared = dict(domains or {})
        self._domains: dict[tuple[str, int], Opset] = {}
        self._domain_users: dict[str, str] = {}
        self._asked = frozenset(self.opsets)
        self._constants: dict[Any, Value] = {}
        self._attributes: dict[Any, tuple[ir.Attr, Any]] = {}
        #: Who is told of what the builder spends time on, where someone is.
        self.events: Events | None = None
        super().__init__()

    # -- emission ------------------------------------------------------------------------------------------------------

    def domain(self, name: str, version: int | None = None) -> Opset:
        """The operators of a domain, e.g. ``g.domain("com.acme", 2).NMS(boxes, scores, _outputs=2)``.

        Args:
            name: The domain; ``""`` is ai.onnx.
            version: Its version; ``None`` is the one that the user asked for, else the one that a plugin declares, else 1.

        Returns:
            An object whose attributes are the domain's operators, as ``g.op`` is for ai.onnx.

        Raises:
            OpsetError: The graph already uses another version of that domain.
        """
        if name in ("", "ai.onnx"):
            if version is not None and version != self.opset:
                raise OpsetError(f"ai.onnx {version} was requested, but the export's opset is {self.opset}")
            return self.op
        asked = version if version is not None else self.opsets.get(name, self._declared.get(name, 1))
        present = self.opsets.get(name)
        if present is not None and present != asked:
            first = self._domain_users.get(name, "the export's opset_version")
            raise OpsetError(
                f"two versions of domain {name!r}: {present} (by {first}) and {asked} (by {self._who()})",
                hint="One model imports one version of a domain; make the rules agree on it.",
            )
        opset = self._domains.get((name, asked))
        if opset is None:
            opset = self._domains[name, asked] = Opset(self, name, asked)
            self.opsets[name] = asked
            self._domain_users[name] = self._who()
        return opset

    def declared_version(self, name: str, default: int = 1) -> int:
        """The version that a plugin declares for a domain.

        Args:
            name: The domain.
            default: The version of a domain that no plugin declares.
        """
        return self._declared.get(name, default)

    def _who(self) -> str:
        return str(self.current) if self.current is not None else "the graph"

    def emit(self, spec: OpSpec, inputs: Sequence[Input], attributes: Mapping[str, Any], outputs: int) -> Any:
        """Emits one node, or finds a value that already holds its result. Converters use ``g.op``.

        Args:
            spec: The operator.
            inputs: Values, ``None`` for an absent optional one, or Python objects, which become constants.
            attributes: Attributes by name; those that are ``None`` are left out.
            outputs: Number of outputs.

        Returns:
            The output, or a tuple of several.

        Raises:
            ConversionError: The inputs, attributes or outputs do not fit the operator's schema.
        """
        values = [
            v if v is None or type(v) is Value else self._as_input(v, spec, i, inputs) for i, v in enumerate(inputs)
        ]
        while values and values[-1] is None:
            values.pop()
        if spec.has_schema:
            check_node(spec, values, outputs)
        if self._has_kernels or (spec.no_bfloat16 and _any_bfloat16(values)):
            widened = self._widening.emit(spec, values, attributes, outputs)
            if widened is not None:
                return widened
        attrs: dict[str, ir.Attr] = {}
        raw: dict[str, Any] = {}
        keys: list[Any] = []
        references: list[ir.Attr] = []
        for name, value in attributes.items():
            if value is not None:
                attr, attr_key = self._as_attribute(spec, name, value)
                attrs[name] = attr
                keys.append((name, attr_key))
                if attr.is_ref():
                    references.append(attr)
                else:
                    raw[name] = attr.value
        for name in spec.required_attributes:
            if name not in attrs:
                raise ConversionError(f"{spec.op_type} needs the attribute {name!r}")
        key = None
        if self.optimize and spec.pure:
            if outputs == 1 and not references:
                found = self._without_node(spec, values, raw)
                if found is not None:
                    return found
            if len(keys) > 1:
                keys.sort(key=_first)
            key = (spec, outputs, *map(id, values), *keys)
            seen = self._scope.lookup(key)
            if seen is not None:
                return seen[0] if outputs == 1 else seen
        # A float that is known at a function's call alone tells nothing of shapes; anything else may.
        typed = spec.op_type != "Constant" and (
            not references or all(a.type == ir.AttributeType.FLOAT for a in references)
        )
        return self._append(spec, values, attrs, raw if typed else None, outputs, key)

    def _without_node(self, spec: OpSpec, values: Sequence[Value | None], raw: Mapping[str, Any]) -> Value | None:
        """A value that holds the result already, or is the constant that it is; ``None`` where a node must compute it."""
        if self.events is None:
            return self._simplified(spec, values, raw)
        started = time.perf_counter_ns()
        found = self._simplified(spec, values, raw)
        self.events.count("part", "simplification and folding", started)
        return found

    def _simplified(self, spec: OpSpec, values: Sequence[Value | None], raw: Mapping[str, Any]) -> Value | None:
        if spec.simplify is not None:
            found: Value | None = spec.simplify(self, values, raw)
            if found is not None:
                return found
        if spec.fold is None:
            return None
        for value in values:
            if value is not None and value.const_value is None:
                return None
        folded = self._folded(spec, values, raw)
        if self.events is not None:
            self.events.count("fold", spec.op_type, hit=folded is not None)
        return folded

    def _folded(self, spec: OpSpec, values: Sequence[Value | None], raw: Mapping[str, Any]) -> Value | None:
        """The constant that an operator on constants gives; ``None`` where that is left to the runtime."""
        assert spec.fold is not None
        arrays = [None if v is None else self.constant(v) for v in values]
        if sum(a.size for a in arrays if a is not None) > folding.MAX_ELEMENTS:
            return None
        result = spec.fold(arrays, raw)
        return None if result is None or result.size > folding.MAX_ELEMENTS else self.const(result)

    def _append(
        self,
        spec: OpSpec,
        values: Sequence[Value | None],
        attrs: Mapping[str, ir.Attr],
        raw: Mapping[str, Any] | None,
        outputs: int,
        key: Any,
    ) -> Any:
        if spec.input_types:
            check_dtypes(spec, values, self._is_stored)
        # Nothing is inferred from an attribute that is known at a function's call alone.
        inferred = self._infer(spec, values, attrs, raw, outputs) if raw is not None else []
        results = []
        for index in range(outputs):
            dtype, dims = inferred[index] if index < len(inferred) else (None, None)
            if dtype is None:
                dtype = spec.output_dtype(index, values)
            kind = ir.TensorType(dtype) if dtype is not None else None
            results.append(Value(type=kind, shape=self.shape_of(dims) if dims is not None else None))
        node = ir.Node(
            spec.domain,
            spec.op_type,
            values,
            attrs,
            outputs=results,
            name="",  # until the model is complete
        )
        self.provenance_of[node] = self.provenance
        if self.package is not None:
            self.made_by[node] = self.package
        answer = tuple(node.outputs)
        self._scope.add(node, key, answer)
        return answer[0] if outputs == 1 else answer

    def _is_stored(self, value: Value) -> bool:
        return value.const_value is not None or self.is_weight(value)

    def _infer(
        self,
        spec: OpSpec,
        values: Sequence[Value | None],
        attrs: Mapping[str, ir.Attr],
        raw: Mapping[str, Any],
        outputs: int,
    ) -> Result:
        started = time.perf_counter_ns() if self.events is not None else 0
        inferred: Result = spec.infer(values, raw, spec) if spec.infer is not None else []
        if not inferred or inferred[0][1] is None:
            inferred = self._infer_by_onnx(spec, values, attrs, outputs) or inferred
        if self.events is not None:
            self.events.count("part", "shape inference", started)
        return inferred

    def _infer_by_onnx(
        self, spec: OpSpec, values: Sequence[Value | None], attrs: Mapping[str, ir.Attr], outputs: int
    ) -> Result:
        if spec.schema is None or any(
            a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in attrs.values()
        ):
            return []
        from onnxplug.build.inference.by_onnx import infer_by_onnx

        started = time.perf_counter_ns() if self.events is not None else 0
        inferred = infer_by_onnx(spec.schema, values, attrs, outputs, self.opsets)
        if self.events is not None:
            self.events.count("part", "shape inference, by onnx", started)
        return inferred

    # -- inputs and attributes -----------------------------------------------------------------------------------------

    def _as_input(self, item: Any, spec: OpSpec, index: int, inputs: Sequence[Input]) -> Value:
        """A constant for a Python object given as input, of the dtype that the operator wants there."""
        if isinstance(item, list | tuple):
            if not set(map(type, item)) <= _INT and any(isinstance(part, Value) for part in item):
                return self.vector(item)
        elif isinstance(item, torch.Tensor | np.ndarray | np.generic):
            return self.const(item)
        elif isinstance(item, Value):
            return item
        dtype = spec.only_dtype(index)
        if dtype is None:
            group = spec.group_of(index)
            for position, other in enumerate(inputs):
                if group and type(other) is Value and spec.group_of(position) == group:
                    dtype = other.dtype
                    break
        return self.const(item, dtype)

    def _as_attribute(self, spec: OpSpec, name: str, value: Any) -> tuple[ir.Attr, Any]:
        """An attribute of an operator, and what is equal for equal ones.

        Equal numbers, texts and lists of integers of one operator share theirs.
        """
        kind = type(value)
        key: Any = None
        if kind is int or kind is str:
            key = spec, name, kind, value
        elif kind is float:
            key = spec, name, kind, value, math.copysign(1.0, value)
        elif (kind is list or kind is tuple) and set(map(type, value)) <= _INT:
            key = spec, name, list, tuple(value)
        else:
            attr = self._new_attribute(spec, name, value)
            return attr, attribute_key(attr)
        found = self._attributes.get(key)
        if found is None:
            attr = self._new_attribute(spec, name, value)
            found = self._attributes[key] = attr, attribute_key(attr)
        return found

    def _new_attribute(self, spec: OpSpec, name: str, value: Any) -> ir.Attr:
        if isinstance(value, Value) or (isinstance(value, list | tuple) and any(isinstance(v, Value) for v in value)):
            raise ConversionError(
                f"attribute {name!r} of {spec.op_type} must be a constant, but it is the dynamic size "
                f"{self.symbol_name(value)}",
                hint="Make that dimension static, or use an operator that takes it as an input.",
            )
        return make_attribute(spec, name, value)

    # -- constants -----------------------------------------------------------------------------------------------------

    def const(self, value: Any, dtype: torch.dtype | ir.DataType | None = None) -> Value:
        """A shared constant of a Python scalar, text, nested list, numpy array or torch tensor.

        Args:
            value: The content; the constant has its shape.
            dtype: The element type. ``None``: int64 for ints, float32 for floats, bool for bools; arrays and tensors keep theirs.
        """
        wanted = to_onnx_dtype(dtype) if dtype is not None else None
        quick: Any = None
        kind = type(value)
        if (kind is list or kind is tuple) and set(map(type, value)) <= _INT:
            quick = (list, tuple(value), wanted)
            found = self._constants.get(quick)
            if found is not None:
                return found
        elif isinstance(value, int | float):
            # 1 == 1.0 == True and 0.0 == -0.0 to a dict, but not to us.
            quick = (type(value), value, math.copysign(1.0, value) if value == 0 else 1.0, wanted)
            found = self._constants.get(quick)
            if found is not None:
                return found
        array = as_array(value, wanted)
        key: Any = (array.dtype, array.shape, array.tobytes()) if array.nbytes <= 65536 else id(array)
        found = self._constants.get(key)
        if found is None:
            tensor = Constant(array) if array.dtype.kind != "U" else text_tensor(array)
            found = Value(type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
            self._constants[key] = found
        if quick is not None:
            self._constants[quick] = found
            if self._has_kernels and wanted in HALVES and quick[0] is not list:
                self._widening.remember(found, self.const(value, ir.DataType.FLOAT))
        return found

    def constant(self, value: Value | None) -> np.ndarray | None:
        """The numpy array that a value is known to be, ``None`` for one that is only known at run time.

        Parameters and buffers are never known: their values may be replaced in the exported model. What they are stored as
        may depend on them: ``g.stored(x)`` and ``g.derive(x, make, key)``.
        """
        if value is None or value.const_value is None:
            return None
        return value.const_value.numpy()

    def cast(self, x: Value, dtype: torch.dtype | ir.DataType) -> Value:
        """``x`` converted to ``dtype``; ``x`` itself when it has that dtype.

        Args:
            x: The value.
            dtype: The element type, of torch or of ONNX.

        Returns:
            A value of the shape of ``x``.
        """
        wanted = to_onnx_dtype(dtype)
        if x.dtype == wanted:
            return x
        if self._has_kernels:
            return self._widening.cast(x, wanted)
        return self.op.Cast(x, to=int(wanted))

    # -- undoing -------------------------------------------------------------------------------------------------------

    def mark(self) -> tuple[Mark, int]:
        """The present end of emission, to be given to :meth:`rollback`."""
        return self._scope.mark(), len(self._domain_users)

    def rollback(self, mark: tuple[Mark, int]) -> None:
        """Removes every node emitted since ``mark``, and what was remembered of them: the domains' versions too."""
        nodes, domains = mark
        self.forget_sizes(self._scope.rollback(nodes))
        while len(self._domain_users) > domains:
            name, _ = self._domain_users.popitem()
            del self._domains[name, self.opsets[name]]
            if name not in self._asked:
                del self.opsets[name]


def _any_bfloat16(values: Sequence[Value | None]) -> bool:
    return ir.DataType.BFLOAT16 in [v.dtype for v in values if v is not None]

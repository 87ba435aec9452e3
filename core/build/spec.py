"""The builder's facts about an ONNX operator at one opset: attribute types, output dtypes, purity."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import onnx.defs
import onnx_ir as ir

from onnxplug.errors import OpsetError
from onnxplug.plugin_api import OnnxOperator

#: Elements above which a folded result is left for the runtime: folding must not swell the file.
MAX_FOLDED = 4096

#: Operators whose result differs from run to run, or that have side effects: never shared, never folded.
IMPURE = frozenset(
    {
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Bernoulli",
        "Multinomial",
        "Dropout",
        "If",
        "Loop",
        "Scan",
        "SequenceMap",
    }
)

_TENSOR_TYPES = {f"tensor({dtype.name.lower()})": dtype for dtype in ir.DataType if dtype.name != "UNDEFINED"}


class OpSpec:
    """One operator of one domain at one version.

    Attributes:
        domain, op_type: The operator.
        name: Its name in messages.
        attributes: Attribute name to its type; empty when there is no schema.
        input_groups: For each formal input the name of its type variable (``"T"``); the last repeats when variadic.
        input_dtypes: For each formal input the only dtype that it takes, or ``None``.
        output_groups: For each formal output its type variable, or the dtype that it always has.
        pure: Two nodes with equal inputs and attributes give equal results.
        schema: Its schema, by onnx or a plugin; ``None`` when there is none.
        has_schema: Whether there is one.
        infer, simplify, fold: Shape inference, simplification at emission and constant folding, when there are any.
    """

    __slots__ = (
        "_optional",
        "attributes",
        "domain",
        "fitting",
        "fold",
        "has_schema",
        "infer",
        "input_dtypes",
        "input_groups",
        "input_types",
        "max_inputs",
        "max_outputs",
        "min_inputs",
        "min_outputs",
        "name",
        "no_bfloat16",
        "op_type",
        "output_groups",
        "pure",
        "required_attributes",
        "schema",
        "simplify",
        "since",
        "variadic_input",
        "variadic_output",
        "version",
    )

    def __init__(
        self,
        domain: str,
        op_type: str,
        version: int,
        schema: onnx.defs.OpSchema | None,
        known: OnnxOperator | None = None,
    ) -> None:
        self.domain = domain
        self.op_type = op_type
        self.name = f"{domain}::{op_type}" if domain else op_type
        self.version = version
        #: The version since which the operator has this schema.
        self.since = schema.since_version if schema is not None else version
        self.has_schema = schema is not None
        self.schema = schema
        self.attributes: dict[str, ir.AttributeType] = {}
        self.required_attributes: tuple[str, ...] = ()
        self.input_groups: list[str] = []
        #: Type variables that may not be bfloat16.
        self.no_bfloat16: frozenset[str] = frozenset()
        self.input_dtypes: list[ir.DataType | None] = []
        self.output_groups: list[str | ir.DataType | None] = []
        #: For each formal input the dtypes that the schema allows; none where it takes more than tensors.
        self.input_types: list[frozenset[ir.DataType]] = []
        #: Combinations of the inputs' dtypes that are known to fit the schema.
        self.fitting: set[tuple[ir.DataType | None, ...]] = set()
        self._optional: frozenset[int] = frozenset()
        self.variadic_input = self.variadic_output = schema is None
        self.min_inputs, self.max_inputs = 0, 1 << 30
        self.min_outputs, self.max_outputs = 1, 1 << 30
        self.pure = schema is not None and op_type not in IMPURE and not getattr(schema, "non_deterministic", False)
        known = known if known is not None else OnnxOperator(op_type, domain)
        self.infer, self.simplify, self.fold = known.infer, known.simplify, known.fold
        if schema is not None:
            self._read(schema)

    def _read(self, schema: onnx.defs.OpSchema) -> None:
        constraints = {c.type_param_str: list(c.allowed_type_strs) for c in schema.type_constraints}
        self.attributes = {name: ir.AttributeType(_number(a.type)) for name, a in schema.attributes.items()}
        self.required_attributes = tuple(name for name, a in schema.attributes.items() if a.required)
        self.min_inputs, self.max_inputs = schema.min_input, schema.max_input
        self.min_outputs, self.max_outputs = schema.min_output, schema.max_output
        variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
        self.no_bfloat16 = frozenset(g for g, allowed in constraints.items() if "tensor(bfloat16)" not in allowed)
        for formal in schema.inputs:
            group = formal.type_str
            # A variadic input that may mix types (If, Loop) has no dtype in common.
            self.input_groups.append("" if formal.option == variadic and not formal.is_homogeneous else group)
            allowed = constraints.get(group, [group])
            self.input_dtypes.append(_TENSOR_TYPES.get(allowed[0]) if len(allowed) == 1 else None)
            types = [_TENSOR_TYPES.get(text) for text in allowed]
            self.input_types.append(frozenset(t for t in types if t is not None) if all(types) else frozenset())
        optional = onnx.defs.OpSchema.FormalParameterOption.Optional
        self._optional = frozenset(i for i, formal in enumerate(schema.inputs) if formal.option == optional)
        self.variadic_input = bool(schema.inputs) and schema.inputs[-1].option == variadic
        for formal in schema.outputs:
            allowed = constraints.get(formal.type_str, [formal.type_str])
            only = _TENSOR_TYPES.get(allowed[0]) if len(allowed) == 1 else None
            self.output_groups.append(only if only is not None else formal.type_str)
        self.variadic_output = bool(schema.outputs) and schema.outputs[-1].option == variadic

    def group_of(self, index: int) -> str:
        """The type variable of the input at ``index``, the empty string when it shares its dtype with none."""
        groups = self.input_groups
        if index < len(groups):
            return groups[index]
        return groups[-1] if groups and self.variadic_input else ""

    def is_required(self, index: int) -> bool:
        """Whether the schema requires the input at ``index``."""
        return self.has_schema and index not in self._optional

    def only_dtype(self, index: int) -> ir.DataType | None:
        """The only dtype that the input at ``index`` takes, if there is a single one."""
        return self.input_dtypes[index] if index < len(self.input_dtypes) else None

    def output_dtype(self, index: int, inputs: Sequence[ir.Value | None]) -> ir.DataType | None:
        """The dtype that the schema gives the output at ``index``, if it follows from the inputs'."""
        groups = self.output_groups
        if not groups or (index >= len(groups) and not self.variadic_output):
            return None
        group = groups[index] if index < len(groups) else groups[-1]
        if not isinstance(group, str):
            return group
        for position, value in enumerate(inputs):
            if value is not None and self.group_of(position) == group:
                return value.dtype
        return None


def _number(kind: Any) -> int:
    return int(kind.value)


@lru_cache(maxsize=4096)
def onnx_spec(op_type: str, opset: int, known: OnnxOperator | None = None) -> OpSpec:
    """The specification of an ai.onnx operator at an opset; ``known``: its record.

    Raises:
        OpsetError: ai.onnx has no such operator at that opset.
    """
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        since = _first_version(op_type)
        reason = f"it exists since opset {since}" if since else "there is no such operator in ai.onnx"
        raise OpsetError(
            f"ai.onnx {opset} has no operator {op_type}: {reason}",
            hint=f"Export with opset_version={since} or later." if since else "Check the spelling of its name.",
        ) from None
    if schema.deprecated:
        raise OpsetError(f"ai.onnx {opset} has deprecated {op_type}")
    return OpSpec("", op_type, opset, schema, known)


def _first_version(op_type: str) -> int | None:
    versions = [s.since_version for s in onnx.defs.get_all_schemas_with_history() if s.name == op_type and not s.domain]
    return min(versions) if versions else None


def custom_spec(
    domain: str, op_type: str, version: int, schemas: Sequence[Any] = (), known: OnnxOperator | None = None
) -> OpSpec:
    """The specification of an operator of another domain: from its schema when one is known, permissive otherwise."""
    schema = next((s for s in schemas if s.name == op_type and s.domain == domain and s.since_version <= version), None)
    if schema is None:
        with contextlib.suppress(onnx.defs.SchemaError):
            schema = onnx.defs.get_schema(op_type, version, domain)
    return OpSpec(domain, op_type, version, schema, known)

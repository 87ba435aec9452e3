"""Finds NumPy kernels: the call's, plugins', ours, onnx's, and last the function body of ONNX's schema."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx.reference.op_run import OpRun

from onnxplug.errors import EvaluationError
from onnxplug.text import in_a_line
from onnxplug_reference.graphs import Compute, Library
from onnxplug_reference.kernels import EXACT_TYPES, Kernel, KernelTable, bound, schema_of, widened, with_defaults
from onnxplug_reference.trace import Trace

#: Domain to onnx's package with its kernels.
_ONNX_KERNELS = {
    "": "onnx.reference.ops",
    "ai.onnx.ml": "onnx.reference.ops.aionnxml",
    "ai.onnx.preview": "onnx.reference.ops.aionnx_preview",
    "ai.onnx.preview.training": "onnx.reference.ops.aionnx_preview_training",
}


@cache
def our_kernels() -> KernelTable:
    """The kernels of this package."""
    from onnxplug_reference.microsoft import KERNELS as MICROSOFT
    from onnxplug_reference.standard import KERNELS as STANDARD

    return KernelTable([*STANDARD, *MICROSOFT])


def has_kernel(domain: str, op: str) -> bool:
    """Whether this package has a kernel for an operator of a domain that ONNX does not define."""
    return our_kernels().find(domain, op, 1) is not None


class NumpyResolver:
    """Finds the kernels of nodes.

    Args:
        classes: ``OpRun`` classes by domain and operator, which come first.
        nested: The function that makes evaluators of subgraphs for ``OpRun`` classes.
    """

    def __init__(
        self,
        classes: Mapping[tuple[str, str], type[OpRun]],
        nested: Callable[..., Any],
        trace: Trace,
    ) -> None:
        self._classes = classes
        self._user_kernels = KernelTable(())
        self._nested = nested
        self._trace = trace

    def give(self, kernels: Iterable[Kernel]) -> None:
        """Adds kernels that precede ours."""
        self._user_kernels = KernelTable(kernels)

    def comes_first(self, domain: str, op_type: str, version: int) -> bool:
        """Whether a kernel of the call or of a plugin replaces the model's function."""
        return (domain, op_type) in self._classes or self._user_kernels.find(domain, op_type, version) is not None

    def compute(self, node: onnx.NodeProto, opsets: Mapping[str, int], library: Library) -> Compute | None:
        """The kernel of a node; ``None`` if there is none."""
        kernel = self._implementation(node, opsets)
        if kernel is None:
            return None

        def quiet(inputs: Sequence[Any]) -> Sequence[Any]:
            with np.errstate(all="ignore"):  # infinities and NaN are no errors
                return kernel(inputs)

        return quiet

    def _implementation(self, node: onnx.NodeProto, opsets: Mapping[str, int]) -> Compute | None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        version = opsets.get(domain, 1)
        own_class = self._classes.get((domain, node.op_type))
        if own_class is not None:
            return self._of_class(own_class, node, opsets)
        kernel = self._user_kernels.find(domain, node.op_type, version) or our_kernels().find(
            domain, node.op_type, version
        )
        schema = schema_of(node.op_type, version, domain)
        if kernel is not None:
            compute = bound(kernel, node, schema)
            return widened(compute, schema) if kernel.widen else compute
        if domain not in _ONNX_KERNELS:
            return None
        onnx_class = _onnx_class(domain, node.op_type, version)
        if onnx_class is not None:
            compute = self._of_class(onnx_class, _with_known_defaults(node, schema, onnx_class), opsets)
            return compute if node.op_type in EXACT_TYPES else widened(compute, schema)
        return self._of_schema(node, schema, version)

    def _of_class(self, kernel: type[OpRun], node: onnx.NodeProto, opsets: Mapping[str, int]) -> Compute:
        """The kernel of an ``OpRun`` class with the attributes of a node."""
        parameters = {
            "log": lambda pattern, *args: None,
            "opsets": dict(opsets),
            "verbose": 0,
            "new_ops": dict(self._classes),
            "existing_functions": {},
            "evaluator_cls": self._nested,
        }
        try:
            instance = kernel(node, parameters)
        except EvaluationError:
            raise
        except Exception as error:
            raise EvaluationError(
                f"the attributes of {node.op_type} are not those that the operator takes: {type(error).__name__}: "
                f"{in_a_line(error)}"
            ) from error
        if not instance.need_context():
            return lambda inputs: instance.run(*inputs)

        def run(inputs: Sequence[Any]) -> Sequence[Any]:
            frame = self._trace.frame
            return instance.run(*inputs, context=frame.visible() if frame is not None else {})

        return run

    def _of_schema(self, node: onnx.NodeProto, schema: Any, version: int) -> Compute | None:
        """The kernel by the function body of an operator's schema; ``None`` without a body."""
        if schema is None or not (schema.has_function or schema.has_context_dependent_function):
            return None

        node = with_defaults(node, schema)

        def run(inputs: Sequence[Any]) -> Sequence[Any]:
            body = _body(node, schema, version, inputs)
            nested = self._nested(_called(body, node))
            feeds = dict.fromkeys(body.input) | dict(zip(body.input, inputs, strict=False))
            return nested.run(None, feeds)

        return run


@cache
def _onnx_class(domain: str, op: str, version: int) -> type[OpRun] | None:
    """onnx's kernel of an operator; ``None`` if onnx has none."""
    module = importlib.import_module(f"{_ONNX_KERNELS[domain]}._op_list")
    registered = module._build_registered_operators()
    versions = registered.get(op)
    if versions is None:
        return None
    best = max((v for v in versions if v is not None and v <= version), default=None)
    return versions[best] if best is not None else versions.get(None)


def _with_known_defaults(
    node: onnx.NodeProto, schema: onnx.defs.OpSchema | None, kernel: type[OpRun]
) -> onnx.NodeProto:
    """A node with the defaults of its schema that onnx's kernel takes, which may be of another version."""
    taken = inspect.signature(kernel._run).parameters
    known = {a.name for a in node.attribute} | set(taken)
    result = onnx.NodeProto()
    result.CopyFrom(with_defaults(node, schema))
    kept = [a for a in result.attribute if a.name in known]
    del result.attribute[:]
    result.attribute.extend(kept)
    return result


def _body(node: onnx.NodeProto, schema: Any, version: int, inputs: Sequence[Any]) -> onnx.FunctionProto:
    """ONNX's function body of an operator at a version, for inputs of these types."""
    body = onnx.FunctionProto()
    if schema.has_function:
        body.CopyFrom(schema.function_body)
        return body
    types = [onnx.TypeProto() if value is None else _type(value) for value in inputs]
    body.ParseFromString(
        schema.get_context_dependent_function(node.SerializeToString(), [t.SerializeToString() for t in types])
    )
    if not body.node:
        raise EvaluationError(f"ONNX has no body of {node.op_type} (version {version}) for inputs of these types")
    return body


def _type(value: Any) -> onnx.TypeProto:
    element = onnx.helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype)
    return onnx.helper.make_tensor_type_proto(element, np.asarray(value).shape)


def _called(body: onnx.FunctionProto, node: onnx.NodeProto) -> onnx.FunctionProto:
    """A function with the attributes of a call as its defaults, and a name of its own among the bodies of an operator."""
    called = onnx.FunctionProto()
    called.CopyFrom(body)
    called.overload = hashlib.sha256(body.SerializeToString(deterministic=True)).hexdigest()
    names = {a.name for a in node.attribute}
    kept = [a for a in called.attribute_proto if a.name not in names]
    del called.attribute_proto[:]
    called.attribute_proto.extend([*kept, *node.attribute])
    return called

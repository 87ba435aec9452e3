"""Whether ONNX Runtime's CPU takes a node in half precision: it is tried with a model of the node alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import onnx_ir as ir

from onnxplug.build.kernels import Kernels
from onnxplug.build.spec import onnx_spec
from onnxplug.run.save import to_bytes
from onnxplug.run.session import make_session

#: Operators that ONNX Runtime loads in float16 and refuses at run time when they reduce.
_REFUSED = frozenset({"ScatterElements", "ScatterND"})
Dtypes = Sequence[ir.DataType | None]


def lacks_kernel(node: ir.Node, version: int, dtypes: Dtypes, results: Dtypes, kernels: Kernels | None) -> str | None:
    """Why a node can't be computed in half precision by ONNX Runtime's CPU; ``None`` where it can.

    A node with a kernel for float32 and none for float16 gets Casts from ONNX Runtime when it loads the model.

    Args:
        dtypes, results: The element types of operands and results in half precision; ``None`` for an absent value.
        kernels: The kernels, of which one must take exactly these types; ``None`` where ONNX Runtime may cast.
    """
    if not node.domain and node.op_type in _REFUSED and node.attributes.get_string("reduction", "none") != "none":
        return "ONNX Runtime refuses it in half precision when it reduces"
    if kernels is not None and not node.domain:
        spec = onnx_spec(node.op_type, version)
        types = {spec.group_of(i): d for i, d in enumerate(dtypes) if d is not None and spec.only_dtype(i) is None}
        types.pop("", None)
        if not kernels.takes(spec, types):
            return "the runtime's CPU has no kernel for it in half precision"
        return None
    wide = [None if d is None else ir.DataType.FLOAT if d in _HALVES else d for d in dtypes]
    wide_results = [None if d is None else ir.DataType.FLOAT if d in _HALVES else d for d in results]
    attributes = tuple(node.attributes.values())
    if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in attributes):
        return None
    key = (node.domain, node.op_type, version, repr(attributes))
    if _loads(key, tuple(dtypes), tuple(results), _Node(node)) or not _loads(
        key, tuple(wide), tuple(wide_results), _Node(node)
    ):
        return None
    return "ONNX Runtime's CPU can't load it in half precision"


_HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


class _Node:
    """A node in an argument that the cache ignores: all are equal."""

    def __init__(self, node: ir.Node) -> None:
        self.node = node

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Node)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=4096)
def _loads(key: tuple[str, str, int, str], dtypes: tuple[Any, ...], results: tuple[Any, ...], holder: _Node) -> bool:
    domain, op_type, version, _ = key
    inputs = [
        None if d is None else ir.Value(name=f"i{i}", type=ir.TensorType(d), shape=_shape(holder.node.inputs[i]))
        for i, d in enumerate(dtypes)
    ]
    outputs = [
        ir.Value(name=f"o{i}" if d is not None else "", type=ir.TensorType(d) if d else None)
        for i, d in enumerate(results)
    ]
    attributes = _typed(holder.node.attributes.values(), results)
    node = ir.Node(domain, op_type, inputs, attributes, outputs=outputs, version=version)
    imports: Mapping[str, int] = {"": 21, domain: version}
    graph = ir.Graph(
        [v for v in inputs if v is not None], [o for o in outputs if o.name], nodes=[node], opset_imports=dict(imports)
    )
    try:
        make_session(to_bytes(ir.Model(graph, ir_version=10)))
    except Exception:
        return False
    return True


def _typed(attributes: Any, results: Sequence[Any]) -> list[ir.Attr]:
    return [
        ir.AttrInt64(a.name, int(results[0])) if a.name in ("to", "dtype") and results and results[0] in _HALVES else a
        for a in attributes
    ]


def _shape(value: ir.Value | None) -> ir.Shape | None:
    """A shape of the same rank without sizes; ``None`` where a value has no shape."""
    return ir.Shape([None] * len(value.shape)) if value is not None and value.shape is not None else None

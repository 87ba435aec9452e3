"""Operators of ONNX that torch has: ``torch.onnx.ops.symbolic`` and the namespace ``onnx``."""

from __future__ import annotations

import operator
import re
from typing import Any

import onnx.defs
from onnx_ir import DataType, Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def symbolic(g: GraphBuilder, node: FxNode) -> Value:
    """_symbolic(Tensor?[] inputs, str op_type, int onnx_dtype, *, SymInt[] shape, str[] attr_keys, str[] attr_types, int[][] attr_pos, int[] attr_ints, float[] attr_floats, str[] attr_strs, str[] metadata_props_keys, str[] metadata_props_values, str domain="", int? version=None) -> Tensor"""  # noqa: E501
    (result,) = _emit(g, node, [node.arg("onnx_dtype")])
    return result


def symbolic_multi_out(g: GraphBuilder, node: FxNode) -> list[Value]:
    """_symbolic_multi_out(Tensor?[] inputs, str op_type, int[] onnx_dtypes, *, SymInt[][] shapes, str[] attr_keys, str[] attr_types, int[][] attr_pos, int[] attr_ints, float[] attr_floats, str[] attr_strs, str[] metadata_props_keys, str[] metadata_props_values, str domain="", int? version=None) -> Tensor[]"""  # noqa: E501
    return _emit(g, node, node.arg("onnx_dtypes"))


def _emit(g: GraphBuilder, node: FxNode, dtypes: list[int]) -> list[Value]:
    domain, version, op_type = node.arg("domain"), node.arg("version"), node.arg("op_type")
    if domain in ("", "ai.onnx"):
        _check_version(g, op_type, version)
        version = None
    attributes = _attributes(node)
    keys, values = node.arg("metadata_props_keys"), node.arg("metadata_props_values")
    with g.provenance.annotated(dict(zip(keys, values, strict=True))):
        emitted = getattr(g.domain(domain, version), op_type)(*node.arg("inputs"), _outputs=len(dtypes), **attributes)
    results = list(emitted) if isinstance(emitted, tuple) else [emitted]
    for result, dtype in zip(results, dtypes, strict=True):
        if result.dtype is None:
            result.dtype = DataType(dtype)
    return results


def _check_version(g: GraphBuilder, op_type: str, version: int | None) -> None:
    """An operator of ai.onnx requested at another version must be the same operator at the target's opset."""
    if version is None or version == g.opset:
        return
    try:
        requested = onnx.defs.get_schema(op_type, version, "").since_version
        present = onnx.defs.get_schema(op_type, g.opset, "").since_version
    except onnx.defs.SchemaError:
        return  # the builder reports the error
    if requested != present:
        raise Unsupported(
            f"{op_type} is requested as of opset {version}, and opset {g.opset} has another version of it",
            hint=f"Export with opset_version={version}.",
        )


def _attributes(node: FxNode) -> dict[str, Any]:
    """The attributes, which torch packs into lists by type; a number in a list of floats stays a float."""
    kinds = {"i": "attr_ints", "f": "attr_floats", "s": "attr_strs"}
    attributes: dict[str, Any] = {}
    keys, types, places = node.arg("attr_keys"), node.arg("attr_types"), node.arg("attr_pos")
    for key, kind, (start, end) in zip(keys, types, places, strict=True):
        packed = node.arg(kinds[kind[0]])
        convert = {"i": int, "f": float, "s": str}[kind[0]]
        attributes[key] = [convert(v) for v in packed[start:end]] if len(kind) > 1 else convert(packed[start])
    return attributes


def rotary_embedding(g: GraphBuilder, node: FxNode) -> Value:
    """RotaryEmbedding.opset23(Tensor x, Tensor cos_cache, Tensor sin_cache, Tensor? position_ids=None, *, bool interleaved=False, SymInt num_heads=0, SymInt rotary_embedding_dim=0) -> Tensor"""  # noqa: E501
    x, cos, sin, positions, interleaved, heads, size = node.args
    return g.op.RotaryEmbedding(
        x, cos, sin, positions, interleaved=int(interleaved), num_heads=heads, rotary_embedding_dim=size
    )


def attention(g: GraphBuilder, node: FxNode) -> list[Value]:
    """Attention.opset23(Tensor Q, Tensor K, Tensor V, Tensor? attn_mask=None, Tensor? past_key=None, Tensor? past_value=None, *, bool is_causal=False, SymInt kv_num_heads=0, SymInt q_num_heads=0, SymInt qk_matmul_output_mode=0, float? scale=None, float softcap=0., SymInt? softmax_precision=None) -> (Tensor, Tensor, Tensor, Tensor)"""  # noqa: E501
    inputs = node.args[:6]
    names = "is_causal kv_num_heads q_num_heads qk_matmul_output_mode scale softcap softmax_precision".split()
    attributes = dict(zip(names, node.args[6:], strict=True))
    attributes["is_causal"] = int(attributes["is_causal"])
    if (
        attributes["kv_num_heads"] == attributes["q_num_heads"] == 0
    ):  # inputs with four axes already state the number of heads
        del attributes["kv_num_heads"], attributes["q_num_heads"]
    # The key and value caches come in pairs; the product is a fourth result that costs its own copy.
    count = {0: 1, 1: 3, 2: 3}.get(_last_used(node), 4)
    results = g.op.Attention(*inputs, _outputs=count, **attributes)
    return list(results) if count > 1 else [results]


def _last_used(node: FxNode) -> int:
    """The highest index of a result that is read; -1 where it is unknown."""
    indices = [user.args[1] if user.target is operator.getitem else -1 for user in node.fx.users if user.users]
    return -1 if -1 in indices else max((int(str(i)) for i in indices), default=0)


def operator_of_onnx(g: GraphBuilder, node: FxNode) -> Any:
    """An operator that a user has registered as ``onnx::Name.opsetN``: positional arguments are inputs, others attributes."""
    op_type, _, overload = node.op_name.removeprefix("onnx::").partition(".")
    version = re.fullmatch(r"opset(\d+)", overload)
    if version is not None:
        _check_version(g, op_type, int(version[1]))
    schema = node.target._schema
    inputs: list[Any] = []
    attributes = {}
    for formal, value in zip(schema.arguments, node.args, strict=True):
        if formal.kwarg_only:
            attributes[formal.name] = int(value) if isinstance(value, bool) else value
        elif isinstance(value, list) and any(isinstance(v, Value) or v is None for v in value):
            inputs.extend(value)
        else:
            inputs.append(value)
    results = getattr(g.op, op_type)(*inputs, _outputs=len(node.outputs), **attributes)
    return list(results) if isinstance(results, tuple) else results


RULES: list[Rule] = [
    Rule("onnx_symbolic::_symbolic.default", symbolic),
    Rule("onnx_symbolic::_symbolic_multi_out.default", symbolic_multi_out),
    Rule("onnx::RotaryEmbedding.opset23", rotary_embedding, opset=(23, None)),
    Rule("onnx::Attention.opset23", attention, opset=(23, None)),
]

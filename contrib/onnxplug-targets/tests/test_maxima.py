"""The largest element of a Concat of two tensors in onnxruntime-openvino 1.24.1: each of the models was run there."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from onnxplug_targets import fallbacks

CONSTANTS = (
    "int64[1] p = {0}, int64[1] q = {1}, int64[1] last = {-1}, int64[2] pq = {0,1}, int64[2] back = {-1,3}, int64[2] ones = {1,1}, "
    "int64[1] far = {9223372036854775807}, float[1,3] c = {-1.0,-1.0,-1.0}, float[0,3] none = {}"
)
LARGEST = "y = ReduceMax <keepdims = 0> (a, p)"


def _breaks(head: str, body: str, opset: int = 21) -> list[tuple[str, bool]]:
    text = f'<ir_version: 10, opset_import: ["": {opset}]> g {head} <{CONSTANTS}> {{ {body} }}'
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    for name in ("webgpu", "qnn"):
        assert not any("Concat of two" in f.reason for f in fallbacks(ir.from_proto(model), name))
    return [(f.operator, bool(f.breaks)) for f in fallbacks(ir.from_proto(model), "openvino")]


@pytest.mark.parametrize(
    ("body", "is_wrong"),
    [
        (f"a = Concat <axis = 0> (x, c) {LARGEST}", True),
        (f"a = Concat <axis = 0> (c, x) {LARGEST}", True),
        (f"a = Concat <axis = 0> (x, x, none) {LARGEST}", True),
        (f"b = Concat <axis = 0> (x, c) a = Concat <axis = 0> (b, x) {LARGEST}", True),
        ("a = Concat <axis = 0> (x, c) y = ReduceMin <keepdims = 0> (a, p)", True),
        (f"a = Concat <axis = 0> (x, c, c) {LARGEST}", False),
        (f"a = Concat <axis = 0> (x) {LARGEST}", False),
        (f"a = Concat <axis = -2> (x, c) {LARGEST}", False),
        ("a = Concat <axis = 1> (x, x) b = ReduceMax (a, p) y = ReduceSum <keepdims = 0> (b, p)", False),
        ("a = Concat <axis = 0> (x, c) b = ReduceMax <keepdims = 1> (a, pq) y = Expand (b, pq)", False),
        ("a = Concat <axis = 0> (x, c) b = ReduceMax <keepdims = 1> (a) y = Expand (b, pq)", False),
        ("a = Concat <axis = 1> (x, x) b = ReduceMax <keepdims = 0> (a, last) y = Relu (b)", True),
        (f"b = Concat <axis = 0> (x, c) a = Relu (b) {LARGEST}", False),
        (f"b = Concat <axis = 0> (x, c) a = Identity (b) {LARGEST}", True),
        (f"b = Concat <axis = 0> (x, c) a = Cast <to = 1> (b) {LARGEST}", True),
        (
            "b = Concat <axis = 0> (x, c) d = Cast <to = 10> (b) e = ReduceMax <keepdims = 0> (d, p) y = Cast <to = 1> (e)",
            False,
        ),
        (f"b = Concat <axis = 0> (x, c) a = Reshape (b, back) {LARGEST}", True),
        (f"b = Concat <axis = 0> (x, c) a = Expand (b, ones) {LARGEST}", True),
        (f"b = Concat <axis = 0> (x, c) a = Slice (b, p, far, p) {LARGEST}", True),
        (f"b = Concat <axis = 0> (x, c) a = Slice (b, q, far, p, q) {LARGEST}", False),
        (f"b = Concat <axis = 0> (x, c) d = Unsqueeze (b, p) a = Squeeze (d, p) {LARGEST}", True),
        ("b = Concat <axis = 0> (x, c) a = Unsqueeze (b, p) y = ReduceMax <keepdims = 0> (a, pq)", False),
        ("b = Concat <axis = 0> (x, c) a = Transpose <perm = [1, 0]> (b) y = ReduceMax <keepdims = 0> (a, q)", True),
        ("b = Concat <axis = -2> (x, c) a = Transpose <perm = [1, 0]> (b) y = ReduceMax <keepdims = 0> (a, q)", False),
        ("a = Concat <axis = 0> (x, c) y = ReduceLogSumExp <keepdims = 0> (a, p)", False),
    ],
)
def test_of_matrices(body: str, is_wrong: bool) -> None:
    assert any(breaks for _, breaks in _breaks("(float[N,3] x) => (float[K] y)", body)) == is_wrong


@pytest.mark.parametrize("element", ["float", "int32", "int64"])
def test_of_vectors(element: str) -> None:
    body = "a = Concat <axis = 0> (x, x) y = ReduceMin <keepdims = 0> (a)"
    assert _breaks(f"({element}[N] x) => ({element} y)", body) == [("ReduceMin", True)]
    assert _breaks(f"({element}[1] x) => ({element} y)", body) == []  # Min of one element each is right


def test_of_axes_that_are_an_attribute() -> None:
    body = "a = Concat <axis = 1> (x, x) y = ReduceMax <axes = [-1]> (a)"
    assert _breaks("(float[4,N] x) => (float[4,1] y)", body, 13) == [("ReduceMax", True)]
    assert _breaks("(float[4,N] x) => (float[1,K] y)", body.replace("-1", "0"), 13) == []


def test_operators_that_it_computes_by_the_largest_element() -> None:
    pool = "a = Concat <axis = 2> (x, x) y = GlobalMaxPool (a)"
    assert _breaks("(float[1,3,N] x) => (float[1,3,1] y)", pool) == [("GlobalMaxPool", True)]
    assert _breaks("(float[1,3,N,1] x) => (float[1,3,1,1] y)", pool) == []
    quantized = "a = Concat <axis = 0> (x, x) y, s, z = DynamicQuantizeLinear (a)"
    assert _breaks("(float[N] x) => (uint8[K] y, float s, uint8 z)", quantized) == [("DynamicQuantizeLinear", True)]


def test_in_a_branch() -> None:
    head = "(bool t, float[N,3] x) => (float[3] y)"
    other = "else_branch = f () => (float[3] w) { b = Concat <axis = 0> (r, r, r) w = ReduceMax <keepdims = 0> (b, p) }"
    inner = "a = Concat <axis = 0> (r, c)"
    largest = "v = ReduceMax <keepdims = 0> (a, p)"
    within = f"r = Relu (x) y = If (t) <then_branch = h () => (float[3] v) {{ {inner} {largest} }}, {other}>"
    assert _breaks(head, within) == [("If", True)]
    across = f"r = Relu (x) {inner} y = If (t) <then_branch = h () => (float[3] v) {{ {largest} }}, {other}>"
    assert _breaks(head, across) == []


@pytest.mark.parametrize("is_before", [True, False])
def test_in_another_group(is_before: bool) -> None:
    """A node that is left, between the Concat and its reader in ONNX Runtime's order, puts them in different groups."""
    largest, left = "y = ReduceMax <keepdims = 0> (a, p) w = Tanh (y)", "z = IsNaN (a)"
    body = " ".join(["r = Relu (x) a = Concat <axis = 0> (r, c)", *((largest, left) if is_before else (left, largest))])
    expected = [("IsNaN", False)] if is_before else [("IsNaN", False), ("ReduceMax", True)]
    assert sorted(_breaks("(float[N,3] x) => (bool[K,3] z, float[3] w)", body)) == expected

"""Products of matrices."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.inference.dims import dims_of
from onnxplug.converters.helpers.arithmetic import compute
from onnxplug.converters.helpers.axes import normalize_axis, rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.dtypes import BOOL, FLOAT, HALVES, INT32, INT64, fits_attribute
from onnxplug.converters.helpers.einsum import as_matrices, sum_of_products
from onnxplug.converters.helpers.products import is_restored, product
from onnxplug.converters.helpers.promotion import operand, operands, wide
from onnxplug.converters.helpers.reductions import is_long, reduced
from onnxplug.converters.helpers.rows import is_taken_apart, rows_with_bias
from onnxplug.converters.helpers.runtimes import ACTIVATIONS_ARE_ROUNDED, computed_in, has_kernel
from onnxplug.errors import Decline, Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def linear(g: GraphBuilder, node: FxNode) -> Value:
    """linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor"""
    x, weight, bias = node.args
    # torch adds a bias of another dtype to a product that it did not make by addmm.
    bias = bias if bias is None else g.cast(bias, node.dtype)
    if rank_of(x) == 2 and rank_of(weight) == 2 and _has_gemm(g, node.dtype) and not is_long(g, x, [1]):
        return g.op.Gemm(x, weight, bias, transB=1)
    if rank_of(weight) == 1:
        result = product(g, x, weight)
    else:
        result = product(g, x, _columns(g, weight))
    return result if bias is None else compute(g, "Add", node.dtype, result, bias)


def _columns(g: GraphBuilder, weight: Value) -> Value:
    """A weight [out, in] transposed to [in, out]; the stored weight is transposed if it has no other reader."""
    if g.optimize and g.weights.is_read_once(weight):
        return g.weights.permuted(weight, (1, 0))
    return g.op.Transpose(weight, perm=[1, 0])


def _has_gemm(g: GraphBuilder, dtype: ir.DataType) -> bool:
    """Whether a Gemm computes in floats of a dtype; torch's factors for integers need not be whole."""
    return dtype.is_floating_point() and has_kernel(g, "Gemm", dtype)


def linear_of_rows(g: GraphBuilder, node: FxNode) -> Value:
    """linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor

    One Gemm of all rows, by a weight that is stored as the model has it.
    """
    x, weight, bias = node.args
    if not g.optimize:
        raise Decline("the plain form is requested")
    if is_long(g, x, [rank_of(x) - 1]):
        raise Decline("so many products are summed in steps")
    if not g.is_weight(weight):
        raise Decline("the weight is no parameter, which ONNX Runtime lays out for its products when it loads them")
    return rows_with_bias(g, x, weight, g.cast(bias, node.dtype), transposed=True)


def _of_rows_with_bias(node: FxNode) -> bool:
    """Whether a product has more than one axis of rows and its columns stay together: a product for each part is faster."""
    x, weight, bias = node.args
    sizes = weight.shape
    if bias is None or node.dtype != FLOAT or x.shape is None or len(x.shape) < 3 or sizes is None or len(sizes) != 2:
        return False
    return all(isinstance(size, int) and size for size in sizes) and not is_taken_apart(node.fx)


def matmul(g: GraphBuilder, node: FxNode) -> Value:
    """matmul(Tensor self, Tensor other) -> Tensor"""
    return product(g, *node.args)


def inner(g: GraphBuilder, node: FxNode) -> Value:
    """inner(Tensor self, Tensor other) -> Tensor"""
    x, y = node.args
    if not rank_of(x) or not rank_of(y):
        return compute(g, "Mul", node.dtype, x, y)
    if rank_of(y) > 2:
        return _contracted(g, x, y, [-1], [-1], node.dtype)
    return product(g, x, g.op.Transpose(y, perm=[1, 0]) if rank_of(y) == 2 else y)


def outer(g: GraphBuilder, node: FxNode) -> Value:
    """outer(Tensor self, Tensor vec2) -> Tensor"""
    x, y = (operand(g, v, node.dtype) for v in node.args)
    return compute(g, "Mul", node.dtype, unsqueeze(g, x, 1), unsqueeze(g, y, 0))


def cross(g: GraphBuilder, node: FxNode) -> Value:
    """linalg_cross(Tensor self, Tensor other, *, int dim=-1) -> Tensor"""
    dtype = wide(node.dtype)
    x, y = operands(g, *node.args[:2], dtype=dtype)
    axis = normalize_axis(node.kwargs.get("dim", -1), rank_of(x))
    following, last = g.const([1, 2, 0]), g.const([2, 0, 1])
    first, second = (
        compute(g, "Mul", dtype, g.op.Gather(x, of_x, axis=axis), g.op.Gather(y, of_y, axis=axis))
        for of_x, of_y in ((following, last), (last, following))
    )
    return g.cast(compute(g, "Sub", dtype, first, second), node.dtype)


def _combined(g: GraphBuilder, node: FxNode, bias: Value, multiplied: Value, beta: Any, alpha: Any) -> Value:
    """``beta * bias + alpha * product``; a beta of zero drops the bias, also its NaN."""
    # torch rounds 16-bit floats once, at the end.
    inner = FLOAT if node.dtype in HALVES else node.dtype
    multiplied = g.cast(multiplied, inner)
    if alpha != 1:
        multiplied = compute(g, "Mul", inner, multiplied, alpha)
    if beta == 0:
        return g.cast(multiplied, node.dtype)
    bias = g.cast(bias, inner)
    if beta != 1:
        bias = compute(g, "Mul", inner, bias, beta)
    return g.cast(compute(g, "Add", inner, bias, multiplied), node.dtype)


def addmm(g: GraphBuilder, node: FxNode) -> Value:
    """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    bias, a, b, beta, alpha = node.args
    plain = not isinstance(alpha, Value) and not isinstance(beta, Value)
    rounding = (is_restored(b) and ACTIVATIONS_ARE_ROUNDED.concerns(g)) or is_long(g, a, [1])
    if not plain or rounding or not _has_gemm(g, node.dtype) or not fits_attribute(node.dtype, alpha, beta):
        return _combined(g, node, bias, product(g, a, b), beta, alpha)
    if beta == 0:
        return g.op.Gemm(a, b, alpha=float(alpha))
    return g.op.Gemm(a, b, bias, alpha=float(alpha), beta=float(beta))


def _may_sum_nothing(node: FxNode) -> bool:
    """Whether the summed axis has size 0, or may have it where the bias has a factor."""
    beta, (_, size) = node.args[3], node.args[1].shape or (None, None)
    return size == 0 or (beta != 1 and not isinstance(size, int))


def add_product(g: GraphBuilder, node: FxNode) -> Value:
    """baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    bias, a, b, beta, alpha = node.args
    if node.dtype in HALVES:
        a, b = g.cast(a, FLOAT), g.cast(b, FLOAT)
    return _combined(g, node, bias, product(g, a, b), beta, alpha)


def addbmm(g: GraphBuilder, node: FxNode) -> Value:
    """addbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor

    The products summed over the batch.
    """
    bias, a, b, beta, alpha = node.args
    inner = computed_in(g, "MatMul ReduceSum", wide(node.dtype))
    total = reduced(g, "ReduceSum", product(g, g.cast(a, inner), g.cast(b, inner)), [0], False, inner, exact=True)
    return _combined(g, node, bias, total, beta, alpha)


def einsum(g: GraphBuilder, node: FxNode) -> Value:
    """einsum(str equation, Tensor[] tensors, *, int[]? path=None) -> Tensor"""
    equation, tensors = node.args[:2]
    plain = explicit(equation.replace(" ", ""), [rank_of(x) for x in tensors])
    tensors = [g.cast(x, node.dtype) for x in tensors]
    letters = set(plain) - set("->,")
    if any(letter not in string.ascii_letters for letter in letters):
        raise Unsupported(f"the einsum equation {equation!r}")
    plain, tensors = _without_broadcasting(g, plain, tensors)
    operator = "Einsum" if as_matrices(g, plain, tensors) is None else "MatMul"
    inner = INT32 if node.dtype == BOOL else computed_in(g, operator, node.dtype)
    return g.cast(sum_of_products(g, plain, [g.cast(x, inner) for x in tensors]), node.dtype)


def _without_broadcasting(g: GraphBuilder, equation: str, tensors: Sequence[Value]) -> tuple[str, list[Value]]:
    """The equation and operands without axes of size 1 whose letter has a larger size in another operand.

    ONNX's shape inference takes the size of the first operand that has the letter.
    """
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    shapes = [dims_of(x) for x in tensors]
    sizes: dict[str, list[Any]] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for letter, size in zip(term, shape or (), strict=False):
            sizes.setdefault(letter, []).append(size)
    broadcast = {letter for letter, lengths in sizes.items() if 1 in lengths and any(size != 1 for size in lengths)}
    kept: list[str] = []
    results: list[Value] = []
    for term, x, shape in zip(terms, tensors, shapes, strict=True):
        ones = [axis for axis, letter in enumerate(term) if letter in broadcast and shape and shape[axis] == 1]
        kept.append("".join(letter for axis, letter in enumerate(term) if axis not in ones))
        results.append(squeeze(g, x, *ones) if ones else x)
    return ",".join(kept) + arrow + right, results


def explicit(equation: str, ranks: Sequence[int]) -> str:
    """An einsum equation with the letters of its result, and with letters for the axes of its ellipses.

    Without an arrow the result has the axes of the ellipses, then every letter that occurs once: A to Z before a to z, which ONNX
    leaves open. ONNX requires the same number of axes for every ellipsis; torch aligns them at the last axis and broadcasts.
    """
    left, arrow, right = equation.partition("->")
    if not arrow:
        named = left.replace("...", "").replace(",", "")
        right = "..." * ("..." in left) + "".join(sorted(letter for letter in named if named.count(letter) == 1))
    terms = left.split(",")
    counts = [
        rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in zip(terms, ranks, strict=True)
    ]
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    if max(counts) > len(unused):
        raise Unsupported(f"the einsum equation {equation!r} has too many axes for its letters")
    letters = "".join(unused[: max(counts)])
    terms = [term.replace("...", letters[len(letters) - n :]) for term, n in zip(terms, counts, strict=True)]
    return ",".join(terms) + "->" + right.replace("...", letters)


def tensordot(g: GraphBuilder, node: FxNode) -> Value:
    """tensordot(Tensor self, Tensor other, int[] dims_self, int[] dims_other) -> Tensor"""
    a, b, left, right = node.args
    return _contracted(g, a, b, left, right, node.dtype)


def _contracted(
    g: GraphBuilder, a: Value, b: Value, left: Sequence[int], right: Sequence[int], dtype: ir.DataType
) -> Value:
    """One product of matrices: the summed axes last on the left, first on the right."""
    inner = computed_in(g, "MatMul", wide(dtype))
    a, b = g.cast(a, inner), g.cast(b, inner)
    over = [normalize_axis(x, rank_of(a)) for x in left], [normalize_axis(x, rank_of(b)) for x in right]
    kept = [x for x in range(rank_of(a)) if x not in over[0]], [x for x in range(rank_of(b)) if x not in over[1]]
    for x, y in zip(*over, strict=True):
        sizes = g.dim(a, x), g.dim(b, y)
        if 1 in sizes and sizes[0] != sizes[1]:
            # A size of 1 is broadcast: the other tensor's axis is summed alone.
            if sizes[0] == 1:
                b = reduced(g, "ReduceSum", b, [y], True, inner, exact=True)
            else:
                a = reduced(g, "ReduceSum", a, [x], True, inner, exact=True)
    shape = [*(g.dim(a, x) for x in kept[0]), *(g.dim(b, y) for y in kept[1])]
    first = _shaped(g, _ordered(g, a, [*kept[0], *over[0]]), [_joined(g, a, kept[0]), _joined(g, a, over[0])])
    second = _shaped(g, _ordered(g, b, [*over[1], *kept[1]]), [_joined(g, b, over[1]), _joined(g, b, kept[1])])
    return g.cast(_shaped(g, product(g, first, second), shape), dtype)


def _shaped(g: GraphBuilder, x: Value, sizes: list[Any]) -> Value:
    """``x`` of these sizes, any of which may be 0 when the model runs: beside a 0 no size can be inferred."""
    if g.opset < 14 or sum(not isinstance(size, int) for size in sizes) < 2:
        return g.reshape(x, sizes)
    return g.op.Reshape(x, g.vector(sizes), allowzero=1)


def _ordered(g: GraphBuilder, x: Value, order: list[int]) -> Value:
    return g.op.Transpose(x, perm=order) if order else x


def _joined(g: GraphBuilder, x: Value, axes: list[int]) -> Any:
    """The number of elements that these axes span."""
    total: Any = 1
    for axis in axes:
        size = g.dim(x, axis)
        total = total * size if isinstance(total, int) and isinstance(size, int) else g.op.Mul(total, size)
    return total


def bilinear(g: GraphBuilder, node: FxNode) -> Value:
    """bilinear(Tensor input1, Tensor input2, Tensor weight, Tensor? bias=None) -> Tensor"""
    x, y, weight, bias = node.args
    # y_o = x W_o y: for each output one product from the left, then a sum over the second input's features.
    inner = computed_in(g, "MatMul", wide(node.dtype))
    x, y, weight = (g.cast(v, inner) for v in (x, y, weight))
    left = g.op.MatMul(unsqueeze(g, x, rank_of(x) - 1, rank_of(x)), weight)
    column = g.op.Unsqueeze(unsqueeze(g, y, rank_of(y) - 1), [rank_of(y) + 1])
    last = rank_of(x)
    result: Value = squeeze(g, g.op.MatMul(left, column), last, last + 1)
    return g.cast(result if bias is None else g.op.Add(result, g.cast(bias, inner)), node.dtype)


def trilinear(g: GraphBuilder, node: FxNode) -> Value:
    """_trilinear(Tensor i1, Tensor i2, Tensor i3, int[] expand1, int[] expand2, int[] expand3, int[] sumdim, int unroll_dim=1) -> Tensor

    The sum over some axes of a product of three tensors, each of which lacks the axes of its ``expand``.
    """  # noqa: E501
    tensors, lacking, summed = node.args[:3], node.args[3:6], node.args[6]
    letters = string.ascii_lowercase[: rank_of(tensors[0]) + len(lacking[0])]
    terms = ["".join(c for axis, c in enumerate(letters) if axis not in gone) for gone in lacking]
    kept = [c for axis, c in enumerate(letters) if axis not in summed]
    known = "".join(c for c in kept if any(c in term for term in terms))
    inner = computed_in(g, "Einsum", node.dtype)
    plain, operands = _without_broadcasting(g, f"{','.join(terms)}->{known}", [g.cast(x, inner) for x in tensors])
    result = sum_of_products(g, plain, operands)
    nowhere = [place for place, c in enumerate(kept) if c not in known]
    return g.cast(unsqueeze(g, result, *nowhere) if nowhere else result, node.dtype)


# -- products by group -------------------------------------------------------------------------------------------------


def grouped_product(g: GraphBuilder, a: Value, b: Value, ends: Value) -> Value:
    """Rows [S, K] in groups, each times a matrix of its own [G, K, N]; ``ends`` has the end of each group.

    A Loop over the groups; an empty group takes no time. Rows beyond the last group, which torch leaves uninitialised,
    are 0.
    """
    assert a.dtype is not None
    # Loop and If take bfloat16 since opset 16, and the product is made in float anyway.
    dtype = FLOAT if a.dtype == ir.DataType.BFLOAT16 else a.dtype
    width = g.dim(b, 2)
    bounds = g.op.Concat(g.const([0]), g.cast(ends, INT64), axis=0)

    def step(index: Value, condition: Value, result: Value) -> list[Value]:
        start, end = (g.op.Gather(bounds, g.as_vector(i)) for i in (index, g.op.Add(index, g.const(1))))

        def with_group() -> Value:
            operands = g.op.Slice(a, start, end, [0]), g.op.Gather(b, index, axis=0)
            return g.op.Concat(result, product(g, *(g.cast(v, dtype) for v in operands)), axis=0)

        branches = [g.subgraph(build, name="group") for build in (with_group, lambda: result)]
        some = g.op.Squeeze(g.op.Greater(end, start), [0])
        return [condition, g.op.If(some, then_branch=branches[0], else_branch=branches[1])]

    rows_by_width = [ir.SymbolicDim(None), width if isinstance(width, int) else ir.SymbolicDim(None)]
    body = g.subgraph(step, [(INT64, ()), (BOOL, ()), (dtype, rows_by_width)])
    result = g.op.Loop(g.as_scalar(g.dim(b, 0)), g.const(True), _zeros(g, [0, width], dtype), body=body)
    result.type, result.shape = ir.TensorType(dtype), ir.Shape(rows_by_width)
    left = g.op.Sub(g.as_scalar(g.dim(a, 0)), g.as_scalar(g.dim(result, 0)))
    return g.cast(g.op.Concat(result, _zeros(g, [left, width], dtype), axis=0), a.dtype)


def _zeros(g: GraphBuilder, sizes: list[Any], dtype: ir.DataType) -> Value:
    return g.op.Expand(g.const(0, dtype), g.vector(sizes))


def grouped_mm(g: GraphBuilder, node: FxNode) -> Value:
    """_grouped_mm(Tensor self, Tensor mat2, Tensor? offs=None, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor

    Groups of rows with a matrix each, groups of columns with a matrix each, or as many products as matrices.
    """
    a, b, ends, bias = (*node.args, None)[:4]
    if bias is not None:
        raise Unsupported("_grouped_mm with a bias")
    if ends is None:
        return g.cast(product(g, a, b), node.dtype)
    ranks = (rank_of(a), rank_of(b))
    if ranks == (2, 2):
        raise Unsupported("_grouped_mm of groups along the summed axis, as a gradient needs it")
    if ranks == (2, 3):
        return g.cast(grouped_product(g, a, b, ends), node.dtype)
    transposed = grouped_product(g, g.op.Transpose(b, perm=[1, 0]), g.op.Transpose(a, perm=[0, 2, 1]), ends)
    return g.cast(g.op.Transpose(transposed, perm=[1, 0]), node.dtype)


RULES: list[Rule] = [
    Rule("aten::_grouped_mm.default", grouped_mm),
    # transformers' own operator, for more dtypes: its default for mixtures of experts.
    Rule("transformers::grouped_mm_fallback.default", grouped_mm),
    Rule("aten::linear.default", linear),
    Rule(
        "aten::linear.default",
        linear_of_rows,
        target="onnxruntime:cpu",
        when=_of_rows_with_bias,
        reason="a Gemm of all rows adds the bias where it writes the product, a MatMul and an Add go over it twice",
    ),
    *[Rule(f"aten::{name}.default", matmul) for name in ("matmul", "mm", "bmm", "mv", "dot", "vdot", "linalg_matmul")],
    Rule("aten::inner.default", inner),
    *[Rule(f"aten::{name}.default", outer) for name in ("outer", "ger")],
    Rule("aten::linalg_cross.default", cross),
    Rule("aten::addmm.default", addmm),
    Rule(
        "aten::addmm.default",
        add_product,
        target="onnxruntime",
        when=_may_sum_nothing,
        reason="its Gemm ignores beta where the summed axis has size 0",
    ),
    Rule("aten::addmv.default", add_product),
    Rule("aten::baddbmm.default", add_product),
    Rule("aten::addbmm.default", addbmm),
    Rule("aten::einsum.default", einsum),
    Rule("aten::tensordot.default", tensordot),
    Rule("aten::bilinear.default", bilinear),
    Rule("aten::_trilinear.default", trilinear),
]


def _linear_cross_entropy(
    input: Any,
    linear_weight: Any,
    target: Any,
    linear_bias: Any,
    weight: Any,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    *options: Any,
) -> tuple[Any, ...]:
    """``linear_cross_entropy`` in chunks of the batch: the loss [], as of all rows at once, and gradients, which are not wanted."""
    import torch

    if any(options[-3:]):
        raise NotImplementedError("the gradients of linear_cross_entropy that are computed with it")
    logits = torch.nn.functional.linear(input, linear_weight, linear_bias)
    loss = torch.nn.functional.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    return loss.to(input.dtype), input.new_empty(0, 0), input.new_empty(0, 0), input.new_empty(0)


DECOMPOSITIONS = {"torch_nn::_linear_cross_entropy_batch_chunked.default": _linear_cross_entropy}

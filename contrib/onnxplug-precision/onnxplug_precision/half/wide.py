"""The nodes that stay in float32, and the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnxplug.build.kernels import Kernels
from onnxplug_precision.half.bodies import spread
from onnxplug_precision.half.kernels import lacks_kernel
from onnxplug_precision.half.masks import masks
from onnxplug_precision.half.ranges import Ranges, range_of
from onnxplug_precision.half.types import FLOAT, Signature, all_graphs, constant_of, signature, subgraphs_of, version_of

#: The largest finite float16; a value that comes within a factor of two of it on the samples counts as beyond.
LARGEST = 65504.0
_SAFE = LARGEST / 2
#: float16's smallest normal number, below which it has fewer than 11 bits.
_SMALLEST = 2.0**-14
#: Operands that stay float32 whatever the schema allows.
KEPT = {("", "Resize"): frozenset({1, 2})}
#: Nodes that stay in float32 whatever the schema allows: quantised values keep their scales, windows and filters their
#: digits.
KEPT_NODES = frozenset(
    """QuantizeLinear DequantizeLinear DynamicQuantizeLinear QLinearConv QLinearMatMul BlackmanWindow HammingWindow HannWindow
    MelWeightMatrix""".split()
)
#: Operators that take any type, so that their operands needn't be cast.
ANY = frozenset({"Cast", "Shape", "Size"})
#: Operators with the places of bounds, ``None`` for all places: a bound beyond float16 may become its largest number.
BOUNDS = {"Clip": frozenset({1, 2}), "Max": None, "Min": None}
_ANGLES = frozenset({"Sin", "Cos", "Tan"})
#: The largest angle that float16 represents to 1/256.
_LARGEST_ANGLE = 4.0
_INTEGERS = frozenset(d for d in ir.DataType if d.is_integer())
#: The most elements of a weight in arithmetic of positions.
_SMALL_WEIGHT = 4096
HEAVY = frozenset(
    """Conv ConvTranspose MatMul Gemm Einsum Attention LSTM GRU RNN LayerNormalization BatchNormalization Softmax
    InstanceNormalization GroupNormalization RMSNormalization""".split()
)


@dataclass
class Facts:
    """The facts of a model by which :func:`decide` chooses the nodes that stay in float32.

    Attributes:
        kernels: The kernels of the runtime; ``None`` where ONNX Runtime may cast.
        constants: Constants of float32.
        imports: The opset imports of each node's graph.
        wide: The nodes that stay in float32, with the reasons.
        exact: Those of them that need the digits of float32.
    """

    model: ir.Model
    half: ir.DataType
    ranges: Ranges
    kernels: Kernels | None = None
    checked: bool = True
    constants: dict[ir.Value, np.ndarray] = field(default_factory=dict)
    fills: list[ir.Value] = field(default_factory=list)
    masked: set[ir.Value] = field(default_factory=set)
    imports: dict[ir.Node, Mapping[str, int]] = field(default_factory=dict)
    wide: dict[ir.Node, str] = field(default_factory=dict)
    exact: set[ir.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        for graph, imports in all_graphs(self.model):
            for value in graph.initializers.values() if isinstance(graph, ir.Graph) else ():
                if value.const_value is not None and value.const_value.dtype == FLOAT and not value.is_graph_input():
                    self.constants[value] = value.const_value.numpy()
            for node in graph:
                self.imports[node] = imports
                tensor = constant_source(node)
                if tensor is not None and tensor.dtype == FLOAT:
                    self.constants[node.outputs[0]] = tensor.numpy()
        spread(self.imports, self.model, self.ranges, self.constants)
        if self.half == ir.DataType.FLOAT16:
            self.fills, self.masked = masks(self.ranges, self.constants)

    def signature(self, node: ir.Node) -> Signature | None:
        """The signature of a node's operator."""
        return signature(node.domain, node.op_type, version_of(node, self.imports[node]))

    def is_call(self, node: ir.Node) -> bool:
        """Whether a node calls a function of the model."""
        return node.op_identifier() in self.model.functions

    def keep_digits(self, node: ir.Node, reason: str) -> None:
        """Notes a node that needs the digits of float32."""
        self.wide.setdefault(node, reason)
        self.exact.add(node)

    def problem(self, value: ir.Value) -> str | None:
        """Why a value can't be of half precision; ``None`` where it can."""
        if self.half != ir.DataType.FLOAT16:
            return None
        if value in self.constants:
            return None if value in self.masked else _problem_of_constant(self.constants[value])
        range_ = self.ranges.get(value)
        if range_ is None:
            return "it is not computed on the samples"
        if value in self.masked:
            return None
        if range_.largest > _SAFE:
            return f"it reaches {range_.largest:.4g}, float16 ends at {LARGEST:g}"
        if 0 < range_.largest < _SMALLEST:
            return f"it is {range_.largest:.2g} at most, where float16 has few digits"
        if range_.holds_integers():
            return f"it holds integers up to {range_.largest:g}, float16 has all up to 2048"
        return None


def constant_source(node: ir.Node) -> ir.TensorProtocol | None:
    """The tensor of a Constant, or the fill of a ConstantOfShape."""
    if node.domain:
        return None
    if node.op_type == "Constant":
        return constant_of(node)
    if node.op_type == "ConstantOfShape":
        value = node.attributes.get("value")
        return value.as_tensor() if value is not None else ir.tensor(np.zeros(1, np.float32))
    return None


def _problem_of_constant(array: np.ndarray) -> str | None:
    known = range_of(array)
    if known.largest > LARGEST:
        return f"the constant {known.largest:.4g} is beyond float16, which ends at {LARGEST:g}"
    if 0 < known.largest < _SMALLEST:
        return f"the constant {known.largest:.2g} has few digits in float16, or is 0"
    if known.holds_integers():
        return f"the constant holds integers up to {known.largest:g}, float16 has all up to 2048"
    return None


def floats(values: Iterable[ir.Value | None]) -> list[tuple[int, ir.Value]]:
    """The values of float32 among a node's operands or results, with their places."""
    return [
        (i, v)
        for i, v in enumerate(values)
        if v is not None and isinstance(v.type, ir.TensorType) and v.dtype == FLOAT and v.name != ""
    ]


def decide(facts: Facts) -> None:
    """Fills in :attr:`Facts.wide`."""
    for node in facts.imports:
        if not subgraphs_of(node) and not facts.is_call(node) and constant_source(node) is None:
            reason = _reason(node, facts)
            if reason is not None:
                facts.wide[node] = reason
    for node in facts.imports:
        _keep_digits(node, facts)


def _reason(node: ir.Node, facts: Facts) -> str | None:
    operands, results = floats(node.inputs), floats(node.outputs)
    if not operands and not results:
        return None
    if any(not isinstance(v.type, ir.TensorType | None) for v in (*node.inputs, *node.outputs) if v is not None):
        return "it takes or gives sequences or optionals"
    signature = facts.signature(node)
    if signature is None:
        return f"nothing says which types {node.domain}::{node.op_type} takes"
    if not node.domain and node.op_type in KEPT_NODES:
        return "its scales and tables stay in float32"
    if node.op_type not in ANY or node.domain:
        slots = [signature.input(i) for i, _ in operands] + [signature.output(i) for i, _ in results]
        if not any(facts.half in slot.allowed for slot in slots):
            return f"its schema does not allow {facts.half.name.lower()}"
    bounds = BOUNDS.get(node.op_type, frozenset()) if not node.domain else frozenset()
    for index, value in (*operands, *results):
        if value in facts.constants and (bounds is None or index in bounds) and value in node.inputs:
            continue
        if index in KEPT.get((node.domain, node.op_type), ()) and value in node.inputs:
            continue
        if node.op_type in ANY and value in node.inputs and value not in facts.constants:
            continue
        problem = facts.problem(value)
        if problem is not None:
            return problem
    if facts.checked and (node.op_type not in ANY or facts.kernels is None):
        return _lacks(node, signature, facts)
    return None


def _lacks(node: ir.Node, signature: Signature, facts: Facts) -> str | None:
    kept = KEPT.get((node.domain, node.op_type), frozenset())
    dtypes = [
        None
        if v is None
        else facts.half
        if v.dtype == FLOAT and i not in kept and facts.half in signature.input(i).allowed
        else v.dtype
        for i, v in enumerate(node.inputs)
    ]
    results = [
        facts.half if v.dtype == FLOAT and facts.half in signature.output(i).allowed else v.dtype
        for i, v in enumerate(node.outputs)
    ]
    version = version_of(node, facts.imports[node])
    return lacks_kernel(node, version, dtypes, results, facts.kernels)


# -- arithmetic that needs float32's digits ----------------------------------------------------------------------------


def _keep_digits(node: ir.Node, facts: Facts) -> None:
    """Keeps the arithmetic in float32 that ends in integers, or in large angles of a sine, cosine or tangent."""
    if node.domain or not node.inputs or node.inputs[0] is None or node.inputs[0].dtype != FLOAT:
        return
    value = node.inputs[0]
    if node.op_type == "Cast" and ir.DataType(node.attributes.get_int("to", 1)) in _INTEGERS:
        if value in facts.constants:
            facts.keep_digits(node, "integers are made of it")
        _keep_arithmetic(value, "integers are made of it", facts)
    elif node.op_type in _ANGLES:
        range_ = facts.ranges.get(value)
        if range_ is None or range_.largest > _LARGEST_ANGLE:
            facts.keep_digits(node, "it is of an angle of many turns")
            _keep_arithmetic(value, "an angle of many turns is made of it", facts)


def _keep_arithmetic(value: ir.Value, reason: str, facts: Facts) -> None:
    stack, seen = [value], set[ir.Node]()
    while stack:
        node = stack.pop().producer()
        if (
            node is None
            or node in seen
            or subgraphs_of(node)
            or facts.is_call(node)
            or constant_source(node) is not None
        ):
            continue
        seen.add(node)
        operands = floats(node.inputs)
        is_small = any(v in facts.constants and facts.constants[v].size <= _SMALL_WEIGHT for _, v in operands)
        if node.op_type in HEAVY and not is_small:
            continue
        facts.keep_digits(node, reason)
        stack += [v for _, v in operands]

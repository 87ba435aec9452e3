"""Early returns of empty results: ``if len(boxes) == 0: return boxes.new_zeros(0, 6)``.

torch.export can't go on where Python branches on a size that the data decide. Where the size is 0, such code returns results
without elements, and the rest of the model, computed for that size, often has the same results. Then the rest is the whole model:

    asked: len(boxes) == 0      captured with a size of 0: the result is [0, 6]
                                captured without the return: the result is [u0, 6], which is [0, 6] for u0 = 0

Both are compared by their graphs. Each result has no elements and one shape and dtype in both, or is computed by equal nodes from
equal inputs; nothing is written to an input or a buffer, and the early return has no conditions of its own on sizes of inputs. A
tensor that a mask selects has no more elements than the mask, so its size is 0 where the mask's is. The rest is computed once more,
for the size 0 and without data, as an operator may refuse that size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import sympy
import torch
from torch.export.graph_signature import InputKind

from onnxplug.torch_private import (
    DispatchKey,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    backed_values,
    pytree,
    unset_fake_temporarily,
)

#: The largest number of early returns to try in a model: each is a capture of its own.
LIMIT = 8
#: Operators with results that have as many rows at most as their operands have elements.
_SELECTING = frozenset({
    *("aten::nonzero", "aten::masked_select", "aten::index", "aten::unique_consecutive", "aten::unique_dim"),
    *("aten::_unique", "aten::_unique2", "torchvision::nms"),
})  # fmt: skip


class EarlyReturn(NamedTuple):
    """A condition that is true for a size of 0 alone, or for all other sizes.

    Attributes:
        answer: The answer for other sizes.
        question: The question and its place.
        size: torch's symbol of the size.
        program: The model captured for the size 0.
        conditions: The conditions on sizes of inputs under which that program is the model.
    """

    answer: bool
    question: Any
    size: Any
    program: torch.export.ExportedProgram
    conditions: Set[str]

    def is_included_in(
        self,
        program: torch.export.ExportedProgram,
        conditions: Set[str],
        before: Sequence[Any] = (),
        after: Sequence[Any] = (),
    ) -> bool:
        """Whether a program, captured for other sizes, has the results of the model for the size 0 too.

        Args:
            conditions: The program's own conditions on sizes of inputs.
            before: Symbols of other sizes that are 0 in the program, of which the model's code asked before.
            after: The same, asked about afterwards: they may have other names in the model for the size 0.
        """
        returned, whole = self.program, program
        if not self.conditions <= conditions:
            return False
        if not _writes_only_results(returned, whole) or returned.call_spec.out_spec != whole.call_spec.out_spec:
            return False
        known: dict[Any, int] = {}
        numbered, numbered_whole = _Numbered(returned, known), _Numbered(whole, known)
        zeros, empty = _zeros(whole, [self.size, *before, *after], numbered_whole)
        renamed = dict(_paired_symbols(returned, whole)) | _zeros(returned, [self.size, *before], numbered, empty)[0]
        for one, other in zip(_results(returned), _results(whole), strict=True):
            if isinstance(one, torch.fx.Node) and isinstance(other, torch.fx.Node):
                if numbered.now(one) == numbered_whole.now(other):
                    continue
                shapes = _empty_shape(one, renamed), _empty_shape(other, zeros)
                if shapes[0] is None or shapes[0] != shapes[1]:
                    return False
            elif type(one) is not type(other) or one != other:
                return False
        return _takes_zeros(whole, zeros)


def may_be_included(program: torch.export.ExportedProgram, size: Any) -> bool:
    """Whether each result of a program, captured for other sizes, has no elements for a size of 0, or doesn't depend on it.

    Otherwise the model for the size 0 hardly has the same results, and needn't be captured.
    """
    zeros, _ = _zeros(program, [size], _Numbered(program, {}))
    depends: set[torch.fx.Node] = set()
    for node in program.graph.nodes:
        operands = {*node.all_input_nodes, *map(_base, node.all_input_nodes)}
        if size in (node.meta.get("unbacked_bindings") or ()) or operands & depends:
            depends |= {node, *_written_by(node)}
    return all(
        not isinstance(result, torch.fx.Node)
        or not {result, _base(result)} & depends
        or _empty_shape(result, zeros) is not None
        for result in _results(program)
    )


def empty_size(env: Any, expr: Any) -> tuple[Any, Any] | None:
    """The data-dependent size of which a condition asks whether it is 0, and sympy's answer for other sizes; else ``None``."""
    symbols = expr.free_symbols
    if len(symbols) != 1 or not symbols <= env.size_like or not isinstance(expr, sympy.core.relational.Relational):
        return None
    (size,) = symbols
    if not env.bound_sympy(size).lower >= 0:
        return None
    other = expr.xreplace({size: sympy.Dummy(integer=True, nonnegative=True) + 1})
    if other not in (sympy.true, sympy.false) or expr.xreplace({size: sympy.Integer(0)}) != sympy.Not(other):
        return None
    return size, other


def _results(program: torch.export.ExportedProgram) -> list[Any]:
    return list(program.graph.find_nodes(op="output")[0].args[0])


def _writes_only_results(*programs: torch.export.ExportedProgram) -> bool:
    """Whether only results of operators are written, and not inputs or weights, and each operator tells what its results share."""
    modules = [part for program in programs for part in program.graph_module.modules()]
    nodes = [node for part in modules if isinstance(part, torch.fx.GraphModule) for node in part.graph.nodes]
    bases = [base for node in nodes for base in _written_by(node)]
    return not bases or not (any(map(_shares_unknown, nodes)) or any(base.op != "call_function" for base in bases))


def _shares_unknown(node: torch.fx.Node) -> bool:
    """Whether results may share the memory of operands without a word in the schema: ``dropout`` returns its operand."""
    if not isinstance(node.target, OpOverload):
        return isinstance(node.target, HigherOrderOperator)
    tensors = [result for result in node.target._schema.returns if "Tensor" in str(result.type)]
    says = any(result.alias_info is not None for result in tensors)
    return bool(tensors) and not says and node.target.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def _written_by(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The nodes with the tensors that an operator writes."""
    for argument, operand in _operands(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from map(_base, filter(_is_node, pytree.tree_leaves(operand)))


def _operands(node: torch.fx.Node) -> list[tuple[Any, Any]]:
    """The parameters of an operator with what is given for them."""
    parameters = node.target._schema.arguments if isinstance(node.target, OpOverload) else ()
    given = dict(zip((parameter.name for parameter in parameters), node.args, strict=False)) | node.kwargs
    return [(parameter, given.get(parameter.name)) for parameter in parameters]


def _base(node: torch.fx.Node) -> torch.fx.Node:
    """The node of which a node's result may be a view."""
    while node.op == "call_function":
        if isinstance(node.target, OpOverload):
            sets = [result.alias_info.before_set for result in node.target._schema.returns if result.alias_info]
            of_lists = set() in sets  # each of the tensors shares the operand's memory
            shared = (
                operand
                for a, operand in _operands(node)
                if a.alias_info is not None and (of_lists or a.alias_info.before_set in sets)
            )
        else:  # getitem
            shared = (operand for operand in node.args[:1])
        base = next(filter(_is_node, pytree.tree_leaves([*shared])), None)
        if base is None:
            break
        node = base
    return node


def _is_node(value: Any) -> bool:
    return isinstance(value, torch.fx.Node)


def _zeros(
    program: torch.export.ExportedProgram, sizes: Sequence[Any], numbered: _Numbered, empty: Set[Any] = frozenset()
) -> tuple[dict[Any, sympy.Integer], Set[Any]]:
    """The symbols that are 0 where others are: of operators that count in equal tensors, or in tensors without elements.

    Args:
        sizes: The symbols that are 0.
        empty: Numbers of tensors whose elements are all 0.

    Returns:
        The symbols, and the numbers of such tensors.
    """
    found = [
        (symbol, numbered.read.get((node, tensor), object()), tensor, is_mask)
        for symbol, node, tensor, is_mask in _counted(program)
    ]
    zeros, before = dict.fromkeys(sizes, sympy.Integer(0)), -1
    while len(zeros) != before:
        before = len(zeros)
        empty = empty | {number for symbol, number, _, is_mask in found if is_mask and symbol in zeros}
        for symbol, number, tensor, is_mask in found:
            if (is_mask and number in empty) or 0 in _sizes(tensor.meta.get("val"), zeros):
                zeros[symbol] = sympy.Integer(0)
    return zeros, empty


def _counted(program: torch.export.ExportedProgram) -> Iterator[tuple[Any, torch.fx.Node, torch.fx.Node, bool]]:
    """The symbols of sizes that operators count.

    Each with the operator, the tensor with at least as many elements, and whether all of these that aren't 0 count.
    """
    for node in program.graph.nodes:
        fresh = node.meta.get("unbacked_bindings")
        if not fresh or not _selects(node):
            continue
        name, tensors = node.target._schema.name, node.all_input_nodes
        if name == "aten::index":
            tensors = [other for other in tensors[1:] if getattr(other.meta.get("val"), "dtype", None) is torch.bool]
        for symbol in fresh if tensors else ():
            yield symbol, node, tensors[0], name in ("aten::index", "aten::nonzero")


def _selects(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.name in _SELECTING


def _paired_symbols(
    returned: torch.export.ExportedProgram, whole: torch.export.ExportedProgram
) -> Iterator[tuple[Any, Any]]:
    """The symbols of the inputs' sizes in two captures of a model."""
    for one, other in zip(*(p.graph.find_nodes(op="placeholder") for p in (returned, whole)), strict=False):
        yield from zip(_sizes(one.meta.get("val"), {}), _sizes(other.meta.get("val"), {}), strict=False)


def _sizes(tensor: Any, known: Mapping[Any, Any]) -> list[Any]:
    """The sizes of a tensor as expressions, none of another value."""
    sizes = tensor.shape if isinstance(tensor, torch.Tensor) else ()
    return [_expression(size).xreplace(known) for size in sizes]


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _empty_shape(result: torch.fx.Node, known: Mapping[Any, Any]) -> Any:
    """Shape, dtype and device of a result without elements; ``None`` for a result that may have some."""
    tensor = result.meta.get("val")
    sizes = _sizes(tensor, known)
    return (sizes, tensor.dtype, tensor.device) if tensor is not None and 0 in sizes else None


class _Numbered:
    """Numbers of the results of a program's nodes: equal operators with equal operands have equal numbers.

    Args:
        known: The numbers of keys, which two programs share.

    Attributes:
        read: By node and operand, the operand's number when the node reads it.
    """

    def __init__(self, program: torch.export.ExportedProgram, known: dict[Any, int]) -> None:
        inputs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        self.read: dict[tuple[torch.fx.Node, torch.fx.Node], Any] = {}
        self._numbers: dict[torch.fx.Node, int] = {}
        self._written: dict[torch.fx.Node, int] = {}
        for node in program.graph.nodes:
            key: Any = object()  # equal to nothing else
            if node.op == "placeholder":
                spec = inputs[node.name]
                key = spec.kind, spec.target or node.name
                if spec.kind is InputKind.CONSTANT_TENSOR:
                    key = _content(program.constants.get(spec.target))
            elif node.op == "call_function" and not _is_random(node.target):
                operands, tree = pytree.tree_flatten((node.args, node.kwargs))
                if not any(_is_node(operand) and operand.op == "get_attr" for operand in operands):
                    self.read |= {(node, operand): self.now(operand) for operand in node.all_input_nodes}
                    kept = [
                        self.now(operand) if _is_node(operand) else (type(operand), repr(operand))
                        for operand in operands
                    ]
                    key = str(node.target), tuple(kept), str(tree)
            number = self._numbers[node] = known.setdefault(key, len(known))
            for base in _written_by(node):
                self._written[base] = number

    def now(self, node: torch.fx.Node) -> tuple[int, int | None]:
        """The number of a node's result, with that of the last operator that wrote it, which has the earlier ones in its key."""
        return self._numbers[node], self._written.get(_base(node))


def _content(constant: Any) -> Any:
    if type(constant) is not torch.Tensor or constant.is_meta or constant.layout is not torch.strided:
        return object()
    content = constant.detach().cpu().contiguous().view(-1)
    return constant.dtype, constant.shape, bytes(content.view(torch.uint8).numpy()) if content.numel() else b""


def _is_random(target: Any) -> bool:
    """Whether two calls with equal operands may differ; other functions than operators compute with sizes."""
    if isinstance(target, OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags
    return isinstance(target, HigherOrderOperator)


def _takes_zeros(program: torch.export.ExportedProgram, zeros: Mapping[Any, Any]) -> bool:
    """Whether the operators of a program take the size 0, at the example's other sizes; sizes of other data are 2."""
    try:
        with FakeTensorMode():
            _OfZeros(program.graph_module, zeros).run(*program.graph.find_nodes(op="placeholder"))
    except Exception:  # an operator's refusal
        return False
    return True


def _zeros_like(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


class _OfZeros(torch.fx.Interpreter):
    """Computes shapes, where some sizes that the data decide are 0."""

    def __init__(self, module: torch.fx.GraphModule, zeros: Mapping[Any, Any]) -> None:
        super().__init__(module)
        self._known = dict(zeros)

    def run_node(self, node: torch.fx.Node) -> Any:
        if node.op == "placeholder" or node.meta.get("unbacked_bindings") or _selects(node):
            return pytree.tree_map(self._example, node.meta.get("val"))
        if getattr(node.target, "__name__", "").startswith(("_assert", "sym_constrain")):
            return None
        if isinstance(node.target, OpOverload):
            self._compute(node)
        return super().run_node(node)

    def _compute(self, node: torch.fx.Node) -> None:
        """Computes an operator whose operand has no elements: ``median`` refuses it, and torch's rule for its shape does not."""
        arguments = self.fetch_args_kwargs_from_env(node)
        counts = [leaf.numel() for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        if 0 in counts:
            with unset_fake_temporarily(), torch.no_grad():
                args, kwargs = pytree.tree_map(_zeros_like, arguments)
                node.target(*args, **kwargs)  # type: ignore[operator]

    def _example(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty([*map(self._number, value.shape)], dtype=value.dtype, device=value.device)
        return self._number(value) if isinstance(value, torch.SymInt) else value

    def _number(self, size: Any) -> int:
        expr = _expression(size)
        if isinstance(size, torch.SymInt):
            known = backed_values(size.node.shape_env)
            self._known |= {
                symbol: sympy.Integer(known.get(symbol, 2)) for symbol in expr.free_symbols - {*self._known}
            }
        return int(expr.xreplace(self._known))

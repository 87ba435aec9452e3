"""Preparation: a functional graph with named inputs and outputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind as TorchInput, OutputKind as TorchOutput

from onnxplug.capture.composites import composites_kept
from onnxplug.capture.locations import source_location
from onnxplug.capture.questions import recorded
from onnxplug.capture.shape_env import new_conditions, shape_env_of
from onnxplug.capture.sides import selects
from onnxplug.capture.signature import Captured, FunctionalGraph, InputKind, InputSlot, OutputKind, OutputSlot
from onnxplug.capture.size_guards import Condition
from onnxplug.errors import CaptureError, UsageError
from onnxplug.functionalize.effects import hidden_effects, targets_of, writes
from onnxplug.functionalize.inplace import Functionalized, make_functional
from onnxplug.functionalize.memory import PART_OF_MEMORY, part_of_memory
from onnxplug.functionalize.naming import assign_names, input_places, output_places, result_names
from onnxplug.functionalize.shared import refusal, shared_with, with_views
from onnxplug.functionalize.sizes import Ranges
from onnxplug.functionalize.subgraphs import inline_regions, subgraphs_are_functional, subgraphs_of
from onnxplug.functionalize.views import show_views
from onnxplug.text import type_with_article, with_article
from onnxplug.torch_private import DispatchKey, fx_config, is_alias_of, is_traceable_wrapper_subclass, pytree
from onnxplug.warn import warn

_MUTATIONS = (TorchOutput.BUFFER_MUTATION, TorchOutput.USER_INPUT_MUTATION)
_STATE = {
    TorchInput.PARAMETER: InputKind.PARAMETER,
    TorchInput.BUFFER: InputKind.BUFFER,
    TorchInput.CONSTANT_TENSOR: InputKind.CONSTANT,
}


def prepare(
    captured: Captured,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    mutations: bool = True,
    present_names: bool = False,
) -> FunctionalGraph:
    """Makes the captured graph functional and gives its inputs, state and outputs their names.

    The user's ``ExportedProgram`` stays as it is.

    Args:
        input_names, output_names: The user's names, in order.
        mutations: Whether the new values of inputs and buffers that the model writes are outputs.
        present_names: Whether an output that is the new value of an input is named after it
            (:func:`onnxplug.capture.signature.present_name`).

    Raises:
        UsageError: ``input_names`` or ``output_names`` doesn't fit.
        CaptureError: torch can't make the graph functional.
    """
    functional = _functional(captured)
    _warn_of_shared_inputs(captured, functional)
    examples = pytree.tree_leaves((captured.args, captured.kwargs))
    part = part_of_memory(leaf for leaf in examples if isinstance(leaf, torch.Tensor))
    if part is not None and captured.strategy != "given":  # torch's own program keeps the strides
        for user_input in functional.inputs:
            if user_input.kind is InputKind.USER:
                user_input.node.meta[PART_OF_MEMORY] = part
    if not mutations:
        for slot in functional.outputs:
            if slot.kind is not OutputKind.USER:
                slot.value = None  # verification still knows that the model writes it
    places = input_places(captured.program, functional), output_places(captured.program, functional)
    assign_names(functional, input_names, output_names, present_names=present_names, places=places)
    return functional


def _functional(captured: Captured) -> FunctionalGraph:
    program = captured.program
    targets = targets_of(program.graph)
    _refuse_assigned_data(program.graph, targets)
    graph, copies = inline_regions(program.graph, targets)
    if graph is not program.graph:
        targets = targets_of(graph)
    if subgraphs_are_functional(graph, graph.owning_module):
        if not writes(graph, targets):
            return _slots(program, graph, copies, "unchanged")
        result = make_functional(graph, _ranges(captured))
        if result is not None:
            tensors = _tensors(program, copies)
            groups = shared_with(result.mutated, tensors)
            if groups:
                graph, inner = with_views(graph, groups, tensors)
                copies = {
                    old: inner[new] for old, new in copies.items() if isinstance(new, torch.fx.Node) and new in inner
                }
                result = make_functional(graph, _ranges(captured))
                if result is None:
                    raise refusal(groups[0])
            _note_conditions(captured, result)
            copies = {old: result.nodes[new] for old, new in copies.items() if isinstance(new, torch.fx.Node)}
            mutated = {result.nodes[old]: new for old, new in result.mutated.items()}
            return _slots(program, result.graph, copies, "linear", mutated)
    selection = next((node for node in graph.nodes if selects(node.target)), None)
    if selection is not None:
        raise CaptureError(
            f"the branch at {source_location(selection)} depends on a tensor's values, and a tensor that it may assign is written "
            "in place",
            hint="Write `x = x + y` instead of `x += y`, or use torch.where instead of `if`.",
        )
    env = shape_env_of(program)
    known = len(env.guards) if env is not None else 0
    try:
        key = DispatchKey.CompositeImplicitAutograd
        program, module = copy.copy(program), copy.deepcopy(program.graph_module)
        program._graph_module = module
        graphs = [module.graph, *(inner.graph for inner in subgraphs_of(module.graph, module))]
        for inner in graphs:
            show_views(inner)
        hidden = {target for inner in graphs for target in hidden_effects(inner)}
        # As in capture: sizes 0 and 1 of the example inputs imply nothing about other sizes.
        with fx_config.patch(backed_size_oblivious=True), recorded(), composites_kept(targets_of(module.graph)):
            program = program.run_decompositions({target: partial(target._op_dk, key) for target in hidden})
    except Exception as error:
        _refuse_replaced_memory(graph, error)
        raise CaptureError(
            f"torch can't make the in-place operators of the model functional: {type(error).__name__}: {error}",
            hint="Replace in-place writes to views (x[...] = y) by torch.where, torch.cat or index_put.",
        ) from error
    _refuse_replaced_memory(program.graph)
    captured.conditions.extend(new_conditions(captured, known))
    targets_written = {output.target for output in program.graph_signature.output_specs if output.kind in _MUTATIONS}
    inputs = dict(zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True))
    written = [node for node, spec in inputs.items() if spec.target in targets_written]
    for group in shared_with(written, _tensors(program, {})):
        raise refusal(group)
    return _slots(program, program.graph, {}, "functionalized")


def _tensors(
    program: torch.export.ExportedProgram, copies: Mapping[torch.fx.Node, Any]
) -> dict[torch.fx.Node, torch.Tensor]:
    """The parameters, buffers and constants with memory and a reader, by their placeholders or the copies of these."""
    inputs = zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True)
    tensors = ((node, _tensor_of(program, spec)) for node, spec in inputs if node.users)
    return {copies.get(node, node): tensor for node, tensor in tensors if _has_memory(tensor)}


def _tensor_of(program: torch.export.ExportedProgram, spec: Any) -> Any:
    """The tensor, or the object, of a parameter, buffer or constant; ``None`` for an input."""
    tensor = program.state_dict.get(spec.target)
    return program.constants.get(spec.target) if tensor is None else tensor


def _has_memory(tensor: Any) -> bool:
    """Whether a tensor is no sparse tensor, which has several inner tensors, and no subclass with inner tensors."""
    is_strided = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    return is_strided and not is_traceable_wrapper_subclass(tensor)


def _ranges(captured: Captured) -> Ranges:
    """The sizes that the program may have. torch's ranges begin at 2 where the program never compared the size with 1."""
    import sympy

    limits_of = {
        symbol: (int(limits.lower) if limits.lower > 2 else 1, int(limits.upper) if limits.upper.is_Integer else None)
        for symbol, limits in captured.program.range_constraints.items()
    }
    for expr in (condition.expr for condition in captured.conditions):
        if isinstance(expr, sympy.GreaterThan) and expr.lhs.is_Symbol and expr.rhs.is_Integer:
            low, high = limits_of.get(expr.lhs, (1, None))
            limits_of[expr.lhs] = max(low, int(expr.rhs)), high
    return limits_of


def _note_conditions(captured: Captured, functional: Functionalized) -> None:
    """Records, and warns, that a graph is right only for sizes at which an operator gives a view, or a copy."""
    known, names = {condition.expr for condition in captured.conditions}, captured.size_names()
    for expr, node in sorted(functional.conditions, key=lambda row: len(row[0].atoms())):
        if known & {expr, *expr.args}:  # any of the alternatives is enough
            continue
        known.add(expr)
        place = source_location(node)
        condition = Condition(expr, place, fixed=False)
        captured.conditions.append(condition)
        where = f" at {place}" if place else ""
        warn(
            f"the exported model is right only where {condition.text(names)}: whether {node.target}{where} gives a "
            "view or a copy depends on it, and one of the two tensors is written later. Call .clone() there, or declare the range "
            "(torch.export.Dim(name, min=2))."
        )


def _warn_of_shared_inputs(captured: Captured, functional: FunctionalGraph) -> None:
    """Warns where the example's inputs share memory and the model writes one of them: the inputs of an ONNX model never do."""
    written = {slot.target for slot in functional.outputs if slot.kind is OutputKind.INPUT_MUTATION}
    leaves = pytree.tree_leaves((captured.args, captured.kwargs)) if written else []
    tensors = {
        slot.name: leaves[slot.position]
        for slot in functional.inputs
        if slot.position is not None and slot.position < len(leaves) and isinstance(leaves[slot.position], torch.Tensor)
    }
    for name in tensors.keys() & written:
        for other in tensors.keys() - {name}:
            if is_alias_of(tensors[name], tensors[other]):
                warn(
                    f"the model writes its input {name!r}, which shares memory with {other!r} in the example; the exported model "
                    "takes them for separate tensors. Give separate ones, or leave one of the inputs away."
                )
                return


def _refuse_assigned_data(graph: torch.fx.Graph, targets: Sequence[Any]) -> None:
    """Refuses ``x.data = y``, for which torch.export records only a check."""
    check = torch.ops.aten._has_compatible_shallow_copy_type.default
    for node in graph.nodes if check in targets else ():
        if node.target is check:
            raise CaptureError(
                f"torch.export does not record the assignment to .data at {source_location(node) or 'unknown source'}",
                hint="Write x.copy_(y), or x.set_(y) where the shapes differ.",
            )


def _refuse_replaced_memory(graph: torch.fx.Graph, cause: Exception | None = None) -> None:
    """Refuses a graph in which a tensor takes other memory (``set_``), if that could not be made functional."""
    for inner in (graph, *(module.graph for module in subgraphs_of(graph, graph.owning_module))):
        for node in inner.nodes:
            if getattr(node.target, "overloadpacket", None) in (torch.ops.aten.set_, torch.ops.aten.set):
                raise CaptureError(
                    f"the call of set_ at {source_location(node) or 'unknown source'} can't be made functional",
                    hint="x.set_(y) works on tensors whose views are all known and not written later; write x.copy_(y).",
                ) from cause


def _slots(
    program: torch.export.ExportedProgram,
    graph: torch.fx.Graph,
    copies: dict[torch.fx.Node, torch.fx.Node],
    strategy: str,
    mutated: dict[torch.fx.Node, torch.fx.Node] | None = None,
) -> FunctionalGraph:
    """Reads the signature off a program whose graph may be a copy.

    Args:
        graph: Its graph, or the functional copy.
        copies: Nodes of its graph to nodes of ``graph``.
        strategy: The method that made ``graph``.
        mutated: Placeholders of ``graph`` that are written, with their final values.
    """
    signature = program.graph_signature
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    inputs: list[InputSlot] = []
    position = 0
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        slot = _input_slot(program, node, copies.get(node, node), spec, position)
        position += slot.position is not None
        inputs.append(slot)
    users: list[OutputSlot] = []
    mutations: list[OutputSlot] = []
    returned = graph.output_node().args[0]
    assert isinstance(returned, list | tuple)
    for value, output in zip(returned, signature.output_specs, strict=True):
        if output.kind is TorchOutput.TOKEN:
            continue
        if output.kind in _MUTATIONS:
            kind = OutputKind.BUFFER_MUTATION
            if output.kind is TorchOutput.USER_INPUT_MUTATION:
                kind = OutputKind.INPUT_MUTATION
            mutations.append(OutputSlot(value, kind, f"{output.target}_out", output.target))
        else:
            users.append(OutputSlot(value, OutputKind.USER, ""))
    slots = {slot.node: slot for slot in inputs}
    for placeholder, new in (mutated or {}).items():
        slot = slots[placeholder]
        kind = OutputKind.INPUT_MUTATION if slot.kind is InputKind.USER else OutputKind.BUFFER_MUTATION
        mutations.append(OutputSlot(new, kind, f"{slot.name}_out", slot.name))
    if mutated:
        # Outputs of the copy too: nodes without a reader aren't converted.
        graph.output_node().args = ((*returned, *mutated.values()),)
    for name, slot_ in zip(result_names(program, len(users)), users, strict=True):
        slot_.name = name
    _name_gradients(users, inputs, program)
    return FunctionalGraph(graph, inputs, [*users, *mutations], strategy)


def _name_gradients(users: list[OutputSlot], inputs: list[InputSlot], program: torch.export.ExportedProgram) -> None:
    """Names gradients in the graph of loss and gradients that torch makes of an exported loss: ``WEIGHT_grad``."""
    specs = [s for s in program.graph_signature.output_specs if s.kind not in (*_MUTATIONS, TorchOutput.TOKEN)]
    # Gradients of inputs go by the names that the placeholders had before torch renamed them, which count them: arg0_1, arg1_1.
    names = {f"arg{position}_1": slot.name for position, slot in enumerate(inputs)}
    names |= {slot.node.name: slot.name for slot in inputs if slot.kind is InputKind.USER}
    for slot, spec in zip(users, specs, strict=True):
        if spec.kind is TorchOutput.LOSS_OUTPUT:
            slot.name = "loss"
        elif spec.kind in (TorchOutput.GRADIENT_TO_PARAMETER, TorchOutput.GRADIENT_TO_USER_INPUT):
            slot.name = f"{names.get(spec.target or '', spec.target)}_grad"


def _input_slot(
    program: torch.export.ExportedProgram, original: torch.fx.Node, node: torch.fx.Node, spec: Any, position: int
) -> InputSlot:
    if spec.kind in _STATE:
        tensor = _tensor_of(program, spec)
        if tensor is not None and is_traceable_wrapper_subclass(tensor):
            raise UsageError(
                f"the weight {spec.target!r} is {type_with_article(tensor)}, a tensor subclass, whose inner tensors the exported "
                "program does not show",
                hint="Give the module itself, or unwrap its weights before torch.export (torchao: unwrap_tensor_subclass).",
            )
        if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided:
            raise UsageError(
                f"the weight {spec.target!r} is a tensor of the layout {tensor.layout}, for which no operator has a rule",
                hint="Keep it dense: tensor.to_dense().",
            )
        persistent = spec.target in program.state_dict
        return InputSlot(node, _STATE[spec.kind], spec.target, tensor=tensor, target=spec.target, persistent=persistent)
    if isinstance(program.constants.get(spec.target), torch.Generator):
        return InputSlot(node, InputKind.NONE, original.name)  # a runtime draws by its own generator
    if spec.kind is TorchInput.TOKEN:
        return InputSlot(node, InputKind.NONE, original.name)  # it only orders effects, of which none is kept
    if spec.kind is not TorchInput.USER_INPUT:
        raise UsageError(
            f"the model uses an object of a class in C++ ({spec.target}), which ONNX can't hold"
            if spec.kind is TorchInput.CUSTOM_OBJ
            else f"the model takes {with_article(spec.kind.name.lower())} ({spec.target}), which ONNX can't hold",
            hint="Export the model in a form whose weights are tensors: the one before quantized.linear_prepack or whatever made "
            "the object; torchao and pt2e quantise so.",
        )
    value = original.meta.get("val")
    if isinstance(spec.arg, ConstantArgument):
        value = spec.arg.value
    if value is None:
        return InputSlot(node, InputKind.NONE, original.name, position=position)
    if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return InputSlot(node, InputKind.USER, original.name, position=position)
    return InputSlot(node, InputKind.STATIC, original.name, value=value, position=position)

"""Divides a graph of AOTAutograd into the graph to convert and the steps that PyTorch runs before and after it.

A graph of AOTAutograd is functional; its parameters, buffers and symbolic sizes are inputs. Outputs that are inputs, views of
inputs or sizes are PyTorch's own: ONNX Runtime would copy them.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from onnxplug.capture.signature import FunctionalGraph, InputKind, InputSlot, OutputKind, OutputSlot
from onnxplug.errors import Unsupported
from onnxplug.functionalize.subgraphs import inlined
from onnxplug.torch_private import OpOverload
from onnxplug_compile.randomness import (
    DROPOUT,
    AnyDraw,
    Draw,
    Mask,
    Replay,
    State,
    apply_mask,
    generator_state,
    is_drawn,
    unwrap_states,
)
from onnxplug_compile.sizes import Sizes, UnknownSizeError

_ATEN = torch.ops.aten
_VIEWS = frozenset(
    {
        _ATEN.alias.default,
        _ATEN.detach.default,
        _ATEN.diagonal.default,
        _ATEN.expand.default,
        _ATEN.permute.default,
        _ATEN.select.int,
        _ATEN.slice.Tensor,
        _ATEN.squeeze.default,
        _ATEN.squeeze.dim,
        _ATEN.squeeze.dims,
        _ATEN.t.default,
        _ATEN.transpose.int,
        _ATEN.unfold.default,
        _ATEN.unsqueeze.default,
        _ATEN.view.default,
    }
)
#: Operators that return several views, of which ``getitem`` takes one.
_PARTS = frozenset({_ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.unbind.int})


@dataclass(frozen=True)
class Computed:
    """An output that ONNX Runtime computes.

    Attributes:
        shape, strides: Indices of sizes and strides in the tuple of :class:`Sizes`; ``None`` where they depend on data.
        order: Where they depend on data, the axes by falling stride.
    """

    index: int
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...] | None
    strides: tuple[int, ...] | None
    contiguous: bool
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Passed:
    """An output that is an input or a draw, by its position among inputs and draws."""

    position: int


@dataclass(frozen=True)
class Constant:
    """An output that is the same in every call: ``None`` or a number."""

    value: Any


@dataclass(frozen=True)
class Number:
    """An output that is a size: its index in the tuple of :class:`Sizes`."""

    index: int


@dataclass(frozen=True)
class View:
    """An output that is a view, as it is in eager: outputs that share memory there share it here.

    Attributes:
        base: The base of the view: an input or a draw, or an output that ONNX Runtime computes.
        steps: View operators, each with the arguments after the tensor; sizes among them are ``Number``.
    """

    base: Passed | Computed
    steps: tuple[tuple[Any, tuple[Any, ...]], ...]


Result = Computed | Passed | Constant | Number | View


@dataclass
class Check:
    """A check of whether a factorisation succeeded, whose error is eager PyTorch's own.

    Attributes:
        info: The node, then the result, that says it.
        rest: The arguments after it, by position and by name.
    """

    info: Any
    rest: tuple[tuple[Any, ...], dict[str, Any]]

    def __call__(self, info: torch.Tensor) -> None:
        """Raises torch's error where the factorisation failed."""
        args, kwargs = self.rest
        _ATEN._linalg_check_errors(info, *args, **kwargs)


@dataclass
class Lowered:
    """A graph, divided.

    Attributes:
        functional: The graph to convert. Its inputs are the original graph's, then the results of ``draws``.
        checks: What PyTorch checks after the graph.
    """

    functional: FunctionalGraph
    results: list[Result]
    draws: list[AnyDraw]
    sizes: Sizes = field(repr=False)
    checks: list[Check] = field(default_factory=list)


def lower(module: torch.fx.GraphModule) -> Lowered:
    """Divides a graph of AOTAutograd. The module stays as it is."""
    graph, _ = inlined(module.graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        _check_input(node)
    sizes = Sizes(placeholders)
    draws, drawn = _take_draws(graph, sizes)
    position = {node: i for i, node in enumerate([*placeholders, *drawn])}
    checks, tokens = _take_checks(graph)
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, list | tuple)
    results, computed = _results([*outputs, *(check.info for check in checks)], position, sizes)
    for check, result in zip(checks, results[len(outputs) :], strict=True):
        check.info = result
    graph.output_node().args = (tuple(computed),)
    slots = [
        InputSlot(node, InputKind.USER if node not in tokens else InputKind.NONE, f"input_{i}", position=i)
        for i, node in enumerate([*placeholders, *drawn])
        if isinstance(node.meta.get("val"), torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
    ]
    fixed = {slot.node for slot in slots}
    slots += [
        InputSlot(node, InputKind.STATIC, f"input_{i}", value=node.meta.get("val"), position=i)
        for i, node in enumerate(placeholders)
        if node not in fixed
    ]
    returned = [OutputSlot(node, OutputKind.USER, f"output_{i}") for i, node in enumerate(computed)]
    return Lowered(FunctionalGraph(graph, slots, returned), results[: len(outputs)], draws, sizes, checks)


def _check_input(node: torch.fx.Node) -> None:
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor) and (val.layout is not torch.strided or val.is_quantized):
        raise Unsupported(f"the input {node.name} is a {val.layout} tensor of {val.dtype}")
    _check_device(node, "input")


def _check_device(node: torch.fx.Node, kind: str) -> None:
    """Refuses memory that the CPU can't read, which no session may get."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor) and val.device.type != "cpu":
        raise Unsupported(
            f"the {kind} {node.name} is on {str(val.device)!r}, and sessions read and write the memory of the CPU"
        )


def _results(
    outputs: Sequence[Any], position: dict[torch.fx.Node, int], sizes: Sizes
) -> tuple[list[Result], list[torch.fx.Node]]:
    """The kind of every output, and the nodes that ONNX Runtime computes."""
    results: list[Result] = []
    computed: dict[torch.fx.Node, Computed] = {}
    for value in outputs:
        if not isinstance(value, torch.fx.Node):
            results.append(Constant(value))
        elif value in position:
            results.append(Passed(position[value]))
        elif value in computed:
            results.append(computed[value])
        else:
            number = _number(value, sizes)
            if number is None:
                root, steps = _view(value, position, sizes)
                base: Passed | Computed | None = Passed(position[root]) if root in position else computed.get(root)
                if base is None:
                    base = computed[root] = _computed(root, len(computed), sizes)
                number = View(base, steps) if steps else base
            results.append(number)
    return results, list(computed)


def _number(node: torch.fx.Node, sizes: Sizes) -> Result | None:
    val = node.meta.get("val")
    if val is None or isinstance(val, int | float | bool):
        return Constant(val)
    if not isinstance(val, torch.SymInt):
        return None
    try:
        return Number(sizes.index(val))
    except UnknownSizeError as error:
        raise Unsupported(f"the output {node.name} is a number that depends on data: {error}") from error


def _view(
    node: torch.fx.Node, position: dict[torch.fx.Node, int], sizes: Sizes
) -> tuple[torch.fx.Node, tuple[tuple[Any, tuple[Any, ...]], ...]]:
    """The base of a tensor, and the view operators that lead from the base to the tensor."""
    steps: list[tuple[Any, tuple[Any, ...]]] = []
    while node not in position:
        chain = [node]
        if node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
            chain.append(node.args[0])
        if chain[-1].target not in (_VIEWS if len(chain) == 1 else _PARTS) or any(step.kwargs for step in chain):
            break
        try:
            calls = [(step.target, tuple(_in_call(a, sizes) for a in step.args[1:])) for step in chain]
        except UnknownSizeError:
            break
        base = chain[-1].args[0]
        if not isinstance(base, torch.fx.Node) or not isinstance(base.meta.get("val"), torch.Tensor):
            break
        steps += calls
        node = base
    return node, tuple(reversed(steps))


def _in_call(argument: Any, sizes: Sizes) -> Any:
    """An argument of a view operator, with its symbolic sizes as :class:`Number`."""
    if isinstance(argument, torch.fx.Node):
        val = argument.meta.get("val")
        if not isinstance(val, torch.SymInt):
            raise UnknownSizeError(f"{argument} is no size")
        return Number(sizes.index(val))
    if isinstance(argument, list | tuple):
        return [_in_call(a, sizes) for a in argument]
    return argument


def _computed(node: torch.fx.Node, index: int, sizes: Sizes) -> Computed:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided or val.is_quantized:
        raise Unsupported(f"the output {node.name} is a {_kind(val)}, which ONNX Runtime does not return")
    _check_device(node, "output")
    try:
        shape = tuple(sizes.index(s) for s in val.shape)
        strides = tuple(sizes.index(s) for s in val.stride())
    except UnknownSizeError:
        order = _memory_order(val)
        return Computed(index, val.dtype, val.device, None, None, order == tuple(range(val.dim())), order)
    return Computed(index, val.dtype, val.device, shape, strides, _always_contiguous(val))


def _kind(val: Any) -> str:
    if not isinstance(val, torch.Tensor):
        return type(val).__name__
    return "quantized tensor" if val.is_quantized else f"{val.layout} tensor"


def _memory_order(val: torch.Tensor) -> tuple[int, ...]:
    """The order of axes in which a tensor is contiguous by its expressions; the axes' own order where there is none."""
    for order in itertools.permutations(range(min(val.dim(), 5))):
        if len(order) == val.dim() and _always_contiguous(val.permute(order)):
            return order
    return tuple(range(val.dim()))


def _always_contiguous(val: torch.Tensor) -> bool:
    """Whether the strides are those of a contiguous tensor by their expressions; no guard is made."""
    expected: Any = 1
    for size, stride in zip(reversed(val.shape), reversed(val.stride()), strict=True):
        if _expr(stride) != expected and _expr(size) != 1:
            return False
        expected = expected * _expr(size)
    return True


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _take_draws(graph: torch.fx.Graph, sizes: Sizes) -> tuple[list[AnyDraw], list[torch.fx.Node]]:
    """Makes an input of every random operator that PyTorch can run before the graph."""
    draws: list[AnyDraw] = []
    inputs: list[torch.fx.Node] = []
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    repeated = unwrap_states(graph)
    first = next((node for node in graph.nodes if node.op != "placeholder"), None)
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_drawn(node):
            continue
        is_dropout = node.target is DROPOUT
        kind = Mask if is_dropout else State if node.target is generator_state else Draw
        try:
            draw: AnyDraw = kind(node, sizes)
        except UnknownSizeError as error:
            if node in repeated:
                raise Unsupported(f"{node.target} draws random numbers in a checkpointed module: {error}") from error
            continue
        state = repeated.get(node)
        if state is not None:
            draw = Replay(draw, placeholders.index(state))
        assert first is not None
        with graph.inserting_before(first):
            new = graph.placeholder(f"draw_{len(draws)}")
        new.meta["val"] = node.meta["val"][1] if is_dropout else node.meta["val"]
        if is_dropout:
            apply_mask(graph, node, new)
        else:
            node.replace_all_uses_with(new)
        draws.append(draw)
        inputs.append(new)
    return draws, inputs


def _take_checks(graph: torch.fx.Graph) -> tuple[list[Check], set[Any]]:
    """Removes the checks of factorisations, ``with_effects(token, operator, info, …)``, which give nothing but the token.

    Returns:
        The checks, and the tokens, which are ``None`` in a call.

    Raises:
        Unsupported: Another operator has effects.
    """
    checks, tokens = [], set()
    for node in list(graph.nodes):
        if getattr(node.target, "__name__", "") != "with_effects":
            continue
        token, target, *operands = node.args
        if target is not _ATEN._linalg_check_errors.default:
            raise Unsupported(f"{target} has effects beside its results")
        info, *rest = operands
        tokens.add(token)
        checks.append(Check(info, (tuple(rest), dict(node.kwargs))))
        for user in list(node.users):
            user.replace_all_uses_with(token)
            graph.erase_node(user)
        graph.erase_node(node)
    return checks, tokens


# -- digests of graphs -------------------------------------------------------------------------------------------------


def structure(functional: FunctionalGraph) -> str:
    """A digest of a graph that is equal for graphs that become the same model."""
    digest = hashlib.sha256()
    symbols: dict[str, str] = {}
    for line in _lines(functional.graph, symbols):
        digest.update(line.encode())
    for line in _known_of_sizes(functional.graph, symbols):
        digest.update(line.encode())
    return digest.hexdigest()


def guard_count(graph: torch.fx.Graph) -> int:
    """The number of guards on sizes. A trace that asks for a size's value adds some."""
    env = _shape_env(graph)
    return 0 if env is None else len(env.guards)


def _shape_env(graph: torch.fx.Graph) -> Any:
    for node in graph.nodes:
        val = node.meta.get("val")
        sizes = val.shape if isinstance(val, torch.Tensor) else (val,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def _known_of_sizes(graph: torch.fx.Graph, symbols: dict[str, str]) -> Iterator[str]:
    """The ranges and guards of symbolic sizes, on which the choices of a trace may depend."""
    env = _shape_env(graph)
    if env is None:
        return
    new = {name: sympy.Symbol(text) for name, text in symbols.items()}
    for symbol, values in env.var_to_range.items():
        if str(symbol) in new:
            yield f"{new[str(symbol)]} {values}\n"
    for guard in env.guards:
        if {str(s) for s in guard.expr.free_symbols} <= new.keys():
            yield f"{guard.expr.xreplace({s: new[str(s)] for s in guard.expr.free_symbols})}\n"


def _lines(graph: torch.fx.Graph, symbols: dict[str, str]) -> Iterator[str]:
    """A line for each node, in which the names of nodes and of symbolic sizes do not matter."""
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        target = f"{node.target}" if node.op == "call_function" else ""
        if node.op == "call_function" and not isinstance(node.target, OpOverload):
            target = f"{getattr(node.target, '__module__', operator.__name__)}.{node.target}"
        args = _text((node.args, dict(node.kwargs)), number)
        yield f"{node.op} {target} {args} {_type(node.meta.get('val'), symbols)}\n"
        if node.op == "get_attr":
            yield from _attribute(graph.owning_module, str(node.target), symbols)


def _attribute(owner: Any, path: str, symbols: dict[str, str]) -> Iterator[str]:
    for part in path.split("."):
        owner = getattr(owner, part)
    if isinstance(owner, torch.fx.GraphModule):
        yield from _lines(owner.graph, symbols)
    elif isinstance(owner, torch.Tensor):
        plain = owner.detach().cpu().contiguous()
        data = plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        yield f"{_type(owner, symbols)} {hashlib.sha256(data).hexdigest()}\n"
    else:
        yield f"{owner!r}\n"


def _text(value: Any, number: dict[torch.fx.Node, str]) -> str:
    if isinstance(value, torch.fx.Node):
        return number[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(v, number) for v in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_text(v, number)}' for k, v in value.items())}}}"
    return repr(value)


def _type(val: Any, symbols: dict[str, str]) -> str:
    if isinstance(val, torch.Tensor):
        dims = ", ".join(_dim(s, symbols) for s in (*val.shape, "/", *val.stride()))
        return f"{val.dtype} {val.device} [{dims}]"
    if isinstance(val, list | tuple):
        return f"({', '.join(_type(v, symbols) for v in val)})"
    if isinstance(val, torch.SymInt | torch.SymFloat | torch.SymBool):
        return f"{type(val).__name__} {_dim(val, symbols)}"
    return repr(val)


def _dim(size: Any, symbols: dict[str, str]) -> str:
    if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(size)
    expr = size.node.expr
    names = {s: symbols.setdefault(str(s), f"d{len(symbols)}") for s in sorted(expr.free_symbols, key=str)}
    return str(expr.xreplace({s: sympy.Symbol(name, integer=True, positive=True) for s, name in names.items()}))

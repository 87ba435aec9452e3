"""Random operators run by PyTorch before a graph, with its generators and seeds, so that results are eager's.

ONNX's random operators draw from generators of their own, and no seed of PyTorch makes them draw what eager draws.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxplug.errors import Unsupported
from onnxplug.torch_private import FakeTensor, HigherOrderOperator, OpOverload, pytree
from onnxplug_compile.sizes import Sizes, UnknownSizeError

_ATEN = torch.ops.aten
#: Random operators that use no more of their tensor arguments than shape, dtype and device.
DRAWS = frozenset(
    {
        _ATEN.rand.default,
        _ATEN.randn.default,
        _ATEN.randint.default,
        _ATEN.randint.low,
        _ATEN.randperm.default,
        _ATEN.rand_like.default,
        _ATEN.randn_like.default,
        _ATEN.randint_like.default,
        _ATEN.randint_like.low_dtype,
        _ATEN.bernoulli.p,
        _ATEN.uniform.default,
        _ATEN.normal_functional.default,
        _ATEN.exponential.default,
        _ATEN.geometric.default,
        _ATEN.log_normal.default,
        _ATEN.cauchy.default,
        _ATEN.random.default,
        _ATEN.random.to,
        getattr(_ATEN.random, "from"),
    }
)

DROPOUT = _ATEN.native_dropout.default

Argument = Callable[[Sequence[int]], Any]


class Draw:
    """One random operator, called anew for every call of the graph.

    Args:
        sizes: Collects the sizes that it needs.
    """

    def __init__(self, node: torch.fx.Node, sizes: Sizes) -> None:
        self.device: torch.device = node.meta["val"].device
        self._target: Any = node.target
        self._args = [_argument(a, sizes) for a in node.args]
        self._kwargs = {name: _argument(a, sizes) for name, a in node.kwargs.items()}

    def __call__(self, numbers: Sequence[int], inputs: Sequence[Any]) -> torch.Tensor:
        """Draws.

        Args:
            numbers: The tuple that the function of ``sizes`` returned for this call.
        """
        args = [argument(numbers) for argument in self._args]
        drawn: torch.Tensor = self._target(*args, **{name: a(numbers) for name, a in self._kwargs.items()})
        return drawn


class Mask:
    """The mask of one dropout: the elements that stay.

    Args:
        sizes: Collects the sizes that it needs.
    """

    def __init__(self, node: torch.fx.Node, sizes: Sizes) -> None:
        operand = node.args[0]
        assert isinstance(operand, torch.fx.Node)
        self.device: torch.device = operand.meta["val"].device
        self._pattern = _pattern(operand.meta["val"], sizes)
        self._probability: Any = node.args[1]

    def __call__(self, numbers: Sequence[int], inputs: Sequence[Any]) -> torch.Tensor:
        """Draws the mask as eager's dropout does."""
        mask: torch.Tensor = DROPOUT(self._pattern(numbers), self._probability, True)[1]
        return mask


class State:
    """The state of a generator before a draw, which the backward graph of a checkpointed module repeats.

    Args:
        node: Its FX node, a call of :func:`generator_state`.
        sizes: Not needed; every kind of draw is made of a node and sizes.
    """

    def __init__(self, node: torch.fx.Node, sizes: Sizes) -> None:
        device = node.args[0]
        assert isinstance(device, torch.device)
        self.device = device

    def __call__(self, numbers: Sequence[int], inputs: Sequence[Any]) -> torch.Tensor:
        """Reads the state."""
        return generator_state(self.device)


class Replay:
    """A draw from a generator in a state that is an input; the generator is left as it was."""

    def __init__(self, draw: AnyDraw, position: int) -> None:
        self.device: torch.device = draw.device
        self._draw = draw
        self._position = position

    def __call__(self, numbers: Sequence[int], inputs: Sequence[Any]) -> torch.Tensor:
        """Draws the same numbers as when the state was saved."""
        current = generator_state(self.device)
        try:
            _set_state(self.device, inputs[self._position])
            return self._draw(numbers, inputs)
        finally:
            _set_state(self.device, current)


AnyDraw = Draw | Mask | State | Replay


def unwrap_states(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node | None]:
    """Replaces checkpointing's operators that save or set a generator's state by the random operators that they run.

    A state that is saved becomes a node of its own before the random operator, a call of :func:`generator_state`.

    Returns:
        The random operators, each with the node of the state to draw from; ``None`` for the generator's present state.

    Raises:
        Unsupported: A random operator can't be run before the graph.
    """
    operators: dict[torch.fx.Node, torch.fx.Node | None] = {}
    for node in list(graph.nodes):
        name = node.target.name() if isinstance(node.target, HigherOrderOperator) else ""
        if name not in (_SAVING, _SETTING):
            continue
        saved = node.args[0] if name == _SETTING else None
        target, *args = node.args[saved is not None :]
        with graph.inserting_before(node):
            inner = graph.call_function(target, tuple(args), dict(node.kwargs))
        inner.meta.update(node.meta, val=_result_of(inner))
        operators[inner] = saved
        if saved is not None:
            node.replace_all_uses_with(inner)
        else:
            device = pytree.tree_leaves(inner.meta["val"])[0].device
            with graph.inserting_before(inner):
                state = graph.call_function(generator_state, (device,))
            for user in list(node.users):
                assert user.target is operator.getitem
                if user.args[1] == 0:
                    state.meta.update(user.meta)
                user.replace_all_uses_with(state if user.args[1] == 0 else inner)
                graph.erase_node(user)
        graph.erase_node(node)
        if not (is_drawn(inner) or _draws_nothing(inner)):
            raise Unsupported(f"{target} draws random numbers in a checkpointed module")
    return operators


def _result_of(node: torch.fx.Node) -> Any:
    """The results of a new node, as fake tensors."""
    target: Any = node.target
    known = [n.meta.get("val") for n in (*node.all_input_nodes, *node.graph.find_nodes(op="placeholder"))]
    mode = next(val.fake_mode for val in known if isinstance(val, FakeTensor))
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode:
        return target(*args, **kwargs)


_SAVING, _SETTING = "run_and_save_rng_state", "run_with_rng_state"


def is_drawn(node: torch.fx.Node) -> bool:
    """Whether a node is a random operator that PyTorch may run before the graph, or the state of a generator."""
    if node.target is DROPOUT:
        return node.args[2] is not False and bool(node.args[1] != 0)
    return node.target in DRAWS or node.target is generator_state


def _draws_nothing(node: torch.fx.Node) -> bool:
    """Whether an operator draws nothing with its arguments, although it may draw, such as attention without dropout."""
    if node.target is DROPOUT:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    arguments = node.target._schema.arguments
    for place, argument in enumerate(arguments):
        if argument.name == "dropout_p":
            return bool((node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0)) == 0)
    return False


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of PyTorch's generator for a device."""
    state: torch.Tensor = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return state


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def generators_of(draws: Sequence[AnyDraw]) -> list[torch.Generator]:
    """The generators that draws advance."""
    generators = []
    for device in {draw.device for draw in draws}:
        if device.type == "cpu":
            generators.append(torch.default_generator)
        elif device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generators.append(torch.cuda.default_generators[index])
    return generators


def apply_mask(graph: torch.fx.Graph, dropout: torch.fx.Node, mask: torch.fx.Node) -> None:
    """Replaces a dropout by products with its mask and with the scale ``1 / (1 - p)``, as eager computes it."""
    operand, probability = dropout.args[:2]
    assert isinstance(operand, torch.fx.Node) and isinstance(probability, int | float)
    scale = 1.0 / (1.0 - probability) if probability < 1 else 0.0
    with graph.inserting_after(dropout):
        kept = graph.call_function(_ATEN.mul.Tensor, (operand, mask))
    with graph.inserting_after(kept):
        scaled = graph.call_function(_ATEN.mul.Tensor, (kept, scale))
    for node in (kept, scaled):
        node.meta.update(dropout.meta, val=dropout.meta["val"][0])
    for user in list(dropout.users):
        user.replace_all_uses_with(scaled if user.args[1] == 0 else mask)


def _argument(value: Any, sizes: Sizes) -> Argument:
    """A function that makes an argument in a call; for a tensor it makes an uninitialised tensor of the same layout."""
    if isinstance(value, torch.fx.Node):
        val = value.meta["val"]
        if isinstance(val, torch.SymInt):
            return _number(val, sizes)
        if isinstance(val, torch.Tensor):
            return _pattern(val, sizes)
        if isinstance(val, torch.SymFloat | torch.SymBool):
            raise UnknownSizeError(f"{value} is a symbolic {type(val).__name__}")
        return lambda _: val
    if isinstance(value, list | tuple):
        items = [_argument(item, sizes) for item in value]
        return lambda numbers: [item(numbers) for item in items]
    return lambda _: value


def _number(size: torch.SymInt, sizes: Sizes) -> Argument:
    index = sizes.index(size)
    return lambda numbers: numbers[index]


def _pattern(val: torch.Tensor, sizes: Sizes) -> Argument:
    """A function that makes a tensor of the same layout, as PyTorch draws in the order of memory."""
    shape = [sizes.index(size) for size in val.shape]
    strides = [sizes.index(stride) for stride in val.stride()]
    dtype, device = val.dtype, val.device
    return lambda numbers: torch.empty_strided(
        [numbers[i] for i in shape], [numbers[i] for i in strides], dtype=dtype, device=device
    )

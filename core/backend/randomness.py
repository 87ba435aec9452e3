"""Random operators run by PyTorch before a graph: its generators and seeds, so that results are those of eager.

ONNX's random operators draw from generators of their own, and no seed of PyTorch makes them draw what eager draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxplug.backend.sizes import Sizes, UnknownSizeError

_ATEN = torch.ops.aten
#: Random operators that take of their tensor arguments no more than shape, dtype and device.
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
        node: Its FX node.
        sizes: Where the sizes that it needs are asked for.

    Raises:
        UnknownSizeError: A size depends on data.
    """

    def __init__(self, node: torch.fx.Node, sizes: Sizes) -> None:
        self.device: torch.device = node.meta["val"].device
        self._target: Any = node.target
        self._args = [_argument(a, sizes) for a in node.args]
        self._kwargs = {name: _argument(a, sizes) for name, a in node.kwargs.items()}

    def __call__(self, numbers: Sequence[int]) -> torch.Tensor:
        """Draws.

        Args:
            numbers: What the function of ``sizes`` returned for this call.
        """
        args = [argument(numbers) for argument in self._args]
        drawn: torch.Tensor = self._target(*args, **{name: a(numbers) for name, a in self._kwargs.items()})
        return drawn


class Mask:
    """The mask of one dropout: the elements that stay.

    Args:
        node: Its FX node.
        sizes: Where the sizes that it needs are asked for.

    Raises:
        UnknownSizeError: A size depends on data.
    """

    def __init__(self, node: torch.fx.Node, sizes: Sizes) -> None:
        given = node.args[0]
        assert isinstance(given, torch.fx.Node)
        self.device: torch.device = given.meta["val"].device
        self._pattern = _pattern(given.meta["val"], sizes)
        self._probability: Any = node.args[1]

    def __call__(self, numbers: Sequence[int]) -> torch.Tensor:
        """Draws the mask as eager's dropout does."""
        mask: torch.Tensor = DROPOUT(self._pattern(numbers), self._probability, True)[1]
        return mask


def generators_of(draws: Sequence[Draw | Mask]) -> list[torch.Generator]:
    """The generators that these draws advance."""
    found = []
    for device in {draw.device for draw in draws}:
        if device.type == "cpu":
            found.append(torch.default_generator)
        elif device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            found.append(torch.cuda.default_generators[index])
    return found


def apply_mask(graph: torch.fx.Graph, dropout: torch.fx.Node, mask: torch.fx.Node) -> None:
    """Replaces a dropout by products with its mask and with what makes up for the elements dropped, as eager computes it."""
    given, probability = dropout.args[:2]
    assert isinstance(given, torch.fx.Node) and isinstance(probability, int | float)
    scale = 1.0 / (1.0 - probability) if probability < 1 else 0.0
    with graph.inserting_after(dropout):
        kept = graph.call_function(_ATEN.mul.Tensor, (given, mask))
    with graph.inserting_after(kept):
        scaled = graph.call_function(_ATEN.mul.Tensor, (kept, scale))
    for node in (kept, scaled):
        node.meta.update(dropout.meta, val=dropout.meta["val"][0])
    for user in list(dropout.users):
        user.replace_all_uses_with(scaled if user.args[1] == 0 else mask)


def _argument(value: Any, sizes: Sizes) -> Argument:
    """How an argument is made in a call: a tensor of the right sizes, whatever it holds, for a tensor."""
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
    """A tensor of the same layout: PyTorch fills memory in its order, not in that of the indices."""
    shape = [sizes.index(size) for size in val.shape]
    strides = [sizes.index(stride) for stride in val.stride()]
    dtype, device = val.dtype, val.device
    return lambda numbers: torch.empty_strided(
        [numbers[i] for i in shape], [numbers[i] for i in strides], dtype=dtype, device=device
    )

"""A small model with its inputs, inputs of other sizes, and the dynamic dimensions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from onnxplug.verification.eager import copied

#: Positional and keyword arguments.
Call = tuple[tuple[Any, ...], dict[str, Any]]
#: The dynamic dimensions of images.
SIDES = ("height", "width")
#: The packages of contrib/ that belong to transformers, timm and torchvision.
PLUGINS = ("onnxplug-transformers", "onnxplug-torchvision")
_SIZES_OF_IMAGES = "image_sizes"
_IMAGES = ("pixel_values", "pixel_values_videos", "image")


class Example(NamedTuple):
    """A small model with random weights, its arguments and their dynamic dimensions.

    Attributes:
        eager: The model to compare with, where it isn't ``module``.
        more: Further calls to compare on, where random sizes and values won't do.
        narrow: The example with images of the model's own size, where ``args`` or ``kwargs`` have images of another.
        plugins: The packages of contrib/ that belong to its library.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic: Any
    eager: nn.Module | None = None
    more: tuple[Call, ...] = ()
    narrow: Example | None = None
    plugins: tuple[str, ...] = PLUGINS

    @property
    def names(self) -> set[str]:
        """The names of the dynamic dimensions."""
        return {getattr(name, "__name__", name) for name in tree_leaves(self.dynamic) if name is not None}


def fixed(example: Example, names: Collection[str] | None = None) -> Example:
    """The example with static sizes along the dimensions of these names, or along all."""
    if names is None:
        kept = None
    elif isinstance(example.dynamic, Mapping):
        kept = {name: _without(axes, names) for name, axes in example.dynamic.items()}
    else:
        kept = tuple(_without(axes, names) for axes in example.dynamic)
    result = example._replace(dynamic=kept)
    wanted = _fixed_sizes(result, (example.args, example.kwargs))
    return result._replace(more=tuple(call for call in example.more if _fixed_sizes(result, call) == wanted))


def numbered(example: Example) -> Example | None:
    """The example with image sizes as Python numbers, by which models crop and split; ``None`` where it has none."""
    if _SIZES_OF_IMAGES not in example.kwargs:
        return None

    def numbers(kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, _SIZES_OF_IMAGES: kwargs[_SIZES_OF_IMAGES].tolist()}

    static = fixed(example, {"batch"})
    more = tuple((args, numbers(kwargs)) for args, kwargs in static.more)
    kwargs = numbers(static.kwargs)
    return static._replace(
        kwargs=kwargs,
        dynamic={**static.dynamic, _SIZES_OF_IMAGES: tree_map(lambda _: None, kwargs[_SIZES_OF_IMAGES])},
        more=tuple(call for call in more if call[1][_SIZES_OF_IMAGES] == kwargs[_SIZES_OF_IMAGES]),
    )


def _without(axes: Any, names: Collection[str]) -> Any:
    """The dynamic dimensions of an argument, also of a nested one, without the dimensions of these names."""
    if isinstance(axes, Mapping):
        return {axis: kept for axis, name in axes.items() if (kept := _without(name, names)) is not None}
    if isinstance(axes, list | tuple):
        return type(axes)(_without(item, names) for item in axes)
    return None if axes in names else axes


def _fixed_sizes(example: Example, call: Call) -> list[list[int]]:
    """The sizes of tensors along axes that aren't dynamic."""
    named = _axes(example, call)
    return [[n for axis, n in enumerate(x.shape) if axis not in axes] for x, axes in named]


def _axes(example: Example, call: Call) -> list[tuple[torch.Tensor, Mapping[int, str]]]:
    """Tensors, each with its dynamic dimensions."""
    args, kwargs = call
    if example.dynamic is None:
        return [(x, {}) for x in tree_leaves(call) if isinstance(x, torch.Tensor)]
    if isinstance(example.dynamic, Mapping):
        return [(x, example.dynamic.get(name, {})) for name, x in kwargs.items() if isinstance(x, torch.Tensor)]
    return list(zip(args, example.dynamic, strict=True))


def sizes(example: Example, call: Call) -> dict[str, int]:
    """The size of each dynamic dimension."""
    return {name: x.shape[axis] for x, axes in _axes(example, call) for axis, name in axes.items()}


def widened(example: Example) -> Example:
    """The example with dynamic heights and widths, where the model takes images of other sizes.

    The images are not square, and larger than the model's own size, at which many models take a branch of their own.
    """
    if not example.dynamic or example.more:
        return example
    if isinstance(example.dynamic, Mapping):
        dynamic: Any = {name: _with_sides(x, example.dynamic.get(name, {}), name) for name, x in example.kwargs.items()}
    else:
        dynamic = tuple(_with_sides(x, axes) for x, axes in zip(example.args, example.dynamic, strict=True))
    wide = example._replace(dynamic=dynamic)
    if not wide.names.issuperset(SIDES):
        return example
    calls = [_drawn(wide, batch, sides) for batch, sides in ((2, (32, 64)), (3, (64, 32)), (1, (0, 0)))]
    if not all(_runs(example, call) for call in calls):
        return example
    calls += [call for sides in ((0, 32), (64, 32)) if _runs(example, call := _drawn(wide, 2, sides))]
    return wide._replace(args=calls[0][0], kwargs=calls[0][1], more=tuple(calls[1:]), narrow=example)


def _with_sides(x: Any, axes: Mapping[int, str], name: str = "image") -> dict[int, str]:
    if name not in _IMAGES or x.dim() < 4 or not x.is_floating_point():
        return dict(axes)
    return {**axes, x.dim() - 2: "height", x.dim() - 1: "width"}


def _drawn(example: Example, batch: int, sides: tuple[int, int]) -> Call:
    """Arguments of other sizes and values."""
    larger = dict(zip(SIDES, sides, strict=True))

    def size(name: str | None, known: int) -> int:
        return batch if name == "batch" else known + larger.get(name or "", 0)

    tensors = [
        _like(x, [size(axes.get(axis), n) for axis, n in enumerate(x.shape)])
        for x, axes in _axes(example, (example.args, example.kwargs))
    ]
    return (tuple(tensors), {}) if example.args else ((), dict(zip(example.kwargs, tensors, strict=True)))


def _like(x: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """A tensor of this shape, of the kind and range of another."""
    if x.is_floating_point():
        return torch.rand(shape) * x.max() if x.min() >= 0 else torch.randn(shape) * x.std()
    return torch.randint(int(x.min()), int(x.max()) + 1, shape).to(x.dtype)


def _runs(example: Example, call: Call) -> bool:
    try:
        run(example.module, call)
    except Exception:
        return False
    return True


def run(module: torch.nn.Module, call: Call) -> None:
    """Runs a copy of a model in PyTorch: a model may keep results of a call, which then fix sizes in an export (VoxelMorph)."""
    with torch.no_grad():
        copied(module)(*call[0], **call[1])

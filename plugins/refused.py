"""Calls whose dtypes PyTorch itself refuses: fake tensors accept dtypes for which an operator's kernels raise an error.

``nn.Linear`` of half precision takes a float input while torch.export traces it, and none when it runs. The operator is run
alone, on small tensors of the call's dtypes, to see whether eager PyTorch refuses it: once for each operator and dtypes, and only
where the dtypes are not all the same floating type.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from onnxplug.interpret.node import meta_of
from onnxplug.torch_private import OpOverload, pytree

#: The most elements of a tensor with which an operator is run; of larger tensors the large sizes are replaced.
_MOST = 4096
#: Sizes up to this size are kept: kernels, groups, heads.
_KEPT = 8
#: dtypes for which a missing kernel proves nothing: another device has it.
_COMMON = frozenset("Float Double Long Int Short Char Byte Bool".split())
#: Beginnings of the names of operators that trust sizes among their arguments: never run with other sizes.
_TRUSTING = ("_", "native_")
#: Operators that hand numbers in tensors to LAPACK unchecked: never run.
_UNCHECKED = ("linalg_lu", "lu_", "linalg_ldl")
_MISSING = re.compile(r"not implemented for '(?:torch\.)?(\w+)'")

#: Kinds of calls that PyTorch accepted.
_taken: set[Any] = set()


def refusal(fx: torch.fx.Node, *, is_doubtful: bool = False, is_unused: bool = False) -> str | None:
    """Eager PyTorch's error for the dtypes of a call; ``None`` where it accepts them, or where that is not known.

    Args:
        fx: A call of an operator.
        is_doubtful: Whether to test even where tensors and results have the same floating dtype, or a call of that kind passed.
        is_unused: Whether nothing reads the result: then no converter notices that a floating dtype is refused.
    """
    if not is_doubtful and not is_unused:
        dtypes: set[Any] = {getattr(node.meta.get("val"), "dtype", None) for node in (fx, *fx.all_input_nodes)} - {None}
        if len(dtypes) < 2 and all(dtype.is_floating_point for dtype in dtypes):
            return None
    target = fx.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return None
    kwargs = fx.kwargs
    # By identity: the hash of a torch operator is computed in Python.
    key = (id(target), *map(_kind, fx.args), *kwargs, *map(_kind, kwargs.values()))
    if not is_doubtful and key in _taken:
        return None
    message = _try(fx)
    if message is None:
        _taken.add(key)
    return message


def _kind(argument: Any) -> Any:
    """The property of an argument that decides whether its dtype is accepted."""
    kind = type(argument)
    if kind is torch.fx.Node:
        val = argument.meta.get("val")
        return (val.dtype, val.ndim, val.device.type) if isinstance(val, torch.Tensor) else type(val)
    if kind in (str, bool, torch.dtype):
        return argument
    return tuple(map(_kind, argument)) if isinstance(argument, list | tuple) else kind


def _try(fx: torch.fx.Node) -> str | None:
    """PyTorch's error for a call on tensors of its dtypes that it doesn't raise for the same call with other dtypes."""
    name = fx.target._schema.name.partition("::")[2]  # type: ignore[union-attr]
    if name.startswith(_UNCHECKED) or name.endswith("_backward"):  # torch calls these with results of its kernels
        return None
    tensors = [node for node in fx.all_input_nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    vals = [node.meta["val"] for node in tensors]
    if not tensors or not all(_is_plain(val) for val in vals):
        return None
    shrink = _smaller(fx)
    if shrink is None:
        return None
    # Indices may not be 1, divisors not 0.
    messages = {_raised(fx, shrink, {}, content) for content in (1, 0)}
    message = messages.pop()
    if messages or message is None or _lacks_kernel(message):
        return None
    if (
        _raised(fx, shrink, {}, 1, turned=True) is None
    ):  # some kernels take more dtypes of tensors that are not contiguous
        return None
    # Wrong sizes or values would be refused whatever the dtypes are.
    others = [dict(zip(tensors, dtypes, strict=True)) for dtypes in _others(vals)]
    runs = any(_raised(fx, shrink, dtypes, content) is None for dtypes in others for content in (1, 0))
    return message if runs else None


def _is_plain(val: torch.Tensor) -> bool:
    return val.device.type == "cpu" and val.layout is torch.strided and not val.is_quantized


def _lacks_kernel(message: str) -> bool:
    missing = _MISSING.search(message)
    return missing is not None and missing[1] not in _COMMON


def _others(vals: Sequence[torch.Tensor]) -> Iterator[list[torch.dtype]]:
    """Other dtypes for the tensors of a call; a valid call is accepted with some of them."""
    own = [val.dtype for val in vals]
    for dtype in (torch.float32, torch.int64, torch.bool):
        yield [dtype] * len(own)
    floats = [torch.float32 if dtype.is_floating_point else dtype for dtype in own]
    yield floats
    for start, (position, dtype) in itertools.product(
        (own, floats),
        itertools.product(range(len(own)), (torch.int64, torch.bool, torch.float32, *dict.fromkeys(own))),
    ):
        yield [*start[:position], dtype, *start[position + 1 :]]


def _smaller(fx: torch.fx.Node) -> Callable[[Any], Any] | None:
    """A function that makes the sizes of a call small and keeps their order and equality; ``None`` where that may be unsafe."""
    vals = [v for n in (fx, *fx.all_input_nodes) for v in pytree.tree_leaves(n.meta.get("val"))]
    tensors = [v for v in vals if isinstance(v, torch.Tensor)]
    shapes = [[_hint(size) for size in v.shape] for v in tensors]
    if all(_product(shape) <= _MOST for shape in shapes):
        return _hint
    name = fx.target._schema.name.partition("::")[2]  # type: ignore[union-attr]
    if name.startswith(_TRUSTING):
        return None
    numbers = [a for a in pytree.tree_leaves((fx.args, dict(fx.kwargs))) if type(a) is int]
    large = sorted({n for n in itertools.chain(numbers, *shapes) if n > _KEPT})
    small: Mapping[int, int] = {n: _KEPT + 1 + i for i, n in enumerate(large)}
    return lambda size: small.get(_hint(size), _hint(size))


def _hint(size: Any) -> int:
    """A size in the example inputs; 2 for a size that depends on data."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.has_hint() and size.node.hint is not None else 2


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _raised(
    fx: torch.fx.Node,
    size: Callable[[Any], Any],
    dtypes: Mapping[torch.fx.Node, torch.dtype],
    content: int,
    turned: bool = False,
) -> str | None:
    """The error of an operator on tensors of a call's sizes and dtypes; ``None`` where it runs.

    Args:
        fx: The call.
        size: Gives the number for a size.
        dtypes: dtypes of some tensors instead of their own.
        content: The numbers in the tensors.
        turned: Whether the last axis is the outermost in memory.
    """

    def argument(item: Any) -> Any:
        val = meta_of(item)
        if isinstance(val, torch.Tensor):
            shape, dtype = [size(n) for n in val.shape], dtypes.get(item, val.dtype)
            if turned and len(shape) > 1:
                return torch.full([shape[-1], *shape[:-1]], content, dtype=dtype, device="cpu").movedim(0, -1)
            return torch.full(shape, content, dtype=dtype, device="cpu")
        if isinstance(val, torch.SymFloat):
            return 1.0
        if isinstance(val, torch.SymBool):
            return False
        return size(val) if type(val) in (int, torch.SymInt) else val

    leaves, spec = pytree.tree_flatten(([*fx.args], dict(fx.kwargs)))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args, kwargs = pytree.tree_unflatten(list(map(argument, leaves)), spec)
            fx.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None

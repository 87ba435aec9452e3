"""torch_scatter's and pyg_lib's operators while torch.export runs: their kernels are C++, which can't be traced."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor

from onnxplug import Unsupported, torch_private
from onnxplug.capture.kernels import patched_kernel
from onnxplug.capture.patching import patched
from onnxplug.torch_private import DispatchKey, detect_fake_mode
from onnxplug_torch_geometric import FUNCTIONS


def function_of(op: str) -> Callable[..., Any]:
    """The function that computes an operator by ATen operators."""
    module, _, name = FUNCTIONS[op].partition(":")
    return getattr(importlib.import_module(f"onnxplug_torch_geometric.{module}"), name)


def whole(op: str) -> Callable[..., Any]:
    """The function of :func:`function_of` for an operator that is a node of a graph.

    ``out`` is refused: the operator's schema does not state that it is written, and the graph would lose the write.
    """
    function = function_of(op)

    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    unknown = next((name for name in ("dim_size", "total") if name in names), None)

    @functools.wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if arguments.get("out") is not None:
            raise Unsupported(
                f"{op} with out= in a captured graph: torch doesn't know that it is written",
                hint="Call it in the model as torch_scatter.…, and export the model itself.",
            )
        if unknown is not None and arguments.get(unknown) is None and (size := _new_size(arguments)) is not None:
            arguments[unknown] = size
        return function(**arguments)

    return kernel


def _new_size(arguments: dict[str, Any]) -> Any:
    """A symbol for a size that depends on values, where torch computes shapes alone; ``None`` elsewhere."""
    mode = detect_fake_mode(list(arguments.values()))
    if mode is None or mode.shape_env is None or proxy_tensor.get_proxy_mode() is not None:
        return None
    size = mode.shape_env.create_unbacked_symint()
    torch._check(size >= 0)
    return size


def _shape_of_segments(x: torch.Tensor, ptr: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], other.shape[-1]))


def _shapes_of_groups(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.new_empty((x.shape[0], y.shape[-1])) for x, y in zip(left, right, strict=True)]


_SHAPES: dict[str, Callable[..., Any]] = {
    "pyg::segment_matmul": _shape_of_segments,
    "pyg::grouped_matmul": _shapes_of_groups,
}


def _packet(op: str) -> Any:
    """torch's operator, ``None`` where its package isn't loaded."""
    namespace, _, name = op.partition("::")
    return getattr(getattr(torch.ops, namespace), name, None)


@contextlib.contextmanager
def companions() -> Iterator[None]:
    """A context for a capture in which the operators are traced, or have shapes.

    ``torch.ops.torch_scatter.scatter_max(…)`` runs our function, which is traced: a symbolic ``dim_size`` stays
    symbolic (torch would make it a number for the operator's ``int``), and the write to ``out`` is traced. For code
    that holds the operator from before, it has shapes, and is a node of the graph.
    """
    with contextlib.ExitStack() as stack:
        for op in (*FUNCTIONS, *_SHAPES):
            packet = _packet(op)
            if packet is None:
                continue
            if op in FUNCTIONS:
                namespace, _, name = op.partition("::")
                stack.enter_context(patched(getattr(torch.ops, namespace), name, _traced(op, packet)))
                stack.enter_context(_kernel(packet.default, whole(op)))
            else:
                stack.enter_context(_kernel(packet.default, _SHAPES[op]))
        yield


def _traced(op: str, packet: Any) -> Callable[..., Any]:
    """Our function to be put under the operator's name; its ``default`` overload is the operator's own."""
    function = function_of(op)

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    traced.default = packet.default  # type: ignore[attr-defined]
    return traced


def _kernel(op: Any, kernel: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """A context with a kernel in place of the operator's own where torch computes shapes."""
    composite = DispatchKey.CompositeImplicitAutograd
    key = composite if torch_private.has_kernel_for_dispatch_key(op.name(), composite) else DispatchKey.Meta
    return patched_kernel(op, key, lambda _: kernel)

"""Other Python kernels of operators while a context holds."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from onnxplug.torch_private import (
    DispatchKey,
    OpOverload,
    decomposition_table,
    pre_dispatch_modes,
    torch_c,
    transforms_depth,
)


@contextlib.contextmanager
def patched_kernel(op: OpOverload, key: DispatchKey, kernel_of: Callable[..., Any]) -> Iterator[None]:
    """Gives an operator another Python kernel for a dispatch key while the context holds.

    A trace below autograd records the operators that a composite kernel calls. Such a trace, and every other mode or transform,
    sees the original kernel: the results of another kernel have a kind, but no values.

    Args:
        key: ``CompositeImplicitAutograd`` for a composite operator; ``Meta`` for the kernel that computes shapes.
        kernel_of: Makes the kernel, called with the operator's arguments, from the original kernel. Where it returns
            ``NotImplemented`` the original is called, and what that asks of sizes counts as its question.
    """
    before = op.py_kernels.get(key)
    original = before or functools.partial(op._op_dk, key)
    kernel = kernel_of(original)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs) if key == DispatchKey.Meta or _sees_no_trace() else NotImplemented
        return original(*args, **kwargs) if result is NotImplemented else result

    op.py_kernels[key] = chosen
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        if before is None:
            del op.py_kernels[key]
        else:
            op.py_kernels[key] = before
        op._dispatch_cache.clear()


@contextlib.contextmanager
def without_decomposition(op: OpOverload) -> Iterator[None]:
    """Keeps torch from computing an operator's shapes by its decomposition while the context holds."""
    function = decomposition_table.pop(op, None)
    try:
        yield
    finally:
        if function is not None:
            decomposition_table[op] = function


def _sees_no_trace() -> bool:
    """Whether operators that are called now are seen by no mode but that of fake tensors, and by no transform."""
    fake = torch_c._get_dispatch_mode(torch_c._TorchDispatchModeKey.FAKE) is not None
    if not callable(pre_dispatch_modes):  # a torch without it
        return False
    return torch_c._len_torch_dispatch_stack() == fake and pre_dispatch_modes() == 0 and transforms_depth() == 0

"""Eager runs of a model that leave no trace in its inputs, its buffers and the random generators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager
from typing import Any

import torch

from onnxplug.torch_private import (
    get_cudnn_allow_tf32,
    get_float32_precision,
    pytree,
    set_cudnn_allow_tf32,
    set_float32_precision,
)

#: The operators (of a library) that may compute products of float32 in TF32 or bfloat16.
_PRODUCTS = tuple((library, operator) for library in ("cuda", "mkldnn") for operator in ("matmul", "conv", "rnn"))


def copied(tree: Any) -> Any:
    """The same tree with detached copies of its tensors, attributes included; a tensor that it holds twice becomes two."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().clone()
        made.__dict__.update({name: value for name, value in vars(tensor).items() if "_dynamo" not in name})
        return made

    return pytree.tree_map_only(torch.Tensor, copy, tree)


class _Shared(ContextDecorator):
    """A change of torch's settings, which all threads share: made as long as any thread needs it.

    Args:
        change: A context in which the change holds.
    """

    def __init__(self, change: Callable[[], AbstractContextManager[None]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._users = 0
        self._changed = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._changed.enter_context(self._change())
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._changed.close()


@contextmanager
def _fast_path_off() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _products_in_float32() -> Iterator[None]:
    # torch.export sets the precision of the library "cuda" too, to the value that it shows.
    places = (("cuda", "all"), *_PRODUCTS)
    before = [get_float32_precision(*place) for place in places]
    _set_products("ieee")
    # torch.export reads PyTorch's older settings, and refuses to go on where they differ from the newer settings.
    products = torch.get_float32_matmul_precision()
    try:
        cudnn = get_cudnn_allow_tf32()
    except RuntimeError:  # the older setting allows TF32, and the newer settings don't any more
        cudnn = True
    torch.set_float32_matmul_precision("highest")
    set_cudnn_allow_tf32(False)
    _set_products("ieee")  # the older settings change the newer settings
    yield
    torch.set_float32_matmul_precision(products)
    set_cudnn_allow_tf32(cudnn)
    for place, precision in zip(places, before, strict=True):
        set_float32_precision(*place, "none")
        if get_float32_precision(*place) != precision:  # it does not only show the precision of its library
            set_float32_precision(*place, precision)


def _set_products(precision: str) -> None:
    for library, operator in _PRODUCTS:
        set_float32_precision(library, operator, precision)


without_fast_path = _Shared(_fast_path_off)

#: PyTorch computes products of float32 in float32. cuDNN takes TF32 by default, and
#: ``torch.set_float32_matmul_precision("medium")`` allows bfloat16; ONNX Runtime computes in float32.
full_float32 = _Shared(_products_in_float32)


@contextmanager
def inference() -> Iterator[None]:
    """Within the context, PyTorch computes as torch.export captures and ONNX Runtime computes.

    Without gradients, without attention's fast path (``torch.backends.mha``), which gives 0 at padding in a mask of
    ``nn.TransformerEncoder``, and with products of float32 in float32.
    """
    with without_fast_path, full_float32, torch.no_grad():
        yield


def run_eagerly(
    model: torch.nn.Module,
    args: Any,
    kwargs: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """The result of a model.

    Args:
        model: The model; its buffers stay as they were.
        args, kwargs: Its inputs. The model gets these tensors themselves.
        buffers: Replacements of the model's buffers, which may be written; copies of them when ``None``.

    Raises:
        Exception: Whatever the model raises.
    """
    if buffers is None:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with inference(), torch.random.fork_rng(devices=[]):
        return torch.func.functional_call(model, dict(buffers), tuple(args), dict(kwargs))

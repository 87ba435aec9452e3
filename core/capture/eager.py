"""Eager runs of a model that leave no trace in its inputs, its buffers and the random generators."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from onnxplug.torch_private import pytree


def copied(tree: Any) -> Any:
    """The same tree with detached copies of its tensors, attributes included; a tensor that it holds twice becomes two."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().clone()
        made.__dict__.update({name: value for name, value in vars(tensor).items() if "_dynamo" not in name})
        return made

    return pytree.tree_map_only(torch.Tensor, copy, tree)


class _FastPath:
    """torch's setting of attention's fast path, which all threads share: off as long as any thread needs it off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                torch.backends.mha.set_fastpath_enabled(self._before)


without_fast_path = _FastPath()


@contextmanager
def inference() -> Iterator[None]:
    """Within the context, PyTorch computes as torch.export captures: without gradients, and without attention's fast path.

    The fast path (``torch.backends.mha``) gives 0 at padding in a mask of ``nn.TransformerEncoder``.
    """
    with without_fast_path, torch.no_grad():
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

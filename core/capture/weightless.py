"""Models whose weights have no numbers: they are captured as if their weights were on the inputs' device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from onnxplug.fake import is_fake
from onnxplug.torch_private import FakeTensor, FakeTensorMode, pytree, unset_fake_temporarily


def with_numbers(inputs: Any) -> Any:
    """Inputs of a call, with zeros on the CPU instead of tensors on the device ``meta`` and fake tensors of known sizes."""

    def real(leaf: torch.Tensor) -> torch.Tensor:
        if not is_fake(leaf) or not all(isinstance(size, int) for size in leaf.shape):
            return leaf
        device = leaf.device if isinstance(leaf, FakeTensor) and leaf.device.type != "meta" else "cpu"
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)

    with unset_fake_temporarily():
        return pytree.tree_map_only(torch.Tensor, real, inputs)


@contextlib.contextmanager
def weights_beside(module: torch.nn.Module, inputs: Any) -> Iterator[None]:
    """While it holds, a module has fake weights on the device of its inputs instead of weights on the device ``meta``.

    The model's code makes tensors on the device of the inputs, and computes with these and with the weights.
    """
    places = [
        (table, name, tensor)
        for part in module.modules()
        for table in (part._parameters, part._buffers)
        for name, tensor in table.items()
        if tensor is not None and tensor.is_meta and not isinstance(tensor, FakeTensor)
    ]
    if not places:
        yield
        return
    device = next((leaf.device for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)), "cpu")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    stand_ins: dict[int, torch.Tensor] = {}
    for _, _, tensor in places:  # a tied weight stays one
        if id(tensor) not in stand_ins:
            stand_ins[id(tensor)] = _stand_in(tensor, mode, device)
    with _exchanged(module, stand_ins):
        yield


@contextlib.contextmanager
def _exchanged(module: torch.nn.Module, stand_ins: dict[int, torch.Tensor]) -> Iterator[None]:
    """Replaces the tensors of a module, by their ids."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    flat: list[tuple[Any, list[Any]]] = []
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, tensor in list(table.items()):
                if id(tensor) in stand_ins:
                    before.append((table, name, tensor))
                    table[name] = stand_ins[id(tensor)]
        if isinstance(part, torch.nn.RNNBase):  # it reads its weights from a list of its own
            flat.append((part, part._flat_weights))
            part._flat_weights = [stand_ins.get(id(weight), weight) for weight in part._flat_weights]
    try:
        yield
    finally:
        for table, name, tensor in before:
            table[name] = tensor
        for part, weights in flat:
            part._flat_weights = weights


def _stand_in(tensor: torch.Tensor, mode: Any, device: Any) -> torch.Tensor:
    with mode, torch.no_grad():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake


def tensors_without_numbers(module: torch.nn.Module) -> Sequence[str]:
    """Names of tensors on the device ``meta`` that modules have as plain attributes, where no weights can be loaded."""
    return [
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor) and is_fake(value)
    ]

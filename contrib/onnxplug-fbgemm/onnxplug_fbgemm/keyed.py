"""torchrec's KeyedJaggedTensor as an input of a model: its values, weights and lengths."""

from __future__ import annotations

from typing import Any

from torchrec.sparse import jagged_tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from onnxplug.torch_private import pytree

_FIELDS = KeyedJaggedTensor._fields
_LENGTHS, _OFFSETS = _FIELDS.index("_lengths"), _FIELDS.index("_offsets")


def register() -> None:
    """Makes pytree flatten every KeyedJaggedTensor to the same inputs.

    torchrec's own form has the lengths or the offsets, whichever the tensor was made of, and both once they have been
    computed: a model's inputs would change when it is called.
    """
    if pytree.SUPPORTED_NODES[KeyedJaggedTensor].flatten_fn is not flatten:
        pytree.SUPPORTED_NODES[KeyedJaggedTensor] = pytree.NodeDef(
            KeyedJaggedTensor, flatten, jagged_tensor._kjt_unflatten, _flatten_with_keys
        )


def flatten(features: KeyedJaggedTensor) -> tuple[list[Any], Any]:
    """The parts of a tensor, always with lengths and never with offsets, and its keys."""
    parts, keys = jagged_tensor._kjt_flatten(features)
    parts[_LENGTHS], parts[_OFFSETS] = features.lengths(), None
    return parts, keys


def _flatten_with_keys(features: KeyedJaggedTensor) -> tuple[list[tuple[Any, Any]], Any]:
    parts, keys = flatten(features)
    return [(pytree.GetAttrKey(name), part) for name, part in zip(_FIELDS, parts, strict=True)], keys


def shapes(features: KeyedJaggedTensor, values: str, lengths: str) -> list[Any]:
    """The dynamic dimensions of each part."""
    names = {"_values": values, "_weights": values, "_lengths": lengths}
    parts, _ = flatten(features)
    return [
        None if part is None else {0: names[name]} if name in names else {}
        for name, part in zip(_FIELDS, parts, strict=True)
    ]

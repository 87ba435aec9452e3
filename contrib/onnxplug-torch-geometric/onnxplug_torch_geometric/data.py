"""``Data`` and its ``Batch`` as inputs: taken apart into their tensors, by name, and put together again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch_geometric.data import Batch, Data
from torch_geometric.data.storage import N_KEYS

from onnxplug.torch_private import pytree

_BATCH = type(Batch(_base_cls=Data))


def register() -> None:
    """Registers both types with torch's pytree; a type that is registered already stays as it is."""
    for kind in (Data, _BATCH):
        if kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                kind,
                flatten,
                unflatten,
                serialized_type_name=f"{kind.__module__}.{kind.__name__}",
                flatten_with_keys_fn=flatten_with_keys,
            )


def flatten(data: Any) -> tuple[list[torch.Tensor], str]:
    """The tensors by their sorted names, and as JSON the type, the names, and the numbers, strings and bools."""
    names, context = _parts(data)
    return [data[name] for name in names], context


def flatten_with_keys(data: Any) -> tuple[list[Any], str]:
    """As :func:`flatten`, each tensor with the name that an input of the graph gets from it."""
    names, context = _parts(data)
    return [(pytree.MappingKey(name), data[name]) for name in names], context


def unflatten(values: Iterable[Any], context: str) -> Any:
    """The object again."""
    kind, names, rest = json.loads(context)
    attributes = {**dict(zip(names, values, strict=True)), **rest}
    return Batch(_base_cls=Data, **attributes) if kind == "Batch" else Data(**attributes)


def _parts(data: Any) -> tuple[list[str], str]:
    names: list[str] = []
    rest: dict[str, Any] = {}
    keys = set(data.keys())
    if keys & N_KEYS:
        keys.discard("num_nodes")  # torch_geometric takes it from these tensors then, at any size
    for name in sorted(keys):
        value = data[name]
        # torch puts other objects in place of tensors while it handles the tree's form: they count as tensors.
        if isinstance(value, bool | int | float | str):
            rest[name] = value
        elif isinstance(value, list | tuple | dict | set) or "SparseTensor" in type(value).__name__:
            raise TypeError(
                f"the attribute {name!r} of the {type(data).__name__} has the type {type(value).__name__}, which can't be "
                "an input of an ONNX model: give the export a Data of tensors alone"
            )
        else:
            names.append(name)
    return names, json.dumps(["Batch" if isinstance(data, Batch) else "Data", names, rest])


def shapes(data: Any, nodes: str, edges: str, graphs: str) -> list[dict[int, str] | None]:
    """See :func:`onnxplug_torch_geometric.data_shapes`."""
    if type(data) not in (Data, _BATCH):
        raise TypeError(f"data_shapes takes a Data or a Batch of them, got {type(data).__name__}")
    axes: list[dict[int, str] | None] = []
    for name in _parts(data)[0]:
        value = data[name]
        if not value.dim():
            axes.append(None)
        elif name == "ptr":
            axes.append({0: "pointers"})
        elif "index" in name or name == "face":
            axes.append({data.__cat_dim__(name, value) % value.dim(): edges})
        elif data.is_node_attr(name):
            axes.append({0: nodes})
        elif data.is_edge_attr(name):
            axes.append({0: edges})
        else:
            axes.append({0: graphs} if isinstance(data, Batch) else None)
    return axes

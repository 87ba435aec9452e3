"""Sharding specifications executed on paper: each annotated node on every device, from the shards that it holds there alone.

Nothing here knows the package: shards are cut as ONNX's *Multi-Device Proposal* describes it, from the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

Arrays = Mapping[str, np.ndarray]

#: How partial results become the result, for operators where it is not their sum.
_BETWEEN = {"ReduceMean": lambda row: sum(row) / len(row), "ReduceMax": lambda row: np.stack(row).max(0)}


def shard_index(spec: onnx.ShardingSpecProto, device: int) -> int:
    """The index of the shard that a device holds."""
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    (index,) = (i for i, key in enumerate(spec.device) if device in groups.get(key, [key]))
    return index


def held(whole: np.ndarray, spec: onnx.ShardingSpecProto, device: int) -> np.ndarray:
    """The part of a tensor that a device holds."""
    return whole[np.ix_(*places(whole, spec, device))] if whole.ndim else whole


def places(whole: np.ndarray, spec: onnx.ShardingSpecProto, device: int) -> list[np.ndarray]:
    """The indices of a device's part, for each axis."""
    counts = [simple.num_shards for dim in spec.sharded_dim for simple in dim.simple_sharding]
    at = iter(np.unravel_index(shard_index(spec, device), counts) if counts else ())
    found = [np.arange(size) for size in whole.shape]
    for dim in spec.sharded_dim:
        axis = dim.axis % whole.ndim
        simples = list(dim.simple_sharding)
        sizes = [s.dim_value for s in simples] if len(simples) > 1 else [whole.shape[axis]]
        grid = np.arange(whole.shape[axis]).reshape(sizes)
        cut = []
        for size, simple in zip(sizes, simples, strict=True):
            assert size % simple.num_shards == 0
            width, index = size // simple.num_shards, int(next(at))
            cut.append(slice(index * width, (index + 1) * width))
        found[axis] = grid[tuple(cut)].reshape(-1)
    return found


def values_of(path: Path, feed: Arrays) -> dict[str, np.ndarray]:
    """Every value of a model's graph."""
    model = onnx.load(path)
    known = {output.name for output in model.graph.output}
    for node in model.graph.node:
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name and name not in known)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {**weights, **feed, **dict(zip(names, session.run(None, dict(feed)), strict=True))}


def prove(path: Path, feed: Arrays, mesh: tuple[int, ...] | None = None, name: str | None = None) -> Counter[str]:
    """Computes each annotated node from its shards, and compares with the whole.

    Args:
        path: The file.
        feed: Its inputs.
        mesh: The mesh, whose devices are in order.
        name: The configuration.

    Returns:
        The number of nodes with the specified results on each device (``"direct"``), and of nodes whose results were
        put together (``"sum"``, ``"concat"``).
    """
    model = onnx.load(path)
    (configuration,) = (c for c in model.configuration if name in (None, c.name))
    mesh = mesh or (configuration.num_devices,)
    values = values_of(path, feed)
    counts: Counter[str] = Counter()
    for node in model.graph.node:
        for entry in node.device_configurations:
            if entry.configuration_id == configuration.name and entry.sharding_spec:
                counts[_proved(node, entry, values, mesh, model)] += 1
    return counts


def _proved(node: onnx.NodeProto, entry: Any, values: Arrays, mesh: tuple[int, ...], model: onnx.ModelProto) -> str:
    specs = {spec.tensor_name: spec for spec in entry.sharding_spec}
    assert set(specs) == {name for name in (*node.input, *node.output) if name}, node.name
    (output,) = node.output
    whole = values[output]
    devices = range(int(np.prod(mesh)))
    results = np.empty(len(devices), dtype=object)
    for device in devices:
        results[device] = _local(node, specs, values, device, model)
    wanted = [held(whole, specs[output], device) for device in devices]
    if all(_same(result, part) for result, part in zip(results, wanted, strict=True)):
        return "direct"
    for way, made in _together(results.reshape(mesh), _BETWEEN.get(node.op_type, sum), ()):
        if _same(made, whole):
            return "sum" if "sum" in way else "concat"
    raise AssertionError(f"{node.name}: its shards do not give its result")


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape:
        return False
    try:
        torch.testing.assert_close(torch.from_numpy(np.array(one)), torch.from_numpy(np.array(other)))
    except AssertionError:
        return False
    return True


def _together(results: np.ndarray, between: Any, way: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """The ways in which results of devices can be put together, along one dimension of the mesh after the other."""
    if results.ndim == 0:
        yield way, results.item()
        return
    rows = results.reshape(-1, results.shape[-1])
    axes = range(rows[0, 0].ndim)
    ways: dict[str, Any] = {"one": lambda row: row[0], "sum": lambda row: between(list(row))}
    ways |= {f"concat{axis}": lambda row, axis=axis: np.concatenate(list(row), axis) for axis in axes}
    for name, put in ways.items():
        if name == "one" and not all(_same(row[0], other) for row in rows for other in row):
            continue
        made = np.empty(len(rows), dtype=object)
        for index, row in enumerate(rows):
            made[index] = put(row)
        yield from _together(made.reshape(results.shape[:-1]), between, (name, *way))


def _local(
    node: onnx.NodeProto, specs: Mapping[str, Any], values: Arrays, device: int, model: onnx.ModelProto
) -> np.ndarray:
    parts: list[Any] = [held(values[name], specs[name], device) if name else None for name in node.input]
    if node.op_type == "Gather":  # a shard of the table gives its own rows
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        table = values[node.input[0]]
        axis %= table.ndim
        rows = places(table, specs[node.input[0]], device)[axis]
        if len(rows) < table.shape[axis]:
            asked = np.where(parts[1] < 0, parts[1] + table.shape[axis], parts[1])
            own = np.isin(asked, rows)
            found = _run(node, [parts[0], np.where(own, np.searchsorted(rows, asked) % len(rows), 0)], model)
            after = found.ndim - axis - own.ndim
            return found * own.reshape(own.shape + (1,) * after).astype(found.dtype)
    if node.op_type == "Gemm" and len(parts) == 3:  # the bias is added once
        flipped = next((a.i for a in node.attribute if a.name == "transA"), 0)
        summed = [dim.axis % 2 == (0 if flipped else 1) for dim in specs[node.input[0]].sharded_dim]
        if any(summed) and places(values[node.input[0]], specs[node.input[0]], device)[0 if flipped else 1][0]:
            parts[2] = np.zeros_like(parts[2])
    return _run(node, parts, model)


def _run(node: onnx.NodeProto, parts: list[Any], model: onnx.ModelProto) -> np.ndarray:
    alone = onnx.NodeProto()
    alone.CopyFrom(node)
    alone.ClearField("device_configurations")
    named = {f"i{index}": np.ascontiguousarray(part) for index, part in enumerate(parts) if part is not None}
    del alone.input[:]
    alone.input.extend(f"i{index}" if part is not None else "" for index, part in enumerate(parts))
    del alone.output[1:]
    alone.output[0], alone.name = "o", ""
    alone.ClearField("metadata_props")
    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(part.dtype), [None] * part.ndim)
        for name, part in named.items()
    ]
    graph = onnx.helper.make_graph([alone], "alone", inputs, [onnx.ValueInfoProto(name="o")])
    made = onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=10)
    (result,) = _session(made.SerializeToString(deterministic=True)).run(None, named)
    return np.asarray(result)


@cache
def _session(model: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options)

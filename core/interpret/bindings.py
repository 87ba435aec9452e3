"""Values of the graph's inputs, state and outputs: for the placeholders of the FX graph, and for the results of its output node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import PART_DTYPE, Complex, from_pairs, to_pairs
from onnxplug.build.dtypes import to_onnx_dtype
from onnxplug.build.provenance import Provenance
from onnxplug.build.quantized import Quantized
from onnxplug.build.stored import META, Origin
from onnxplug.capture.locations import source_location
from onnxplug.capture.signature import InputKind, InputSlot, OutputSlot
from onnxplug.capture.transforms import is_lost
from onnxplug.errors import CaptureError, Unsupported, UsageError
from onnxplug.fake import is_fake
from onnxplug.interpret.symbols import SymbolNames
from onnxplug.strings import STRING


def bind_inputs(
    builder: GraphBuilder, symbols: SymbolNames, slots: Sequence[InputSlot]
) -> tuple[dict[torch.fx.Node, Any], list[ir.Value], dict[ir.Value, torch.Tensor]]:
    """The Values of placeholders: graph inputs, and state, in which equal tensors are stored once.

    Returns:
        The value of every placeholder, the graph inputs in order, and the values of the state with their tensors.

    Raises:
        UsageError: The program lacks a tensor of its state.
        CaptureError: A constant that is read has no values.
    """
    values: dict[torch.fx.Node, Any] = {}
    inputs: list[ir.Value] = []
    state: dict[ir.Value, torch.Tensor] = {}
    builder.weights.state = state
    stored: dict[Any, ir.Value] = {}
    for slot in slots:
        if slot.kind is InputKind.NONE:
            values[slot.node] = None
        elif slot.kind is InputKind.STATIC:
            values[slot.node] = slot.value
        elif slot.kind is InputKind.USER:
            value = _input_value(slot, symbols)
            inputs.append(value)
            values[slot.node] = _maybe_complex(builder, slot, value)
            _add_symbols(builder, symbols, slot, value)
        elif slot.tensor is None:
            raise UsageError(f"the exported program holds no tensor for {slot.name!r}")
        elif slot.kind is InputKind.CONSTANT and is_lost(
            slot.tensor
        ):  # left by a trace of a torch.func transform, often without any reader
            if slot.node.users:
                raise CaptureError(
                    f"torch.export left {slot.name!r}, a tensor that the model's code makes, without its values",
                    hint="Register it as a buffer of the module, or make it outside of the function that torch.func transforms.",
                )
            values[slot.node] = None
        elif slot.kind is InputKind.CONSTANT and slot.tensor.numel() <= 64 and not slot.tensor.is_complex():
            values[slot.node] = builder.const(slot.tensor)
        else:
            key = _tensor_key(slot.tensor)
            weight = stored.get(key)
            if weight is None:
                weight = stored[key] = _state_value(builder, slot)
                state[weight] = _real(slot.tensor)
            builder.weights.add_readers(weight, len(slot.node.users))
            known: Origin | None = weight.meta.get(META)
            targets = (*known.targets, slot.target) if known is not None else (slot.target,)
            persistent = slot.persistent or (known is not None and known.persistent)
            weight.meta[META] = Origin(targets, _real, slot.tensor.dtype, slot.tensor.shape, persistent)
            values[slot.node] = _maybe_complex(builder, slot, weight)
    return values, inputs, state


def bind_outputs(
    builder: GraphBuilder, values: Mapping[torch.fx.Node, Any], slots: Iterable[OutputSlot]
) -> list[tuple[str, Any]]:
    """Name and value (or number) of every graph output; a ``None`` among the model's results is no output.

    Raises:
        Unsupported: An output is a quantised tensor.
    """
    outputs: list[tuple[str, Any]] = []
    for slot in slots:
        value = values[slot.value] if isinstance(slot.value, torch.fx.Node) else slot.value
        if isinstance(value, Complex):
            with builder.provenance.converting(None, Provenance(slot.name, "output")):
                value = to_pairs(builder, value)
        if isinstance(value, Quantized):
            line = source_location(slot.value) or "unknown source"
            raise Unsupported(
                f"the output {slot.name!r} is a quantised tensor, made at {line}; ONNX has no such element type",
                hint="Return x.dequantize(), and quantise it again outside of the model if need be.",
            )
        if value is not None:
            outputs.append((slot.name, value))
    return outputs


def _maybe_complex(builder: GraphBuilder, slot: InputSlot, value: ir.Value) -> Any:
    """The value of a placeholder; of a complex tensor the two parts, which lie on the last axis of the input or initializer."""
    meta = slot.node.meta.get("val")
    if isinstance(meta, torch.Tensor) and meta.dtype.is_complex:
        with builder.provenance.converting(None, Provenance(slot.name, "input")):
            return from_pairs(builder, value)
    return value


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _tensor_key(tensor: torch.Tensor) -> Any:
    """Equal for tied weights: tensors that see the same memory in the same way, conjugated and negated views included."""
    if is_fake(tensor) or not tensor.numel():
        return id(tensor)
    seen = (tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), seen)


def _state_value(builder: GraphBuilder, slot: InputSlot) -> ir.Value:
    """The initializer of a tensor, under its name; of a complex tensor the real tensor ``NAME.view_as_real``."""
    assert slot.tensor is not None
    tensor = _real(slot.tensor)
    if tensor.dtype == STRING:
        raise Unsupported(
            f"{slot.name!r} is a buffer of strings: give them to an operator as an argument of Python strings"
        )
    name = f"{slot.name}.view_as_real" if slot.tensor.is_complex() else slot.name
    kind = ir.TensorType(to_onnx_dtype(tensor.dtype))
    return ir.Value(name=name, type=kind, shape=builder.sizes.shape_of(tuple(tensor.shape)))


def _input_value(slot: InputSlot, symbols: SymbolNames) -> ir.Value:
    val = slot.node.meta["val"]
    if isinstance(val, torch.Tensor):
        dtype, dims = to_onnx_dtype(val.dtype), symbols.dims(val)
        if dtype in PART_DTYPE:
            dtype, dims = PART_DTYPE[dtype], (*dims, 2)
    else:
        dtype = {torch.SymFloat: ir.DataType.DOUBLE, torch.SymBool: ir.DataType.BOOL}.get(type(val), ir.DataType.INT64)
        dims = ()
    return ir.Value(name=slot.name, type=ir.TensorType(dtype), shape=ir.Shape(dims))


def _add_symbols(builder: GraphBuilder, symbols: SymbolNames, slot: InputSlot, value: ir.Value) -> None:
    val = slot.node.meta["val"]
    if isinstance(val, torch.SymInt):
        name = symbols.number(val)
        if isinstance(name, str):
            builder.sizes.add(name, value)
        return
    for axis, dim in enumerate(value.shape or ()):
        if isinstance(dim, ir.SymbolicDim):
            builder.sizes.add_source(dim, value, axis)

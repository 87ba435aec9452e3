"""The bytes of tensors, and a model's protocol buffer in pieces: neither takes memory for more than one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]

from onnxplug.build.stored import WeightTensor
from onnxplug.errors import SaveError, WeightsError
from onnxplug.run.protobuf import to_proto

#: Called with the bytes that are written so far, and those that will be.
Progress = Callable[[int, int], None]
#: Tensors of at least so many bytes are written after the rest of a model's graph, one by one.
_APART_BYTES = 1 << 20
#: Bytes that are written at a time.
_CHUNK_BYTES = 1 << 24
#: The largest protocol buffer.
_LIMIT = 2**31 - 1
#: Fields of ONNX's messages, with the mark of what is as long as the number before it says.
_GRAPH, _INITIALIZER, _RAW_DATA = (field << 3 | 2 for field in (7, 5, 9))


def content(tensor: ir.TensorProtocol) -> Any:
    """The bytes of a tensor as ONNX stores them, a view of its memory where they are there as they are.

    Raises:
        WeightsError: The tensor has no numbers, can't be read from its file, or is of another size than it says.
    """
    expected, name = tensor.nbytes, tensor.name
    if isinstance(tensor, ir.LazyTensor):
        tensor = tensor.raw()
    if tensor.dtype.bitwidth < 8:
        found: Any = tensor.tobytes()
    else:
        if isinstance(tensor, WeightTensor) and type(tensor.raw) is torch.Tensor:
            tensor = WeightTensor(tensor.raw.contiguous(), tensor.name)  # which torch does faster than numpy
        found = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data
    if len(found) != expected:
        raise WeightsError(f"the weight {name!r} has {len(found)} bytes, not {expected}", names=[str(name)])
    return found


class Writer:
    """Writes to files and tells how far it is.

    Args:
        total: Bytes that will be written.
        progress: What is told.
    """

    def __init__(self, total: int, progress: Progress | None = None) -> None:
        self._total = total
        self._done = 0
        self._progress = progress

    def write(self, file: IO[bytes], data: Any) -> None:
        """Writes bytes, a large number of them in several steps."""
        for start in range(0, len(data), _CHUNK_BYTES):
            part = data[start : start + _CHUNK_BYTES]
            file.write(part)
            self.advance(len(part))

    def advance(self, count: int) -> None:
        """Counts bytes as written."""
        self._done += count
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


class ModelView:
    """A model with the weights and inputs that are to be written.

    Args:
        model: The model.
        weights: The initializers' tensors by name.
        inputs: The graph's inputs.
    """

    def __init__(self, model: ir.Model, weights: Mapping[str, ir.TensorProtocol], inputs: Sequence[ir.Value]) -> None:
        self._model = model
        self.weights = weights
        self._inputs = inputs

    def pieces(self, places: Mapping[str, tuple[str, int, int]] | None = None) -> Iterator[Any]:
        """The model's protocol buffer, piece by piece.

        Args:
            places: Weights that are in other files: their names to the file's, the offset and the length.

        Raises:
            SaveError: It is larger than protocol buffers can be, or a weight has no content.
        """
        tensors: dict[str, ir.TensorProtocol] = {}
        apart: list[str] = []
        for name, tensor in self.weights.items():
            place = (places or {}).get(name)
            if place is not None:
                tensor = ir.ExternalTensor(*place, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name)
            elif tensor.dtype != ir.DataType.STRING and tensor.nbytes >= _APART_BYTES and not _described(tensor):
                apart.append(name)
            elif isinstance(tensor, ir.ExternalTensor):  # its location is relative to the file that it came from
                tensor = ir.Tensor(tensor.numpy(), tensor.dtype, shape=tensor.shape, name=name)
            tensors[name] = tensor
        proto = onnx.ModelProto()
        try:
            to_proto(self._model, proto, tensors=tensors, inputs=self._inputs, apart=apart)
            graph = proto.graph.SerializeToString()
            heads = [_head(name, self.weights[name]) for name in apart]
            size = len(graph) + sum(map(len, heads)) + sum(self.weights[name].nbytes for name in apart)
            if size > _LIMIT:
                raise SaveError(
                    f"the model has {size / 1e9:.1f} GB, and a protocol buffer at most 2",
                    hint="Its weights go into a file beside it: external_data=True.",
                )
            proto.ClearField("graph")
            rest = proto.SerializeToString()
        except WeightsError:
            raise
        except (ir.serde.SerdeError, EncodeError, ValueError) as error:
            raise SaveError(f"the model can't be written as a protocol buffer: {error}") from error
        yield rest + bytes((_GRAPH,)) + _varint(size)
        yield graph
        for name, head in zip(apart, heads, strict=True):
            yield head
            yield content(self.weights[name])


def _described(tensor: ir.TensorProtocol) -> bool:
    return bool(tensor.doc_string or tensor.metadata_props)


def _head(name: str, tensor: ir.TensorProtocol) -> bytes:
    """What stands before the bytes of an initializer in the graph's protocol buffer."""
    message = onnx.TensorProto(name=name, data_type=tensor.dtype.value, dims=tensor.shape.numpy())
    head = message.SerializeToString() + bytes((_RAW_DATA,)) + _varint(tensor.nbytes)
    return bytes((_INITIALIZER,)) + _varint(len(head) + tensor.nbytes) + head


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)

"""ONNX models from untrusted files: read, and checked before any use.

ONNX's own library trusts the declarations of tensors, and ONNX Runtime logs before it raises. Checked here, once for all later
code: the declared and the actual size of every tensor, the places of external data, names, opsets, and that no function calls
itself.
"""

from __future__ import annotations

import graphlib
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path, PureWindowsPath

import numpy as np
import onnx
import onnx_ir as ir

from onnxplug.errors import UsageError
from onnxplug.text import shortened

#: The largest protocol buffer.
_LIMIT = 2**31 - 1
#: The largest number of a model's nodes after inlining its functions, as runtimes do.
_MOST_NODES = 10_000_000
#: Rank, and bytes, that no tensor has.
_MOST_DIMS, _MOST_BYTES = 1000, 1 << 50
#: The most elements that the sparse weights of a model may have with the zeros between them.
_MOST_DENSE = 1 << 26
_T = onnx.TensorProto
#: The field that holds the elements of a dtype if they are no raw bytes, and its number of entries for an element; other dtypes are
#: in ``int32_data``, with an entry for each element, or for each byte of several elements.
_FIELDS: dict[int, tuple[str, int]] = {
    _T.FLOAT: ("float_data", 1),
    _T.COMPLEX64: ("float_data", 2),
    _T.DOUBLE: ("double_data", 1),
    _T.COMPLEX128: ("double_data", 2),
    _T.INT64: ("int64_data", 1),
    _T.UINT32: ("uint64_data", 1),
    _T.UINT64: ("uint64_data", 1),
    _T.STRING: ("string_data", 1),
}
_TYPED = ("float_data", "double_data", "int32_data", "int64_data", "uint64_data", "string_data")


#: The field that an attribute of a type must have; a number that is 0 need not be written.
_CONTENTS = {
    onnx.AttributeProto.TENSOR: "t",
    onnx.AttributeProto.GRAPH: "g",
    onnx.AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    onnx.AttributeProto.TYPE_PROTO: "tp",
}
#: Domain, name and overload of an operator or a function.
_Key = tuple[str, str, str]


class _Wrong(Exception):
    """A fault of a model."""


def read_model(path: str | os.PathLike[str], *, external: bool = False, to_run: bool = True) -> onnx.ModelProto:
    """Reads a model's file and checks it.

    Args:
        external: Whether the model gets the weights from other files; otherwise they are only checked.
        to_run: Whether it is read to be run: its opsets must be known here, and its data files must exist and be large enough.
    """
    path = os.fsdecode(path)
    name = shortened(path, 300)
    model = _parsed(_content(path, name), name)
    folder = os.path.dirname(os.path.abspath(path))
    _check(model, name, folder if to_run else None, os.path.realpath(path))
    if external:
        try:
            onnx.external_data_helper.load_external_data_for_model(model, folder)
        except Exception as error:  # ONNX refuses links too, and a file may have gone
            raise UsageError(f"{name}: the weights beside it can't be read: {_text(error)}") from error
    return model


def as_ir(model: onnx.ModelProto, name: str) -> ir.Model:
    """A protocol buffer as an ``onnx_ir`` model. What ``onnx_ir`` lacks is changed in the protocol buffer, too."""
    try:
        _to_what_onnx_ir_has(model)
        converted = ir.serde.deserialize_model(model)
        for value in converted.graph.initializers.values():
            if value.type is None and value.const_value is not None:  # value_info has only its metadata
                value.dtype, value.shape = value.const_value.dtype, ir.Shape(value.const_value.shape.numpy())
        return converted
    except _Wrong as error:
        raise UsageError(f"{shortened(name, 300)} can't be read: {error}") from error
    except Exception as error:
        raise UsageError(f"{shortened(name, 300)} is not a sound ONNX model: {_text(error)}") from error


def _to_what_onnx_ir_has(model: onnx.ModelProto) -> None:
    """Replaces what ``onnx_ir`` lacks: sparse weights and constants by dense ones, and types of maps by no type."""
    graphs, nodes = [model.graph], [node for function in model.functions for node in function.node]
    room = _MOST_DENSE
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            nodes += graph.node
            for sparse in graph.sparse_initializer:
                room -= math.prod(sparse.dims)
                graph.initializer.append(_dense(sparse, room))
            del graph.sparse_initializer[:]
            for value in (*graph.input, *graph.output, *graph.value_info):
                if _has_map(value.type):
                    value.ClearField("type")
            continue
        for attribute in nodes.pop().attribute:
            graphs += attribute.graphs
            if attribute.HasField("g"):
                graphs.append(attribute.g)
            if attribute.name == "sparse_value" and attribute.HasField("sparse_tensor"):  # of a Constant
                room -= math.prod(attribute.sparse_tensor.dims)
                attribute.CopyFrom(onnx.helper.make_attribute("value", _dense(attribute.sparse_tensor, room)))


def _has_map(kind: onnx.TypeProto) -> bool:
    while (name := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = getattr(kind, name).elem_type
    return name == "map_type"


def _dense(sparse: onnx.SparseTensorProto, room: int) -> onnx.TensorProto:
    """A sparse tensor's elements with the zeros between them; there must be ``room`` left for them."""
    if room < 0:
        raise _Wrong(f"its sparse weights have more than {_MOST_DENSE:,} elements with the zeros between them")
    values, indices = onnx.numpy_helper.to_array(sparse.values), onnx.numpy_helper.to_array(sparse.indices)
    if sparse.values.data_type == _T.STRING:
        raise _Wrong(f"the sparse weight {_quoted(sparse.values.name)} holds texts")
    flat = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), tuple(sparse.dims))
    array = np.zeros(math.prod(sparse.dims), values.dtype)
    array[flat] = values
    return onnx.numpy_helper.from_array(array.reshape(tuple(sparse.dims)), sparse.values.name)


def parse_model(content: bytes) -> onnx.ModelProto:
    """A model from its bytes, checked; it must not have weights in files."""
    model = _parsed(content, "the serialised model")
    _check(model, "the serialised model", os.curdir)
    return model


def _content(path: str | os.PathLike[str], name: str) -> bytes:
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = "" if isinstance(error, FileNotFoundError) else f": {_text(error)}"
        raise UsageError(f"there is no file {name}{reason}") from error
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{name} is not a regular file")
    if status.st_size > _LIMIT:
        raise UsageError(
            f"{name} is not an ONNX model: it has {status.st_size / 1e9:.1f} GB, and a protocol buffer at most 2",
            hint="The weights of a larger model are in files beside it.",
        )
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{name} can't be read: {error.strerror or error}") from error


def _parsed(content: bytes, name: str) -> onnx.ModelProto:
    try:
        return onnx.load_model_from_string(content)
    except Exception as error:
        raise UsageError(
            f"{name} is not an ONNX model that can be read: {_text(error)}",
            hint="It may be truncated, or of another kind.",
        ) from error


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' if lines else ''}{shortened(lines[0], 300) if lines else ''}"


def _check(model: onnx.ModelProto, name: str, folder: str | None, own: str | None = None) -> None:
    """Checks a model.

    Args:
        folder: Where its external data are; ``None``: the model is not to be run.
    """
    try:
        _Checker(folder).check(model, own)
    except _Wrong as error:
        raise UsageError(f"{name} is not a sound ONNX model: {error}") from None


class _Checker:
    """Checks a model part by part; each method raises :class:`_Wrong`.

    Args:
        folder: Where its external data are; ``None``: the model is not to be run.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        #: The places of external data in each file: begin, end, and the name of the tensor.
        self._regions: dict[str, list[tuple[int, int, str]]] = {}

    def check(self, model: onnx.ModelProto, own: str | None) -> None:
        """Checks a whole model; ``own`` is its file."""
        if not model.HasField("graph"):
            raise _Wrong("it has no graph")
        self._opsets(model.opset_import)
        of_graph = self._nodes_within([model.graph])
        calls: dict[_Key, Counter[_Key]] = {}
        for function in model.functions:
            for name in (function.name, function.domain, function.overload):
                self._identifier(name)
            self._opsets(function.opset_import)
            key = (_domain(function.domain), function.name, function.overload)
            if key in calls:
                raise _Wrong(f"it has two functions {_quoted(function.name)} of the domain {_quoted(function.domain)}")
            graphs: list[onnx.GraphProto] = []
            calls[key] = self._nodes(function.node, graphs) + self._nodes_within(graphs)
        _check_calls(calls, of_graph)
        for file, places in self._regions.items():
            if file == own:
                raise _Wrong(f"{places[0][2]} is in the model's own file")
            _check_overlap(file, places)

    def _opsets(self, imports: Iterable[onnx.OperatorSetIdProto]) -> None:
        newest = onnx.defs.onnx_opset_version()
        versions: dict[str, int] = {}
        for imported in imports:
            self._identifier(imported.domain)
            domain, version = _domain(imported.domain), imported.version
            if not 1 <= version < 2**31 or (self._folder is not None and domain == "" and version > newest):
                known = f"; the installed onnx knows ai.onnx up to {newest}" if domain == "" else ""
                raise _Wrong(f"it imports opset {version} of {_quoted(imported.domain or 'ai.onnx')}{known}")
            if versions.setdefault(domain, version) != version:
                raise _Wrong(f"it imports two opsets of {_quoted(imported.domain or 'ai.onnx')}")

    def _nodes_within(self, graphs: list[onnx.GraphProto]) -> Counter[_Key]:
        """Checks graphs and their subgraphs; counts the calls of each operator and function."""
        calls: Counter[_Key] = Counter()
        while graphs:
            graph = graphs.pop()
            calls += self._nodes(graph.node, graphs)
            self._graph(graph)
        return calls

    def _nodes(self, nodes: Iterable[onnx.NodeProto], graphs: list[onnx.GraphProto]) -> Counter[_Key]:
        """Checks nodes and the tensors in their attributes; counts their calls. Graphs in them are added to ``graphs``."""
        calls: Counter[_Key] = Counter()
        for node in nodes:
            calls[_domain(node.domain), node.op_type, node.overload] += 1
            for name in (*node.input, *node.output, node.name):
                _check_name(name)
            self._identifier(node.op_type)
            self._identifier(node.domain)
            for attribute in node.attribute:
                self._attribute(attribute, node)
                graphs += attribute.graphs
                if attribute.HasField("g"):
                    graphs.append(attribute.g)
        return calls

    def _attribute(self, attribute: onnx.AttributeProto, node: onnx.NodeProto) -> None:
        _check_name(attribute.name)
        where = f"the attribute {_quoted(attribute.name)} of {_quoted(node.name or node.op_type)}"
        if not attribute.type:
            raise _Wrong(f"{where} has no type")
        needed = _CONTENTS.get(attribute.type)
        if needed is not None and not attribute.ref_attr_name and not attribute.HasField(needed):
            raise _Wrong(f"{where} has no content")
        for tensor in (*attribute.tensors, *([attribute.t] if attribute.HasField("t") else [])):
            self._tensor(tensor, where)
        sparse = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
        for each in (*attribute.sparse_tensors, *sparse):
            self._sparse(each, where)

    def _identifier(self, name: str | bytes) -> None:
        """Checks the name of an operator or domain, an identifier in ONNX: it must at least have no control characters."""
        _check_name(name)
        if self._folder is not None and not str(name).isprintable():
            raise _Wrong(f"{_quoted(str(name))} is no name of an operator or a domain")

    def _graph(self, graph: onnx.GraphProto) -> None:
        sparse = [tensor.values for tensor in graph.sparse_initializer]
        for named in (graph, *graph.input, *graph.output, *graph.value_info, *graph.initializer, *sparse):
            _check_name(named.name)
        for noun, named_alike in (("weights", (*graph.initializer, *sparse)), ("inputs", graph.input)):
            for name, count in Counter(each.name for each in named_alike).items():
                if count > 1:
                    raise _Wrong(f"it has two {noun} {_quoted(name)}")
        for tensor in graph.initializer:
            self._tensor(tensor, f"the weight {_quoted(tensor.name)}")
        for each in graph.sparse_initializer:
            self._sparse(each, f"the weight {_quoted(each.values.name)}")

    def _tensor(self, tensor: onnx.TensorProto, where: str) -> None:
        try:
            dtype = ir.DataType(tensor.data_type)
        except ValueError:
            raise _Wrong(f"{where} is of the data type {tensor.data_type}, which there is none of") from None
        if dtype == ir.DataType.UNDEFINED:
            raise _Wrong(f"{where} has no data type")
        dims = list(tensor.dims)
        if len(dims) > _MOST_DIMS or any(size < 0 for size in dims):
            raise _Wrong(f"{where} has the dimensions {shortened(str(dims), 100)}")
        count = math.prod(dims)
        size = None if dtype == ir.DataType.STRING else -(-count * dtype.bitwidth // 8)
        if max(count, size or 0) > _MOST_BYTES:
            raise _Wrong(f"{where} has the dimensions {shortened(str(dims), 100)}, which is more than there can be")
        if tensor.data_location == _T.EXTERNAL:
            self._external(tensor, where, size)
            return
        filled = [field for field in (*_TYPED, "raw_data") if len(getattr(tensor, field))]
        if len(filled) > 1:
            raise _Wrong(f"{where} has its content twice: in {' and in '.join(filled)}")
        if not filled:
            if count:
                raise _Wrong(f"{where} has {count} elements, and no content")
            return
        if filled == ["raw_data"]:
            if size is None:
                raise _Wrong(f"{where} holds strings as raw bytes")
            wanted = size
        else:
            field, entries = _FIELDS.get(tensor.data_type, ("int32_data", 1))
            if filled != [field]:
                raise _Wrong(f"{where} is of {dtype.name} and has its content in {filled[0]}")
            wanted = size if size is not None and dtype.bitwidth < 8 else count * entries
        length = len(getattr(tensor, filled[0]))
        if length != wanted:
            raise _Wrong(f"{where} has {length} {'bytes' if filled == ['raw_data'] else 'entries'}, and takes {wanted}")

    def _sparse(self, sparse: onnx.SparseTensorProto, where: str) -> None:
        """Checks a sparse tensor: as many indices as values, each within the shape."""
        dims = list(sparse.dims)
        self._tensor(sparse.values, where)
        self._tensor(sparse.indices, f"{where}, its indices")
        locations = (sparse.indices.data_location, sparse.values.data_location)
        # ONNX Runtime writes the smallest type that the indices fit in.
        if sparse.indices.data_type not in (_T.INT8, _T.INT16, _T.INT32, _T.INT64) or _T.EXTERNAL in locations:
            raise _Wrong(f"{where} is sparse, and its indices are no integers in the model")
        if any(size < 0 for size in dims) or math.prod(dims) > 1 << 33:
            raise _Wrong(f"{where} is sparse, and has the dimensions {shortened(str(dims), 100)}")
        indices = onnx.numpy_helper.to_array(sparse.indices)
        count = math.prod(sparse.values.dims)
        bounds = [math.prod(dims)] if indices.ndim == 1 else dims
        fits = indices.shape in ((count,), (count, len(dims))) and (
            not count or bool((indices >= 0).all() and (indices < bounds).all())
        )
        if not fits:
            raise _Wrong(f"{where} is sparse, and its indices are not those of {count} elements of {dims}")

    def _external(self, tensor: onnx.TensorProto, where: str, size: int | None) -> None:
        entries: dict[str, str] = {}
        for entry in tensor.external_data:
            _check_name(entry.key)
            _check_name(entry.value)
            if entries.setdefault(entry.key, entry.value) != entry.value:
                raise _Wrong(f"{where} says twice what {_quoted(entry.key)} is")
        location = entries.get("location", "")
        if size is None:
            raise _Wrong(f"{where} holds strings, which can't be in another file")
        file, length_of_file = self._external_file(location, where)
        offset = _number(entries.get("offset", "0"), where, "offset")
        length = _number(entries.get("length", str(size)), where, "length")
        if length != size:
            raise _Wrong(f"{where} takes {size} bytes, and is said to have {length} in {_quoted(location)}")
        end = offset + length
        if end > length_of_file:
            raise _Wrong(
                f"{where} is at the bytes {offset} to {end} of {_quoted(location)}, which has {length_of_file}"
            )
        self._regions.setdefault(file, []).append((offset, end, where))

    def _external_file(self, location: str, where: str) -> tuple[str, int]:
        """The file of external data, all links followed, and its size; if files are not checked, its name and no limit."""
        parts = PureWindowsPath(location)  # its separators include those of POSIX
        if not location or "\0" in location or parts.anchor or ".." in parts.parts:
            raise _Wrong(f"{where} is in the file {_quoted(location)}, which is not one of the model's folder")
        if self._folder is None:
            return os.path.normpath(location), 1 << 63
        try:
            folder = os.path.realpath(self._folder)
            file = os.path.realpath(os.path.join(self._folder, location))
            if os.path.commonpath([file, folder]) != folder:
                raise _Wrong(f"{where} is in {_quoted(location)}, a link that leads out of the model's folder")
            status = os.stat(file)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise _Wrong(f"{where} is in the file {_quoted(location)}, which can't be read: {reason}") from None
        if not stat.S_ISREG(status.st_mode):
            raise _Wrong(f"{where} is in {_quoted(location)}, which is not a regular file")
        return file, status.st_size


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _quoted(name: str) -> str:
    return repr(shortened(name, 100))


def _check_name(name: str | bytes) -> None:
    """Checks a name. A protocol buffer returns bytes for names that are not UTF-8."""
    if isinstance(name, bytes):
        raise _Wrong(f"the name {name[:100]!r} is not UTF-8")
    if "\0" in name:
        raise _Wrong(f"the name {_quoted(name)} has a null character")


def _check_calls(calls: Mapping[_Key, Counter[_Key]], of_graph: Counter[_Key]) -> None:
    """Checks that no function calls itself, and that the inlined calls don't exceed the largest number of nodes."""
    callees = {key: called.keys() & calls.keys() for key, called in calls.items()}
    try:
        order = list(graphlib.TopologicalSorter(callees).static_order())
    except graphlib.CycleError as error:
        names = [name for _, name, _ in error.args[1]]
        raise _Wrong(f"the function {_quoted(names[0])} calls itself") from None
    nodes: dict[_Key, int] = {}
    for key in order:  # callees go first
        nodes[key] = sum(count * nodes.get(called, 1) for called, count in calls[key].items())
    whole = sum(count * nodes.get(called, 1) for called, count in of_graph.items())
    if whole > _MOST_NODES:
        raise _Wrong(f"its functions call each other so often that they are {whole:.1e} nodes")


def _number(text: str, where: str, noun: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise _Wrong(f"{where} has the {noun} {_quoted(text)}")
    return int(text)


def _check_overlap(file: str, places: list[tuple[int, int, str]]) -> None:
    """Checks that tensors of the same file don't overlap, or are the same bytes."""
    end, last = -1, ("", 0, 0)
    for start, stop, where in sorted(places):
        if start < end and (start, stop) != last[1:]:
            raise _Wrong(f"{where} lies in the bytes of {last[0]} in {_quoted(os.path.basename(file))}")
        if stop > end:
            end, last = stop, (where, start, stop)

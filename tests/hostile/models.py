"""Hostile .onnx files: each function writes ``bad.onnx``, and the files that go with it, into a folder.

The good model of which they are made takes ``x`` and ``y`` and returns ``x @ w + b + y``, as the target of the cases does.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BAD = "bad.onnx"
Write = Callable[[Path], Any]


def good() -> onnx.ModelProto:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["m"], name="m"),
            helper.make_node("Add", ["m", "b"], ["s"], name="s"),
            helper.make_node("Add", ["s", "y"], ["z"], name="z"),
        ],
        "graph",
        [info("x", TensorProto.FLOAT, [3, 4]), info("y", TensorProto.FLOAT, [3, 2])],
        [info("z", TensorProto.FLOAT, [3, 2])],
        [
            numpy_helper.from_array(np.arange(8, dtype=np.float32).reshape(4, 2), "w"),
            numpy_helper.from_array(np.ones(2, np.float32), "b"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def changed(change: Callable[[onnx.ModelProto], Any]) -> Write:
    """Writes a good model after a change."""

    def write(folder: Path) -> None:
        model = good()
        change(model)
        (folder / BAD).write_bytes(model.SerializeToString())

    return write


def of_bytes(content: bytes | Callable[[], bytes]) -> Write:
    return lambda folder: (folder / BAD).write_bytes(content() if callable(content) else content)


def number(value: int) -> bytes:
    """A varint."""
    result = bytearray()
    while value > 127:
        result.append(value & 127 | 128)
        value >>= 7
    return bytes([*result, value])


def field(key: int, content: bytes) -> bytes:
    return number(key << 3 | 2) + number(len(content)) + content


# -- bytes -------------------------------------------------------------------------------------------------------------


def boundaries(content: bytes, depth: int = 4) -> list[int]:
    """The places where the fields of a message begin and end, also those of the messages in it."""
    result: set[int] = set()

    def walk(start: int, end: int, left: int) -> bool:
        places = []
        while start < end:
            places.append(start)
            key, start = _read(content, start, end)
            kind = key & 7
            if kind == 2:
                length, start = _read(content, start, end)
                if length > end - start:
                    return False
                places.append(start)
                if left:
                    walk(start, start + length, left - 1)
                start += length
            elif kind == 0:
                _, start = _read(content, start, end)
            elif kind in (1, 5):
                start += 8 if kind == 1 else 4
            else:
                return False
        result.update(places)
        return start == end

    walk(0, len(content), depth)
    return sorted(result - {0})


def _read(content: bytes, start: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while start < end:
        value |= (content[start] & 127) << shift
        start, shift = start + 1, shift + 7
        if content[start - 1] < 128:
            return value, start
    return 0, end


def flipped(seed: int) -> bytes:
    generator = random.Random(seed)
    content = bytearray(good().SerializeToString())
    for _ in range(generator.choice((1, 1, 3, 20))):
        content[generator.randrange(len(content))] = generator.randrange(256)
    return bytes(content)


def nested_groups(depth: int) -> bytes:
    return bytes([7 << 3 | 3]) * depth


def nested_messages(depth: int) -> bytes:
    """Graphs in attributes of nodes of graphs, to a depth that no library's own writer reaches."""
    content = field(2, b"innermost")
    for _ in range(depth):
        attribute = field(1, b"then_branch") + number(20 << 3) + number(5) + field(6, content)
        content = field(1, field(4, b"If") + field(5, attribute) + field(2, b"r"))
    return number(1 << 3) + number(10) + field(7, content) + field(8, number(2 << 3) + number(21))


def nested_types(depth: int) -> bytes:
    content = field(1, number(1 << 3) + number(1))
    for _ in range(depth):
        content = field(4, field(1, content))
    info = field(1, b"x") + field(2, content)
    return number(1 << 3) + number(10) + field(7, field(11, info)) + field(8, number(2 << 3) + number(21))


def sparse_file(size: int, head: bytes = b"") -> Write:
    def write(folder: Path) -> None:
        with open(folder / BAD, "wb") as file:
            file.write(head)
            file.truncate(size)

    return write


#: Files that no library reads as a model.
UNREADABLE: dict[str, Write] = {
    "one-byte": of_bytes(b"\x08"),
    "zeros": of_bytes(bytes(4096)),
    "ones": of_bytes(b"\xff" * 4096),
    "random": of_bytes(lambda: random.Random(0).randbytes(4096)),
    "text": of_bytes(b"this is not a model\n" * 50),
    "html": of_bytes(b"<html><script>alert(1)</script></html>"),
    "json": of_bytes(b'{"model": [1, 2, 3]}'),
    "zip": of_bytes(b"PK\x03\x04" + bytes(200)),
    "gzip": of_bytes(b"\x1f\x8b\x08" + bytes(200)),
    "pickle": of_bytes(b"\x80\x04cos\nsystem\n(Vtouch pwned\ntR."),
    "elf": of_bytes(b"\x7fELF" + bytes(300)),
    "lfs-pointer": of_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"),
    "safetensors": of_bytes(struct.pack("<Q", 2) + b"{}"),
    "length-2-63": of_bytes(b"\x3a" + number(2**63 - 1) + b"x"),
    "length-2-64": of_bytes(b"\x3a" + number(2**64 - 1)),
    "length-2-31": of_bytes(b"\x3a" + number(2**31) + b"x"),
    "varint-without-end": of_bytes(b"\x3a" + b"\xff" * 100),
    "field-0": of_bytes(b"\x02\x01x"),
    "wire-type-7": of_bytes(b"\x3f\x01x"),
    "groups": of_bytes(nested_groups(10_000)),
    "nested-messages-1000": of_bytes(lambda: nested_messages(1000)),
    "nested-messages-20000": of_bytes(lambda: nested_messages(20_000)),
    "nested-types-5000": of_bytes(lambda: nested_types(5000)),
    "sparse-3-gigabytes": sparse_file(3 << 30),
    "sparse-3-gigabytes-graph": sparse_file(3 << 30, b"\x3a" + number((3 << 30) - 6)),
    "sparse-200-gigabytes": sparse_file(200 << 30),
    "graph-is-text": of_bytes(field(7, b"this is no graph at all")),
    "graph-is-a-number": of_bytes(b"\x38\x05"),
    "folder": lambda folder: (folder / BAD).mkdir(),
    "fifo": lambda folder: os.mkfifo(folder / BAD),
    "link-loop": lambda folder: os.symlink(BAD, folder / BAD),
    "link-to-nothing": lambda folder: os.symlink("nothing", folder / BAD),
    "link-to-device": lambda folder: os.symlink("/dev/zero", folder / BAD),
    "link-to-terminal": lambda folder: os.symlink("/dev/stdin", folder / BAD),
}
if os.geteuid():

    def _unreadable(folder: Path) -> None:
        changed(lambda model: None)(folder)
        (folder / BAD).chmod(0)

    UNREADABLE["no-permission"] = _unreadable


# -- graphs ------------------------------------------------------------------------------------------------------------


def _function(name: str, calls: str) -> onnx.FunctionProto:
    return helper.make_function(
        "own",
        name,
        ["a"],
        ["c"],
        [helper.make_node(calls, ["a"], ["c"], domain="own")],
        [helper.make_opsetid("own", 1)],
    )


def recursive(*names: str) -> Callable[[onnx.ModelProto], None]:
    """Functions, each of which calls the next one, and the last the first."""

    def change(model: onnx.ModelProto) -> None:
        model.opset_import.append(helper.make_opsetid("own", 1))
        for name, following in zip(names, (*names[1:], names[0]), strict=True):
            model.functions.append(_function(name, following))
        model.graph.node[2].CopyFrom(helper.make_node(names[0], ["s"], ["z"], domain="own"))

    return change


def bombing_functions(model: onnx.ModelProto) -> None:
    """Each function calls the next one ten times: 10**20 nodes, once they are put in each other's place."""
    model.opset_import.append(helper.make_opsetid("own", 1))
    for level in range(20):
        nodes = [helper.make_node(f"f{level + 1}", [f"v{i}"], [f"v{i + 1}"], domain="own") for i in range(10)]
        model.functions.append(
            helper.make_function("own", f"f{level}", ["v0"], ["v10"], nodes, [helper.make_opsetid("own", 1)])
        )
    model.functions.append(
        helper.make_function(
            "own", "f20", ["a"], ["c"], [helper.make_node("Identity", ["a"], ["c"])], [helper.make_opsetid("", 21)]
        )
    )
    model.graph.node[2].CopyFrom(helper.make_node("f0", ["s"], ["z"], domain="own"))


def nested_ifs(depth: int) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        info = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)
        graph = helper.make_graph([helper.make_node("Identity", ["s"], ["r"])], "g", [], [info])
        for level in range(depth):
            node = helper.make_node(
                "If", ["c"], [f"r{level}"], then_branch=graph, else_branch=graph if level < 2 else None
            )
            graph = helper.make_graph(
                [node], "g", [], [helper.make_tensor_value_info(f"r{level}", TensorProto.FLOAT, None)]
            )
        model.graph.node.append(graph.node[0])

    return change


def _tensor(**changes: Any) -> Callable[[onnx.ModelProto], None]:
    """Changes of the weight ``w``: ``dims``, ``raw_data``, ``data_type`` …"""

    def change(model: onnx.ModelProto) -> None:
        tensor = model.graph.initializer[0]
        for name, value in changes.items():
            if name in ("dims", "float_data", "int32_data", "string_data"):
                del getattr(tensor, name)[:]
                getattr(tensor, name).extend(value)
            elif value is None:
                tensor.ClearField(name)
            else:
                setattr(tensor, name, value)

    return change


def _sparse(dims: list[int], indices: list[int]) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        values = numpy_helper.from_array(np.ones(len(indices), np.float32), "w")
        sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(indices, np.int64), "i"), dims)
        del model.graph.initializer[0]
        model.graph.sparse_initializer.append(sparse)

    return change


def _node(index: int, **fields: Any) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        for name, value in fields.items():
            if isinstance(value, list):
                del getattr(model.graph.node[index], name)[:]
                getattr(model.graph.node[index], name).extend(value)
            else:
                setattr(model.graph.node[index], name, value)

    return change


def _extended(*nodes: onnx.NodeProto) -> Callable[[onnx.ModelProto], None]:
    return lambda model: model.graph.node.extend(nodes)


def _opsets(*imports: tuple[str, int]) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        del model.opset_import[:]
        model.opset_import.extend(helper.make_opsetid(name, version) for name, version in imports)

    return change


def _attribute(**fields: Any) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        attribute = model.graph.node[0].attribute.add()
        for name, value in fields.items():
            setattr(attribute, name, value)

    return change


#: Models that a library reads, and that nothing can run.
WRONG: dict[str, Callable[[onnx.ModelProto], Any]] = {
    "no-graph": lambda m: m.ClearField("graph"),
    "no-nodes": lambda m: m.graph.ClearField("node"),
    "cycle": _node(0, input=["z", "w"]),
    "own-input": _node(0, input=["m", "w"]),
    "missing-input": _node(0, input=["nobody", "w"]),
    "empty-input": _node(0, input=["", ""]),
    "no-inputs": _node(0, input=[]),
    "too-many-inputs": _node(0, input=["x", "w"] * 200),
    "no-outputs": _node(2, output=[]),
    "output-twice": _node(1, output=["m"]),
    "output-is-an-input": _node(2, output=["x"]),
    "output-is-a-weight": _node(2, output=["w"]),
    "unsorted": lambda m: m.graph.node.reverse() if hasattr(m.graph.node, "reverse") else None,
    "inputs-twice": lambda m: m.graph.input.append(m.graph.input[0]),
    "outputs-twice": lambda m: m.graph.output.append(m.graph.output[0]),
    "weights-twice": lambda m: m.graph.initializer.append(m.graph.initializer[0]),
    "output-of-nobody": lambda m: setattr(m.graph.output[0], "name", "nobody"),
    "no-output": lambda m: m.graph.ClearField("output"),
    "input-without-name": lambda m: setattr(m.graph.input[0], "name", ""),
    "input-without-type": lambda m: m.graph.input[0].ClearField("type"),
    "input-dims-negative": lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", -5),
    "input-dims-huge": lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", 2**62),
    "unknown-operator": _node(0, op_type="Nothing"),
    "no-operator": _node(0, op_type=""),
    "unknown-domain": _node(0, domain="com.nobody"),
    "operator-is-a-path": _node(0, op_type="../../MatMul", domain="/etc"),
    "no-opset": _opsets(),
    "opset-zero": _opsets(("", 0)),
    "opset-negative": _opsets(("", -1)),
    "opset-9999": _opsets(("", 9999)),
    "opset-2-62": _opsets(("", 2**62)),
    "opsets-disagree": _opsets(("", 21), ("ai.onnx", 7)),
    "opset-of-nobody": _opsets(("com.nobody", 1)),
    "ir-version-none": lambda m: m.ClearField("ir_version"),
    "ir-version-9999": lambda m: setattr(m, "ir_version", 9999),
    "ir-version-negative": lambda m: setattr(m, "ir_version", -1),
    "function-calls-itself": recursive("f"),
    "functions-in-a-circle": recursive("f", "g", "h"),
    "functions-in-a-long-circle": recursive(*(f"f{i}" for i in range(3000))),
    "nested-ifs": nested_ifs(25),
    "dims-huge-no-data": _tensor(dims=[2**40, 2**20], raw_data=b""),
    "dims-of-a-terabyte": _tensor(dims=[1 << 38], raw_data=None),
    "dims-overflow": _tensor(dims=[2**32, 2**32], raw_data=b"1234"),
    "dims-overflow-to-8": _tensor(dims=[2**62 + 2, 4]),
    "dims-negative": _tensor(dims=[-4, -2]),
    "dims-minimum": _tensor(dims=[-(2**63)]),
    "dims-many": _tensor(dims=[1] * 100_000),
    "data-too-short": _tensor(raw_data=b"123"),
    "data-too-long": _tensor(raw_data=bytes(4000)),
    "data-none": _tensor(raw_data=None),
    "data-twice": _tensor(float_data=[1.0] * 8),
    "data-of-other-type": _tensor(raw_data=None, int32_data=[1] * 8),
    "data-type-none": _tensor(data_type=0),
    "data-type-999": _tensor(data_type=999),
    "data-type-negative": _tensor(data_type=-1),
    "strings-as-weights": _tensor(data_type=8, raw_data=None, string_data=[b"x"] * 8),
    "int4-too-short": _tensor(data_type=22, raw_data=b"1"),
    "sparse-outside": _sparse([4, 2], [0, 3, 999]),
    "sparse-negative": _sparse([4, 2], [-1, 0, 1]),
    "sparse-of-a-terabyte": _sparse([2**20, 2**20], [0, 1, 2]),
    "attribute-without-type": _attribute(name="a", i=3),
    "attribute-refers-to-nothing": _attribute(name="a", ref_attr_name="nobody", type=2),
    "attribute-without-name": _attribute(i=3, type=2),
    "attribute-tensor-without-data": _attribute(name="t", type=4),
    "attribute-graph-empty": _attribute(name="g", type=5),
    "constant-without-value": _extended(helper.make_node("Constant", [], ["k"])),
    "constant-twice": _extended(helper.make_node("Constant", [], ["k"], value_float=1.0, value_int=2)),
    "if-without-branches": _extended(helper.make_node("If", ["x"], ["k"])),
    "shapes-that-do-not-fit": _tensor(dims=[2, 4]),
    "other-outputs": lambda m: m.graph.output.append(helper.make_tensor_value_info("m", 1, [3, 2])),
    "other-inputs": lambda m: m.graph.input.append(helper.make_tensor_value_info("more", 1, [3, 2])),
    "other-dtype": lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 11),
}
#: Models that count as good where nothing is run, or where the library at hand passes over the fault.
HARMLESS = set(
    "unsorted outputs-twice no-output input-without-type ir-version-none ir-version-9999 ir-version-negative other-outputs "
    "attribute-refers-to-nothing attribute-without-name attribute-graph-empty constant-twice no-nodes".split()
)


# -- external data -----------------------------------------------------------------------------------------------------


def external(
    files: Callable[[Path], Any] | None = None, data: bytes | None = bytes(64), **entries: str | bytes | None
) -> Write:
    """A model whose weight ``w`` is in another file.

    Args:
        files: Makes the other files.
        data: The content of ``w.bin``; ``None``: there is no such file.
        entries: The model's entries about ``w.bin``, ``location`` and others.
    """

    def write(folder: Path) -> None:
        if data is not None:
            (folder / "w.bin").write_bytes(data)
        if files is not None:
            files(folder)
        model = good()
        _store_outside(model.graph.initializer[0], {"location": "w.bin", **entries})
        (folder / BAD).write_bytes(model.SerializeToString())

    return write


def _store_outside(tensor: onnx.TensorProto, entries: dict[str, Any]) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        if value is not None:
            content = value if isinstance(value, bytes) else value.encode()
            tensor.MergeFromString(field(13, field(1, key.encode()) + field(2, content)))


def two_weights(first: dict[str, str], second: dict[str, str]) -> Write:
    def write(folder: Path) -> None:
        (folder / "w.bin").write_bytes(bytes(64))
        model = good()
        _store_outside(model.graph.initializer[0], {"location": "w.bin", **first})
        _store_outside(model.graph.initializer[1], {"location": "w.bin", **second})
        (folder / BAD).write_bytes(model.SerializeToString())

    return write


def _beside(name: str, content: bytes = bytes(64)) -> Callable[[Path], Any]:
    return lambda folder: (folder.parent / "outside" / name).write_bytes(content)


def _linked(name: str, to: str) -> Callable[[Path], Any]:
    def make(folder: Path) -> None:
        (folder.parent / "outside" / "w.bin").write_bytes(bytes(64))
        os.symlink(to, folder / name)

    return make


def _hard_linked(folder: Path) -> None:
    (folder.parent / "outside" / "w.bin").write_bytes(bytes(64))
    os.link(folder.parent / "outside" / "w.bin", folder / "hard.bin")


def _in_folder(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "w.bin").write_bytes(bytes(64))


#: Weights that a model can't have where it says they are.
OUTSIDE: dict[str, Write] = {
    "passwd": external(location="../../../../../../../../etc/passwd"),
    "absolute": external(location="/etc/passwd"),
    "beside": external(_beside("w.bin"), location="../outside/w.bin"),
    "through-itself": external(_beside("w.bin"), location="./../here/../outside/w.bin"),
    "through-a-folder": external(lambda f: (_in_folder(f), _beside("w.bin")(f)), location="sub/../../outside/w.bin"),
    "link": external(_linked("link.bin", "../outside/w.bin"), location="link.bin"),
    "link-absolute": external(_linked("link.bin", "/etc/passwd"), location="link.bin"),
    "folder-link": external(_linked("away", "../outside"), location="away/w.bin"),
    "link-loop": external(lambda f: os.symlink("loop.bin", f / "loop.bin"), location="loop.bin"),
    "link-to-nothing": external(lambda f: os.symlink("nothing", f / "n.bin"), location="n.bin"),
    "device": external(location="/dev/zero"),
    "device-by-link": external(lambda f: os.symlink("/dev/zero", f / "d.bin"), location="d.bin"),
    "random-by-link": external(lambda f: os.symlink("/dev/urandom", f / "d.bin"), location="d.bin"),
    "fifo": external(lambda f: os.mkfifo(f / "p.bin"), location="p.bin"),
    "folder": external(_in_folder, location="sub"),
    "here": external(location="."),
    "above": external(location=".."),
    "empty": external(location=""),
    "none": external(location=None),
    "missing": external(data=None),
    "null-character": external(location="w.bin\0/etc/passwd"),
    "not-utf8": external(location=b"w\xff.bin"),
    "escape": external(location="\x1b[2J"),
    "markup": external(location="[bold]w.bin[/bold]"),
    "newline": external(location="w.bin\n"),
    "backslash": external(location="..\\..\\etc\\passwd"),
    "drive": external(location="C:\\w.bin"),
    "url": external(location="https://localhost:1/w.bin"),
    "file-url": external(location="file:///etc/passwd"),
    "home": external(location="~/w.bin"),
    "variable": external(location="$HOME/w.bin"),
    "long": external(location="n" * 100_000),
    "long-path": external(location="a/" * 5000 + "w.bin"),
    "itself": external(location=BAD),
    "empty-file": external(data=b""),
    "short-file": external(data=bytes(31)),
    "offset-past-the-end": external(offset="1000000"),
    "offset-at-the-end": external(offset="64"),
    "offset-beyond-64-bits": external(offset="99999999999999999999999"),
    "offset-of-5000-digits": external(offset="9" * 5000),
    "offset-negative": external(offset="-32"),
    "offset-word": external(offset="zero"),
    "offset-float": external(offset="1e1"),
    "offset-hex": external(offset="0x10"),
    "offset-empty": external(offset=""),
    "length-negative": external(length="-1"),
    "length-word": external(length="all"),
    "length-beyond-the-file": external(length="4096"),
    "length-of-a-terabyte": external(length=str(1 << 40)),
    "length-too-short": external(length="16"),
    "length-too-long": external(length="64"),
    "length-zero": external(length="0"),
    "overlap": two_weights({"offset": "0", "length": "32"}, {"offset": "16", "length": "8"}),
    "overlap-by-a-byte": two_weights({"offset": "0", "length": "32"}, {"offset": "31", "length": "8"}),
}

# -- names -------------------------------------------------------------------------------------------------------------

NAMES: dict[str, str] = {
    "slash": "a/b",
    "dots": "../../x",
    "null": "a\0b",
    "newline": "a\nerror: nothing\nerror: nothing",
    "return": "kept\rlost",
    "escape": "\x1b[31m\x1b[2J\x1b]0;title\x07",
    "c1": "\x9b2J\x90q\x9c",
    "markup": "[bold red]x[/bold red]",
    "unopened": "[/x]",
    "link": "[link=https://localhost]x[/link]",
    "html": "<script>alert(1)</script>",
    "rtl": "abc\u202efdp.exe",
    "isolate": "\u2066x\u2069",
    "zero-width": "a\u200b\u200eb",
    "quotes": "'\"`$(touch pwned)",
    "percent": "%s%n{0}{x.__class__}",
    "million": "n" * 1_000_000,
    "wide": "漢" * 300,
    "combining": "e" + "\u0301" * 2000,
    "empty": "",
}


def named(name: str) -> Write:
    """A good model, but for its names: of the graph, its values, nodes, domains, metadata, and of its producer."""

    def write(folder: Path) -> None:
        model = good()
        graph = model.graph
        graph.name = graph.doc_string = model.producer_name = model.producer_version = model.doc_string = name
        model.domain = name
        for key in (name, f"k{name}"):
            entry = model.metadata_props.add()
            entry.key, entry.value = key, name
        model.opset_import.append(helper.make_opsetid(f"d{name}", 1))
        new = {"x": f"x{name}", "z": f"z{name}", "w": f"w{name}"}
        graph.input[0].name, graph.output[0].name, graph.initializer[0].name = new["x"], new["z"], new["w"]
        graph.input[0].type.tensor_type.shape.dim[0].dim_param = f"n{name}"
        graph.node[0].input[:] = [new["x"], new["w"]]
        graph.node[0].name = graph.node[0].doc_string = name
        graph.node[2].output[:] = [new["z"]]
        graph.node.append(helper.make_node(f"Op{name}", ["y"], [f"o{name}"], domain=f"d{name}"))
        (folder / BAD).write_bytes(model.SerializeToString())

    return write


def not_utf8(folder: Path) -> None:
    content = good().SerializeToString().replace(b"graph", b"gr\xff\xfeh").replace(b"MatMul", b"M\xc3\x28Mul")
    (folder / BAD).write_bytes(content)


def many(count: int) -> Callable[[onnx.ModelProto], None]:
    """A chain of many nodes, each of another operator."""

    def change(model: onnx.ModelProto) -> None:
        model.graph.node.extend(
            helper.make_node(f"Op{i}", [f"c{i}"], [f"c{i + 1}"], domain=f"d{i % 997}") for i in range(count)
        )

    return change


def truncations(every: int) -> Iterator[tuple[int, bytes]]:
    content = good().SerializeToString()
    places = boundaries(content)
    for place in places[::every]:
        yield place, content[:place]

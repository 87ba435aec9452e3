"""Bad files of weights and of programs: .safetensors, files of torch.save, indices, folders, .pt2, .npy."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.hostile.case import FAILED, USAGE, Case, call, cli

Write = Callable[[Path], Any]
_WEIGHTS = {"linear.weight": torch.ones(2, 4), "linear.bias": torch.ones(2)}
#: The file that a pickle leaves beside the case's folder where it is loaded.
_TRACE = "../outside/pwned"


class _Code:
    """An object that is pickled as a call."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {_TRACE}",)


def code() -> Any:
    """An object whose pickle runs a command."""
    return _Code()


def _bytes(name: str, content: bytes | Callable[[], bytes]) -> Write:
    return lambda folder: (folder / name).write_bytes(content() if callable(content) else content)


# -- safetensors -------------------------------------------------------------------------------------------------------


def _safetensors(header: Any, data: bytes = bytes(40), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(dtype: Any = "F32", shape: Any = (2, 4), offsets: Any = (0, 32)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def _two(**changes: Any) -> dict[str, Any]:
    return {"linear.weight": _entry(**changes), "linear.bias": _entry(shape=(2,), offsets=(32, 40))}


SAFETENSORS: dict[str, bytes] = {
    "empty": b"",
    "seven-bytes": bytes(7),
    "length-alone": struct.pack("<Q", 100),
    "length-2-60": _safetensors(_two(), length=1 << 60),
    "length-2-63": _safetensors(_two(), length=(1 << 64) - 1),
    "length-zero": _safetensors(_two(), length=0),
    "length-short": _safetensors(_two(), length=10),
    "length-long": _safetensors(_two(), length=10_000),
    "length-of-100-megabytes": _safetensors(_two(), length=100_000_001),
    "not-json": _safetensors(b"{nothing}"),
    "not-utf8": _safetensors(b'{"\xff\xfe": 1}'),
    "list": _safetensors([1, 2]),
    "number": _safetensors(b"3"),
    "null": _safetensors(b"null"),
    "deep": _safetensors(b"[" * 100_000),
    "deep-objects": _safetensors(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "entry-number": _safetensors({"linear.weight": 3}),
    "entry-empty": _safetensors({"linear.weight": {}}),
    "entry-without-offsets": _safetensors({"linear.weight": {"dtype": "F32", "shape": [2]}}),
    "dtype-unknown": _safetensors(_two(dtype="F999")),
    "dtype-number": _safetensors(_two(dtype=3)),
    "shape-negative": _safetensors(_two(shape=(-2, -4))),
    "shape-float": _safetensors(_two(shape=(2.0, 4.0))),
    "shape-text": _safetensors(_two(shape=("2", "4"))),
    "shape-huge": _safetensors(_two(shape=(1 << 40, 1 << 40))),
    "shape-other": _safetensors(_two(shape=(3, 3))),
    "offsets-turned": _safetensors(_two(offsets=(32, 0))),
    "offsets-negative": _safetensors(_two(offsets=(-32, 0))),
    "offsets-beyond": _safetensors(_two(offsets=(0, 1 << 50))),
    "offsets-three": _safetensors(_two(offsets=(0, 16, 32))),
    "offsets-text": _safetensors(_two(offsets=("0", "32"))),
    "overlap": _safetensors({"linear.weight": _entry(), "linear.bias": _entry(shape=(2,), offsets=(28, 36))}),
    "hole": _safetensors({"linear.weight": _entry(), "linear.bias": _entry(shape=(2,), offsets=(36, 44))}, bytes(44)),
    "not-covered": _safetensors({"linear.weight": _entry()}, bytes(400)),
    "truncated": _safetensors(_two(), bytes(20)),
    "no-data": _safetensors(_two(), b""),
    "name-twice": _safetensors(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
        bytes(16),
    ),
    "no-tensors": _safetensors({}, b""),
    "metadata-alone": _safetensors({"__metadata__": {"format": "pt"}}, b""),
    "metadata-list": _safetensors({"__metadata__": [1], **_two()}),
    "other-names": _safetensors({"a": _entry(), "b": _entry(shape=(2,), offsets=(32, 40))}),
    "names-escape": _safetensors({"\x1b[2J[red]": _entry(), "\nerror: x": _entry(shape=(2,), offsets=(32, 40))}),
    "name-of-a-megabyte": _safetensors({"n" * 1_000_000: _entry(), "b": _entry(shape=(2,), offsets=(32, 40))}),
    "zip": b"PK\x03\x04" + bytes(100),
    "pickle": pickle.dumps(_Code()),
    "text": b"version https://git-lfs.github.com/spec/v1\n",
    "other-dtype": _safetensors(
        {"linear.weight": _entry("BOOL", (2, 4), (0, 8)), "linear.bias": _entry("F32", (2,), (8, 16))}, bytes(16)
    ),
    "random": random.Random(1).randbytes(3000),
}

# -- torch.save --------------------------------------------------------------------------------------------------------


def _saved(content: Any, old: bool = False) -> Callable[[], bytes]:
    def make() -> bytes:
        file = io.BytesIO()
        torch.save(content, file, _use_new_zipfile_serialization=not old)
        return file.getvalue()

    return make


def _cut(make: Callable[[], bytes], part: float) -> Callable[[], bytes]:
    return lambda: (content := make())[: int(len(content) * part)]


def _flipped(make: Callable[[], bytes], seed: int) -> Callable[[], bytes]:
    def flip() -> bytes:
        generator, content = random.Random(seed), bytearray(make())
        for _ in range(5):
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        return bytes(content)

    return flip


def _zip(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Callable[[], bytes]:
    def make() -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", compression) as archive:
            for name, content in entries.items():
                archive.writestr(name, content)
        return file.getvalue()

    return make


def bomb(name: str, size: int = 4 << 30) -> Callable[[], bytes]:
    """An archive of a few megabytes that says it holds gigabytes of zeros, and does."""

    def make() -> bytes:
        step = 1 << 24
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        block = packer.compress(bytes(step)) + packer.flush(zlib.Z_FULL_FLUSH)
        data = block * (size // step) + packer.flush()
        text = name.encode()
        sizes = struct.pack("<HHQQ", 1, 16, size, len(data))
        common = struct.pack("<HHHHHIIIHH", 45, 0, 8, 0, 0x21, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(text), len(sizes))
        entry = b"PK\3\4" + common + text + sizes + data
        listed = b"PK\1\2" + struct.pack("<H", 45) + common + struct.pack("<HHHII", 0, 0, 0, 0, 0) + text + sizes
        end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(listed), len(entry), 0)
        return entry + listed + end

    return make


def _recompressed(make: Callable[[], bytes]) -> Callable[[], bytes]:
    """A file of torch.save whose entries are compressed, as torch never writes them."""

    def again() -> bytes:
        with zipfile.ZipFile(io.BytesIO(make())) as archive:
            return _zip({name: archive.read(name) for name in archive.namelist()}, zipfile.ZIP_DEFLATED)()

    return again


def _script() -> bytes:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(4, 2)), file)
    return file.getvalue()


_GOOD = _saved(_WEIGHTS)
PICKLED: dict[str, bytes | Callable[[], bytes]] = {
    "empty": b"",
    "text": b"not a checkpoint",
    "zip-of-nothing": _zip({}),
    "zip-of-others": _zip({"a.txt": b"x"}),
    "zip-of-paths": _zip({"../../outside/pwned": b"x", "archive/data.pkl": b"x"}),
    "code": _saved({"linear.weight": _Code()}),
    "code-old": _saved({"linear.weight": _Code()}, old=True),
    "code-alone": pickle.dumps(_Code()),
    "code-in-archive": _zip(
        {"archive/data.pkl": pickle.dumps(_Code()), "archive/version": b"3\n", "archive/byteorder": b"little"}
    ),
    "module": _saved(torch.nn.Linear(4, 2)),
    "script": _script,
    "list": _saved([torch.ones(2)]),
    "number": _saved(3),
    "tensor": _saved(torch.ones(2)),
    "numbers-as-names": _saved({1: torch.ones(2)}),
    "texts": _saved({"linear.weight": "x", "linear.bias": "y"}),
    "nested": _saved({"state_dict": _WEIGHTS}),
    "other-names": _saved({"a": torch.ones(2)}),
    "other-shapes": _saved({"linear.weight": torch.ones(9, 9), "linear.bias": torch.ones(2)}),
    "other-dtypes": _saved({"linear.weight": torch.ones(2, 4).bool(), "linear.bias": torch.ones(2)}),
    "sparse": _saved({"linear.weight": torch.ones(2, 4).to_sparse(), "linear.bias": torch.ones(2)}),
    "meta": _saved({"linear.weight": torch.empty(2, 4, device="meta"), "linear.bias": torch.ones(2)}),
    "escape": _saved({"\x1b[2J": torch.ones(2)}),
    "cut-a-tenth": _cut(_GOOD, 0.1),
    "cut-half": _cut(_GOOD, 0.5),
    "cut-the-end": _cut(_GOOD, 0.98),
    "cut-old": _cut(_saved(_WEIGHTS, old=True), 0.6),
    "compressed": _recompressed(_GOOD),
    "bomb-pickle": bomb("archive/data.pkl"),
    "bomb-data": bomb("archive/data/0"),
    "deep": b"\x80\x02" + b"(" * 1_000_000 + b".",
    "deep-lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "huge-string": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62),
    "huge-int": b"\x80\x02\x8b" + struct.pack("<i", (1 << 31) - 1),
    "huge-tuple-memo": b"\x80\x02r\xff\xff\xff\xff.",
}

# -- indices and folders -----------------------------------------------------------------------------------------------


def _index(content: Any, *others: tuple[str, bytes]) -> Write:
    def write(folder: Path) -> None:
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / "w.index.json").write_bytes(text)
        for name, data in others:
            (folder / name).write_bytes(data)

    return write


def _map(file: Any, **others: Any) -> dict[str, Any]:
    return {"weight_map": {"linear.weight": file, "linear.bias": file, **others}}


_GOOD_SAFETENSORS = _safetensors(_two())
INDICES: dict[str, Write] = {
    "empty": _index(b""),
    "not-json": _index(b"{"),
    "not-utf8": _index(b"\xff\xfe"),
    "list": _index([1]),
    "no-map": _index({}),
    "map-list": _index({"weight_map": [1]}),
    "map-null": _index({"weight_map": None}),
    "file-number": _index(_map(3)),
    "file-missing": _index(_map("no.safetensors")),
    "file-empty": _index(_map("")),
    "file-folder": _index(_map(".")),
    "file-absolute": _index(_map("/etc/passwd")),
    "file-above": _index(_map("../outside/kept")),
    "file-itself": _index(_map("w.index.json")),
    "file-circle": _index(_map("b.index.json"), ("b.index.json", json.dumps(_map("w.index.json")).encode())),
    "file-of-another-kind": _index(_map("x.txt"), ("x.txt", b"x")),
    "file-null": _index(_map("a\0b.safetensors")),
    "file-long": _index(_map("n" * 5000 + ".safetensors")),
    "file-escape": _index(_map("\x1b[2J.safetensors")),
    "tensor-missing": _index(_map("w.safetensors", more="w.safetensors"), ("w.safetensors", _GOOD_SAFETENSORS)),
    "too-few": _index({"weight_map": {"linear.bias": "w.safetensors"}}, ("w.safetensors", _GOOD_SAFETENSORS)),
    "deep": _index(b"[" * 100_000),
    "deep-objects": _index(b'{"weight_map":' * 50_000),
    "names-escape": _index(_map("w.safetensors", **{"\x1b[2J": "w.safetensors"}), ("w.safetensors", _GOOD_SAFETENSORS)),
    "device-by-link": lambda f: (_index(_map("d.safetensors"))(f), os.symlink("/dev/zero", f / "d.safetensors")),
    "fifo": lambda f: (_index(_map("p.safetensors"))(f), os.mkfifo(f / "p.safetensors")),
    "link-out": lambda f: (
        _index(_map("l.safetensors"))(f),
        (f.parent / "outside" / "w.safetensors").write_bytes(_GOOD_SAFETENSORS[:-1]),
        os.symlink("../outside/w.safetensors", f / "l.safetensors"),
    ),
}
PLACES: dict[str, tuple[str, Write | None]] = {
    "missing": ("no.safetensors", None),
    "folder-of-nothing": (".", None),
    "folder-called-so": ("w.safetensors", lambda f: (f / "w.safetensors").mkdir()),
    "fifo": ("w.safetensors", lambda f: os.mkfifo(f / "w.safetensors")),
    "fifo-pt": ("w.pt", lambda f: os.mkfifo(f / "w.pt")),
    "fifo-index": ("w.index.json", lambda f: os.mkfifo(f / "w.index.json")),
    "device": ("w.safetensors", lambda f: os.symlink("/dev/zero", f / "w.safetensors")),
    "device-pt": ("w.pt", lambda f: os.symlink("/dev/zero", f / "w.pt")),
    "device-index": ("w.index.json", lambda f: os.symlink("/dev/zero", f / "w.index.json")),
    "link-loop": ("w.pt", lambda f: os.symlink("w.pt", f / "w.pt")),
    "kind": ("w.txt", lambda f: (f / "w.txt").write_text("x")),
    "long": ("n" * 5000 + ".pt", None),
    "null-character": ("a\0.pt", None),
    "sparse-100-gigabytes": ("w.safetensors", lambda f: _sparse(f / "w.safetensors", 100 << 30)),
    "sparse-100-gigabytes-pt": ("w.pt", lambda f: _sparse(f / "w.pt", 100 << 30)),
    "sparse-100-gigabytes-index": ("w.index.json", lambda f: _sparse(f / "w.index.json", 100 << 30)),
}


def _sparse(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


# -- programs ----------------------------------------------------------------------------------------------------------


def _exported() -> bytes:
    file = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.Linear(4, 2).eval(), (torch.ones(3, 4),)), file)
    return file.getvalue()


PROGRAMS: dict[str, bytes | Callable[[], bytes]] = {
    "empty": b"",
    "text": b"not a program",
    "zip-of-nothing": _zip({}),
    "zip-of-others": _zip({"a.txt": b"x"}),
    "zip-of-paths": _zip({"../../outside/pwned": b"x"}),
    "checkpoint": _GOOD,
    "script": _script,
    "pickle": pickle.dumps(3),
    "bomb": bomb("archive/models/model.json"),
    "bomb-data": bomb("archive/data/weights/weight_0"),
    "compressed": _recompressed(_exported),
    "cut-a-tenth": _cut(_exported, 0.1),
    "cut-half": _cut(_exported, 0.5),
    "cut-the-end": _cut(_exported, 0.99),
    **{f"flipped-{seed}": _flipped(_exported, seed) for seed in range(8)},
}


def _apply(path: str) -> Callable[[], Any]:
    def run() -> Any:
        from tests.hostile.cases_calls import _program

        program = _program()
        program.apply_weights(path)
        return program.save(io.BytesIO())

    return run


def _cases() -> list[Case]:
    results = []
    files: dict[str, tuple[str, Write | None]] = {
        **{f"safetensors-{n}": ("w.safetensors", _bytes("w.safetensors", c)) for n, c in SAFETENSORS.items()},
        **{f"pt-{n}": ("w.pt", _bytes("w.pt", c)) for n, c in PICKLED.items()},
        **{f"index-{n}": ("w.index.json", write) for n, write in INDICES.items()},
        **{f"place-{n}": place for n, place in PLACES.items()},
    }
    for number, (name, (path, write)) in enumerate(files.items()):
        results.append(call(f"apply-weights/{name}", _apply(path), ("UsageError",), files=write))
        if number % 3 == 0:
            results.append(
                cli(
                    f"weights/{name}",
                    "export",
                    "m.py:make",
                    "-o",
                    "o.onnx",
                    "--weights",
                    path,
                    files=write,
                    expected=(USAGE, FAILED),
                )
            )
    for name, content in PROGRAMS.items():
        for command in (("export", "p.pt2", "-o", "o.onnx"), ("inspect", "p.pt2"), ("diagnose", "p.pt2")):
            results.append(
                cli(f"program-{command[0]}/{name}", *command, files=_bytes("p.pt2", content), expected=(USAGE, FAILED))
            )
    for name, path in (("fifo", "p"), ("device", "/dev/zero"), ("folder", ".")):

        def place(folder: Path, path: str = path) -> None:
            os.mkfifo(folder / "p.pt2") if path == "p" else os.symlink(path, folder / "p.pt2")

        results.append(cli(f"program-export/{name}", "export", "p.pt2", "-o", "o.onnx", files=place))
    return results


CASES = _cases()

"""Bad input of the commands that look at finished models: ``inspect``, ``compare`` and ``bench``, and of ``--report``."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.hostile import models
from tests.hostile.case import DONE, FAILED, USAGE, Case, cli
from tests.hostile.cases_weights import PICKLED, bomb, code

GOOD = "good.onnx"
Write = Callable[[Path], Any]


def _good(folder: Path) -> None:
    (folder / GOOD).write_bytes(models.good().SerializeToString())


def _with_good(write: Write | None) -> Write:
    def both(folder: Path) -> None:
        _good(folder)
        if write is not None:
            write(folder)

    return both


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def _npz(**entries: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def _header(text: bytes, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


_OBJECTS = np.array([code()], dtype=object)
#: Files of inputs: ``x`` is float32[3,4].
FEEDS: dict[str, tuple[str, bytes | Callable[[], bytes]]] = {
    "npy-empty": ("x=f.npy", b""),
    "npy-text": ("x=f.npy", b"not an array"),
    "npy-objects": ("x=f.npy", _npy(_OBJECTS)),
    "npy-pickle": ("x=f.npy", pickle.dumps(code())),
    "npy-cut": ("x=f.npy", _npy(np.ones((3, 4), np.float32))[:-8]),
    "npy-header-cut": ("x=f.npy", _npy(np.ones((3, 4), np.float32))[:20]),
    "npy-header-code": ("x=f.npy", _header(b"__import__('os').system('touch pwned')\n")),
    "npy-header-list": ("x=f.npy", _header(b"[1, 2]\n")),
    "npy-header-deep": ("x=f.npy", _header(b"(" * 9000 + b"\n")),
    "npy-huge": ("x=f.npy", _header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 1024)}\n")),
    "npy-negative": ("x=f.npy", _header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-3, -4)}\n", bytes(48))),
    "npy-shape": ("x=f.npy", _npy(np.ones((9, 9), np.float32))),
    "npy-dtype": ("x=f.npy", _npy(np.ones((3, 4), np.int64))),
    "npy-texts": ("x=f.npy", _npy(np.array([["a"] * 4] * 3))),
    "npz-empty": ("f.npz", b""),
    "npz-objects": ("f.npz", _npz(x=_npy(_OBJECTS))),
    "npz-unknown": ("f.npz", _npz(zzz=_npy(np.ones(2, np.float32)))),
    "npz-of-text": ("f.npz", _npz(x=b"text")),
    "npz-bomb": ("f.npz", bomb("x.npy")),
}
_SIZES = {
    "word": "batch",
    "empty": "",
    "negative": "batch=-1",
    "twice": "batch=1,batch=2",
    "digits": "batch=" + "9" * 5000,
    "superscript": "batch=²",
    "escape": "\x1b[2J=x",
}


def _cases() -> list[Case]:
    results = []
    for name, (text, content) in FEEDS.items():
        files = _with_good(lambda f, t=text, c=content: (f / t.split("=")[-1]).write_bytes(c() if callable(c) else c))  # type: ignore[misc]
        results.append(cli(f"feeds/compare-{name}", "compare", GOOD, GOOD, "--input", text, files=files))
        results.append(
            cli(
                f"feeds/bench-{name}",
                "bench",
                GOOD,
                "--repeat",
                "1",
                "--input",
                text,
                files=files,
                expected=(USAGE, FAILED),
            )
        )
    for name, text in _SIZES.items():
        for command in (("inspect", GOOD), ("compare", GOOD, GOOD), ("bench", GOOD)):
            results.append(cli(f"sizes/{command[0]}-{name}", *command, "--sizes", text, files=_good))
    for name in (
        "zeros",
        "random",
        "zip",
        "pickle",
        "length-2-63",
        "groups",
        "nested-messages-20000",
        "sparse-3-gigabytes",
        "folder",
        "fifo",
        "link-to-device",
    ):
        write = _with_good(models.UNREADABLE[name])
        results += [
            cli(f"compare/{name}", "compare", GOOD, models.BAD, files=write),
            cli(f"diff/{name}", "inspect", models.BAD, "--diff", GOOD, files=write),
            cli(f"bench/{name}", "bench", models.BAD, "--repeat", "1", files=write, expected=(USAGE, FAILED)),
        ]
    for name in (
        "cycle",
        "missing-input",
        "unknown-operator",
        "weights-twice",
        "data-too-short",
        "dims-huge-no-data",
        "function-calls-itself",
        "opset-9999",
        "sparse-negative",
    ):
        write = _with_good(models.changed(models.WRONG[name]))
        results += [
            cli(f"compare/wrong-{name}", "compare", GOOD, models.BAD, files=write),
            cli(f"bench/wrong-{name}", "bench", models.BAD, "--repeat", "1", files=write, expected=(USAGE, FAILED)),
        ]
    for name in (
        "passwd",
        "absolute",
        "beside",
        "link",
        "folder-link",
        "fifo",
        "device-by-link",
        "offset-past-the-end",
        "offset-negative",
        "overlap",
        "itself",
    ):
        write = _with_good(models.OUTSIDE[name])
        results += [
            cli(f"compare/data-{name}", "compare", GOOD, models.BAD, files=write),
            cli(f"bench/data-{name}", "bench", models.BAD, "--repeat", "1", files=write, expected=(USAGE, FAILED)),
        ]
    for name, text in models.NAMES.items():
        results += [
            cli(
                f"page/{name}",
                "inspect",
                models.BAD,
                "--html",
                "p.html",
                files=models.named(text),
                expected=(DONE, FAILED),
                writes=("p.html",),
            ),
            cli(f"json/{name}", "inspect", models.BAD, "--json", files=models.named(text), expected=(DONE, FAILED)),
        ]
    for place in ("no/p.html", ".", "p", "a\0b", ""):
        results.append(
            cli(
                f"page/at-{place!r}",
                "inspect",
                GOOD,
                "--html",
                place,
                files=_with_good(lambda f: os.mkfifo(f / "p")),
                expected=(USAGE, FAILED),
            )
        )
    return results + _never_opened()


def _never_opened() -> list[Case]:
    """Files of PyTorch are code: the commands that look at models say so, and don't open them."""

    def exported(folder: Path, name: str) -> None:
        torch.export.save(
            torch.export.export(torch.nn.Linear(4, 2).eval(), (torch.ones(3, 4),)), folder / f"{name}.pt2"
        )
        os.replace(folder / f"{name}.pt2", folder / name)

    contents: dict[str, Callable[[Path, str], Any]] = {
        "pickle": lambda f, n: (f / n).write_bytes(pickle.dumps(code())),
        "checkpoint": lambda f, n: (f / n).write_bytes(PICKLED["code"]()),  # type: ignore[operator]
        "script": lambda f, n: (f / n).write_bytes(PICKLED["script"]()),  # type: ignore[operator]
        "program": exported,
    }
    results = []
    for kind, write in contents.items():
        for name in ("p.pt2", "p.pt", "p.pth", "p.onnx"):
            files = _with_good(lambda f, w=write, n=name: w(f, n))  # type: ignore[misc]
            for command in (
                ("inspect", name),
                ("compare", GOOD, name),
                ("inspect", GOOD, "--diff", name),
                ("bench", name),
            ):
                results.append(
                    cli(
                        f"never-opened/{command[0]}-{len(command)}-{kind}-{name}",
                        *command,
                        files=files,
                        words="code that runs",
                    )
                )
    return results


CASES = _cases()

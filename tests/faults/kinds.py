"""The kinds of files that onnxplug writes, each with a number that tells the old file from the new file."""

from __future__ import annotations

import json
import os
import runpy
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnxplug_compile.cache import path_of, read_model, write_model

import onnxplug

#: The number in every old file, and in every new file.
OLD, NEW = 1.0, 2.0


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        name: Its name.
        write: Writes the file into a folder, for a number.
        read: The number in the file, ``None`` where there is no file; raises where it is broken or has both numbers.
        files: The most files after it is written again: where a process was killed after the new model had its name,
            a data file that no model refers to may stay.
        prepare: Makes files and folders that a write needs.
        may_drop: Whether a failed write leaves the old file without an error, as a cache does.
    """

    name: str
    write: Callable[[Path, float], Any]
    read: Callable[[Path], float | None]
    files: int = 1
    prepare: Callable[[Path], Any] = lambda folder: None
    may_drop: bool = False


class Model(torch.nn.Module):
    """Two layers that hold one number each; every weight is large enough to lie in a data file."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first = torch.nn.Linear(24, 24)
        self.second = torch.nn.Linear(24, 24)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Chain(Model):
    """The same two layers, and nothing between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@cache
def program(value: float) -> onnxplug.OnnxProgram:
    return onnxplug.to_onnx(Model(value).eval(), (torch.ones(1, 24),))


@cache
def pieces(value: float) -> onnxplug.OnnxPieces:
    return onnxplug.to_onnx(Chain(value).eval(), (torch.ones(1, 24),), pieces=["first", "second"])


def number_in(path: Path) -> float | None:
    """The number of a model and of its data files."""
    if not path.exists():
        return None
    model = onnx.load(path)
    onnx.checker.check_model(model)
    arrays = [onnx.numpy_helper.to_array(t) for t in model.graph.initializer]
    arrays = [a for a in arrays if a.dtype == np.float32]
    assert len(arrays) >= 2, "weights are missing"
    values = {float(v) for array in arrays for v in np.unique(array)}
    assert len(values) == 1, f"a mixture of {values}"
    return values.pop()


def _model(**options: Any) -> Callable[[Path, float], Any]:
    return lambda folder, value: program(value).save(folder / "model.onnx", **options)


def _changing(before: bool, after: bool) -> Callable[[Path, float], Any]:
    """Saves the old model with external data and the new model without, or the other way round."""
    return lambda folder, value: program(value).save(
        folder / "model.onnx", external_data=before if value == OLD else after
    )


def _sharded(folder: Path, value: float) -> None:
    if value == OLD:
        program(value).save(folder / "model.onnx", external_data=True)
    else:
        program(value).save(folder / "model.onnx", shard=3000)


def _link(folder: Path) -> None:
    (folder / "real").mkdir()
    os.symlink("real/m.onnx", folder / "model.onnx")


def _linked(folder: Path, value: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program(value).save(folder / "model.onnx", external_data=True)


def _weights(folder: Path) -> None:
    """A file of weights for each number, as a model keeps the files that it refers to."""
    from safetensors.torch import save_file

    for value in (OLD, NEW):
        save_file(Model(value).state_dict(), folder / f"weights-{value}.safetensors")


def _from_files(external: str | None) -> Callable[[Path, float], Any]:
    """A save with weights from files."""

    def write(folder: Path, value: float) -> None:
        weights = folder / f"weights-{value}.safetensors"
        program(OLD).save(folder / "model.onnx", weights=weights, external=external, external_data=True)

    return write


def _chain(folder: Path) -> float | None:
    """The number of a chain: each piece is whole, and the chain runs pieces of one save alone and refuses others."""
    if not (folder / "first.onnx").exists() or not (folder / "second.onnx").exists():
        return None
    first, second = number_in(folder / "first.onnx"), number_in(folder / "second.onnx")
    assert first in (OLD, NEW)
    assert second in (OLD, NEW)
    if not (folder / "chain.py").exists():  # chain.py is written last
        return None
    chain = runpy.run_path(str(folder / "chain.py"))
    inputs = {name: np.ones((1, 24), np.float32) for name in chain["INPUTS"]}
    if {_mark(folder / "first.onnx"), _mark(folder / "second.onnx")} != {chain["SAVE"]}:
        with pytest.raises(RuntimeError, match="different saves"):
            chain["run"](inputs)
        return OLD
    assert first == second
    (result,) = chain["run"](inputs)
    torch.testing.assert_close(torch.from_numpy(result), Chain(second)(torch.ones(1, 24)).detach())
    return second


def _mark(path: Path) -> str:
    return onnx.load(path, load_external_data=False).graph.doc_string


def _artifacts(folder: Path, value: float) -> None:
    onnxplug.export(
        Model(value).eval(),
        (torch.ones(1, 24),),
        folder / "model.onnx",
        report=True,
        artifacts_dir=folder,
        verbose=False,
        dump_exported_program=True,
    )


def _reported(folder: Path) -> float | None:
    for path in folder.rglob("*"):
        if path.suffix == ".pt2":
            with zipfile.ZipFile(path) as archive:
                assert archive.testzip() is None
        elif path.suffix in (".json", ".sarif"):
            json.loads(path.read_text())
        elif path.suffix == ".html":
            assert path.read_text().rstrip().endswith("</html>")
    return number_in(folder / "model.onnx")


def _cache(folder: Path, value: float) -> None:
    write_model(path_of(folder, f"key{value}"), program(value).model)


def _cached(folder: Path) -> float | None:
    result = None
    for value in (OLD, NEW):
        path = path_of(folder, f"key{value}")
        if read_model(path) is not None:
            assert number_in(path) == value
            result = value
    return result


def _package(folder: Path, value: float) -> None:
    from onnxplug_tools.scaffold.write import write_package

    name = "onnxplug-acme" if value == OLD else "onnxplug-other"
    if not (folder / name).exists():
        write_package(name, folder)


def _packages(folder: Path) -> float | None:
    result = None
    for value, name in ((OLD, "onnxplug-acme"), (NEW, "onnxplug-other")):
        if (folder / name).exists():
            files = [p for p in (folder / name).rglob("*") if p.is_file()]
            assert len(files) == _FILES_OF_A_PACKAGE, f"{len(files)} files"
            assert all(p.read_text().endswith("\n") or p.name in ("py.typed", "__init__.py") for p in files)
            result = value
    return result


_FILES_OF_A_PACKAGE = 5


def _profile(folder: Path, value: float) -> None:
    from onnxplug_tools.profiling.observer import recording
    from onnxplug_tools.profiling.profile import Profile

    from onnxplug.observers import span

    with recording() as recorder, span(f"stage {value}" * 3000):
        pass
    Profile(recorder).save(folder / "profile.json")


def _profiled(folder: Path) -> float | None:
    if not (folder / "profile.json").exists():
        return None
    text = json.dumps(json.loads((folder / "profile.json").read_text()))
    return OLD if f"stage {OLD}" in text else NEW


def _page(folder: Path, value: float) -> None:
    from onnxplug_tools.inspection.pages import save_text

    save_text(folder / "page.html", f"<html>{value}{'x' * 50_000}</html>", "page")


def _paged(folder: Path) -> float | None:
    if not (folder / "page.html").exists():
        return None
    text = (folder / "page.html").read_text()
    assert text.endswith("</html>")
    return float(text[6:9])


KINDS = [
    Kind("single", _model(external_data=False), lambda folder: number_in(folder / "model.onnx")),
    Kind("data", _model(external_data=True), lambda folder: number_in(folder / "model.onnx"), files=2),
    Kind("shards", _model(shard=3000), lambda folder: number_in(folder / "model.onnx"), files=3),
    Kind("to-data", _changing(False, True), lambda folder: number_in(folder / "model.onnx"), files=3),
    Kind("to-single", _changing(True, False), lambda folder: number_in(folder / "model.onnx"), files=2),
    Kind("to-shards", _sharded, lambda folder: number_in(folder / "model.onnx"), files=4),
    Kind("inputs", _model(keep_initializers_as_inputs=True), lambda folder: number_in(folder / "model.onnx")),
    Kind("link", _linked, lambda folder: number_in(folder / "real" / "m.onnx"), files=3, prepare=_link),
    Kind("from-files", _from_files(None), lambda folder: number_in(folder / "model.onnx"), files=4, prepare=_weights),
    Kind(
        "safetensors",
        _from_files("safetensors"),
        lambda folder: number_in(folder / "model.onnx"),
        files=4,
        prepare=_weights,
    ),
    Kind("pieces", lambda folder, value: pieces(value).save(folder), _chain, files=4),
    Kind("report", _artifacts, _reported, files=20),
    Kind("cache", _cache, _cached, files=2, may_drop=True),
    Kind("package", _package, _packages, files=2 * _FILES_OF_A_PACKAGE),
    Kind("profile", _profile, _profiled),
    Kind("page", _page, _paged),
]

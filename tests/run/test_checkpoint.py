"""Weights from files: every kind, and everything that can be wrong with them."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from onnxplug_tools.checkpoint import open_checkpoint
from safetensors.torch import save_file
from torch import nn

import onnxplug
from onnxplug import OnnxplugError, WeightsError
from tests.support.weightless import WAYS, Tied, state_of

X = torch.randn(2, 3, 4)


def export(way: str) -> onnxplug.OnnxProgram:
    return onnxplug.to_onnx((Tied() if way == "real" else WAYS[way](Tied)).eval(), (X,))


@pytest.fixture(scope="module")
def untouched() -> dict[str, onnxplug.OnnxProgram]:
    """Programs that every test leaves as they are."""
    return {way: export(way) for way in ("real", "meta")}


@pytest.fixture
def meta(untouched: dict[str, onnxplug.OnnxProgram]) -> Iterator[onnxplug.OnnxProgram]:
    """A program whose weights have no values; a test may give it some."""
    program = untouched["meta"]
    values = list(program.model.graph.initializers.values())
    before = [value.const_value for value in values]
    yield program
    program.release()
    for value, tensor in zip(values, before, strict=True):
        value.const_value = tensor


def untied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state_dict as safetensors takes it: each tensor has memory of its own."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def write_parts(folder: Path, state: dict[str, torch.Tensor], save: Callable[..., Any], end: str) -> Path:
    names = list(state)
    places = {}
    for part, chosen in enumerate((names[::2], names[1::2])):
        save({name: state[name] for name in chosen}, folder / f"part-{part}{end}")
        places.update(dict.fromkeys(chosen, f"part-{part}{end}"))
    index = folder / f"model{end}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    return index


def written(folder: Path, state: dict[str, torch.Tensor], kind: str) -> Any:
    save_file(state, folder / "model.safetensors") if kind in ("safetensors", "folder") else None
    match kind:
        case "safetensors":
            return folder / "model.safetensors"
        case "folder":
            return str(folder)
        case "torch" | "old torch":
            torch.save(state, folder / "model.pt", _use_new_zipfile_serialization=kind == "torch")
            return folder / "model.pt"
        case "index":
            return write_parts(folder, state, save_file, ".safetensors")
        case "torch index":
            return write_parts(folder, state, torch.save, ".bin")
        case _:
            index = write_parts(folder, state, save_file, ".safetensors")
            index.unlink()
            return [folder / "part-0.safetensors", str(folder / "part-1.safetensors")]


@pytest.mark.parametrize(
    "kind", ["safetensors", "folder", "torch", "old torch", "index", "torch index", "several files"]
)
def test_every_kind_of_file(tmp_path: Path, meta: onnxplug.OnnxProgram, kind: str) -> None:
    real, program = Tied().eval(), meta
    program.apply_weights(written(tmp_path, untied(real.state_dict()), kind))
    torch.testing.assert_close(program(X)[0], real(X))


def truncated(folder: Path, state: dict[str, torch.Tensor]) -> Any:
    path = folder / "model.safetensors"
    save_file(state, path)
    os.truncate(path, path.stat().st_size - 5)
    return path


def cut_header(folder: Path, state: dict[str, torch.Tensor]) -> Any:
    path = folder / "model.safetensors"
    save_file(state, path)
    os.truncate(path, 20)
    return path


def truncated_torch(folder: Path, state: dict[str, torch.Tensor]) -> Any:
    path = folder / "model.bin"
    torch.save(state, path)
    os.truncate(path, path.stat().st_size // 2)
    return path


def holding(content: Any, name: str = "model.pt") -> Any:
    def write(folder: Path, state: dict[str, torch.Tensor]) -> Any:
        torch.save(content, folder / name)
        return folder / name

    return write


def text(content: str, name: str) -> Any:
    def write(folder: Path, state: dict[str, torch.Tensor]) -> Any:
        save_file(state, folder / "model.safetensors")
        (folder / name).write_text(content, encoding="utf-8")
        return folder / name

    return write


def without_a_part(folder: Path, state: dict[str, torch.Tensor]) -> Any:
    index = write_parts(folder, state, save_file, ".safetensors")
    (folder / "part-1.safetensors").unlink()
    return index


def twice(folder: Path, state: dict[str, torch.Tensor]) -> Any:
    for name in ("a.safetensors", "b.safetensors"):
        save_file(state, folder / name)
    return [folder / "a.safetensors", folder / "b.safetensors"]


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder, state: folder / "none.safetensors", "there is no file .*none.safetensors"),
        (lambda folder, state: folder, "the folder .* has no weights: none of model.safetensors.index.json"),
        (lambda folder, state: 3, "weights are a mapping from names to tensors, or files, got an int"),
        (lambda folder, state: [], "or files, got a list"),
        (lambda folder, state: [3], "the files of weights are paths, got an int"),
        (truncated, "model.safetensors is not a whole safetensors file"),
        (cut_header, "model.safetensors is not a whole safetensors file"),
        (text("", "empty.safetensors"), "empty.safetensors is not a whole safetensors file"),
        (truncated_torch, "model.bin is not a whole file of torch.save"),
        (holding([1, 2]), "is not a state_dict: it holds a list"),
        (holding({"a": 1}), "is not a state_dict: it holds a dict of other things than tensors"),
        (holding(nn.Linear(1, 1)), "is not a whole file of torch.save with tensors alone"),
        (text("x", "model.gguf"), "model.gguf is no file of weights that onnxplug knows"),
        (text("{", INDEX), "is not an index of weights: JSONDecodeError"),
        (text("[]", INDEX), "is not an index of weights: TypeError"),
        (text('{"weight_map": {"a": 1}}', INDEX), "is not an index of weights: .*must be strings"),
        (text('{"weight_map": {"a": "../a.safetensors"}}', INDEX), "which is not beside it"),
        (text('{"weight_map": {"a": "model.safetensors"}}', INDEX), "places 'a' in model.safetensors, which does not"),
        (without_a_part, "names the file part-1.safetensors, which is not there"),
        (twice, "a.safetensors and .*b.safetensors both have a tensor 'embedding.weight'"),
    ],
)
def test_files_that_are_no_weights(tmp_path: Path, untouched: Any, write: Any, message: str) -> None:
    state = untied(Tied().state_dict())
    program = untouched["real"]
    before = program(X)[0]
    with pytest.raises(WeightsError, match=message):
        program.apply_weights(write(tmp_path, state))
    torch.testing.assert_close(program(X)[0], before, rtol=0, atol=0)


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(OnnxplugError, match=r"needs safetensors, which is not installed\nHint: pip install"):
        open_checkpoint(path)


def test_a_file_that_changes(tmp_path: Path, meta: onnxplug.OnnxProgram) -> None:
    real = Tied().eval()
    path = tmp_path / "model.safetensors"
    save_file(untied(real.state_dict()), path)
    program = meta
    program.apply_weights(path)
    save_file(untied(Tied().state_dict()), path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(WeightsError, match="has changed since the weights were applied"):
        program(X)
    path.unlink()
    with pytest.raises(WeightsError, match=r"can't read 'embedding.weight' from .*No such file"):
        program.save(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["safetensors", "bin", "bin of old"])
def test_a_file_is_not_opened_anew_for_each_tensor(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time would be quadratic in the tensors; and what is open keeps in memory what was read of it."""
    state = {f"weight.{n}": torch.full((1 << 18,), float(n)) for n in range(12)}
    path = tmp_path / f"model.{kind.split()[0]}"
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "bin")
    opened = []
    for module, name in ((torch, "load"), (safetensors, "safe_open")):
        open_file = getattr(module, name)

        def counting(*args: Any, open_file: Any = open_file, **kwargs: Any) -> Any:
            file = open_file(*args, **kwargs)
            opened.append(file)
            return file

        monkeypatch.setattr(module, name, counting)
    for most, times in ((1 << 28, 1), (4 << 20, 3)):
        opened.clear()
        monkeypatch.setattr("onnxplug_tools.checkpoint._MOST_READ", most)
        for name, stored in open_checkpoint(path).items():
            assert torch.equal(stored.load(), state[name])
        assert len(opened) == (1 if kind == "bin of old" else times)


def change(**changes: Any) -> Any:
    def changed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state = dict(state)
        for name, make in changes.items():
            name = name.replace("__", ".")
            if make is None:
                del state[name]
            else:
                state[name] = make(state.get(name))
        return state

    return changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (change(inner__weight=None), "1 weight of the model is missing, 'inner.weight'"),
        (
            change(inner__weight=None, inner__bias=None),
            "2 weights of the model are missing, 'inner.weight', 'inner.bias'",
        ),
        (change(more=lambda _: torch.ones(1)), "1 weight is not the model's, 'more'"),
        (
            lambda state: {f"model.{name}": tensor for name, tensor in state.items()},
            "(?s)missing.*not the model's.*Hint: 'embedding.weight' may be what is called 'model.embedding.weight' there",
        ),
        (change(inner__bias=lambda t: t[:2].clone()), r"'inner.bias' has the shape \[4\], got \[2\]"),
        (change(inner__bias=lambda t: t.int()), "'inner.bias' is torch.float32, got torch.int32"),
        (change(inner__bias=lambda t: t.to(torch.float8_e5m2)), "'inner.bias' is torch.float32, got torch.float8_e5m2"),
        (change(inner__bias=lambda t: t > 0), "'inner.bias' is torch.float32, got torch.bool"),
        (change(inner__bias=lambda t: t.to(torch.complex64)), "'inner.bias' is torch.float32, got torch.complex64"),
        (change(head__weight=lambda t: t + 1), "'embedding.weight' and 'head.weight' are one tensor"),
    ],
)
@pytest.mark.parametrize("way", ["real", "meta"])
def test_weights_that_do_not_fit(tmp_path: Path, untouched: Any, changed: Any, message: str, way: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file(changed(untied(Tied().state_dict())), path)
    program = untouched[way]
    before = {name: value.const_value for name, value in program.model.graph.initializers.items()}
    with pytest.raises(WeightsError, match=message):
        program.apply_weights(path)
    with pytest.raises(WeightsError, match=message):
        program.apply_weights(changed(untied(Tied().state_dict())), strict=True)
    assert all(value.const_value is before[name] for name, value in program.model.graph.initializers.items())


def test_weights_that_are_converted(tmp_path: Path, meta: onnxplug.OnnxProgram) -> None:
    real = Tied().eval()
    path = tmp_path / "model.safetensors"
    for dtype in (torch.bfloat16, torch.float64):
        state = {name: tensor.to(dtype) for name, tensor in untied(real.state_dict()).items()}
        del state["head.weight"], state["unread"]  # a tied one is in the file once, and one is read by nothing
        save_file(state, path)
        program = meta
        program.apply_weights(path)
        expected = Tied().eval()
        expected.load_state_dict({"unread": torch.zeros(3), "head.weight": state["embedding.weight"], **state})
        torch.testing.assert_close(program(X)[0], expected(X))


def test_bad_mappings(untouched: Any) -> None:
    program = untouched["real"]
    for mapping, message in (
        ({1: torch.ones(1)}, "weights are given by name, got 1"),
        ({"inner.bias": [1.0]}, "'inner.bias' must be a tensor, got a list"),
        (WAYS["meta"](Tied).state_dict(), "'embedding.weight' has no numbers"),
    ):
        with pytest.raises(WeightsError, match=message):
            program.apply_weights(mapping)
    with pytest.raises(onnxplug.UsageError, match="strict= takes True, False or None, got 'yes'"):
        program.apply_weights({}, strict="yes")  # type: ignore[arg-type]


def test_some_of_the_weights(tmp_path: Path) -> None:
    """strict=False leaves the other weights as they are, and ignores tensors that are no weights."""
    real, other, path = Tied().eval(), Tied().eval(), tmp_path / "model.safetensors"
    save_file({"inner.bias": other.inner.bias.detach(), "more": torch.ones(1)}, path)
    program = onnxplug.to_onnx(copy.deepcopy(real), (X,))
    program.apply_weights(path, strict=False)
    real.load_state_dict({**state_of(real), "inner.bias": other.inner.bias})
    torch.testing.assert_close(program(X)[0], real(X))

"""Saving large models: weights from files, several data files, and safetensors as data."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnxplug_tools import progress
from safetensors.torch import save_file
from torch import nn

import onnxplug
from onnxplug import SaveError, UsageError, WeightsError
from onnxplug.run import protobuf, save
from onnxplug.run.data_files import size_of
from tests.run.saved import age, names
from tests.support.tolerances import looser

X = torch.randn(2, 32)


class Model(nn.Module):
    """Weights that are stored as they are (Gemm), transposed (MatMul), small ones, tied ones, and of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.wide = nn.Linear(32, 64, bias=False)
        self.scale = nn.Parameter(torch.rand(64, dtype=torch.float64))
        self.table = nn.Parameter(torch.rand(64, 64))
        self.again = self.table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.wide(self.layers(x)[None]) * self.scale.float()
        return y @ self.table + y @ self.again


def trained(seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def program() -> onnxplug.OnnxProgram:
    """A program whose weights have no values; no test gives it any."""
    with onnxplug.fake_weights():
        model = Model().eval()
    return onnxplug.to_onnx(model, (X,), dynamic_shapes=({0: "batch"},))


@pytest.fixture
def real() -> Model:
    return trained(1)


def checkpoint(folder: Path, model: nn.Module, name: str = "weights.safetensors") -> Path:
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "again"}
    save_file(state, folder / name)
    return folder / name


def check(path: Path, model: nn.Module) -> onnx.ModelProto:
    """Checks that a file computes a PyTorch model's results; returns the model without its external data."""
    import onnxruntime

    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(str(path))
    for x in (X, torch.randn(5, 32)):
        (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(result), model(x), **looser("core"))
    return onnx.load(str(path), load_external_data=False)


def locations(model: onnx.ModelProto) -> dict[str, str]:
    """Initializers with external data, and the names of their files."""
    return {t.name: next(e.value for e in t.external_data if e.key == "location") for t in external(model)}


def external(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    return [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]


# -- weights of the save -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("external_data", [None, True])
def test_weights_of_the_save_alone(
    tmp_path: Path, program: onnxplug.OnnxProgram, real: Model, external_data: bool | None
) -> None:
    path = tmp_path / "model.onnx"
    for seed in (1, 2):
        model = trained(seed)
        weights: Any = checkpoint(tmp_path, model) if seed == 1 else model.state_dict()
        program.save(path, weights=weights, external_data=external_data)
        check(path, model)
    assert names(tmp_path) == ["model.onnx", *(["model.onnx.data.2"] if external_data else []), "weights.safetensors"]
    with pytest.raises(WeightsError, match=r"can't be saved: 11 weights have no numbers, .* and 6 others"):
        program.save(path)
    check(path, trained(2))
    buffer = io.BytesIO()
    program.save(buffer, weights=checkpoint(tmp_path, real))
    (tmp_path / "copy.onnx").write_bytes(buffer.getvalue())
    check(tmp_path / "copy.onnx", real)


def test_a_single_file_of_large_tensors(
    tmp_path: Path, program: onnxplug.OnnxProgram, real: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that are written after the rest of the graph."""
    program.save(tmp_path / "plain.onnx", weights=checkpoint(tmp_path, real))
    monkeypatch.setattr(protobuf, "_APART_BYTES", 100)
    program.save(tmp_path / "apart.onnx", weights=checkpoint(tmp_path, real))
    check(tmp_path / "apart.onnx", real)
    plain, apart = (onnx.load(tmp_path / f"{name}.onnx") for name in ("plain", "apart"))
    assert {t.name: t for t in plain.graph.initializer} == {t.name: t for t in apart.graph.initializer}
    for model in (plain, apart):
        del model.graph.initializer[:]
    assert plain == apart
    monkeypatch.setattr(protobuf, "_LIMIT", 10_000)
    with pytest.raises(SaveError, match=r"(?s)a protocol buffer at most 2.*external_data=True"):
        program.save(tmp_path / "apart.onnx", weights=checkpoint(tmp_path, real))
    check(tmp_path / "apart.onnx", real)


# -- several data files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shard", "count"), [(17000, 3), ("20KB", 3), ("20KiB", 3), ("32 kb", 2), ("0.1MB", 1), (10**9, 1)]
)
def test_shards(tmp_path: Path, program: onnxplug.OnnxProgram, real: Model, shard: Any, count: int) -> None:
    path = tmp_path / "model.onnx"
    program.save(path, weights=real.state_dict(), shard=shard)
    used = set(locations(check(path, real)).values())
    assert names(tmp_path) == sorted(["model.onnx", *used])
    assert len(used) == count
    assert all((tmp_path / name).stat().st_size <= size_of(shard) for name in used)
    if count > 1:
        assert used == {f"model.onnx.data-{i:05d}-of-{count:05d}" for i in range(1, count + 1)}
    program.save(path, weights=real.state_dict(), shard=shard)  # while the model uses the files
    check(path, real)
    assert len(names(tmp_path)) == 1 + count
    program.save(path, weights=real.state_dict())
    assert names(tmp_path) == ["model.onnx"]


def test_shards_that_a_copy_uses_stay(tmp_path: Path, program: onnxplug.OnnxProgram, real: Model) -> None:
    path, backup = tmp_path / "model.onnx", tmp_path / "backup.onnx"
    program.save(path, weights=real.state_dict(), shard=20000)
    backup.write_bytes(path.read_bytes())
    for seed in (2, 3):
        program.save(path, weights=trained(seed).state_dict(), shard=20000)
        check(path, trained(seed))
        check(backup, real)
        assert len(names(tmp_path)) == 8
    orphan = tmp_path / "model.onnx.data-00001-of-00009"
    orphan.write_bytes(b"of a save that was killed")
    age(tmp_path)
    program.save(path, weights=real.state_dict())
    assert not orphan.exists()
    check(backup, real)


# -- safetensors as external data --------------------------------------------------------------------------------------


@pytest.mark.parametrize("within", ["", "below"])
def test_safetensors_as_data(tmp_path: Path, program: onnxplug.OnnxProgram, real: Model, within: str) -> None:
    (tmp_path / within).mkdir(exist_ok=True)
    file = checkpoint(tmp_path / within, real)
    before = file.read_bytes()
    path = tmp_path / "model.onnx"
    program.save(path, weights=file, external="safetensors")
    model = check(path, real)
    places = locations(model)
    inside = {name for name, location in places.items() if location == f"{within}/weights.safetensors".lstrip("/")}
    assert inside == {f"layers.{i}.weight" for i in range(4)} | {"table"}
    assert set(places.values()) - {f"{within}/weights.safetensors".lstrip("/")} == {"model.onnx.data"}
    assert file.read_bytes() == before
    copied = sum(t.nbytes for n, t in real.named_parameters() if n not in inside)
    assert (tmp_path / "model.onnx.data").stat().st_size <= copied + 4096
    program.save(path, weights=file, external="safetensors", shard=17000)
    check(path, real)
    program.save(path, weights=file)
    check(path, real)
    assert file.read_bytes() == before, "no data of ours, which is never removed"


def test_dtypes_that_do_not_fit_into_safetensors(tmp_path: Path, program: onnxplug.OnnxProgram, real: Model) -> None:
    """Tensors of another dtype, and tensors of bytes that are not aligned, are written to a new file."""
    path = tmp_path / "model.onnx"
    half = checkpoint(tmp_path, trained(1).half(), "half.safetensors")
    program.save(path, weights=half, external="safetensors")
    assert set(locations(check(path, trained(1).half().float())).values()) == {"model.onnx.data"}
    odd = tmp_path / "odd.safetensors"
    raw = checkpoint(tmp_path, real).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    odd.write_bytes((length + 2).to_bytes(8, "little") + raw[8 : 8 + length] + b"  " + raw[8 + length :])
    program.save(path, weights=odd, external="safetensors")
    assert set(locations(check(path, real)).values()) == {"model.onnx.data.2"}


def test_safetensors_that_no_model_may_refer_to(tmp_path: Path, program: onnxplug.OnnxProgram, real: Model) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "model.onnx"
    file = checkpoint(tmp_path / "weights", real)
    link = tmp_path / "models" / "link.safetensors"
    link.symlink_to(file)
    for inputs in (file, link):
        with pytest.raises(SaveError, match=r"(?s)a model's data is in its own folder.*hard-link"):
            program.save(path, weights=inputs, external="safetensors")
    assert names(path.parent) == ["link.safetensors"]
    hard = tmp_path / "models" / "hard.safetensors"
    os.link(file, hard)
    program.save(path, weights=hard, external="safetensors")
    assert "hard.safetensors" in locations(onnx.load(path, load_external_data=False)).values()
    with pytest.raises(UsageError, match="no weight of the model comes from one"):
        program.save(path, weights=real.state_dict(), external="safetensors")
    torch.save(real.state_dict(), tmp_path / "models" / "weights.pt")
    with pytest.raises(UsageError, match="no weight of the model comes from one"):
        program.save(path, weights=tmp_path / "models" / "weights.pt", external="safetensors")


# -- wrong usage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shard": "2 gallons"}, "the unknown unit 'gallons'"),
        ({"shard": "lots"}, "a size is a number of bytes or a text such as '2GB', got 'lots'"),
        ({"shard": 1.5}, "a size is a number of bytes"),
        ({"shard": True}, "a size is a number of bytes"),
        ({"shard": 0}, "can't hold anything"),
        ({"shard": "-1GB"}, "a size is a number of bytes"),
        ({"shard": 1000}, r"the weight '.*' has \d+ bytes, more than the 1000 that shard= allows"),
        ({"external": "gguf"}, "external= takes 'safetensors' or None, got 'gguf'"),
        ({"external": True}, "external= takes 'safetensors' or None, got True"),
        ({"shard": "2GB", "external_data": False}, "shard= can't be given together with external_data=False"),
        ({"external": "safetensors", "external_data": False}, "external= can't be given together with external_data"),
        ({"shard": "2GB", "include_initializers": False}, "shard= can't be given together with include_initializers"),
        ({"external": "safetensors", "include_initializers": False}, "external= can't be given together with include"),
        ({"weights": {}, "include_initializers": False}, "weights= can't be given together with include_initializers"),
        ({"weights": None, "strict": True}, "strict= is about weights=, which is not given"),
        ({"strict": 1}, "strict= takes True, False or None, got 1"),
        ({"progress": "bar"}, "progress= takes True, False or a function of two numbers, got 'bar'"),
        ({"weights": 3}, "weights are a mapping from names to tensors, or files, got an int"),
        ({"weights": "nowhere.safetensors"}, "there is no file nowhere.safetensors"),
    ],
)
def test_wrong_usage(
    tmp_path: Path, program: onnxplug.OnnxProgram, real: Model, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        program.save(tmp_path / "model.onnx", **{"weights": real.state_dict(), **settings})
    assert not list(tmp_path.iterdir())


def test_tensors_that_are_no_weight_of_the_model(tmp_path: Path, program: onnxplug.OnnxProgram, real: Model) -> None:
    path, state = tmp_path / "model.onnx", {**real.state_dict(), "more": torch.ones(1)}
    with pytest.raises(WeightsError, match="1 weight is not the model's, 'more'"):
        program.save(path, weights=state, strict=True)
    with pytest.warns(UserWarning, match="the model has no weights 'more', which are left out"):
        program.save(path, weights=state)
    check(path, real)


def test_several_places_of_data(tmp_path: Path, program: onnxplug.OnnxProgram, real: Model) -> None:
    file = checkpoint(tmp_path, real)
    with pytest.raises(SaveError, match="its weights are read from this file"):
        program.save(file, weights=file)
    with pytest.raises(SaveError, match="a file path, not a file object"):
        program.save(io.BytesIO(), weights=file, shard="2GB")


# -- progress ----------------------------------------------------------------------------------------------------------


def test_progress(
    tmp_path: Path, program: onnxplug.OnnxProgram, real: Model, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(save, "_CHUNK_BYTES", 1000)
    notices: list[tuple[int, int]] = []
    program.save(
        tmp_path / "model.onnx",
        weights=checkpoint(tmp_path, real),
        shard=20000,
        progress=lambda *now: notices.append(now),
    )
    done = [now for now, _ in notices]
    (total,) = {total for _, total in notices}
    assert done == sorted(done)
    assert done[-1] == total
    assert len(done) > 30
    assert capsys.readouterr().err == ""
    program.save(tmp_path / "model.onnx", weights=checkpoint(tmp_path, real), shard=20000, progress=True)
    assert capsys.readouterr().err == "", "no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    program.save(tmp_path / "model.onnx", weights=checkpoint(tmp_path, real), shard=20000, progress=True)
    assert "saving" in capsys.readouterr().err
    program.save(tmp_path / "model.onnx", weights=checkpoint(tmp_path, real), shard=20000)
    assert capsys.readouterr().err == "", "too little to show"
    monkeypatch.setattr(progress, "_WORTH_A_BAR", 1000)
    program.save(tmp_path / "model.onnx", weights=checkpoint(tmp_path, real), shard=20000, progress=False)
    assert capsys.readouterr().err == ""
    program.save(tmp_path / "model.onnx", weights=checkpoint(tmp_path, real), shard=20000)
    assert "saving" in capsys.readouterr().err

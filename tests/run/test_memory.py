"""Peak memory of export and save, in processes of their own: the model's size, 1 GB and the largest tensor."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file

from tests.support.child import run_child
from tests.support.tolerances import looser

CODE = """
import json, os
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import onnxplug

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear({width}, {width}, bias=False) for _ in range({layers})]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def rss():
    # Not resource.getrusage, whose ru_maxrss a process inherits from the one that started it.
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

x = torch.randn({shape})
if {fake}:
    with onnxplug.fake_weights():
        model = Model().eval()
else:
    model = Model().eval()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.fill_(0.0).fill_diagonal_((number % 3 + 1) / 2)
small = onnxplug.to_onnx(torch.nn.Linear(2, 2), (torch.randn(1, 2),))  # what an export imports
before = rss()
program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({{0: "batch"}},))
program.save({path!r}, **{settings!r})
print(json.dumps([before, rss()]))
"""
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the largest resident size is read as Linux tells it"
)

WIDTH = 2048
LAYER = WIDTH * WIDTH * 4


def peak(path: Path, layers: int, *, fake: bool, shape: tuple[int, ...], **settings: object) -> tuple[int, int]:
    """The largest resident size before the export and after the save, in bytes.

    A freed tensor goes back to the system at once: how much glibc would keep in its heap differs by several layers from run to run.
    """
    code = CODE.format(
        width=WIDTH, layers=layers, fake=fake, shape=", ".join(map(str, shape)), path=str(path), settings=settings
    )
    done = run_child("-c", code, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(LAYER // 16)})
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])
    return before, after


def diagonal(number: int) -> torch.Tensor:
    return torch.eye(WIDTH) * ((number % 3 + 1) / 2)


def check(path: Path, layers: int, shape: tuple[int, ...]) -> None:
    """The file loads, is checked, and computes the product of the diagonals."""
    import onnxruntime

    onnx.checker.check_model(str(path))
    session = onnxruntime.InferenceSession(str(path))
    factor = float(np.prod([(number % 3 + 1) / 2 for number in range(layers)]))
    for batch in (shape[0], 1):
        x = np.random.default_rng(batch).standard_normal((batch, *shape[1:])).astype(np.float32)
        (result,) = session.run(None, {"x": x})
        np.testing.assert_allclose(result, x * factor, **looser("core"))


AS_IT_IS = pytest.param((2, WIDTH), id="as it is", marks=pytest.mark.long)
TRANSPOSED = pytest.param((2, 3, WIDTH), id="transposed")


@pytest.mark.long
@pytest.mark.parametrize("shape", [AS_IT_IS, TRANSPOSED])
@pytest.mark.parametrize("external_data", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_save_makes_no_second_copy(tmp_path: Path, shape: tuple[int, ...], external_data: bool) -> None:
    layers = 12
    before, after = peak(tmp_path / "model.onnx", layers, fake=False, shape=shape, external_data=external_data)
    assert after - before < 6 * LAYER, "half of the model is a second copy already"
    check(tmp_path / "model.onnx", layers, shape)


@pytest.mark.long
@pytest.mark.parametrize("shape", [AS_IT_IS, TRANSPOSED])
def test_weights_from_files_are_never_all_in_memory(tmp_path: Path, shape: tuple[int, ...]) -> None:
    layers = 12
    save_file({f"layers.{n}.weight": diagonal(n) for n in range(layers)}, tmp_path / "weights.safetensors")
    path = tmp_path / "model.onnx"
    before, after = peak(
        path, layers, fake=True, shape=shape, weights=str(tmp_path / "weights.safetensors"), shard="60MB"
    )
    assert after - before < 5 * LAYER
    assert len(list(tmp_path.iterdir())) == 2 + 4
    check(path, layers, shape)


@pytest.mark.long
@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("shape", [AS_IT_IS, TRANSPOSED])
def test_more_than_two_gigabytes(tmp_path: Path, fake: bool, shape: tuple[int, ...]) -> None:
    """Saved, checked, loaded and run; the memory of the process that saves it is measured."""
    layers = 150
    size = layers * LAYER
    assert size > 2.5e9
    settings: dict[str, object] = {}
    if fake:
        places: dict[str, str] = {}
        for part in range(3):
            names = [f"layers.{n}.weight" for n in range(layers) if n % 3 == part]
            file = f"part-{part}.safetensors"
            save_file({name: diagonal(int(name.split(".")[1])) for name in names}, tmp_path / file)
            places.update(dict.fromkeys(names, file))
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
        settings = {"weights": str(tmp_path), "shard": "1GB"}
    path = tmp_path / "model.onnx"
    after = peak(path, layers, fake=fake, shape=shape, **settings)[1]
    assert after < (0 if fake else size) + 1e9 + LAYER
    check(path, layers, shape)
    stored = onnx.load(str(path), load_external_data=False).graph.initializer
    assert sum(int(e.value) for t in stored for e in t.external_data if e.key == "length") == size
    for file in tmp_path.iterdir():
        file.unlink()  # 2.5 GB or 5, of which pytest would keep those of three runs

"""`torchvision:NAME` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from onnxplug.cli.app import run
from tests.support.contrib import installed


@pytest.mark.long
def test_a_model_by_its_name(tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "m.onnx"
    dynamic = ["--dynamic", "x=batch,_,_,_"]
    assert run(["export", "torchvision:squeezenet1_1", "-o", str(output), "--verify", *dynamic]) == 0
    (x,) = ir.load(output).graph.inputs
    assert str(x.shape) == "[batch,3,224,224]"
    with installed("onnxplug-torchvision", "onnxplug-tools"):
        assert run(["verify", str(output), "torchvision:squeezenet1_1", *dynamic]) == 0  # the same random weights
    assert run(["export", "torchvision:nosuch", "-o", str(tmp_path / "n.onnx")]) == 2
    assert "torchvision has no model 'nosuch'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("inception_v3", [(2, 3, 299, 299)]),
        pytest.param("fcn_resnet50", [(2, 3, 224, 224)], marks=pytest.mark.long),
        pytest.param("r3d_18", [(2, 3, 8, 112, 112)], marks=pytest.mark.long),
        pytest.param("raft_small", [(2, 3, 224, 224)] * 2, marks=pytest.mark.long),
        pytest.param("ssdlite320_mobilenet_v3_large", [(3, 224, 224)], marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_inputs_are_those_that_the_model_takes(name: str, sizes: list[tuple[int, ...]]) -> None:
    from onnxplug_torchvision.sources import load

    model, args = load(name)
    tensors = args[0] if isinstance(args[0], list) else args
    assert [tuple(x.shape) for x in tensors] == sizes
    with torch.no_grad():
        assert model(*args) is not None


def test_trained_weights_that_are_not_there(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    """Nothing is downloaded here: the error says that the weights can't be loaded."""
    import torch.hub

    def offline(*_: Any, **__: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", offline)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    assert run(["export", "torchvision:squeezenet1_1", "-o", str(tmp_path / "m.onnx"), "--pretrained"]) == 1
    assert "can't load the trained weights" in " ".join(capsys.readouterr().err.split())

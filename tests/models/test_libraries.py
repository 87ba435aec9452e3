"""Models of libraries that are not installed here: their descriptions, and the effect of a missing library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.models import libraries, report
from tests.models.libraries import OTHERS, PACKAGES, PLUGINS_OF_OTHERS, PROJECTS, draw_arguments
from tests.models.measure import KINDS, Architecture, Outcome, measure
from tests.models.small import Small


def test_arguments_as_they_are_written() -> None:
    small = Small(
        "acme:Net",
        "x: batch 4 8*height 3; ids: batch text < 9; mask: batch text mask; image: 2 frames image; drop: batch flags",
        sizes={"height": 5},
        constants={"shapes": [1, 2]},
    )
    arguments, dynamic = draw_arguments(small)
    assert arguments["x"].shape == (2, 4, 40, 3)
    assert arguments["ids"].dtype == torch.int64
    assert int(arguments["ids"].max()) < 9
    assert arguments["mask"].tolist() == [[1] * 7, [1] * 5 + [0] * 2]
    assert arguments["image"].shape == (2, 3)
    assert 0 <= float(arguments["image"].min()) <= float(arguments["image"].max()) <= 1
    assert arguments["drop"].dtype == torch.bool
    assert arguments["shapes"] == [1, 2]
    assert dynamic["x"][0] == "batch"
    assert dynamic["x"][2].__name__ == "8*height"
    assert set(dynamic["x"]) == {0, 2}
    assert dynamic["ids"] == {0: "batch", 1: "text"}
    assert dynamic["image"] == {1: "frames"}
    assert dynamic["shapes"] == [None, None]


def test_each_library_is_pinned() -> None:
    assert set(OTHERS) == set(PROJECTS) == set(PLUGINS_OF_OTHERS)
    assert set(OTHERS) <= set(KINDS)
    for project in (project for projects in PROJECTS.values() for project in projects):
        assert "==" in project
        assert not project.startswith(("torch==", "torchvision==", "numpy=="))


@pytest.mark.parametrize("kind", OTHERS)
def test_every_model_is_written_down_well(kind: str) -> None:
    for name, small in OTHERS[kind].items():
        arguments, dynamic = draw_arguments(small)
        assert set(arguments) == set(dynamic), name
        assert any(tree_leaves(dynamic)), f"nothing of {name} is dynamic"


@pytest.mark.long
def test_a_library_that_is_not_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [Architecture("monai", "UNet", "UNet"), Architecture("causal", "a", "A")]
    (tmp_path / "causal-a-A.json").write_text(json.dumps(vars(Outcome("pass"))))
    monkeypatch.setattr(report, "architectures", lambda: chosen)
    monkeypatch.setattr(libraries, "PACKAGES", tmp_path / "packages")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr("sys.argv", ["report", "--out", str(tmp_path), "--write", str(tmp_path / "page.md")])
    report.main()
    assert "monai is left out" in capsys.readouterr().out
    assert "| monai | UNet | UNet | unmeasured |" in (tmp_path / "page.md").read_text()
    assert not (tmp_path / "packages/monai").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "name", "model"),
    [
        ("diffusers", "FluxTransformer2DModel", "FluxTransformer2DModel"),
        ("open_clip", "SigLIP", "CustomTextCLIP"),
        ("segmentation_models_pytorch", "FPN", "FPN"),
        ("monai", "BasicUNet", "BasicUNet"),
        ("kornia", "GaussianBlur2d", "GaussianBlur2d"),
        ("ultralytics", "yolo11n", "DetectionModel"),
    ],
)
def test_a_model_of_each(kind: str, name: str, model: str) -> None:
    if not (PACKAGES / kind).is_dir():
        pytest.skip("make models installs it")
    outcome = measure(Architecture(kind, name, model))
    assert outcome.status == "pass", outcome.detail

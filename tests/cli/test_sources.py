"""Kinds of models that plugins bring to the command line, with options of their own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import onnxplug_tools
import pytest
import torch
import typer

import onnxplug
from onnxplug import ExportedFile, ExportRequest, ModelSource, OnnxplugError, PluginError, hookimpl
from onnxplug.cli.app import run
from onnxplug.plugins.loading import check_sources
from onnxplug.testing import IsolatedRegistry


def load(name: str) -> Any:
    if name == "broken":
        raise ValueError("no such size")
    return torch.nn.Linear(int(name), 2), (torch.randn(3, int(name)),)


def load_trained(name: str, pretrained: bool) -> Any:
    layer = torch.nn.Linear(4, 2)
    torch.nn.init.constant_(layer.weight, 7.0 if pretrained else 1.0)
    return layer, (torch.randn(3, 4),)


def export(
    request: ExportRequest,
    *,
    twice: Annotated[bool, typer.Option("--twice", help="Write it two times")] = False,
    scale: Annotated[float, typer.Option("--scale", help="What it is multiplied by")] = 1.0,
) -> list[ExportedFile]:
    model, args = load(request.name)
    if scale <= 0:
        raise OnnxplugError("--scale must be positive", hint="1 leaves the model as it is.")
    program = onnxplug.to_onnx(lambda x: model(x) * scale, args, progress=request.stage, **request.options)
    report = program.verify() if request.verify else None
    request.output.mkdir()
    names = ["a.onnx", "b.onnx"] if twice else ["a.onnx"]
    for name in names:
        program.save(request.output / name, external_data=request.external_data)
    return [ExportedFile(request.output / name, program, report) for name in names]


def source(*sources: Any) -> Any:
    return SimpleNamespace(onnxplug_sources=hookimpl(lambda: list(sources)))


@pytest.fixture
def shop(isolated_registry: IsolatedRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    plugin = source(
        ModelSource("sizes", load),
        ModelSource("trained", load_trained),
        ModelSource("shop", load, export, help="A size."),
    )
    isolated_registry.add_plugin(plugin, name="shop")
    isolated_registry.add_plugin(onnxplug_tools, name="tools", distribution="onnxplug-tools")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_source_is_a_target_of_every_command(shop: Path, capsys: Any) -> None:
    assert run(["export", "sizes:5", "-o", "m.onnx", "--verify"]) == 0
    assert run(["verify", "m.onnx", "sizes:5"]) == 0
    assert run(["ops", "--missing", "sizes:5"]) == 0
    assert run(["export", "sizes:broken", "-o", "n.onnx"]) == 1
    assert "sizes:broken can't be loaded: ValueError: no such size" in capsys.readouterr().err
    assert run(["export", "sizes:5", "-o", "n.onnx", "--pretrained"]) == 2
    assert run(["export", "sizes:", "-o", "n.onnx"]) == 2
    assert [p.name for p in shop.iterdir()] == ["m.onnx"]


def test_a_library_that_cannot_be_imported(shop: Path, isolated_registry: IsolatedRegistry, capsys: Any) -> None:
    """A library that imports its parts lazily hides the cause; the error names the cause."""

    def lazy(name: str) -> Any:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'AutoModel'") from error

    def own(request: ExportRequest) -> list[ExportedFile]:
        return list(lazy(request.name))

    isolated_registry.add_plugin(source(ModelSource("lazy", lazy), ModelSource("own", lazy, own)), name="lazy")
    for target in ("lazy:x", "own:x"):
        assert run(["export", target, "-o", "m.onnx"]) == 1
        printed = " ".join(capsys.readouterr().err.split())
        assert "Could not import module 'AutoModel', because of RuntimeError: operator torchvision::nms" in printed
    assert not (shop / "m.onnx").exists()


def test_trained_weights(shop: Path) -> None:
    import onnx_ir as ir

    for flags, value in (([], 1.0), (["--pretrained"], 7.0)):
        assert run(["export", "trained:x", "-o", "m.onnx", *flags]) == 0
        weights = [
            v.const_value.numpy() for v in ir.load("m.onnx").graph.initializers.values() if v.const_value.size == 8
        ]
        assert [float(w.max()) for w in weights] == [value]


def test_a_source_with_an_export_of_its_own(shop: Path, capsys: Any) -> None:
    """The command takes the source's own options and the options of every export, in any order."""
    assert run(["export", "--scale", "2", "--opset", "18", "shop:5", "--twice", "--verify", "-o", "both"]) == 0
    assert sorted(p.name for p in (shop / "both").iterdir()) == ["a.onnx", "b.onnx"]
    assert "ai.onnx 18" in capsys.readouterr().out
    assert run(["export", "shop:5", "-o", "none", "--scale", "-1"]) == 1
    assert "--scale must be positive" in capsys.readouterr().err
    for wrong in (["--dynamic", "x=a,_"], ["--scale", "much"], ["--nosuch"], ["--opset", "99"]):
        assert run(["export", "shop:5", "-o", "none", *wrong]) == 2
    assert not (shop / "none").exists()
    capsys.readouterr()
    assert run(["export", "shop:5", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "--twice" in printed
    assert "--no-plugin" in printed
    assert run(["export", "--help"]) == 0
    assert "--twice" not in capsys.readouterr().out


def test_a_plugin_that_is_left_out_has_no_sources(shop: Path, capsys: Any) -> None:
    assert run(["export", "shop:5", "-o", "m", "--no-plugin", "shop"]) == 2
    assert "no module 'shop'" in capsys.readouterr().err
    assert run(["--no-plugin", "shop", "export", "sizes:5", "-o", "m"]) == 2


def test_two_plugins_with_the_same_scheme(shop: Path, isolated_registry: IsolatedRegistry, capsys: Any) -> None:
    isolated_registry.add_plugin(source(ModelSource("sizes", load)), name="other")
    assert run(["export", "sizes:5", "-o", "m.onnx"]) == 1
    assert "sizes: is a kind of model of" in capsys.readouterr().err
    assert run(["export", "sizes:5", "-o", "m.onnx", "--no-plugin", "other"]) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        "shop",
        ModelSource("Shop", load),
        ModelSource("my_module", load),
        ModelSource("", load),
        ModelSource("shop", None),  # type: ignore[arg-type]
        ModelSource("shop", "nothing"),
        ModelSource("shop", load, 3),  # type: ignore[arg-type]
    ],
)
def test_sources_are_checked(wrong: Any) -> None:
    with pytest.raises(PluginError, match="onnxplug_sources returned"):
        check_sources([wrong])


def test_a_report_of_a_source_with_an_export_of_its_own(shop: Path, capsys: Any) -> None:
    """The plugin has no code for reports: a report holds its exports, verification and files, and its errors."""
    assert run(["export", "shop:5", "--twice", "--verify", "-o", "both", "--report", "reports"]) == 0
    data = json.loads((shop / "reports" / "report.json").read_text(encoding="utf-8"))
    assert [file["path"] for file in data["files"]] == ["both/a.onnx", "both/b.onnx"]
    assert data["verification"]["accepted"]
    assert not (shop / "reports" / "report-2.json").exists()
    assert run(["export", "shop:5", "--scale", "0", "-o", "none", "--report", "failed"]) == 1
    failure = json.loads((shop / "failed" / "report.json").read_text(encoding="utf-8"))["failure"]
    assert failure["message"] == "--scale must be positive"
    assert failure["hint"] == "1 leaves the model as it is."

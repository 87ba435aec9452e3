"""Models kept on disk: used for the graph, the options and the plugins that made them, and for no others."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint, PathDistribution, entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

import onnxplug
from onnxplug.plugins.manager import discovering
from tests.support.compiled import tower
from tests.support.distributions import run_python

_PLUGIN = """
from onnxplug import Rule, hookimpl
@hookimpl
def onnxplug_rules():
    return [Rule("aten::exp.default", lambda g, node: g.op.{op}(node.args[0]), override=True)]
"""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(folder: Path, **options: Any) -> float:
    """The result of exp of 1, compiled with models kept in a folder."""
    torch._dynamo.reset()
    options = {"cache": str(folder), "fallback": False, **options}
    compiled = torch.compile(lambda x: x.exp(), backend="onnxplug", options=options)
    return round(compiled(torch.ones(1)).item(), 3)


def kept(folder: Path) -> int:
    return len(list(folder.glob("*.onnx")))


def _builtin() -> list[EntryPoint]:
    return [point for point in entry_points(group="onnxplug") if point.name == "builtin"]


class Installed:
    """A distribution with a plugin that translates exp by another operator."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        monkeypatch.syspath_prepend(str(folder))

    def __call__(self, op: str, version: str, *, record: bool = True) -> Any:
        sys.modules.pop("cache_shop", None)
        module = self._folder / "cache_shop.py"
        module.write_text(_PLUGIN.format(op=op))
        os.utime(module, (time.time() - 60,) * 2)
        info = self._folder / "cache_shop-1.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: cache-shop\nVersion: {version}\n")
        (info / "RECORD").write_text(f"cache_shop.py,sha256={op},1\n")
        if not record:
            (info / "RECORD").unlink()
        own = EntryPoint("shop", "cache_shop", "onnxplug")._for(PathDistribution(info))  # type: ignore[attr-defined]
        return discovering(lambda: [*_builtin(), own])


def test_a_model_made_with_other_plugins_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the module is written anew within a second
    install, models = Installed(tmp_path, monkeypatch), tmp_path / "models"
    with discovering(_builtin):
        assert (run(models), kept(models)) == (2.718, 1)
    with install("Sin", "1.0"):
        assert (run(models), kept(models)) == (0.841, 2)
        assert (run(models, plugins=[]), kept(models)) == (2.718, 2)
    with install("Cos", "1.1"):
        assert (run(models), kept(models)) == (0.54, 3)
    with install("Neg", "1.1"):  # the version is the same, the code isn't
        assert (run(models), kept(models)) == (-1.0, 4)
    with install("Sin", "1.0"):
        assert (run(models), kept(models)) == (0.841, 4)
    with install("Tan", "1.0", record=False):  # as an editable installation
        assert (run(models), kept(models)) == (1.557, 5)
    with discovering(_builtin):
        assert (run(models), kept(models)) == (2.718, 5)


@pytest.mark.long
def test_options_that_decide_the_model_are_distinguished(tmp_path: Path) -> None:
    variants: list[dict[str, Any]] = [{}, {"opset": 18}, {"exact": True}, {"target": None}, {"optimize": False}]
    for count, options in enumerate(variants, start=1):
        run(tmp_path, **options)
        assert kept(tmp_path) == count
    same: list[dict[str, Any]] = [{"opset": 21}, {"threads": 1}, {"optimization": "basic"}, {"fallback": True}]
    for options in same:  # these make another session of the same model
        run(tmp_path, **options)
        assert kept(tmp_path) == len(variants)


def test_a_call_with_rules_of_its_own_keeps_nothing(tmp_path: Path) -> None:
    rule = onnxplug.Rule("aten::exp.default", lambda g, node: g.op.Sin(node.args[0]))
    assert run(tmp_path, rules=[rule]) == 0.841
    assert run(tmp_path, transforms=[lambda model: None]) == 2.718
    assert kept(tmp_path) == 0
    assert run(tmp_path) == 2.718
    assert run(tmp_path, rules=[rule]) == 0.841


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert run(blocked / "models") == 2.718


def test_graphs_whose_sizes_have_other_ranges_are_distinguished(tmp_path: Path) -> None:
    for count, largest in enumerate((10, 1000, 10), start=1):
        torch._dynamo.reset()
        x = torch.ones(4)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=largest)
        torch.compile(lambda x: x.exp(), backend="onnxplug", options={"cache": str(tmp_path), "fallback": False})(x)
        assert kept(tmp_path) == min(count, 2)


@pytest.mark.long
def test_a_graph_that_is_tied_to_the_sizes_of_a_call_is_not_kept(tmp_path: Path) -> None:
    """The gradient of this pool asks, while it is traced, whether sizes are larger than 1."""
    compiled = torch.compile(
        lambda x: torch.nn.functional.avg_pool2d(x, 3, 2, 1).square(),
        backend="onnxplug",
        dynamic=True,
        options={"cache": str(tmp_path), "fallback": False},
    )
    for size in (9, 12, 2):
        x = torch.randn(2, 3, size, size, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        compiled(x).sum().backward()
        torch.nn.functional.avg_pool2d(other, 3, 2, 1).square().sum().backward()
        torch.testing.assert_close(x.grad, other.grad)
        if size == 9:
            assert kept(tmp_path) == 1


_TWO = """
import os, sys, torch
from tests.support.compiled import tower
folder, *seeds = sys.argv[1:]
children = []
for seed in seeds:
    if not (child := os.fork()):
        compiled, model = tower(folder, int(seed))
        x = torch.randn(3, 4)
        torch.testing.assert_close(compiled(x), model(x))
        os._exit(0)
    children.append(child)
print("statuses", *[os.waitpid(child, 0)[1] for child in children])
"""


@pytest.mark.long
def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Two processes start at once, with equal graphs; a third process uses the models that they keep."""
    models = tmp_path / "models"
    root = str(Path(__file__).parents[3])
    assert "statuses 0 0" in run_python(tmp_path, "-c", _TWO, str(models), "1", "2", PYTHONPATH=root)
    files = {file: file.stat().st_mtime_ns for file in models.iterdir()}
    assert {file.suffix for file in files} == {".onnx"}
    compiled, model = tower(str(models), 3)
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(x), model(x))
    assert {file: file.stat().st_mtime_ns for file in models.iterdir()} == files

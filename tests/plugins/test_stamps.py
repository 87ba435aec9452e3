"""Stamps, which tell two states of a plugin's code apart."""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path

import pytest

from onnxplug.plugins.stamps import stamp_of

EDITABLE = '{"url": "file:///x", "dir_info": {"editable": true}}'


def point(folder: Path, module: str = "shop", **files: str) -> EntryPoint:
    """The entry point of a distribution with these files of metadata."""
    info = folder / "onnxplug_shop-1.0.dist-info"
    info.mkdir(exist_ok=True)
    for file in info.iterdir():
        file.unlink()
    for name, text in {"METADATA": "Metadata-Version: 2.1\nName: onnxplug-shop\nVersion: 1.0\n", **files}.items():
        (info / name.replace("_json", ".json")).write_text(text)
    result: EntryPoint = EntryPoint("shop", module, "onnxplug")._for(PathDistribution(info))  # type: ignore[attr-defined]
    return result


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a module, imported, changed a minute ago."""
    (tmp_path / "shop").mkdir()
    for name in ("__init__.py", "rules.py"):
        (tmp_path / "shop" / name).write_text("")
        os.utime(tmp_path / "shop" / name, (time.time() - 60,) * 2)
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("shop")
    yield tmp_path
    del sys.modules["shop"]


def test_an_installed_distribution_is_known_by_the_digests_it_states(tmp_path: Path) -> None:
    stamp = stamp_of(point(tmp_path, RECORD="shop.py,sha256=abc,10\n"), 0)
    assert stamp is not None
    assert stamp == stamp_of(point(tmp_path, RECORD="shop.py,sha256=abc,10\n"), 0)
    assert stamp != stamp_of(point(tmp_path, RECORD="shop.py,sha256=xyz,10\n"), 0)


def test_versions_of_required_distributions_count(tmp_path: Path) -> None:
    metadata = "Metadata-Version: 2.1\nName: onnxplug-shop\nVersion: 1.0\nRequires-Dist: {}\n"
    stamps = {
        text: stamp_of(point(tmp_path, RECORD="", METADATA=metadata.format(text)), 0)
        for text in ("torch", "onnx", "not-installed", 'onnx; extra == "dev"', "??")
    }
    assert stamps["torch"] != stamps["onnx"]
    assert stamps["not-installed"] == stamps['onnx; extra == "dev"'] == stamps["??"] != stamps["onnx"]


@pytest.mark.parametrize(
    "files", [{"RECORD": "", "direct_url_json": EDITABLE}, {}, {"RECORD": "", "direct_url_json": "{"}]
)
def test_an_editable_plugin_is_known_by_its_files(package: Path, files: dict[str, str]) -> None:
    now = time.time()
    stamp = stamp_of(point(package, **files), now)
    assert stamp is not None
    assert stamp == stamp_of(point(package, **files), now)
    rules = package / "shop" / "rules.py"
    os.utime(rules, (now - 30,) * 2)
    changed = stamp_of(point(package, **files), now)
    assert changed not in (stamp, None)
    (package / "shop" / "more.py").write_text("")
    os.utime(package / "shop" / "more.py", (now - 60,) * 2)
    assert stamp_of(point(package, **files), now) not in (stamp, changed, None)


def test_folders_that_are_links_count(package: Path) -> None:
    """An editable install may hold links, as onnxplug's own does."""
    now = time.time()
    (package / "parts").mkdir()
    (package / "shop" / "parts").symlink_to(package / "parts")
    stamps = [stamp_of(point(package), now)]
    for age in (60, 30):
        (package / "parts" / "rules.py").write_text("")
        os.utime(package / "parts" / "rules.py", (now - age,) * 2)
        stamps.append(stamp_of(point(package), now))
    assert None not in stamps
    assert len(set(stamps)) == 3


def test_code_that_has_changed_since_it_was_loaded_is_not_known(package: Path) -> None:
    assert stamp_of(point(package), time.time() - 90) is None


def test_code_without_files_is_not_known(tmp_path: Path) -> None:
    assert stamp_of(point(tmp_path, module="builtins"), time.time()) is None
    assert stamp_of(EntryPoint("shop", "builtins", "onnxplug"), time.time()) is None

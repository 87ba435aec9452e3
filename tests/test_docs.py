"""Every Python block in README and docs runs, each file's blocks one after the other in a folder of their own."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from onnxplug import FxNode, GraphBuilder
from tests.support.contrib import CONTRIB, installed, modules_alone

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
#: READMEs of packages that the development environment has installed.
PAGES += [
    CONTRIB / f"onnxplug-{name}" / "README.md"
    for name in (
        "compile",
        "fleet",
        "precision",
        "quantized",
        "reference",
        "sharding",
        "targets",
        "tools",
        "torch-onnx",
        "torchscript",
    )
]
#: Pages about packages of contrib/, with these packages.
PLUGINS = {
    "generation.md": ("onnxplug-transformers",),
    "graph-networks.md": ("onnxplug-torch-geometric",),
    "sharding.md": ("onnxplug-sharding",),
    "mixtures-of-experts.md": ("onnxplug-transformers",),
}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(
    page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sources = tmp_path_factory.mktemp("sources")  # torch.jit.script reads the source of the code that it compiles
    namespace: dict[str, object] = {"__name__": "docs"}
    packages = PLUGINS.get(page.name, ())
    for package in packages:
        monkeypatch.syspath_prepend(modules_alone(CONTRIB / package))
    with installed(*packages) if packages else nullcontext():
        for number, code in enumerate(BLOCK.findall(page.read_text(encoding="utf-8"))):
            source = sources / f"{page.name} block {number}"
            source.write_text(code, encoding="utf-8")
            exec(compile(code, str(source), "exec", dont_inherit=True), namespace)


def test_readme_begins_with_a_users_first_steps() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[2].startswith("onnxplug exports PyTorch models to ONNX.")
    assert lines.index('pip install "onnxplug[ort]"') < 15
    example = BLOCK.search(text)
    assert example is not None
    assert len(example[1].splitlines()) <= 14
    make = lines.index(
        "make demo   # a pretrained sentence encoder: PyTorch to ONNX, verified, then used from the ONNX file alone"
    )
    assert lines[make + 1] == "make test   # the tests"
    assert lines.index("def onnxplug_rules():") < make < 60


def test_links_of_the_readme_are_absolute_and_lead_somewhere() -> None:
    """PyPI shows the README without the files beside it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    defined = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", text, re.MULTILINE))
    used = set(
        re.findall(
            r"\[[^\]]+\]\[([\w-]+)\]|\[([\w-]+)\](?![:(\[])", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
        )
    )
    assert set(defined) <= {a or b for a, b in used}
    assert re.findall(r"\]\((?!https://)", text) == []
    base = "https://github.com/onnxplug/onnxplug/blob/main/"
    assert len(defined) > 15
    for target in defined.values():
        assert target.startswith(base)
        assert (ROOT / target.removeprefix(base).partition("#")[0]).is_file(), target


def test_the_page_of_converters_names_all_that_g_and_node_have() -> None:
    text = (ROOT / "docs" / "writing-a-converter.md").read_text(encoding="utf-8")
    named = {
        name: re.findall(rf"`{name}\.(\w+)`", " ".join(re.findall(r"^\| (`.*?) \| ", text, re.MULTILINE)))
        for name in ("g", "node")
    }
    of_builder = {name for name in dir(GraphBuilder({"": 21})) if not name.startswith("_")}
    of_node = {name for name in dir(FxNode) if not name.startswith("_")}
    assert sorted(named["g"]) == sorted(of_builder)
    assert sorted(named["node"]) == sorted(of_node)


def test_the_map_of_contributing_names_what_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = text[text.index("## Where things are") : text.index("## How a converter is written")]
    folders = [
        ROOT / name for name in ("benchmarks", "docs", "patches", "operators", "rewrites", "verification", "tests")
    ]
    engine = [ROOT / name for name in ("core", "plugins", "cli", "converters")]
    paths = [path for folder in (*engine, *folders, CONTRIB) for path in (folder, *folder.rglob("*"))]
    known = {path.as_posix() for path in paths if path.is_dir() or path.suffix == ".py"}
    named = set(re.findall(r"`([\w./-]+(?:\.py|/))`", text))
    missing = [name for name in named if not any(path.endswith("/" + name.rstrip("/")) for path in known)]
    assert not missing
    modules = {path.name for folder in engine[:3] for path in folder.glob("*.py")}
    unnamed = modules - {name.rpartition("/")[2] for name in named} - {"__init__.py", "__main__.py", "version.py"}
    assert unnamed == set()


@pytest.mark.parametrize("page", ["README.md", "contrib/README.md"])
def test_every_package_is_in_the_table(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = set(re.findall(r"`(onnxplug-[\w-]+)`", "".join(re.findall(r"^\|[^|]*\|", text, re.MULTILINE))))
    assert rows == {path.parent.name for path in CONTRIB.glob("*/pyproject.toml")}

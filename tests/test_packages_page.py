"""The index of packages agrees with the packages: stale where their contents, or an installed library, has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import packages as index

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "pyproject.toml": """
[project]
name = "onnxplug-annex"
version = "1.0"
description = "An onnxplug plugin: annex in ONNX"
dependencies = ["onnxplug", "annex>=2,<3"]
[project.optional-dependencies]
test = ["onnxplug[ort]", "pytest>=8", "annex==2.1"]
[project.entry-points.onnxplug]
annex = "onnxplug_annex"
""",
    "onnxplug_annex/__init__.py": """
from onnxplug import Domain, LibraryFunctions, OpSample, PluginInfo, Rule, hookimpl
@hookimpl
def onnxplug_rules(): return [Rule("annex::whole", "onnxplug_annex.rules:whole"), Rule("annex_probe::double", lambda g, n: n.args[0])]
@hookimpl
def onnxplug_patches(): return [LibraryFunctions({"annex_models.ops:fit": "onnxplug_annex.rules:fit"}, "annex_models>=4")]
@hookimpl
def onnxplug_domains(): return [Domain("com.annex", 1)]
@hookimpl
def onnxplug_samples(): return [OpSample("annex::whole", lambda: ())]
@hookimpl
def onnxplug_info(): return PluginInfo(namespaces=("annex", "annex_probe"), libraries=("annex_models",), replaced=["annex::inner"])
""",
}


def test_the_page_and_the_table_are_those_of_the_packages() -> None:
    packages = index.packages_in(ROOT / "contrib")
    text = (ROOT / index.PAGE).read_text(encoding="utf-8")
    assert index.page(packages, text) == text, "make index"
    assert index.table(packages) == (ROOT / index.TABLE).read_text(encoding="utf-8")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        file = tmp_path / "contrib/onnxplug-annex" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    makefile = "ALONE_annex := --no-build-isolation annex-models==4.2 \\\n  annex-parts==0.1\nNEXT := 1\n"
    (tmp_path / "Makefile").write_text(makefile, encoding="utf-8")
    for folder in ("docs", "plugins"):
        (tmp_path / folder).mkdir()
    return tmp_path


@pytest.mark.long
def test_rows_of_a_package(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.main(checkout)
    text = (checkout / index.PAGE).read_text(encoding="utf-8")
    for line in (
        "| [onnxplug-annex](#onnxplug-annex) | `annex`, `annex_models`, `annex_probe` | 4 |",
        "annex in ONNX.",
        "| needs | `annex>=2,<3` |",
        "| for | `annex_models>=4` |",
        "| tested with | `annex==2.1`, `annex-models==4.2`, `annex-parts==0.1`; 1 sample |",
        "| runtime | `com.annex` of ONNX Runtime where it is used |",
        "| onnxplug_annex/rules.py | `annex`: `whole`; `annex_models.ops`: `fit` |",
        "| onnxplug_annex/__init__.py | `annex_probe`: `double` |",
        "| replaced during capture | `annex`: `inner` |",
    ):
        assert line in text.splitlines()
    assert '"annex_models": "onnxplug-annex",' in (checkout / index.TABLE).read_text(encoding="utf-8")
    # A library that can be imported is counted; where it can't, the count stays.
    library = "import torch\nfor name in ('double', 'triple'):\n    torch.library.define(f'annex_probe::{name}', '(Tensor x) -> Tensor')\n"
    (checkout / "annex_probe.py").write_text(library, encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(checkout))
        index.main(checkout)
    counted = (checkout / index.PAGE).read_text(encoding="utf-8")
    assert "| of the library's | 1 of 2 |" in counted
    assert "| not translated | `annex_probe`: `triple` |" in counted
    (checkout / "annex_probe.py").unlink()
    index.main(checkout)
    assert (checkout / index.PAGE).read_text(encoding="utf-8") == counted

"""`onnxplug plugins new --for LIBRARY`: a package with a rule, inputs and a test for each operator, without the formulas."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from onnxplug_tools.library.operators import read_library
from onnxplug_tools.scaffold.library import write_library_package

from onnxplug.cli.app import run
from onnxplug.errors import UsageError
from tests.support.distributions import run_python

LIBRARY = """
import torch
import torch.ao.quantization.fx._decomposed  # torch's own operators, which it registers meanwhile
print("noise on stdout")

@torch.library.custom_op("bench::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float, indices: torch.Tensor | None = None) -> torch.Tensor:
    return x * factor

@torch.library.custom_op("bench::accumulate", mutates_args=("total",))
def accumulate(total: torch.Tensor, x: torch.Tensor) -> None:
    total += x
accumulate.register_fake(lambda total, x: None)

library = torch.library.Library("bench", "DEF")
for schema in ("composite(Tensor x) -> Tensor", "scaled_backward(Tensor grad, float factor) -> Tensor",
               "lambda(Tensor x, Tensor[] lengths, *, int[2] sizes) -> (Tensor, Tensor)",
               "lambda.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"):
    library.define(schema)
library.impl("composite", lambda x: x + 1, "CompositeImplicitAutograd")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, source in (("benchlib", LIBRARY), ("dies", "import os; os._exit(3)"), ("broken", "1 / 0")):
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.long
def test_operators_of_a_library(folder: Path) -> None:
    result = {op.name.removeprefix("bench::"): op for op in read_library("benchlib")}
    assert sorted(result) == [
        *("accumulate.default", "composite.default", "lambda.default", "lambda.out", "scaled.default"),
        "scaled_backward.default",
    ]
    assert [name for name, op in result.items() if op.needs_rule] == [
        "accumulate.default",
        "lambda.default",
        "scaled.default",
    ]
    assert [name for name, op in result.items() if op.has_fake] == ["accumulate.default", "composite.default"]
    assert [name for name, op in result.items() if op.runs_on_cpu] == [
        *("accumulate.default", "composite.default", "scaled.default"),
    ]
    assert result["accumulate.default"].mutates == ("total",)
    assert result["lambda.default"].arguments == (
        ("x", "Tensor", False),
        ("lengths", "List[Tensor]", False),
        ("sizes", "List[int]", False),
    )


@pytest.mark.long
def test_the_package_imports_and_its_tests_name_the_missing_parts(folder: Path) -> None:
    made = write_library_package("benchlib", folder)
    assert made.folder == folder / "onnxplug-benchlib"
    assert made.summary == (
        "6 operators (1 for gradients, 1 computed by others, 1 that write to an output that they are given)"
    )
    readme = (made.folder / "README.md").read_text(encoding="utf-8")
    assert "| `bench::scaled.default` | no formula yet; no fake kernel |" in readme
    assert "Torch computes these by other operators, which are translated: `bench::composite.default`." in readme
    rules = (made.folder / "onnxplug_benchlib/rules.py").read_text(encoding="utf-8")
    assert '    """accumulate(Tensor(a0!) total, Tensor x) -> ()\n\n    It writes to total: return' in rules
    assert "def lambda_(g: Any, node: Any) -> Any:" in rules
    inputs = (made.folder / "onnxplug_benchlib/inputs.py").read_text(encoding="utf-8")
    assert "lambda: (torch.randn(2, 3), [torch.tensor([0, 1])], [1])," in inputs

    def tested(status: int) -> str:
        path = os.pathsep.join([str(made.folder), str(folder), *filter(None, sys.path)])
        return run_python(made.folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", status=status, PYTHONPATH=path)

    code = "import setuptools; setuptools.setup()"
    subprocess.run([sys.executable, "-c", code, "-q", "egg_info"], cwd=made.folder, check=True, capture_output=True)
    printed = tested(0)
    assert "1 passed, 3 xfailed" in printed
    assert "test_sample[bench::scaled.default-opset21] - no formula yet; no fake kernel" in printed
    # A formula and a fake kernel for an operator: its test passes, which is a failure while it counts as missing.
    _replace(
        made.folder / "onnxplug_benchlib/rules.py",
        'raise Unsupported("the formula of bench::scaled.default is to be written")',
        "return g.op.Mul(x, factor)",
    )
    fakes = made.folder / "onnxplug_benchlib/fakes.py"
    start, end = (fakes.read_text(encoding="utf-8").partition(text)[0] for text in ("def scaled", "FAKES"))
    fakes.write_text(f"{start}def scaled(x, factor, indices=None):\n    return torch.empty_like(x)\n\n\nFAKES = {{'bench::scaled': scaled}}\n" + fakes.read_text(encoding="utf-8")[len(end):].partition("}\n")[2], encoding="utf-8")  # fmt: skip
    assert "XPASS(strict)" in tested(1)
    line = '    "bench::scaled.default": "no formula yet; no fake kernel",\n'
    _replace(made.folder / "onnxplug_benchlib/__init__.py", line, "")
    assert "2 xfailed" in tested(0)


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    ("library", "message"),
    [
        ("nosuchlib", "the library nosuchlib is not installed"),
        ("json", "importing json registers no operator with torch"),
        ("broken", "the library broken can't be imported: ZeroDivisionError: division by zero"),
        ("dies", "importing dies ended Python with status 3"),
        ("not a module", "is not the name of a module"),
    ],
)
@pytest.mark.long
def test_refused(folder: Path, library: str, message: str) -> None:
    before = sorted(folder.iterdir())
    with pytest.raises(UsageError, match=message):
        write_library_package(library, folder)
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.long
def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plugins", "new", "onnxplug-some", "--for", "benchlib", "--op", "bench::s*", "-o", str(folder)]
    assert run(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "a rule without its formula, inputs and a test for 1 operator" in printed
    assert 'OPERATORS = {\n    "bench::scaled.default": "scaled",\n}' in (
        folder / "onnxplug-some/onnxplug_some/__init__.py"
    ).read_text(encoding="utf-8")
    assert run([*arguments[:3], *arguments[3:5], "--op", "bench::scalde", "-o", str(folder / "other")]) == 2
    assert "bench::scaled" in " ".join(capsys.readouterr().err.split())
    assert run(["plugins", "new", "-o", str(folder)]) == 2
    assert "--for LIBRARY" in capsys.readouterr().err

"""A model that uses a library with a package: every error that a user meets names the package to install."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import onnxplug
from onnxplug import PluginInfo, hookimpl
from onnxplug.cli.app import run
from onnxplug.plugins.advice import _known_libraries
from onnxplug.plugins.libraries import LIBRARIES
from onnxplug.testing import IsolatedRegistry

ADVICE = "pip install onnxplug-annex: this package is for models that use annex"


class Annex:
    """The package, installed, without a rule."""

    @hookimpl
    def onnxplug_info(self) -> PluginInfo:
        return PluginInfo(namespaces=("annex",))


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operators of a library, one with a fake kernel and one without; the table names a package for the library."""
    for name in ("annex", "annex_models"):
        monkeypatch.setitem(LIBRARIES, name, "onnxplug-annex")
    fragment = torch.library.Library("annex", "FRAGMENT")
    for name in ("whole", "bare"):
        fragment.define(f"{name}(Tensor x) -> Tensor")
        fragment.impl(name, lambda x: x * 2, "CPU")
    fragment.impl("whole", torch.empty_like, "Meta")
    yield
    fragment._destroy()


class Calls(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(torch.ops.annex, self.name)(x) + 1


class Refused(torch.nn.Module):
    """Its error says nothing of the library."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            raise RuntimeError("no attribute 'state'")
        return x * 2


def error_of(model: Any) -> onnxplug.OnnxplugError:
    with pytest.raises(onnxplug.OnnxplugError) as caught:
        onnxplug.to_onnx(model, (torch.randn(2, 3),))
    return caught.value


def test_an_operator_without_a_rule() -> None:
    error = error_of(Calls("whole"))
    assert isinstance(error, onnxplug.MissingRuleError)
    assert str(error.hint).count(ADVICE) == 1


def test_an_operator_without_a_fake() -> None:
    error = error_of(Calls("bare"))
    assert isinstance(error, onnxplug.CaptureError)
    assert str(error.hint).splitlines()[0] == f"{ADVICE}."
    assert "register_fake" in str(error.hint)


def test_a_module_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "onnxplug-annex" not in str(error_of(torch.nn.Sequential(Refused())))
    monkeypatch.setattr(Refused, "__module__", "annex_models.layers")
    error = error_of(torch.nn.Sequential(torch.nn.Linear(3, 3), Refused()))
    assert isinstance(error, onnxplug.CaptureError)
    assert str(error.hint).startswith("pip install onnxplug-annex: this package is for models that use annex_models.\n")


def test_a_capture_that_proves_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of bitsandbytes' layers of 4 bits, whose tensors torch.export loses: onnxplug-bitsandbytes tests that."""

    def lost(*_: Any, **__: Any) -> Any:
        raise onnxplug.CaptureError("torch.export left 'lifted_tensor_0' without its values", hint="Register it.")

    monkeypatch.setattr(Refused, "__module__", "annex_models.layers")
    monkeypatch.setattr("onnxplug.pipeline.convert", lost)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: False)
    assert str(error_of(Refused().eval()).hint).count(ADVICE) == 1


@pytest.mark.parametrize(
    ("text", "named"), [("torch._C._nn.gelu got no tensor", False), ("_C::rms_norm has no fake", True)]
)
def test_a_namespace_with_the_name_of_a_module_of_torch(text: str, named: bool) -> None:
    assert _known_libraries(RuntimeError(text), None) == (["_C"] if named else [])


def test_code_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def layer(x):\n    if x.sum() > 0:\n        return x\n    return -x\n"
    namespace: dict[str, Any] = {"__name__": "annex.functional"}
    exec(compile(source, "annex/functional.py", "exec"), namespace)
    error = error_of(lambda x: namespace["layer"](x) + 1)
    assert isinstance(error, onnxplug.CaptureError)
    assert str(error.hint).startswith(ADVICE)


def test_the_package_is_installed_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = IsolatedRegistry()
    registry.add_plugin(Annex(), name="annex", distribution="onnxplug-annex", version="1.0")
    with registry.active():
        assert "pip install" not in str(error_of(Calls("whole")))
        with pytest.raises(onnxplug.MissingRuleError, match="may translate annex, but it is left out"):
            onnxplug.to_onnx(Calls("whole"), (torch.randn(2, 3),), plugins=[])


def test_commands_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): return torch.ops.annex.whole(x)\n"
        "def make(): return Model(), (torch.randn(2, 3),)\n"
    )
    (tmp_path / "annexed.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "annexed", raising=False)

    def printed(*arguments: str) -> str:
        run([*arguments])
        captured = capsys.readouterr()
        return " ".join((captured.out + captured.err).split())

    assert ADVICE in printed("ops", "--missing", "annexed.py:make")
    assert ADVICE in printed("ops", "--missing", "annexed.py:make", "--json")
    assert ADVICE in printed("why", "annex::whole")
    assert ADVICE in printed("diagnose", "annexed.py:make")
    with pytest.raises(onnxplug.MissingRuleError):
        onnxplug.to_onnx(Calls("whole"), (torch.randn(2, 3),), report=tmp_path / "report")
    texts = [path.read_text(encoding="utf-8") for path in (tmp_path / "report").glob("*.md")]
    assert texts
    assert all(ADVICE in " ".join(text.split()) for text in texts)
    assert ADVICE in str(onnxplug.diagnose(Calls("bare"), (torch.randn(2, 3),)))

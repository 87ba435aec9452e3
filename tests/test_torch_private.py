"""Private names of torch: all are there, and the effects of a missing name."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest
import sympy
import torch
from torch.testing._internal.two_tensor import TwoTensor

from onnxplug import OnnxplugError, to_onnx, torch_private
from tests.support.child import run_child


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Forgets the names that were looked up."""
    for name in torch_private._NAMES:
        monkeypatch.delitem(vars(torch_private), name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", torch_private._NAMES)
def test_this_torch_has_it(fresh: pytest.MonkeyPatch, name: str) -> None:
    private = torch_private._NAMES[name]
    fresh.setitem(torch_private._NAMES, name, private._replace(instead=None))
    assert getattr(torch_private, name) is not None


@pytest.mark.parametrize("place", ["torch._nowhere:Name", "torch._ops:Nowhere"])
@pytest.mark.parametrize("name", torch_private._NAMES)
def test_a_name_that_is_gone(fresh: pytest.MonkeyPatch, name: str, place: str) -> None:
    private = torch_private._NAMES[name]
    fresh.setitem(torch_private._NAMES, name, private._replace(place=place))
    if private.instead is None:
        with pytest.raises(
            OnnxplugError, match=f"torch {torch.__version__.split('+')[0]}.* has no torch._.*{private.purpose}"
        ):
            getattr(torch_private, name)
    else:
        assert getattr(torch_private, name) is not None


def test_replacements_of_missing_names(fresh: pytest.MonkeyPatch) -> None:
    real = torch_private.DimHint
    for name, private in torch_private._NAMES.items():
        fresh.setitem(torch_private._NAMES, name, private._replace(place="torch:nowhere"))
        fresh.delitem(vars(torch_private), name, raising=False)
    x = torch.zeros(2, 3)
    assert torch_private.is_alias_of(x, x.t())
    assert not torch_private.is_alias_of(x, x.clone())
    assert list(torch_private.registered_operators()) == []
    assert "cond" not in torch_private.higher_order_operators
    assert torch_private.DimHint is real
    assert torch_private.is_traceable_wrapper_subclass(TwoTensor(x, x))
    assert not torch_private.is_traceable_wrapper_subclass(x)
    assert torch_private.python_notation().doprint(sympy.Symbol("n") + 1) == "n + 1"


WITHOUT_OPTIONAL_NAMES = """
import warnings
from onnxplug import torch_private
for name, private in torch_private._NAMES.items():
    if private.instead is not None:
        torch_private._NAMES[name] = private._replace(place="torch:nowhere")

import onnxplug, torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.dropout = torch.nn.Dropout(0.0)
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x):
        y = self.dropout(self.norm(self.linear(x)))
        y[:, 0] = 1
        return torch.softmax(y.reshape(-1, 3), -1), x

for model, strict in ((Model().eval(), None), (Model().eval(), True), (lambda x: torch.nn.functional.gelu(x) @ x.T, None)):
    auto = {0: torch.export.Dim.AUTO}
    program = onnxplug.to_onnx(model, (torch.randn(5, 4),), dynamic_shapes=(auto,), strict=strict, verify=True)
    assert isinstance(program.model.graph.inputs[0].shape[0].value, str), program.model.graph.inputs[0]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    onnxplug.to_onnx(Model().train(), (torch.randn(5, 4),))
assert any("training mode" in str(warning.message) for warning in caught)
print("exported")
"""


@pytest.mark.long
def test_models_are_exported_without_the_names_that_something_else_serves_for() -> None:
    done = run_child("-c", WITHOUT_OPTIONAL_NAMES)
    assert done.stdout.splitlines()[-1:] == ["exported"], done.stderr


def test_other_names() -> None:
    with pytest.raises(AttributeError, match="nothing_like_it"):
        torch_private.nothing_like_it  # noqa: B018


def test_the_tested_versions_are_those_of_the_matrix() -> None:
    tree = ast.parse((Path(__file__).parents[1] / "noxfile.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Combination"]
    combinations = {(ast.literal_eval(call.args[0]), ast.literal_eval(call.args[1])) for call in calls}
    tested = {(python, torch) for python, torchs in torch_private.TESTED.items() for torch in torchs}
    assert {(python, torch.rpartition(".")[0]) for python, torch in combinations} == tested


@pytest.mark.parametrize("versions", [("2.13.0+cpu", "3.11.7"), ("2.13.2", "3.12.1"), ("2.15.1", "3.13.0")])
def test_tested_versions_are_silent(versions: tuple[str, str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_private.warn_if_untested.cache_clear()
        torch_private.warn_if_untested(*versions)


@pytest.mark.parametrize(
    "versions", [("2.8.1", "3.11.7"), ("2.13.0", "3.14.0rc1"), ("2.14.1", "3.13.0"), ("2.15.0", "3.12.1")]
)
def test_versions_that_were_not_tested_warn(versions: tuple[str, str]) -> None:
    torch_private.warn_if_untested.cache_clear()
    message = f"not tested with torch {versions[0]} on Python {versions[1]}, but with torch 2.9 and 2.13 on Python 3.11, torch 2.13"
    with pytest.warns(UserWarning, match=message):
        torch_private.warn_if_untested(*versions)


@pytest.mark.parametrize("version", ["2.16.0a0+gitabc", "2.100.0", "3.0"])
def test_an_export_with_a_newer_torch_warns_once(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    torch_private.warn_if_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            to_onnx(torch.relu, (torch.ones(2),))
    (warning,) = [warning for warning in caught if "was not tested with" in str(warning.message)]
    assert str(warning.message).startswith(f"onnxplug was not tested with torch {version} on Python ")
    assert warning.filename == __file__

"""Wrong or meaningless arguments of an export: an error or a warning of our own, before the model is captured."""

from __future__ import annotations

import builtins
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
import onnxplug.pipeline
from onnxplug import OnnxplugError, Rule, SaveError, UsageError
from onnxplug.opsets import max_opset
from onnxplug.plugins.call import UnusedRuleWarning
from onnxplug.verification import ready

X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which capture is entered."""

    def entered(*args: Any, **kwargs: Any) -> Any:
        pytest.fail("capture was entered")

    monkeypatch.setattr(onnxplug.pipeline, "capture_model", entered)


def relu(g: Any, node: Any) -> Any:
    return g.op.Relu(node.args[0])


# -- before capture ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"f": "/nowhere/at/all.onnx"}, SaveError, "there is no folder /nowhere/at"),
        ({"f": "/tmp"}, SaveError, "it is a folder"),
        ({"f": 3}, UsageError, "f must be the path of a file, got 3"),
        ({"input_names": ["a", "b"]}, UsageError, "input_names has 2 names for 1 inputs"),
        ({"input_names": "x"}, UsageError, "input_names must be a list of names"),
        ({"input_names": [""]}, UsageError, "input_names must be a list of names"),
        ({"output_names": ["y", "y"]}, UsageError, "output_names has 'y' twice"),
        ({"input_names": ["y"], "output_names": ["y"]}, UsageError, "'y' is in input_names and in output_names"),
        (
            {"opset_version": {"": 21, "com.acme": 1}, "plugins": []},
            UsageError,
            "names the domain 'com.acme', which nothing",
        ),
        ({"opset_version": {"com.microsofd": 1}, "plugins": []}, UsageError, "Did you mean 'com.microsoft'"),
        ({"rules": [Rule("aten::rellu", relu)]}, UsageError, r"'aten::rellu'.*\n.*Did you mean .*'aten::relu'"),
        ({"rules": [Rule("aten::add.Tensr", relu)]}, UsageError, r"Did you mean .*'aten::add.Tensor'"),
        ({"rules": [Rule("complex:aten::rellu", relu)]}, UsageError, "'complex:aten::rellu'"),
        ({"custom_translation_table": {"aten::rellu": relu}}, UsageError, "torch does not know"),
    ],
)
def test_arguments_are_checked_in_order(
    options: dict[str, Any], error: type[Exception], message: str, no_capture: None
) -> None:
    with pytest.raises(error, match=message):
        onnxplug.to_onnx(lambda x: x.relu(), (X,), **options)


@pytest.mark.parametrize("options", [{"rules": [Rule("aten::relu", relu)]}, {"plugins": []}, {"prefer": {"a::b": "c"}}])
def test_a_registry_stands_alone(options: dict[str, Any], no_capture: None) -> None:
    from onnxplug.plugins.manager import registry_for

    with pytest.raises(UsageError, match="registry= can't be given together with"):
        onnxplug.to_onnx(lambda x: x.relu(), (X,), registry=registry_for(plugins=[]), **options)


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_capture: None) -> None:
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    with pytest.raises(SaveError, match="no permission"):
        onnxplug.to_onnx(lambda x: x.relu(), (X,), tmp_path / "model.onnx")


def test_verification_without_onnx_runtime(monkeypatch: pytest.MonkeyPatch, no_capture: None) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "onnxruntime":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(OnnxplugError, match="needs ONNX Runtime, which is not installed"):
        onnxplug.to_onnx(lambda x: x.relu(), (X,), verify=True)


def test_verification_at_an_opset_that_onnx_runtime_does_not_load(
    monkeypatch: pytest.MonkeyPatch, no_capture: None
) -> None:
    newest = ready.newest_loadable_opset()
    assert ready.loads_opset(newest)
    opset = newest + 1
    if opset > max_opset():  # the installed ONNX Runtime loads every opset that onnx knows
        opset = newest
        monkeypatch.setattr(ready, "loads_opset", lambda o: o < newest)
    with pytest.raises(OnnxplugError, match=rf"loads opset {opset}; version .* loads opsets up to"):
        onnxplug.to_onnx(lambda x: x.relu(), (X,), verify=True, opset_version=opset)


def test_too_many_output_names_are_refused_before_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxplug.pipeline, "interpret", lambda *a, **k: pytest.fail("conversion was entered"))
    with pytest.raises(UsageError, match="output_names has 2 names for 1 values"):
        onnxplug.to_onnx(lambda x: x.relu(), (X,), output_names=["a", "b"])


# -- rules of the call -------------------------------------------------------------------------------------------------


def test_a_rule_for_an_operator_that_the_model_registers_itself() -> None:
    """The model imports the operator's library when it runs for the first time."""
    libraries = []

    class Late(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not libraries:
                library = torch.library.Library("onnxplug_late", "DEF")
                library.define("twice(Tensor x) -> Tensor")
                library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
                libraries.append(library)
            return torch.ops.onnxplug_late.twice(x)

    def twice(g: Any, node: Any) -> Any:
        return g.op.Add(node.args[0], node.args[0])

    program = onnxplug.to_onnx(Late(), (X,), rules=[Rule("onnxplug_late::twice", twice)], verify=True)
    assert [n.op_type for n in program.model.graph] == ["Add"]


def test_a_rule_of_a_library_that_nobody_imports() -> None:
    with pytest.raises(UsageError, match="'onnxplug_nowhere::f', an operator that torch does not know"):
        onnxplug.to_onnx(lambda x: x.relu(), (X,), rules=[Rule("onnxplug_nowhere::f", relu)])


def test_rules_that_no_operator_uses() -> None:
    rules = [Rule("aten::relu", relu), Rule("aten::add.Scalar", relu), Rule("aten::gelu", relu)]
    with pytest.warns(UnusedRuleWarning) as caught:
        onnxplug.to_onnx(lambda x: x.relu() + x, (X,), rules=rules)
    (text,) = [str(w.message) for w in caught if w.category is UnusedRuleWarning]
    assert "aten::gelu (" in text
    assert "where the model has aten::add.Tensor" in text
    assert "aten::relu (" not in text


def test_rules_that_an_operator_uses_give_no_warning() -> None:
    def inner(g: Any, node: Any) -> Any:
        return g.call_next(node)

    rules = [Rule("aten::relu.default", relu), Rule("aten::add", inner), Rule("_operator::mul", inner, priority=1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnusedRuleWarning)
        onnxplug.to_onnx(
            lambda x: (x.relu() + x).reshape(x.shape[0] * 3), (X,), rules=rules, dynamic_shapes=({0: "n"},)
        )


# -- domains -----------------------------------------------------------------------------------------------------------


def scaled(g: Any, node: Any) -> Any:
    return g.domain("com.acme", 2).Scale(node.args[0])


def test_a_domain_that_a_rule_of_the_call_emits() -> None:
    rules = [Rule("aten::relu", scaled)]
    program = onnxplug.to_onnx(lambda x: x.relu(), (X,), rules=rules, opset_version={"com.acme": 2})
    assert program.model.opset_imports["com.acme"] == 2
    with pytest.raises(UsageError, match=r"'com.acmee'.*\n.*Did you mean 'com.acme'"):
        onnxplug.to_onnx(lambda x: x.relu(), (X,), rules=rules, opset_version={"com.acmee": 2})


def test_domains_that_are_known() -> None:
    opsets = {"": 21, "com.microsoft": 1, "ai.onnx.ml": 3}
    onnxplug.to_onnx(lambda x: x.relu(), (X,), plugins=[], opset_version=opsets)


def test_one_tensor_is_a_tuple_of_it() -> None:
    program = onnxplug.to_onnx(lambda x: x.relu(), X, input_names=["x"], verify=True)
    assert [v.name for v in program.model.graph.inputs] == ["x"]


# -- keyword inputs at the end of args ---------------------------------------------------------------------------------


def masked(x: torch.Tensor, mask: Any = None, *, scale: Any = 1.0) -> torch.Tensor:
    assert mask is None or isinstance(mask, torch.Tensor)
    return (x if mask is None else x * mask) * scale


def takes_a_dict(x: torch.Tensor, options: dict[str, torch.Tensor]) -> torch.Tensor:
    return x + options["shift"]


def takes_anything(*args: Any, **kwargs: Any) -> torch.Tensor:
    return args[0] + sum(kwargs.values())


@pytest.mark.parametrize(
    ("model", "args", "kwargs", "names"),
    [
        (masked, (X, {"mask": X}), None, ["x", "mask"]),
        (masked, ({"x": X, "mask": X},), None, ["x", "mask"]),
        (masked, (X, {}), None, ["x"]),
        (masked, [X, {"scale": X}], None, ["x", "scale"]),
        (masked, (X, {"mask": X}), {}, ["x", "mask"]),
        (takes_a_dict, (X, {"shift": X}), None, ["x", "options_shift"]),
        (takes_a_dict, (X, {"shift": X}, {}), None, ["x", "options_shift"]),
        (takes_a_dict, (X,), {"options": {"shift": X}}, ["x", "options_shift"]),
        (takes_anything, (X, {"a": X, "b": X}), None, ["args_0", "a", "b"]),
    ],
)
def test_a_dict_at_the_end_of_args(model: Any, args: Any, kwargs: Any, names: list[str]) -> None:
    program = onnxplug.to_onnx(model, args, kwargs=kwargs)
    assert [v.name for v in program.model.graph.inputs] == names
    assert program.verify().cases


def test_a_dict_at_the_end_of_args_that_fits_nothing(no_capture: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(UsageError, match="unexpected keyword argument 'maks'"):
        onnxplug.to_onnx(masked, (X, X, {"maks": X}))


def test_the_same_as_torch_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares with torch's own reading of args, on the calls where both agree by contract."""
    from torch.onnx._internal.exporter import _compat

    from onnxplug.arguments import positional_and_named

    for args in ((X, {"mask": X}), ({"x": X},), (X, {}), (X,), (X, X)):
        theirs_args, theirs_kwargs = _compat._get_torch_export_args(args, None)
        ours_args, ours_kwargs = positional_and_named(masked, args, None)
        assert len(ours_args) == len(theirs_args)
        assert (ours_kwargs or {}).keys() == (theirs_kwargs or {}).keys()

"""Models that ONNX Runtime does not run, by evaluators: onnx's own, which core has, and evaluators of plugins."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import onnxplug
from onnxplug import Evaluator, MissingPackageError, VerificationError, hookimpl
from onnxplug.plugins.manager import host_for
from onnxplug.run.session import Runner
from onnxplug.testing import IsolatedRegistry


def test_onnx_verifies_operators_that_onnxruntime_lacks() -> None:
    """Core alone, with the builtin plugin only: ONNX Runtime has no AveragePool of doubles."""
    model = torch.nn.AvgPool2d(2)
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: "batch", 2: "height"},), plugins=[])
    with pytest.warns(UserWarning, match=r"AveragePool.*: onnx\.reference ran the model instead"):
        report = program.verify()
    assert {case.runtime for case in report.cases} == {"onnx.reference"}
    for values in (x, -x[:1, :, 2:] * 1e3):
        torch.testing.assert_close(program(values)[0], model(values))
        torch.testing.assert_close(program.call_reference(values)[0], model(values))
    assert program.runtime == "onnx.reference"


FUSED = """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
g (bfloat16[2, 3] x) => (bfloat16[2, 2] y) { y = com.microsoft.FusedMatMul <transB = 1> (x, x) }"""


def test_the_package_is_named_where_onnx_has_no_kernel() -> None:
    model = ir.serde.deserialize_model(onnx.parser.parse_model(FUSED))
    with pytest.raises(VerificationError, match=r"NOT_IMPLEMENTED.*onnx\.reference can't run .*FusedMatMul") as caught:
        Runner(model, host_for([]))
    assert "pip install onnxplug-reference" in str(caught.value.hint)
    x = torch.randn(2, 3, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"onnxplug\.reference ran the model instead"):
        runner = Runner(model, host_for(["reference"]))
    torch.testing.assert_close(runner({"x": x})[0], x @ x.T)


class Halve(OpRun):
    op_domain = "references.test"

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:  # type: ignore[override]
        return (x / np.float32(2),)


#: ``Later`` is called before its definition, with an attribute; ``Halve`` has a body, and a kernel that goes first.
FUNCTIONS = """<ir_version: 10, opset_import: ["": 21, "references.test": 1]>
g (float[N] x) => (float[N] y) { y = references.test.Outer <by = 3.0> (x) }
<domain: "references.test", opset_import: ["": 21, "references.test": 1]>
Outer <by> (x) => (y) { z = references.test.Later <by: float = @by> (x)  y = references.test.Halve (z) }
<domain: "references.test", opset_import: ["": 21, "references.test": 1]>
Later <by> (x) => (y) { c = Constant <value_float: float = @by> ()  y = Mul (x, c) }
<domain: "references.test", opset_import: ["": 21, "references.test": 1]>
Halve (x) => (y) { y = Neg (x) }"""


def test_kernels_and_functions_of_functions() -> None:
    model = ir.serde.deserialize_model(onnx.parser.parse_model(FUNCTIONS))
    x = torch.tensor([1.0, -2.0])
    torch.testing.assert_close(Runner(model, host_for([]), reference=True)({"x": x})[0], x * -3)
    with IsolatedRegistry().active() as registry:
        registry.add_plugin(
            _plugin(onnxplug_runtime=lambda: [onnxplug.ReferenceOp(Halve)]), name="halves", distribution="halves"
        )
        runner = Runner(model, host_for(), reference=True)
    assert runner.runtime == "onnx.reference"
    torch.testing.assert_close(runner({"x": x})[0], x * 1.5)


def _plugin(**hooks: Any) -> Any:
    return SimpleNamespace(**{name: hookimpl(function) for name, function in hooks.items()})


class Doubling(ReferenceEvaluator):
    """An evaluator from outside, whose results show that it ran."""

    def __init__(self, source: bytes, kernels: Any) -> None:
        super().__init__(source, new_ops=list(kernels))

    def run(self, *args: Any, **options: Any) -> Any:
        return [value * 2 for value in super().run(*args, **options)]


def _refuse(source: bytes, kernels: Any) -> Any:
    raise NotImplementedError("it has no Abs")


@pytest.mark.parametrize(("first", "runtime", "factor"), [(Doubling, "acme", 2), (_refuse, "onnx.reference", 1)])
def test_evaluators_of_a_plugin(first: Any, runtime: str, factor: int) -> None:
    """The first evaluator that takes the model runs it."""
    program = onnxplug.to_onnx(lambda x: x.abs(), (torch.randn(3),), input_names=["x"])
    with IsolatedRegistry().active() as registry:
        plugin = _plugin(onnxplug_evaluators=lambda: [Evaluator("acme", first)])
        registry.add_plugin(plugin, name="acme", distribution="acme")
        runner = Runner(program.model, host_for(), reference=True)
    assert runner.runtime == runtime
    for x in (torch.tensor([1.0, -2.0, 0.0]), torch.tensor([-3.0, 4.0, -0.5])):
        torch.testing.assert_close(runner({"x": x})[0], x.abs() * factor)


@pytest.mark.parametrize(("name", "make"), [("", Doubling), ("acme", "nowhere"), ("acme", None)])
def test_an_evaluator_that_is_none(name: str, make: Any) -> None:
    with pytest.raises(onnxplug.UsageError, match="Evaluator"):
        Evaluator(name, make)


def test_a_hook_that_returns_no_evaluator() -> None:
    with IsolatedRegistry().active() as registry:
        registry.add_plugin(_plugin(onnxplug_evaluators=lambda: [3]), name="acme", distribution="acme")
        with pytest.warns(UserWarning, match="which is not an Evaluator"):
            assert [evaluator.name for evaluator in host_for().evaluators()] == ["onnx.reference"]


def test_the_package_by_its_name_in_onnxplug(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxplug_reference

    from onnxplug.reference import Kernel

    assert Kernel is onnxplug_reference.Kernel is onnxplug.reference.Kernel
    monkeypatch.setitem(sys.modules, "onnxplug_reference", None)
    with pytest.raises(
        MissingPackageError, match=r"onnxplug\.reference needs the package onnxplug-reference"
    ) as caught:
        onnxplug.reference.Kernel  # noqa: B018
    assert caught.value.hint == "pip install onnxplug-reference"

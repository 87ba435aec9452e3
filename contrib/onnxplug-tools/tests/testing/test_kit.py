"""The test kit: the models that its fixtures accept, and above all the faults that they refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onnxplug_tools.testing import GraphExpectation, IsolatedRegistry, cases_of, sample_cases
from onnxplug_tools.testing.faults import check_plugins

import onnxplug
from onnxplug import OpSample, PluginInfo, Rule, hookimpl
from onnxplug.errors import PluginError, UsageError, VerificationError
from onnxplug.plugins.records import Selection
from tests.support.child import run_child


@torch.library.custom_op("kit::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_fake(lambda x: torch.empty_like(x))


def right(g: Any, node: Any) -> Any:
    return g.op.Mul(node.args[0], 2.0)


def wrong_for_large(g: Any, node: Any) -> Any:
    """Right for the exported size alone."""
    return g.op.Where(g.op.Less(g.op.Size(node.args[0]), g.op.Constant(value_int=13)), right(g, node), node.args[0])


def wrong_for_negative(g: Any, node: Any) -> Any:
    return g.op.Abs(right(g, node))


class Plugin:
    """A plugin as an object."""

    def __init__(self, converter: Callable[..., Any], **options: Any) -> None:
        self.converter, self.options = converter, options

    @hookimpl
    def onnxplug_rules(self) -> list[Rule]:
        return [Rule("kit::double", self.converter, opset=(18, 20))]

    @hookimpl
    def onnxplug_samples(self) -> list[OpSample]:
        return [OpSample("kit::double", lambda: (torch.full((3, 4), 1.5),), **self.options)]

    @hookimpl
    def onnxplug_info(self) -> PluginInfo:
        return PluginInfo(namespaces=("kit",))


def test_importing_the_pytest_plugin_is_cheap() -> None:
    code = "import sys, onnxplug_tools.testing, onnxplug_tools.testing.plugin; print([m for m in ('torch', 'onnx', 'onnx_ir', 'numpy', 'rich', 'typer') if m in sys.modules])"
    done = run_child("-c", code, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "operators", "fits"),
    [
        ("Div -> Tanh -> Mul", "Div Tanh Mul", True),
        ("Div Tanh", "Div Tanh Mul", False),
        ("Tanh Div Mul", "Div Tanh Mul", False),
        ("Div ... Mul", "Div Mul", True),
        ("Div ... Mul", "Div A B Mul Mul", True),
        ("Div ... Mul", "Div A B", False),
        ("...", "", True),
        ("", "Add", False),
        ("... Add ...", "Mul Add", True),
        ("Add*3 Relu|Clip", "Add Add Add Clip", True),
        ("Add*3", "Add Add", False),
        ("com.acme::NMS  # theirs\nAdd", "com.acme::NMS Add", True),
    ],
)
def test_expectations(text: str, operators: str, fits: bool) -> None:
    assert GraphExpectation(text).matches(operators.split()) is fits


def test_expect_graph_shows_both_sides(expect_graph: Any, isolated_registry: IsolatedRegistry) -> None:
    program = onnxplug.to_onnx(lambda x: x.relu() + 1, (torch.randn(2),))
    expect_graph(program, "Relu Add", absent="Mul Cast")
    expect_graph(program.model_proto, "... Add")
    with pytest.raises(AssertionError, match=r"(?s)expected, \+ found.*- Clip.*\+ Relu.*Add"):
        expect_graph(program, "Clip Add")
    with pytest.raises(AssertionError, match="the graph has Add, which it must not"):
        expect_graph(program, absent=["Add"])
    with pytest.raises(UsageError, match="can't read"):
        expect_graph(program, "Add**")


@pytest.mark.long
def test_onnx_check_finds_faults(onnx_check: Any, isolated_registry: IsolatedRegistry) -> None:
    shapes = ({0: "rows"},)
    x = torch.randn(3, 4)
    onnx_check(lambda x: double(x), x, rules=[Rule("kit::double", right)], dynamic_shapes=shapes, opsets=(18, 21))
    with pytest.raises(VerificationError, match="differs"):
        onnx_check(lambda x: double(x), x, rules=[Rule("kit::double", wrong_for_large)], dynamic_shapes=shapes)
    edge = [(torch.tensor([[-1.0, float("nan"), 0.0, 1.0]]),)]
    positive = x.abs() + 1
    rules = [Rule("kit::double", wrong_for_negative)]
    with pytest.raises(VerificationError, match="differs"):
        onnx_check(lambda x: double(x), positive, rules=rules, dynamic_shapes=shapes, inputs=edge)
    with pytest.raises(onnxplug.MissingRuleError) as caught:
        onnx_check(lambda x: double(x), x, rules=[Rule("kit::double", right, opset=(None, 18))], opsets=(18, 19))
    assert "onnx_check: at opset 19" in caught.value.__notes__[0]


def test_the_isolated_registry_is_put_back(isolated_registry: IsolatedRegistry) -> None:
    with pytest.raises(onnxplug.MissingRuleError):
        onnxplug.to_onnx(lambda x: double(x), (torch.randn(2),))
    isolated_registry.add(Rule("kit::double", right))
    program = onnxplug.to_onnx(lambda x: double(x), (torch.randn(2),), verify=True)
    assert [n.op_type for n in program.model.graph] == ["Mul"]
    assert [row.source for row in isolated_registry.explain("kit::double") if row.taken] == ["test"]
    with IsolatedRegistry().active(), pytest.raises(onnxplug.MissingRuleError):
        onnxplug.to_onnx(lambda x: double(x), (torch.randn(2),))
    onnxplug.to_onnx(lambda x: double(x), (torch.randn(2),))
    with pytest.raises(UsageError, match="takes Rule objects"):
        isolated_registry.add("kit::double")  # type: ignore[arg-type]


def test_samples_go_through_every_opset_promised(isolated_registry: IsolatedRegistry) -> None:
    isolated_registry.add_plugin(Plugin(right), name="kit")
    cases = sample_cases("kit")
    assert [str(case) for case in cases] == [f"kit::double-opset{opset}" for opset in (18, 19, 20)]
    assert cases[0].check().model.opset_imports[""] == 18
    with pytest.raises(PluginError, match="no plugin 'ghost'"):
        sample_cases("ghost")
    only = OpSample("kit::double", (torch.ones(2),), opsets=(19, 21))
    assert [c.opset for c in cases_of("kit", [only], [Rule("kit::double", right, opset=(18, 20))])] == [19]


def test_inputs_that_a_sample_is_compared_on(isolated_registry: IsolatedRegistry) -> None:
    """Random inputs unless the sample names others; of several results only the results that it names."""
    isolated_registry.add(Rule("kit::double", wrong_for_negative))
    args = (torch.full((3, 4), 1.5),)

    def check(**options: Any) -> None:
        cases_of("kit", [OpSample("kit::double", args, opsets=(18,), **options)], [])[0].check()

    check(others=())
    check(others=[lambda: (torch.ones(3, 4),), (torch.zeros(3, 4),)])
    for options in ({}, {"others": [(torch.ones(3, 4),), lambda: (-torch.ones(3, 4),)]}):
        with pytest.raises(VerificationError, match="differs"):
            check(**options)

    def first_alone(g: Any, node: Any) -> list[Any]:
        values, indices = g.op.TopK(node.args[0], [2], axis=0, _outputs=2)
        return [values, g.op.Neg(indices)]

    isolated_registry.add(Rule("aten::topk", first_alone, override=True))
    sample = OpSample("aten::topk", (torch.tensor([3.0, 1.0, 2.0]), 2), opsets=(18,), results=(0,))
    cases_of("kit", [sample], [])[0].check()
    with pytest.raises(VerificationError, match="differs"):
        cases_of("kit", [dataclasses.replace(sample, results=None)], [])[0].check()


def test_a_sample_with_a_dtype() -> None:
    with torch.library._scoped_library("kit", "FRAGMENT") as library:
        library.define("as_dtype(Tensor x, ScalarType dtype) -> Tensor")
        library.impl("as_dtype", lambda x, dtype: x.to(dtype), "CompositeImplicitAutograd")
        sample = OpSample("kit::as_dtype", (torch.tensor([1.5, -2.5]), torch.int32), opsets=(18,))
        program = cases_of("kit", [sample], [])[0].check()
    assert [node.op_type for node in program.model.graph] == ["Cast"]


def test_onnx_check_without_random_inputs(onnx_check: Any, isolated_registry: IsolatedRegistry) -> None:
    isolated_registry.add(Rule("kit::double", wrong_for_negative))
    onnx_check(lambda x: double(x), torch.full((3, 4), 1.5), seeds=(), inputs=[(torch.zeros(3, 4),)])
    with pytest.raises(VerificationError, match="differs"):
        onnx_check(lambda x: double(x), torch.full((3, 4), 1.5))


@pytest.mark.parametrize(
    ("converter", "options"), [(wrong_for_negative, {}), (wrong_for_large, {"dynamic_shapes": ({0: "rows"},)})]
)
def test_a_sample_that_is_not_kept(
    isolated_registry: IsolatedRegistry, converter: Callable[..., Any], options: dict[str, Any]
) -> None:
    isolated_registry.add_plugin(Plugin(converter, **options), name="kit")
    with pytest.raises(VerificationError, match="the sample of kit::double of kit at opset 18: output"):
        sample_cases("kit")[0].check()


def test_a_sample_with_values_that_mean_something(isolated_registry: IsolatedRegistry) -> None:
    """The sample is compared on its own values alone: a fault at other values is not found, a fault at these is."""
    isolated_registry.add_plugin(Plugin(wrong_for_negative, others=()), name="kit")
    sample_cases("kit")[0].check()
    negative = OpSample("kit::double", (torch.full((2,), -1.5),), others=())
    with pytest.raises(VerificationError):
        cases_of("kit", [negative], [Rule("kit::double", wrong_for_negative, opset=(18, 20))])[0].check()


@pytest.mark.parametrize("library", ["nosuchlib", "nosuchlib.ops", "json.nosuch", "..ops", ""])
def test_a_library_that_is_not_installed(library: str, isolated_registry: IsolatedRegistry) -> None:
    class Absent:
        @hookimpl
        def onnxplug_rules(self) -> list[Rule]:
            return [Rule("nosuchspace::f", right)]

        @hookimpl
        def onnxplug_info(self) -> PluginInfo:
            return PluginInfo(namespaces=("nosuchspace",), libraries=(library,))

    isolated_registry.add_plugin(Absent(), name="absent")
    findings = check_plugins(Selection(), name="absent")
    assert {finding.kind: finding.severity for finding in findings} == {
        "absent library": "note",
        "sample": "note",
        "rules": "ok",
    }

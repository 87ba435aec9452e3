"""How a rule is chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from onnxplug.errors import PluginError, RuleConflictError, UsageError
from onnxplug.registry.registry import Layer, OnnxRegistry, RuleWarning
from onnxplug.registry.rule import Rule
from onnxplug.registry.target import Target, check_runtime


def rule(op: str, name: str, source: str = "", **options: Any) -> Rule:
    def convert(g: Any, node: Any) -> None:
        return None

    convert.__qualname__ = name
    made = Rule(op, convert, **options)
    made.source = source
    return made


def node(op: str, **attributes: Any) -> Any:
    return SimpleNamespace(op_name=op, **attributes)


def names(registry: OnnxRegistry, op: str, opset: int = 21, **domains: int) -> list[str]:
    target = Target(opset, {"": opset, **domains})
    return [r.name.partition(":")[2] for r in registry.candidates(node(op), target)]


def test_layers_then_closeness_then_priority_then_opset() -> None:
    builtin = [
        rule("a::f", "packet"),
        rule("a::f.x", "old"),
        rule("a::f.x", "new", opset=(18, None)),
        rule("a::f.x", "first", priority=5),
    ]
    plugin = [rule("a::f", "plugin packet", "p", override=True), rule("a::f.x", "plugin", "p", override=True)]
    call = [rule("a::f", "call")]
    registry = OnnxRegistry(builtin, plugin, call)
    assert names(registry, "a::f.x") == ["call", "plugin", "plugin packet", "first", "new", "old", "packet"]
    assert names(registry, "a::f.x", 17) == ["call", "plugin", "plugin packet", "first", "old", "packet"]
    assert names(registry, "a::f.default") == ["call", "plugin packet", "packet"]
    assert names(registry, "a::g.x") == []


def test_opset_ranges_are_inclusive() -> None:
    registry = OnnxRegistry([rule("a::f.x", "f", opset=(15, 18))])
    assert [opset for opset in range(13, 21) if names(registry, "a::f.x", opset)] == [15, 16, 17, 18]


def test_domains_and_predicates() -> None:
    registry = OnnxRegistry([
        rule("a::f.x", "fused", domains={"com.microsoft": 1}, priority=1),
        rule("a::f.x", "halves", when=lambda n: n.half, priority=2),
        rule("a::f.x", "plain"),
    ])  # fmt: skip
    target = Target(21, {"": 21})
    assert [r.name.partition(":")[2] for r in registry.candidates(node("a::f.x", half=True), target)] == [
        "halves",
        "plain",
    ]
    assert [r.name.partition(":")[2] for r in registry.candidates(node("a::f.x", half=False), target)] == ["plain"]
    with_domain = Target(21, {"": 21, "com.microsoft": 1})
    assert registry.find(node("a::f.x", half=False), with_domain).name.endswith("fused")  # type: ignore[union-attr]


def test_conflicts_only_where_the_operator_is_met() -> None:
    plugin = [rule("a::f", "one", "dist-a"), rule("a::f", "two", "dist-b"), rule("a::g", "g", "dist-a")]
    registry = OnnxRegistry([], plugin)
    assert names(registry, "a::g.default") == ["g"]
    with pytest.raises(RuleConflictError, match=r"both translate a::f\.default") as caught:
        names(registry, "a::f.default")
    assert "--prefer" in str(caught.value)
    assert names(OnnxRegistry([], plugin, prefer={"a::f": "dist-b"}), "a::f.default") == ["two", "one"]
    by_priority = [rule("a::f", "one", "dist-a", priority=1), rule("a::f", "two", "dist-b")]
    assert names(OnnxRegistry([], by_priority), "a::f.default") == ["one", "two"]
    with pytest.raises(UsageError, match="has no rule"):
        OnnxRegistry([], plugin, prefer={"a::f": "dist-c"})


def test_one_distribution_must_not_state_a_rule_twice() -> None:
    with pytest.raises(PluginError, match="two rules for a::f"):
        OnnxRegistry([], [rule("a::f", "one", "d"), rule("a::f", "two", "d")])


def test_explain() -> None:
    builtin = [rule("a::f.x", "old", opset=(None, 19)), rule("a::f.x", "new", opset=(20, None))]
    plugin = [rule("a::f.x", "conditional", "p", override=True, when=lambda n: False)]
    registry = OnnxRegistry(builtin, plugin)
    candidates = registry.explain("a::f.x", Target(21, {"": 21}))
    assert [(e.rule.name.partition(":")[2], e.layer, e.taken) for e in candidates] == [
        ("conditional", Layer.PLUGIN, False),
        ("new", Layer.BUILTIN, True),
        ("old", Layer.BUILTIN, False),
    ]
    assert "holds up to opset 19" in candidates[-1].reason
    assert {e.rule.name for e in registry.explain("a::f", Target(21, {"": 21}))} == {e.rule.name for e in candidates}


def test_converters_by_name_are_imported_late() -> None:
    lazy = Rule("a::f", "json:dumps")
    import json

    assert lazy.resolve() is json.dumps
    with pytest.raises(PluginError, match="cannot import 'nowhere:f'"):
        Rule("a::f", "nowhere:f").resolve()


def test_many_plugins_cost_time_in_proportion() -> None:
    """200 plugins of 50 rules: a scan of the table for each of them took 15 seconds (see benchmarks/plugins.py)."""
    import time

    builtin = [rule(f"aten::f{i}.{o}", "builtin") for i in range(250) for o in "abcd"]
    plugin = [rule(f"p{p}::f{i}", "plugin", f"dist-{p}") for p in range(200) for i in range(50)]
    started = time.process_time()
    registry = OnnxRegistry(builtin, plugin)
    assert time.process_time() - started < 1.5
    assert len(registry) == 11_000
    assert registry.refused == []
    shadowing = [rule("aten::f7", "all overloads", "d"), rule("aten::f8.c", "one", "d"), rule("aten::f9.z", "new", "d")]
    with pytest.warns(RuleWarning):
        assert OnnxRegistry(builtin, shadowing).refused == shadowing[:2]


def for_target(registry: OnnxRegistry, runtime: str | None, exact: bool = False) -> list[str]:
    candidates = registry.candidates(node("a::f.x"), Target(21, {"": 21}, runtime, exact))
    return [r.name.partition(":")[2] for r in candidates]


def test_targets_nest_and_the_closer_goes_first() -> None:
    registry = OnnxRegistry([
        rule("a::f.x", "plain", opset=(18, None)),
        rule("a::f.x", "ort", target="onnxruntime"),
        rule("a::f.x", "cpu", target="onnxruntime:cpu"),
        rule("a::f.x", "several", target=("openvino", "qnn:htp")),
    ])  # fmt: skip
    assert for_target(registry, None) == ["plain"]
    assert for_target(registry, "onnxruntime") == ["ort", "plain"]
    assert for_target(registry, "onnxruntime:cpu") == ["cpu", "ort", "plain"]
    assert for_target(registry, "onnxruntime:cuda") == ["ort", "plain"]
    assert for_target(registry, "onnxruntimes") == ["plain"]
    assert for_target(registry, "openvino:gpu") == ["several", "plain"]
    assert for_target(registry, "qnn") == ["plain"]
    assert for_target(registry, "qnn:htp") == ["several", "plain"]
    assert registry.targets() == {"onnxruntime", "onnxruntime:cpu", "openvino", "qnn", "qnn:htp"}


def test_priority_goes_before_the_target() -> None:
    rules = [rule("a::f.x", "ort", target="onnxruntime"), rule("a::f.x", "first", priority=1)]
    assert for_target(OnnxRegistry(rules), "onnxruntime") == ["first", "ort"]


def test_exact_rules_go_first_with_exact() -> None:
    registry = OnnxRegistry([
        rule("a::f.x", "any", opset=(18, None)),
        rule("a::f.x", "exactly", exact=True),
        rule("a::f.x", "plainly", exact=False),
    ])  # fmt: skip
    assert for_target(registry, None) == ["plainly", "any"]
    assert for_target(registry, "onnxruntime", exact=True) == ["exactly", "any"]


def test_a_plugin_does_not_shadow_rules_that_never_hold_with_its_own() -> None:
    builtin = [rule("a::f.x", "ort", target="onnxruntime"), rule("a::g.x", "g", exact=False)]
    plugin = [
        rule("a::f.x", "vino", "d", target="openvino"),
        rule("a::g.x", "g", "d", exact=True),
    ]
    assert OnnxRegistry(builtin, plugin).refused == []
    shadowing = [rule("a::f.x", "cpu", "d", target="onnxruntime:cpu"), rule("a::g.x", "any", "d")]
    with pytest.warns(RuleWarning):
        assert OnnxRegistry(builtin, shadowing).refused == shadowing


def test_equal_conditions_of_any_kind_are_refused() -> None:
    twice = {"target": "onnxruntime", "exact": True}
    with pytest.raises(PluginError, match="same conditions"):
        OnnxRegistry([rule("a::f", "one", **twice), rule("a::f", "two", **twice)])
    for other in ({"target": "openvino", "exact": True}, {"target": "onnxruntime"}):
        OnnxRegistry([rule("a::f", "one", **twice), rule("a::f", "two", **other)])


def test_explain_gives_target_exactness_and_reason() -> None:
    registry = OnnxRegistry([
        rule("a::f.x", "plain"),
        rule("a::f.x", "cpu", target="onnxruntime:cpu", reason="it has no kernel for int8"),
        rule("a::f.x", "exactly", exact=True, reason="NaN goes first"),
    ])  # fmt: skip

    def reasons(runtime: str | None, exact: bool) -> list[str]:
        candidates = registry.explain("a::f.x", Target(21, {"": 21}, runtime, exact))
        return [f"{e.rule.name.partition(':')[2]}: {e.reason}" for e in candidates]

    assert reasons("onnxruntime", False) == [
        "plain: builtin, every opset",
        "cpu: holds for the target onnxruntime:cpu, not for onnxruntime: it has no kernel for int8",
        "exactly: applies only with exact=True: NaN goes first",
    ]
    assert reasons("onnxruntime:cpu", True)[0].endswith("every opset, for onnxruntime:cpu: it has no kernel for int8")
    assert reasons(None, True)[0] == "exactly: builtin, every opset, exact special values: NaN goes first"


def test_malformed_conditions() -> None:
    for name in ("ONNXRuntime", "onnxruntime:", ":cpu", "", 3):
        with pytest.raises(UsageError, match="a target is a lower-case name"):
            rule("a::f", "f", target=[name])
    with pytest.raises(UsageError, match="exact must be True, False or None"):
        rule("a::f", "f", exact="yes")


def test_unknown_targets_are_an_error_that_suggests() -> None:
    known = {"onnxruntime:cpu", "openvino"}
    for runtime in (None, "onnxruntime", "onnxruntime:cpu", "openvino"):
        assert check_runtime(runtime, known) == runtime
    for runtime, near in (
        ("onnxruntme", "'onnxruntime'"),
        ("OpenVINO", "'openvino'"),
        ("onnxruntime:cup", "'onnxruntime:cpu'"),
    ):
        with pytest.raises(UsageError, match="is unknown") as caught:
            check_runtime(runtime, known)
        assert f"Did you mean {near}?" in str(caught.value)
    with pytest.raises(UsageError, match="None for portable ONNX"):
        check_runtime("zzz", known)

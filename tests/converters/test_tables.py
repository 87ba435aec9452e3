"""The rule tables: every rule is for an operator that torch has, and every docstring says the operator's own schema."""

from __future__ import annotations

import re

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
import torch.onnx.ops  # registers onnx and onnx_symbolic

from onnxplug.plugins.builtin import families
from onnxplug.registry.rule import Rule

SPACES = ("aten::", "prims::", "quantized_decomposed::", "onnx::", "onnx_symbolic::")
SCHEMA = re.compile(r"^(\w+(?:\.\w+)?)\((.*)\) -> ")
RULES: list[tuple[str, Rule]] = [(family.__name__, rule) for family in families() for rule in family.RULES]


def overload(name: str) -> torch._ops.OpOverload | None:
    namespace, _, rest = name.partition("::")
    packet, _, which = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    return getattr(found, which or "default", None) if found is not None else None


@pytest.mark.parametrize("op", sorted({rule.op for _, rule in RULES if rule.op.startswith(SPACES)}))
def test_rule_is_for_an_operator_of_torch(op: str) -> None:
    assert overload(op) is not None, f"torch has no {op}: the rule can never be used"


@pytest.mark.parametrize("name", sorted({rule.name for _, rule in RULES}))
def test_docstring_is_the_schema(name: str) -> None:
    function = next(rule for _, rule in RULES if rule.name == name).resolve()
    first = (function.__doc__ or "").strip().splitlines()
    if not first or not SCHEMA.match(first[0]):
        # A row of a table of identical operators, or a Python function: what it is for stands on its factory.
        return
    match = SCHEMA.match(first[0])
    assert match is not None
    found = [overload(f"{space}{match[1]}") for space in SPACES]
    schemas = [str(op._schema).partition("::")[2] for op in found if op is not None]
    assert first[0] in schemas


def test_no_rule_stands_twice() -> None:
    seen = [(rule.op, rule.opset, rule.target, rule.exact) for _, rule in RULES]
    assert len(seen) == len(set(seen)), sorted({s for s in seen if seen.count(s) > 1})

"""The rule tables: every rule is for an operator of torch, and every docstring states the operator's own schema."""

from __future__ import annotations

import re
import sys
from collections import defaultdict

import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
import torch.onnx.ops  # registers onnx and onnx_symbolic

from onnxplug.capture import sides
from onnxplug.plugins.builtin import families
from onnxplug.registry.names import without_prefix
from onnxplug.registry.rule import Rule

SPACES = ("aten::", "prims::", "quantized_decomposed::", "onnx::", "onnx_symbolic::")
SCHEMA = re.compile(r"^(\w+(?:\.\w+)?)\((.*)\) -> ")
RULES: list[tuple[str, Rule]] = [(family.__name__, rule) for family in families() for rule in family.RULES]


#: Operators that only the oldest or only the newest of the tested releases of torch has.
ONLY = {
    "aten::cholesky.default": "2.13",
    "aten::linalg_matrix_sqrth.default": "2.15",
    "aten::linalg_polar.default": "2.15",
}


def of_another_torch(op: str) -> bool:
    """Whether the installed torch is expected not to have an operator."""
    return op in ONLY and not torch.__version__.startswith(f"{ONLY[op]}.")


def overload(name: str) -> torch._ops.OpOverload | None:
    namespace, _, rest = name.partition("::")
    packet, _, which = rest.partition(".")
    result = getattr(getattr(torch.ops, namespace), packet, None)
    return getattr(result, which or "default", None) if result is not None else None


def test_rules_are_for_operators_of_torch() -> None:
    ops = {rule.op for _, rule in RULES if rule.op.startswith(SPACES)}
    present = {op for op in ops if overload(op) is not None}
    expected = {op for op in ops if not of_another_torch(op)}
    assert present - expected == set(), f"torch {torch.__version__} has them; their rows in ONLY are wrong"
    assert expected - present == set(), "torch has none of them: their rules can never be used"


#: Operators that have no ATen schema: Python's functions on sizes, higher-order operators, and a library that tests may lack.
WITHOUT_SCHEMA = re.compile(r"(_operator|torch|math|builtins|torchao)::|(quantized:)?\w+$")
#: Converters for dozens of operators at once, by the kinds of the operators' arguments.
FOR_MANY = {"partwise", "partwise_mixed", "moved", "shape_of"}


def schemas_of(op: str) -> list[str]:
    """The schemas of an overload, or of every overload of a packet, without the namespace."""
    name = without_prefix(op)
    namespace, _, rest = name.partition("::")
    if "." in rest:
        overloads = [overload(name)]
    else:
        packet = getattr(getattr(torch.ops, namespace), rest)
        overloads = [getattr(packet, which) for which in packet.overloads()]
    return [str(one._schema).partition("::")[2] for one in overloads if one is not None]


def test_docstrings_are_schemas() -> None:
    """A function's docstring begins with the schema of an operator that it translates; a factory says what it makes."""
    sides._library()  # which defines an operator once a branch is selected
    operators: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for _, rule in RULES:
        operators[rule.resolve().__module__, rule.resolve().__doc__].append(rule.op)
    for function in {id(f): f for f in (rule.resolve() for _, rule in RULES)}.values():
        name = f"{function.__module__}.{function.__qualname__}"
        doc = (function.__doc__ or "").strip()
        factory = function.__code__.co_qualname.partition(".<locals>")[0]
        if not doc and factory != function.__code__.co_qualname:
            assert (getattr(sys.modules[function.__module__], factory).__doc__ or "").strip(), name
            continue
        assert doc, name
        # Functions made of one, for several ranks or overloads, share its docstring.
        ops = operators[function.__module__, function.__doc__]
        if all(WITHOUT_SCHEMA.match(op) for op in ops) or function.__name__ in FOR_MANY:
            assert not SCHEMA.match(doc), name
            continue
        if all(of_another_torch(op) for op in ops):
            assert SCHEMA.match(doc), name
            continue
        assert doc.splitlines()[0] in [schema for op in ops for schema in schemas_of(op)], name


def test_no_rule_stands_twice() -> None:
    seen = [(rule.op, rule.opset, rule.target, rule.exact) for _, rule in RULES]
    assert len(seen) == len(set(seen)), sorted({s for s in seen if seen.count(s) > 1})

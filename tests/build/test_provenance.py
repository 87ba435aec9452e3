"""The provenance of nodes, and its traces in nodes of rewrites."""

from __future__ import annotations

import ast

from onnxplug.build.provenance import NAMESPACE, REPLACED, REWRITE, Named, Provenance, Rewritten, WithProperties


def test_replaced_nodes_are_those_before_any_rewrite() -> None:
    add, mul = Provenance("add", "aten.add.Tensor", "layer"), Provenance("mul", "aten.mul.Tensor", "layer")
    first = Rewritten(add, "one")
    first.replaced = [("Add", add), ("Mul", mul)]
    second = Rewritten(first, "two")
    second.replaced = [("Fused", first), ("Mul", mul)]
    metadata = second.metadata(full=True)
    assert metadata[NAMESPACE] == "add: aten.add.Tensor"
    assert set(metadata[REWRITE].split(", ")) == {"one", "two"}
    assert ast.literal_eval(metadata[REPLACED]) == ["add: aten.add.Tensor: Add", "mul: aten.mul.Tensor: Mul"]
    assert second.place == "layer"


def test_short_metadata_name_the_rewrite_alone() -> None:
    container = Rewritten(Provenance("add", "aten.add.Tensor"), "one")
    container.replaced = [("Add", Provenance("add", "aten.add.Tensor"))]
    assert container.metadata(full=False) == {NAMESPACE: "add: aten.add.Tensor", REWRITE: "one"}


def test_thousands_of_rewrites_in_a_chain() -> None:
    start = Provenance("start", "kind")
    current: Provenance = start
    for _ in range(20_000):
        following = Rewritten(current, "again")
        following.replaced = [("Op", current)]
        current = following
    metadata = current.metadata(full=True)
    assert metadata[REWRITE] == "again"
    assert ast.literal_eval(metadata[REPLACED]) == ["start: kind: Op"]


def test_additional_metadata_and_names_in_words() -> None:
    before = Provenance("add", "aten.add.Tensor", "layer", call="3")
    more = WithProperties(before, {"key": "value"})
    assert more.metadata(full=False) == {NAMESPACE: "add: aten.add.Tensor", "key": "value"}
    assert (more.place, more.call, more.title) == ("layer", "3", before.title)
    assert Named(before, "check: it holds").words == "check: it holds"
    assert before.words is None

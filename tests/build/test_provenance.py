"""Where nodes come from: what rewrites leave of it."""

from __future__ import annotations

import ast

from onnxplug.build.provenance import NAMESPACE, REPLACED, REWRITE, Named, Provenance, Rewritten, WithProperties


def test_what_was_rewritten_is_what_was_there_before_any_rewrite() -> None:
    add, mul = Provenance("add", "aten.add.Tensor", "layer"), Provenance("mul", "aten.mul.Tensor", "layer")
    first = Rewritten(add, "one")
    first.replaced = [("Add", add), ("Mul", mul)]
    second = Rewritten(first, "two")
    second.replaced = [("Fused", first), ("Mul", mul)]
    said = second.metadata(full=True)
    assert said[NAMESPACE] == "add: aten.add.Tensor"
    assert set(said[REWRITE].split(", ")) == {"one", "two"}
    assert ast.literal_eval(said[REPLACED]) == ["add: aten.add.Tensor: Add", "mul: aten.mul.Tensor: Mul"]
    assert second.place == "layer"


def test_short_metadata_name_the_rewrite_alone() -> None:
    found = Rewritten(Provenance("add", "aten.add.Tensor"), "one")
    found.replaced = [("Add", Provenance("add", "aten.add.Tensor"))]
    assert found.metadata(full=False) == {NAMESPACE: "add: aten.add.Tensor", REWRITE: "one"}


def test_thousands_of_rewrites_one_after_the_other() -> None:
    start = Provenance("start", "kind")
    current: Provenance = start
    for _ in range(20_000):
        following = Rewritten(current, "again")
        following.replaced = [("Op", current)]
        current = following
    said = current.metadata(full=True)
    assert said[REWRITE] == "again"
    assert ast.literal_eval(said[REPLACED]) == ["start: kind: Op"]


def test_further_metadata_and_names_in_words() -> None:
    before = Provenance("add", "aten.add.Tensor", "layer", call="3")
    further = WithProperties(before, {"key": "value"})
    assert further.metadata(full=False) == {NAMESPACE: "add: aten.add.Tensor", "key": "value"}
    assert (further.place, further.call, further.title) == ("layer", "3", before.title)
    assert Named(before, "check: it holds").words == "check: it holds"
    assert before.words is None

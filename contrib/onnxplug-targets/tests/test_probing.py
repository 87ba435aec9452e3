"""Tables made of answers: they give the provider's outcome for every node that was asked about."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir
import pytest
from onnxplug_targets.features import features
from onnxplug_targets.forms import forms, model_of, types_of, variants, versions_of
from onnxplug_targets.prediction import Judge
from onnxplug_targets.table import condensed

#: Made-up providers: the outcome of a node by its features.
PROVIDER: dict[str, Callable[[frozenset[str]], str]] = {
    "one type": lambda found: "takes" if "T=float" in found else "leaves",
    "a type of one mode": lambda found: "breaks" if {"mode=reflect", "T=int32"} <= found else "takes",
    "few ranks, and constants": lambda found: (
        "leaves" if found & {"rank 0", "rank 5", "input 1 computed", "dynamic"} else "takes"
    ),
    "nothing": lambda found: "leaves",
}


def _asked(operators: set[str]) -> list[tuple[str, int, ir.Node, int]]:
    results = []
    for form in (form for form in forms() if form.op in operators):
        for since in versions_of(form.op, 13, 21):
            if not form.versions[0] <= since <= form.versions[1]:
                continue
            for index, types in enumerate(types_of(form, since)):
                for variant in variants(form) if index == 0 else (form,):
                    opset = max(since, 13)
                    model, _ = model_of(variant, since, types, opset)
                    try:
                        model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
                    except onnx.shape_inference.InferenceError:
                        continue
                    results.append((form.op, since, ir.from_proto(model).graph[-1], opset))
    return results


@pytest.mark.parametrize("how", PROVIDER)
def test_a_table_repeats_the_answers(how: str) -> None:
    requested = _asked({"Pad", "Abs", "Reshape", "Squeeze"})
    assert len(requested) > 300
    answers = [
        {
            "op": op,
            "since": since,
            "features": sorted(entry),
            "outcome": outcome,
            "why": outcome * (outcome == "breaks"),
        }
        for op, since, node, opset in requested
        for entry in [features(node, opset)]
        for outcome in [PROVIDER[how](entry)]
    ]
    judge = Judge(condensed(answers))
    for (_, _, node, opset), answer in zip(requested, answers, strict=True):
        judged = judge.judge(node, opset)
        verb = "takes" if judged is None else "breaks" if judged[1] else "leaves"
        assert verb == answer["outcome"], (answer, judged)


def test_unprobed_operators_are_not_taken() -> None:
    plain = _node("y = Pad (x, p)")
    row = {"op": "Pad", "since": 21, "features": sorted(features(plain, 21)), "outcome": "takes", "why": ""}
    judge = Judge(condensed([row]))
    assert judge.judge(plain, 21) is None
    assert judge.judge(_node('y = Pad <mode = "edge"> (x, p)'), 21) == ("mode=edge is not in the table", "")
    assert judge.judge(_node("y = Abs (x)"), 21) == ("no kernel", "")
    assert judge.judge(plain, 23) == ("no kernel of version 23, but of 21", "")


def _node(text: str) -> ir.Node:
    graph = onnx.parser.parse_graph(f"g (float[2] x) => (float[4] y) <int64[2] p = {{1, 1}}> {{ {text} }}")
    return ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])).graph[0]

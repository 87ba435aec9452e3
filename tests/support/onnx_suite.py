"""onnx's own backend test suite: nodes, small models, and models that PyTorch converted."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import numpy as np
import onnx
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner


@functools.cache
def node_cases() -> dict[str, Any]:
    """The tests of single operators, by name; made by onnx's own functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: case for case in collect_testcases(None)}


@functools.cache
def model_cases() -> dict[str, Any]:
    """The tests of small models, by kind and name; real networks are left out, as their weights are not there."""
    kinds = ("simple", "pytorch-converted", "pytorch-operator")
    return {f"{kind}/{case.name}": case for kind in kinds for case in load_model_tests(kind=kind)}


def passes(evaluator: type, case: Any) -> str | None:
    """Runs a test; returns its error, ``None`` where it passes."""
    try:
        model = case.model if case.model is not None else onnx.load(os.path.join(case.model_dir, "model.onnx"))
        sets = case.data_sets if case.data_sets is not None else _stored(case.model_dir, model)
        session = evaluator(model)
        for inputs, expected in sets:
            feeds = dict(zip(session.input_names, [_array(x) for x in inputs], strict=False))
            got = session.run(None, feeds)
            same(got, [_array(x) for x in expected], case.rtol, case.atol)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def same(got: list[Any], expected: list[Any], rtol: float, atol: float) -> None:
    """onnx's comparison; sequences element by element, as onnx can't compare sequences of scalars."""
    assert len(got) == len(expected)
    for actual, wanted in zip(got, expected, strict=True):
        if isinstance(wanted, list):
            assert isinstance(actual, list)
            same(actual, wanted, rtol, atol)
        elif wanted is None:
            assert actual is None
        else:
            Runner.assert_similar_outputs([wanted], [actual], rtol, atol)


def _array(value: Any) -> Any:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _stored(folder: str, model: onnx.ModelProto) -> list[tuple[list[Any], list[Any]]]:
    """Inputs and outputs in the files of a test."""
    sets = []
    for name in sorted(os.listdir(folder)):
        if name.startswith("test_data_set_"):
            path = os.path.join(folder, name)
            sets.append((_read(path, "input", model.graph.input), _read(path, "output", model.graph.output)))
    return sets


def _read(folder: str, kind: str, declared: Any) -> list[Any]:
    values: list[Any] = []
    for number, value in enumerate(declared):
        path = os.path.join(folder, f"{kind}_{number}.pb")
        if not os.path.exists(path):
            break
        with open(path, "rb") as file:
            content = file.read()
        if value.type.HasField("sequence_type"):
            values.append(onnx.numpy_helper.to_list(onnx.SequenceProto.FromString(content)))
        elif value.type.HasField("optional_type"):
            values.append(onnx.numpy_helper.to_optional(onnx.OptionalProto.FromString(content)))
        else:
            values.append(np.asarray(onnx.numpy_helper.to_array(onnx.TensorProto.FromString(content))))
    return values

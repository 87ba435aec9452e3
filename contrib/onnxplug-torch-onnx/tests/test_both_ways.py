"""The same call both ways: by ``torch.onnx.export`` and by ``onnxplug.export``."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch.onnx import TrainingMode
from torch.utils import _pytree

import onnxplug
from tests.support.sampling import rotated
from tests.support.tolerances import looser
from tests.support.torch_onnx_calls import CALLS, Call, tensors_of


def exported(export: Any, call: Call, path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """The return value of the export, and the file."""
    path.mkdir()
    monkeypatch.chdir(path)
    options = copy.deepcopy(call.options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        returned = export(call.model(), copy.deepcopy(call.args), "model.onnx", **options)
    return returned, path / "model.onnx"


def run(path: Path, tensors: list[torch.Tensor], *, quiet: bool) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    if quiet:  # torch's exporter states wrong sizes of an LSTM's results
        options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options)
    names = [value.name for value in session.get_inputs()][: len(tensors)]
    assert len(names) == len(tensors)
    results: list[np.ndarray] = session.run(None, {n: t.numpy() for n, t in zip(names, tensors, strict=True)})
    return results


def in_own_form(call: Call) -> tuple[Any, dict[str, Any]]:
    """The example inputs of a call."""
    model = call.model()
    if isinstance(model, getattr(torch.onnx, "ExportableModule", ())):
        return model.example_arguments()  # type: ignore[return-value]
    if isinstance(model, torch.export.ExportedProgram):
        return model.example_inputs  # type: ignore[return-value]
    args, kwargs = (call.args,) if isinstance(call.args, torch.Tensor) else call.args, call.options.get("kwargs", {})
    return (args[:-1], args[-1]) if args and isinstance(args[-1], dict) else (args, kwargs)


def eager(call: Call, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    model = call.model()
    model = model.module() if isinstance(model, torch.export.ExportedProgram) else model
    if call.options.get("training", TrainingMode.EVAL) == TrainingMode.TRAINING:
        model.train()
    elif call.options.get("dynamo") is False and isinstance(model, torch.nn.Module):
        model.eval()
    with torch.no_grad():
        return _pytree.tree_leaves(model(*args, **kwargs))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", rotated(CALLS, every=6))
@pytest.mark.long
def test_same_call_both_ways(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[name]
    theirs, their_file = exported(torch.onnx.export, call, tmp_path / "torch", monkeypatch)
    ours, our_file = exported(onnxplug.export, call, tmp_path / "onnxplug", monkeypatch)
    assert (theirs is None) == (ours is None)
    assert isinstance(ours, torch.onnx.ONNXProgram | None)
    for positional, keywords in (in_own_form(call), call.other):
        expected = eager(call, positional, keywords)
        tensors = tensors_of(call, call.model(), positional, keywords)
        for path in (their_file, our_file):
            results = run(path, tensors, quiet=path == their_file)
            assert len(results) == len(expected)
            for result, wanted in zip(results, expected, strict=True):
                torch.testing.assert_close(torch.from_numpy(result), wanted, **looser("both ways"))
    check_signature(
        call, onnx.load(their_file, load_external_data=False), onnx.load(our_file, load_external_data=False)
    )


def check_signature(call: Call, theirs: onnx.ModelProto, ours: onnx.ModelProto) -> None:
    """The names, sizes and opset that the call asks for."""
    options = call.options
    weights = {tensor.name for model in (theirs, ours) for tensor in model.graph.initializer}
    their_inputs = [value for value in theirs.graph.input if value.name not in weights]
    our_inputs = [value for value in ours.graph.input if value.name not in weights]
    assert len(their_inputs) == len(our_inputs)
    assert len(theirs.graph.output) == len(ours.graph.output)
    # The exporter of old makes names such as onnx::Gemm_0 where no names are given.
    named = len(options.get("input_names", ())) if options.get("dynamo") is False else len(their_inputs)
    assert [v.name for v in our_inputs][:named] == [v.name for v in their_inputs][:named]
    names = len(options.get("output_names", ()))
    assert [v.name for v in ours.graph.output][:names] == [v.name for v in theirs.graph.output][:names]
    their_names = {dim for value in their_inputs for dim in sizes(value)}
    for their_value, our_value in zip(their_inputs, our_inputs, strict=True):
        for their_dim, our_dim in zip(sizes(their_value), sizes(our_value), strict=True):
            # torch's own names of sizes say nothing; of two names for one size either may stay.
            if isinstance(their_dim, int) or isinstance(our_dim, int):
                assert their_dim == our_dim
            elif not re.fullmatch(r"s\d+", their_dim):
                assert our_dim in their_names
    opset = options.get("opset_version")
    assert opset is None or [i.version for i in ours.opset_import if not i.domain] == [opset]


def sizes(value: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def test_weights_are_listed_and_named_as_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("weights as inputs", "old: weights as inputs", "old: names of weights"):
        call = CALLS[name]
        _, file = exported(onnxplug.export, call, tmp_path / name, monkeypatch)
        graph = onnx.load(file, load_external_data=False).graph
        stored, inputs = {tensor.name for tensor in graph.initializer}, {value.name for value in graph.input}
        state = list(call.model().state_dict())
        if call.options.get("keep_initializers_as_inputs"):
            assert {"linear.weight", "linear.bias"} <= stored <= inputs
        else:
            named = [f"learned_{number}" for number in range(4)]
            assert set(named) <= stored
            assert not set(state[:4]) & stored
            assert not stored & inputs


def test_the_table_is_large() -> None:
    assert len(CALLS) >= 32

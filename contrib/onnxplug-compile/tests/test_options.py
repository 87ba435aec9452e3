"""Options of the backend: effects, and clear errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from onnxplug_compile.backend import onnxplug_backend
from onnxplug_compile.options import BackendOptions, parse_options

import onnxplug

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"optimise": True}, "no option 'optimise'.*\n.*'optimize'"),
    "provider": ({"providers": ["NoSuchProvider"]}, "no execution provider 'NoSuchProvider'"),
    "providers text": ({"providers": "CPUExecutionProvider"}, "'providers'.* is a list"),
    "level": ({"optimization": "most"}, "disable, basic, extended, all"),
    "threads": ({"threads": 0}, "positive number"),
    "opset": ({"opset": 3}, "opset 3 is not supported"),
    "store": ({"store": []}, "'store'.* is a dict"),
    "transforms": ({"transforms": [3]}, "functions of a model"),
    "fallback": ({"fallback": "no"}, "True or False"),
    "rewrites": ({"rewrites": ["fuse"]}, "'rewrites'.* is a dict"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_refused_by_name(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(onnxplug.OnnxplugError, match=message):
        parse_options(options)


def test_modes() -> None:
    assert parse_options(None, "reduce-overhead") == BackendOptions()
    with pytest.raises(onnxplug.UsageError, match="'fastest' is unknown"):
        parse_options(None, "fastest")


def compiled_with(function: Any, *args: Any, **options: Any) -> tuple[Any, list[ir.Model]]:
    torch._dynamo.reset()
    store: dict[str, Any] = {}
    compiled = torch.compile(function, backend=onnxplug_backend, options={"fallback": False, "store": store, **options})
    return compiled(*args), [graph.model for graph in store["graphs"]]


def test_opset_and_target() -> None:
    _, (model,) = compiled_with(lambda x: x + 1, torch.ones(2), opset=17, target=None)
    assert model.opset_imports[""] == 17
    assert model.graph.metadata_props["onnxplug.target"].startswith("portable")


def test_rules_of_the_call() -> None:
    rule = onnxplug.Rule("aten::sin.default", lambda g, node: g.op.Cos(node.args[0]))
    got, _ = compiled_with(lambda x: x.sin(), torch.tensor([0.5]), rules=[rule])
    torch.testing.assert_close(got, torch.tensor([0.5]).cos())


def test_rewrites_by_name() -> None:
    with pytest.raises(Exception, match="there is no such rewrite"):
        compiled_with(lambda x: x + 1, torch.ones(2), rewrites={"no such": False})


def test_transforms_of_the_model() -> None:
    seen: list[ir.Model] = []
    got, (model,) = compiled_with(lambda x: x + 1, torch.ones(2), transforms=[seen.append])
    assert seen == [model]
    assert got.tolist() == [2, 2]


def test_session_options() -> None:
    got, _ = compiled_with(
        lambda x: x * 3, torch.ones(2), session_options={"enable_mem_pattern": False}, optimization="basic", threads=1
    )
    assert got.tolist() == [3, 3]
    with pytest.raises(Exception, match="no attribute 'enable_everything'"):
        compiled_with(lambda x: x * 3, torch.ones(2), session_options={"enable_everything": True})


def test_store_keeps_inputs_and_results() -> None:
    torch._dynamo.reset()
    store: dict[str, Any] = {}
    compiled = torch.compile(lambda x: x * 2, backend="onnxplug", options={"store": store})
    compiled(torch.ones(2))
    compiled(torch.zeros(2))
    (graph,) = store["graphs"]
    assert graph.kind == "inference"
    assert isinstance(graph.module, torch.fx.GraphModule)
    assert [node.op_type for node in graph.model.graph] == ["Mul"]
    assert [[t.tolist() for t in inputs] for inputs, _ in graph.calls] == [[[1, 1]], [[0, 0]]]
    assert [[t.tolist() for t in outputs] for _, outputs in graph.calls] == [[[2, 2]], [[0, 0]]]


def test_models_are_kept_on_disk(tmp_path: Path) -> None:
    def run() -> torch.Tensor:
        torch._dynamo.reset()
        options = {"cache": str(tmp_path / "models"), "fallback": False}
        compiled = torch.compile(lambda x: x.exp() + 1, backend="onnxplug", options=options)
        result: torch.Tensor = compiled(torch.zeros(3))
        return result

    assert run().tolist() == [2, 2, 2]
    (file,) = (tmp_path / "models").iterdir()
    assert file.suffix == ".onnx"
    # The model on disk is run: another model under the key is used.
    model = ir.load(file)
    for node in model.graph:
        if node.op_type == "Exp":
            node.op_type = "Sin"
    ir.save(model, file)
    assert run().tolist() == [1, 1, 1]
    file.write_bytes(b"no model")
    with pytest.warns(UserWarning, match=r"made anew, since it does not load"):
        assert run().tolist() == [2, 2, 2]
    assert run().tolist() == [2, 2, 2]

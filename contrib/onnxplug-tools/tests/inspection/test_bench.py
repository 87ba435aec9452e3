"""Measurements: turns, profiles by operator and module, the optimised graph. No test depends on speed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnx_ir as ir
import pytest
import torch
from onnxplug_tools.inspection import bench as bench_module
from onnxplug_tools.inspection.bench import EAGER, Limits, bench
from onnxplug_tools.inspection.benches import module_times, operator_changes, timing_rows, to_html
from onnxplug_tools.inspection.load import load_model
from onnxplug_tools.inspection.ort_profile import Spent, read_profile
from onnxplug_tools.inspection.view import view_with_model

import onnxplug
from onnxplug.errors import OnnxplugError, SaveError, UsageError
from onnxplug.run.session import make_session
from tests.support.onnx_files import BATCH, example, made

FEW = Limits(repeat=4)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bench")
    for name, options in (("a.onnx", {}), ("b.onnx", {"opset_version": 18})):
        onnxplug.to_onnx(*example(), folder / name, dynamic_shapes=BATCH, **options)
    return [folder / "a.onnx", folder / "b.onnx"]


def test_two_models_and_pytorch(files: list[Path], tmp_path: Path) -> None:
    model, args = example()
    threads = torch.get_num_threads()
    result = bench(files, given=[("x", args[0])], threads=1, limits=FEW, eager=lambda: model(*args), optimized=None)
    assert torch.get_num_threads() == threads
    assert [m.timing.name for m in result.models] == ["a.onnx", "b.onnx"]
    assert result.eager is not None
    assert result.eager.name == EAGER
    for timing in (*(m.timing for m in result.models), result.eager):
        assert timing.runs == 4
        assert 0 < timing.p10 <= timing.median <= timing.p90
        assert timing.ratio == pytest.approx(timing.median / result.models[0].timing.median)
    assert result.inputs == {"x": "float32[2, 3, 8, 8]"}
    for measured in result.models:
        assert measured.profile is not None
        assert measured.profile.runs == 10
        modules = {spent.name: spent for spent in measured.profile.modules}
        assert {"conv", "layers.0", "layers.0.linear", "layers.1.norm"} <= set(modules)
        assert modules["layers.0.linear"].calls == 1
        assert measured.profile.unmapped == ()
        assert sum(spent.share for spent in measured.profile.operators) == pytest.approx(1)
        assert sum(spent.seconds for spent in measured.profile.modules) == pytest.approx(measured.profile.in_nodes)
        assert measured.profile.in_nodes <= measured.profile.seconds
    json.dumps([timing_rows(result)])
    page = to_html(result, "<b>")
    assert page.startswith("<!doctype html>")
    assert "&lt;b&gt;" in page
    assert "<script" not in page
    assert page.count("<svg") == 3 + 2
    (tmp_path / "page.html").write_text(page)


def test_models_take_turns(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """In each round each model runs once, and the next round begins with the next model."""
    ran: list[str] = []

    def run(name: str) -> Callable[[], None]:
        return lambda: ran.append(name)

    seconds = bench_module._in_turns([run("a"), run("b"), run("c")], Limits(repeat=3))
    assert "".join(ran) == "abc" * 3 + "abc" + "bca" + "cab"
    assert [len(times) for times in seconds] == [3, 3, 3]
    ran.clear()
    bench_module._in_turns([run("a")], Limits(repeat=1000, seconds=0))
    assert len(ran) == 3 + 3


def test_fused_nodes_are_attributed(tmp_path: Path) -> None:
    """ONNX Runtime makes one node of a convolution and its activation, under a name of its own, and lays out the data anew."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 36, 4), torch.nn.ReLU()
    ).eval()
    onnxplug.to_onnx(model, (torch.randn(1, 3, 8, 8),), tmp_path / "m.onnx")
    (measured,) = bench([tmp_path / "m.onnx"], limits=FEW, optimized=tmp_path / "o.onnx").models
    profile = measured.profile
    assert profile is not None
    assert {name: (before, after) for name, before, after in operator_changes(measured)}["Relu"] == (2, 0)
    by_module = {spent.name for spent in profile.modules}
    assert {"0", "3"} <= by_module <= {"0", "1", "2", "3"}  # activations are in the products; 1 has a change of layout
    assert profile.unmapped == ()
    assert "Relu" not in {spent.name for spent in profile.operators}
    written = onnx.load(tmp_path / "o.onnx")
    assert [node.op_type for node in written.graph.node if node.op_type == "Relu"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "o.onnx"]
    x = np.ones((1, 3, 8, 8), np.float32)
    (got,) = make_session(str(tmp_path / "o.onnx")).run(None, {written.graph.input[0].name: x})
    torch.testing.assert_close(torch.from_numpy(got), model(torch.from_numpy(x)).detach())


def test_the_weights_of_a_large_optimised_graph_are_beside_it(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "_BESIDE", 0)
    model = torch.nn.Linear(64, 64).eval()
    onnxplug.to_onnx(model, (torch.randn(2, 64),), tmp_path / "m.onnx")
    bench([tmp_path / "m.onnx"], limits=FEW, profile=False, optimized=tmp_path / "o.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "o.onnx", "o.onnx.data"]
    x = torch.randn(2, 64)
    name = load_model(tmp_path / "o.onnx").graph.inputs[0].name
    (got,) = make_session(str(tmp_path / "o.onnx")).run(None, {name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), model(x).detach())


def _event(name: str, start: int, duration: int, op: str, category: str = "Node") -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start, "dur": duration, "tid": 1, "args": {"op_name": op}}


def test_a_node_counts_without_the_nodes_of_its_body(tmp_path: Path) -> None:
    """The first runs are left out too; neighbours that seem to be within each other are not taken for bodies."""
    events = [
        _event("model_run", 0, 90, "", "Session"),
        _event("a/Relu_kernel_time", 5, 80, "Relu"),
        _event("model_run", 100, 100, "", "Session"),
        _event("a/Relu_kernel_time", 110, 10, "Relu"),
        _event("a/Neg_kernel_time", 110, 5, "Neg"),
        _event("b/Exp_kernel_time", 135, 20, "Exp"),
        _event("made by ONNX Runtime_kernel_time", 160, 10, "Copy"),
        _event("b/If_kernel_time", 130, 50, "If"),
    ]
    (tmp_path / "p.json").write_text(json.dumps(events))
    branch = oh.make_graph(
        [oh.make_node("Exp", ["x"], ["e"], name="b/Exp")], "t", [], [oh.make_tensor_value_info("e", 1, None)]
    )
    nodes = [
        oh.make_node("Relu", ["x"], ["r"], name="a/Relu"),
        oh.make_node("Neg", ["r"], ["n"], name="a/Neg"),
        oh.make_node("Cast", ["n"], ["c"], name="b/Cast", to=9),
        oh.make_node("If", ["c"], ["y"], name="b/If", then_branch=branch, else_branch=branch),
    ]
    profile = read_profile(tmp_path / "p.json", view_with_model(ir.from_proto(made(nodes))), None, 1)
    assert profile.runs == 1
    assert profile.seconds == pytest.approx(100e-6)
    assert {s.name: round(s.seconds * 1e6) for s in profile.operators} == {
        "Exp": 20,
        "If": 20,
        "Copy": 10,
        "Relu": 10,
        "Neg": 5,
    }
    assert {s.name: round(s.seconds * 1e6) for s in profile.modules} == {"a": 15, "b": 40}
    assert [s.name for s in profile.unmapped] == ["made by ONNX Runtime"]
    assert [(s.name, round(s.seconds * 1e6)) for s in module_times(profile, 1)] == [("", 55), ("a", 15), ("b", 40)]


def test_nodes_without_a_name(tmp_path: Path) -> None:
    """ONNX Runtime makes up names for them; a model without modules is one module."""
    onnx.save(made([oh.make_node("Neg", ["x"], ["a"]), oh.make_node("Sin", ["a"], ["y"])]), tmp_path / "m.onnx")
    (measured,) = bench([tmp_path / "m.onnx"], limits=FEW).models
    assert measured.profile is not None
    assert measured.profile.unmapped == ()
    assert [(spent.name, spent.calls) for spent in measured.profile.modules] == [("", 2)]


def test_modules_down_to_a_depth() -> None:
    spent = [Spent("", 1, 1.0, 0.1), Spent("a.b", 2, 2.0, 0.2), Spent("a.c", 3, 3.0, 0.3), Spent("d", 4, 4.0, 0.4)]

    class Made:
        modules = spent
        in_nodes = 10.0

    result = {s.name: (s.calls, s.seconds, s.share) for s in module_times(Made(), 1)}  # type: ignore[arg-type]
    assert result == {"": (10, 10.0, 1.0), "a": (5, 5.0, 0.5), "d": (4, 4.0, 0.4)}


def test_errors(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no provider 'abacus'"):
        bench(files, providers=["abacus"])
    with pytest.raises(UsageError, match="one model at a time"):
        bench(files, optimized=tmp_path / "o.onnx")
    content = files[0].read_bytes()
    with pytest.raises(SaveError, match="it is the model itself"):
        bench(files[:1], optimized=files[0])
    assert files[0].read_bytes() == content
    onnx.save(made([oh.make_node("Relu", ["z"], ["y"])], inputs=[("z", ["n", 4])]), tmp_path / "z.onnx")
    with pytest.raises(UsageError, match="takes the inputs z"):
        bench([files[0], tmp_path / "z.onnx"])
    onnx.save(made([oh.make_node("Nonsense", ["x"], ["y"])]), tmp_path / "nonsense.onnx")
    with pytest.raises(OnnxplugError, match="can't load"):
        bench([tmp_path / "nonsense.onnx"])
    onnx.save(made([oh.make_node("Reshape", ["x", "s"], ["y"])], weights={"s": np.int64([7])}), tmp_path / "bad.onnx")
    with pytest.raises(OnnxplugError, match="does not run on these inputs"):
        bench([tmp_path / "bad.onnx"])

"""``options={"dump": DIR}``: each graph as a model with its inputs and expected outputs, ready to be run again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnxplug_compile.backend import onnxplug_backend
from onnxplug_compile.debug import onnxplug_debug_backend
from onnxplug_compile.dump import MOST_CALLS
from onnxplug_compile.options import parse_options
from torch import nn

import onnxplug
from onnxplug.run.session import from_ort_value, make_session, to_ort_value
from tests.support.compiled import Everything
from tests.support.tolerances import looser

BACKENDS = {"onnxplug": onnxplug_backend, "onnxplug_debug": onnxplug_debug_backend}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def load(path: Path) -> tuple[str, torch.Tensor]:
    proto = onnx.load_tensor(path)
    loaded: Any = ir.serde.deserialize_tensor(proto)
    array = np.array(loaded.numpy())
    if array.dtype.name == "bfloat16":
        return proto.name, torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return proto.name, torch.from_numpy(array)


def run_again(graph: Path) -> int:
    """Runs each call of a graph by ONNX Runtime and compares it with the expected outputs; returns their number."""
    session = make_session(str(graph / "model.onnx"))
    sets = sorted(graph.glob("test_data_set_*"))
    for data in sets:
        inputs = dict(load(path) for path in data.glob("input_*.pb"))
        expected = dict(load(path) for path in data.glob("output_*.pb"))
        assert set(inputs) == {i.name for i in session.get_inputs()}
        names = [o.name for o in session.get_outputs()]
        assert set(expected) == set(names)
        results = session.run_with_ort_values(names, {name: to_ort_value(x) for name, x in inputs.items()})
        for name, value in zip(names, results, strict=True):
            torch.testing.assert_close(from_ort_value(value), expected[name], **looser("reference, products"))
    return len(sets)


def compiled(backend: str, model: Callable[..., Any], folder: Path, **options: Any) -> Callable[..., Any]:
    options = {"dump": folder, "fallback": False, **options}
    return torch.compile(model, backend=BACKENDS[backend], options=options, dynamic=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_training(backend: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 2))
    mine = compiled(backend, model, tmp_path / "made" / "here")
    for rows in (3, 5, 3):
        mine(torch.randn(rows, 4)).sum().backward()
    graphs = sorted((tmp_path / "made" / "here").iterdir())
    assert [graph.name for graph in graphs] == ["graph_0_forward", "graph_1_backward"]
    assert [run_again(graph) for graph in graphs] == [2, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_kinds_of_values(backend: str, tmp_path: Path) -> None:
    """Numbers, a buffer, complex and half numbers, and outputs that the graph does not compute."""
    torch.manual_seed(0)
    with torch.no_grad():
        compiled(backend, Everything(), tmp_path)(torch.randn(3, 4), 2, 0.5)
        torch._dynamo.reset()
        z = torch.randn(3, dtype=torch.complex64)
        compiled(backend, lambda z, h: (z.conj() * 2, h.t() @ h), tmp_path)(z.conj(), torch.randn(2, 3).bfloat16())
    graphs = sorted(tmp_path.iterdir())
    assert [graph.name for graph in graphs] == ["graph_0_inference", "graph_1_inference"]
    assert [run_again(graph) for graph in graphs] == [1, 1]


def test_graphs_of_an_earlier_run_stay(tmp_path: Path) -> None:
    for _ in range(2):
        torch._dynamo.reset()
        compiled("onnxplug", lambda x: x + 1, tmp_path)(torch.ones(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph_0_inference", "graph_1_inference"]


def test_each_size_is_kept_once_and_not_all(tmp_path: Path) -> None:
    mine = compiled("onnxplug", lambda x: x.sin() + 1, tmp_path)
    for size in [*range(2, MOST_CALLS + 6), 3, 4]:
        mine(torch.randn(size))
    (graph,) = tmp_path.iterdir()
    assert run_again(graph) == MOST_CALLS


def test_a_failed_dump_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("onnxplug_compile.dump._write_tensor", broken)
    with pytest.raises(onnxplug.OnnxplugError, match=r"can't be kept in .*no space left"):
        compiled("onnxplug", lambda x: x + 1, tmp_path)(torch.ones(2))
    (graph,) = tmp_path.iterdir()
    assert [p.name for p in graph.iterdir()] == ["model.onnx"]
    monkeypatch.setattr("onnxplug_compile.dump.save_model", broken)
    torch._dynamo.reset()
    with pytest.raises(onnxplug.OnnxplugError, match=r"can't be kept"):
        compiled("onnxplug", lambda x: x + 2, tmp_path)(torch.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == [graph.name]
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="can't be kept"):
        got = compiled("onnxplug", lambda x: x + 2, tmp_path, fallback=True)(torch.ones(2))
    assert got.tolist() == [3, 3]


def test_calls_from_several_threads(tmp_path: Path) -> None:
    mine = compiled("onnxplug", lambda x: x.exp() * 2, tmp_path)
    mine(torch.ones(3))
    threads = [threading.Thread(target=mine, args=(torch.ones(3 + n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run_again(graph) for graph in tmp_path.iterdir()] == [4]


@pytest.mark.parametrize("backend", [None, "file"])
def test_a_folder_that_can_not_be_written(backend: str | None, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    with pytest.raises(onnxplug.UsageError, match=r"'dump'.*is not a folder that can be written"):
        parse_options({"dump": file if backend else file / "below"})
    with pytest.raises(onnxplug.UsageError, match=r"'dump'.* is a folder"):
        parse_options({"dump": 3})

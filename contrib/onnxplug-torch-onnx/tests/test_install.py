"""``as_torch_onnx``: when ``torch.onnx.export`` is onnxplug's, and in which modules and threads."""

from __future__ import annotations

import inspect
import io
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import CaptureError, Rule, UsageError, VerificationError, as_torch_onnx
from tests.support.child import run_child

X = torch.linspace(-2, 2, 8).reshape(2, 4)
#: In a list, as a name of this module would be replaced too.
TORCHS = [torch.onnx.export, torch.onnx.utils.export]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    assert [torch.onnx.export, torch.onnx.utils.export] == TORCHS


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that imported the function before, under another name."""
    made: Any = types.ModuleType("inplace_taken")
    made.to_file, made.old, made.kept = torch.onnx.export, torch.onnx.utils.export, [torch.onnx.export]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made  # type: ignore[no-any-return]


def relu(export: Any = None, **options: Any) -> Any:
    return (export or torch.onnx.export)(nn.ReLU(), (X,), **options)


def test_while_it_lasts(module: Any, tmp_path: Path) -> None:
    file = tmp_path / "relu.onnx"
    with as_torch_onnx() as exports:
        assert inspect.signature(torch.onnx.export) == inspect.signature(TORCHS[0])
        assert torch.onnx.export.__doc__ == TORCHS[0].__doc__
        program = relu()
        assert type(program) is onnxplug.OnnxProgram
        torch.testing.assert_close(program(-X)[0], (-X).relu())
        assert type(relu(module.to_file, f=file)) is onnxplug.OnnxProgram
        assert relu(f=str(file), dynamo=False) is None
        assert relu(torch.onnx.utils.export, f=io.BytesIO()) is None
        assert module.old is torch.onnx.utils.export
        later = torch.onnx.export
    assert [(e.file, e.opset, e.nodes, e.error) for e in exports] == [
        (None, 21, 1, None),
        (str(file), 21, 1, None),
        (str(file), 21, 1, None),
        (None, 21, 1, None),
    ]
    assert [module.to_file, module.old] == TORCHS
    assert type(relu(later, verbose=False)) is torch.onnx.ONNXProgram
    assert len(exports) == 4


def test_a_module_that_is_imported_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "inplace_late.py").write_text("from torch.onnx import export as taken\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with as_torch_onnx():
        import inplace_late  # type: ignore[import-not-found]

        assert inplace_late.taken is torch.onnx.export is not TORCHS[0]
    assert inplace_late.taken is TORCHS[0]


@pytest.mark.skipif(not hasattr(torch.onnx, "ExportableModule"), reason="torch.onnx has none before torch 2.10")
def test_an_exportable_module_exports_itself() -> None:
    from tests.support.torch_onnx_calls import Exportable

    with as_torch_onnx() as exports:
        program = Exportable().eval().to_onnx(opset_version=18)
    assert type(program) is onnxplug.OnnxProgram
    assert [e.opset for e in exports] == [18]
    assert [v.name for v in program.model.graph.inputs] == ["first", "second"]


def test_options_for_every_export() -> None:
    def convert(g: Any, node: Any) -> Any:
        return g.op.Max(node.args[0], 0.0)

    wrong = Rule("aten::relu", lambda g, node: g.op.Neg(node.args[0]))
    with as_torch_onnx(rules=[Rule("aten::relu", convert)], target=None, plugins=[], verify=True):
        program = relu()
    assert [node.op_type for node in program.model.graph] == ["Max"]
    assert program.model.graph.metadata_props["onnxplug.target"] == "portable"
    with as_torch_onnx(rules=[wrong], verify=True) as exports, pytest.raises(VerificationError):
        relu()
    assert [str(e.error).partition(":")[0] for e in exports] == ["VerificationError"]
    for name, hint in (("targt", "Did you mean 'target'"), ("dynamic_axes", "the program's own calls")):
        with pytest.raises(UsageError, match=rf"(?s)no option '{name}'.*{hint}"), as_torch_onnx(**{name: 1}):  # type: ignore[misc]
            pass


@pytest.mark.long
def test_verification_on_the_calls_own_inputs() -> None:
    """As torch verifies; other inputs may mean nothing to the model."""

    def picky(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x == X, x, x * float("nan")).nan_to_num(5.0)

    def convert(g: Any, node: Any) -> Any:
        return node.args[0]

    table = {torch.ops.aten.nan_to_num.default: convert}
    with as_torch_onnx():
        torch.onnx.export(picky, (X,), verify=True, custom_translation_table=table)  # type: ignore[arg-type]
    with as_torch_onnx(verify=True), pytest.raises(VerificationError):
        torch.onnx.export(picky, (X,), verify=True, custom_translation_table=table)  # type: ignore[arg-type]
    with as_torch_onnx(), pytest.raises(VerificationError):
        torch.onnx.export(picky, (X + 1,), verify=True, custom_translation_table=table)  # type: ignore[arg-type]
    with pytest.raises(VerificationError):
        onnxplug.export(picky, (X,), verify=True, custom_translation_table=table)  # type: ignore[arg-type]


def test_errors_are_those_that_programs_catch() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else x.flip(0)

    with as_torch_onnx() as exports:
        for error in (torch.onnx.OnnxExporterError, RuntimeError, CaptureError):
            with pytest.raises(error):
                torch.onnx.export(branches, (X,))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="unexpected keyword argument 'fallback'"):
            torch.onnx.export(nn.ReLU(), (X,), fallback=True)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="dynamo must be"):
            torch.onnx.export(nn.ReLU(), (X,), dynamo="yes")  # type: ignore[arg-type]
    assert [e.error is None for e in exports] == [False] * 4


def test_tables_of_all_that_may_be_needed_say_nothing() -> None:
    def convert(g: Any, node: Any) -> Any:
        return g.op.Max(node.args[0], 0.0)

    table: Any = {torch.ops.aten.relu.default: convert, torch.ops.aten.gelu.default: convert}
    with as_torch_onnx(), warnings.catch_warnings():
        warnings.simplefilter("error")
        relu(custom_translation_table=table)


def test_one_within_another_and_in_threads() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with as_torch_onnx():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with as_torch_onnx() as outer:
        with as_torch_onnx(target=None) as inner:
            program = relu()
        assert program.model.graph.metadata_props["onnxplug.target"] == "portable"
        thread.start()
        assert entered.wait(60)
        assert type(relu()) is onnxplug.OnnxProgram
    assert (len(inner), len(outer)) == (1, 2)
    assert torch.onnx.export is not TORCHS[0]  # the other thread's context lasts
    leave.set()
    thread.join()


def test_an_error_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), as_torch_onnx():
        raise ZeroDivisionError


LATE = """
import sys
finders = len(sys.meta_path)
import onnxplug
with onnxplug.as_torch_onnx() as exports:
    assert "torch" not in sys.modules and "onnx_ir" not in sys.modules
    import torch
    from torch.onnx import export
    assert export is torch.onnx.export and export.__wrapped__
    export(torch.nn.ReLU(), (torch.ones(2),))
    import inspect
    assert "def export(" in inspect.getsource(export) and "Set namespace" in inspect.getsource(torch.onnx)
assert len(exports) == 1 and export is torch.onnx.export and not hasattr(export, "__wrapped__")
with onnxplug.as_torch_onnx():
    pass
assert len(sys.meta_path) == finders
print("done")
"""


@pytest.mark.long
def test_torch_is_not_imported_for_it() -> None:
    """A program may set environment variables that torch reads when it is imported."""
    assert run_child("-c", LATE, check=True).stdout == "done\n"

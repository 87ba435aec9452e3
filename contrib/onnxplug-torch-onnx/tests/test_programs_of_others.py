"""Programs that call ``torch.onnx.export``, unchanged: run by python, and by ``onnxplug run`` or within ``as_torch_onnx``."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch.utils import _pytree as pytree

import onnxplug
from tests.support.child import run_fork
from tests.support.tolerances import looser

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(__file__).parent / "scripts"
#: The first line of a program, which declares the operators of torchvision's missing library.
VISION = "from tests.support.vision import define_vision_schemas; define_vision_schemas(); import sys; "
PLAIN = VISION + "import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
OURS = VISION + "from onnxplug.cli.app import run; sys.exit(run(['run', *sys.argv[1:]]))"


def run(code: str, script: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return run_fork("-W", "ignore", "-c", code, str(script), *arguments, env=environment, cwd=folder)


@pytest.mark.parametrize(
    ("script", "arguments", "status", "message"),
    [
        pytest.param("super_resolution.py", (), 0, "super_resolution.onnx: opset 14", marks=pytest.mark.long),
        pytest.param("transformer_encoder.py", (), 0, "not to a path: opset 21", marks=pytest.mark.long),
        ("lstm_tagger.py", (), 0, "not to a path: opset 21"),
        ("vision.py", ("squeeze.onnx",), 3, "squeeze.onnx: opset 21"),
    ],
)
def test_a_script_both_ways(script: str, arguments: tuple[str, ...], status: int, message: str, tmp_path: Path) -> None:
    results = []
    for name, code in (("torch", PLAIN), ("onnxplug", OURS)):
        done = run(code, SCRIPTS / script, *arguments, folder=tmp_path / name)
        assert done.returncode == status, done.stderr
        assert (message in done.stderr) == ("1 export by onnxplug" in done.stderr) == (name == "onnxplug")
        results.append(np.load(tmp_path / name / "results.npz"))
    theirs, ours = results
    assert list(theirs) == list(ours)
    for key in theirs:
        np.testing.assert_allclose(ours[key], theirs[key], **looser("both ways"))
    files = list((tmp_path / "onnxplug").glob("*.onnx"))
    is_saved_later = ".save(" in (SCRIPTS / script).read_text(encoding="utf-8")
    assert bool(files) == ("not to a path" not in message or is_saved_later)
    for path in files:
        assert onnx.load(path, load_external_data=False).producer_name == "onnxplug"


# -- timm --------------------------------------------------------------------------------------------------------------

TIMM: dict[str, dict[str, Any]] = {
    "old": {"check_forward": True},
    "dynamo": {"use_dynamo": True, "check_forward": True},
    "dynamic sizes": {"dynamic_size": True, "check_forward": True},
    "weights as inputs": {"keep_initializers": True},
    "training": {"training": True},
    "opset and kept operators": {"aten_fallback": True, "opset": 17},
    "names": {"input_names": ["image"], "output_names": ["classes"], "use_dynamo": True, "external_data": True},
}


@pytest.mark.parametrize(
    "name", [n if n in ("old", "training") else pytest.param(n, marks=pytest.mark.long) for n in TIMM]
)
@pytest.mark.long
def test_timm_both_ways(name: str, vision: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm
    from timm.utils.onnx import onnx_export

    options = TIMM[name]
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", pretrained=False)
    x = torch.randn(2, 3, 64, 64)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    results = []
    for file in ("torch.onnx", "onnxplug.onnx"):
        model.load_state_dict(state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if file == "torch.onnx":
                onnx_export(model, file, x, **options)
            else:
                with onnxplug.as_torch_onnx() as exports:
                    onnx_export(model, file, x, **options)
                assert [exported.file for exported in exports] == [file]
        results.append(file)
    model.load_state_dict(state)
    model.train(options.get("training", False))
    sizes = [(2, 3, 64, 64), (3, 3, 64, 64), *([(2, 3, 96, 32)] if "dynamic_size" in options else [])]
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 3  # it warns of weights among the inputs
    sessions = [onnxruntime.InferenceSession(file, quiet) for file in results]
    names = [[value.name for value in (*s.get_inputs(), *s.get_outputs())] for s in sessions]
    assert names[0][:1] + names[0][-1:] == names[1][:1] + names[1][-1:]
    for size in sizes:
        x = torch.randn(size)
        expected = model(x).detach().numpy()
        for session in sessions:
            (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
            np.testing.assert_allclose(result, expected, **looser("both ways"))


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_pytrees() -> Iterator[None]:
    """Removes the pytree nodes of caches that transformers' exporter registers otherwise than onnxplug-transformers."""
    before = set(pytree.SUPPORTED_NODES)
    yield
    from transformers import Cache

    for kind in [k for k in pytree.SUPPORTED_NODES if k not in before and issubclass(k, Cache)]:
        del pytree.SUPPORTED_NODES[kind]
        serialized = pytree.SUPPORTED_SERIALIZED_TYPES.pop(kind, None)
        if serialized is not None:
            pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.pop(serialized.serialized_type_name, None)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(torch.onnx, "ExportableModule"), reason="OnnxExporter asks for torch 2.11")
@pytest.mark.parametrize("kind", ["bert", pytest.param("llama", marks=pytest.mark.long)])
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.long)])
def test_transformers_own_exporter(kind: str, dynamic: bool, vision: None, own_pytrees: None, tmp_path: Path) -> None:
    """The exporter goes on with the program: it names outputs, changes nodes, saves the program, and runs it."""
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    model: Any = BertModel(BertConfig(num_attention_heads=2, **sizes))
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
    model.eval()
    inputs = {"input_ids": torch.randint(0, 50, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exporter, config = OnnxExporter(), OnnxConfig(dynamic=dynamic)
        theirs = exporter.export(model, dict(inputs), config=config)
        with onnxplug.as_torch_onnx() as exports:
            ours = exporter.export(model, dict(inputs), config=config)
    assert len(exports) == 1
    assert ours.program.producer_name == "onnxplug"
    for values in ("inputs", "outputs"):
        names = [[value.name for value in getattr(made.program.graph, values)] for made in (theirs, ours)]
        assert names[0] == names[1]
    other = {"input_ids": torch.randint(0, 50, (3, 5)), "attention_mask": torch.ones(3, 5, dtype=torch.long)}
    other["attention_mask"][1, -2:] = 0
    for sample in (inputs, other) if dynamic else (inputs,):
        expected = model(**sample)[0]
        for made in (theirs, ours):
            torch.testing.assert_close(next(iter(made(**sample).values())), expected, **looser("both ways"))
    ours.save_pretrained(tmp_path)
    assert (tmp_path / "model.onnx").is_file()

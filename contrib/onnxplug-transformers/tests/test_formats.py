"""`--dtypes … --verify`: the file of each number format is compared with PyTorch, and a wrong file is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import pytest
import torch

from onnxplug.cli.app import run

_SAID = re.compile(
    r"(\S+\.onnx): [^:]*.*?furthest from PyTorch's, by (\S+) of its size \(PyTorch's model with such numbers: (\S+)\)"
)


@pytest.mark.parametrize(
    ("name", "models"), [("llama", ["model"]), ("t5", ["encoder_model", "decoder_model_merged"])], ids=["llama", "t5"]
)
def test_each_format_is_compared_with_pytorch(
    name: str, models: list[str], saved: Callable[[str], Path], tmp_path: Path, capsys: Any
) -> None:
    options = ["--for", "optimum", "--dtypes", "fp32,fp16,q8,q4,q4f16", "--verify"]
    assert run(["export", f"transformers:{saved(name)}", "-o", str(tmp_path / "onnx"), *options]) == 0
    said = _SAID.findall(" ".join(capsys.readouterr().err.split()))
    suffixes = ["_fp16", "_quantized", "_q4", "_q4f16"]
    assert [file for file, *_ in said] == [f"{model}{suffix}.onnx" for model in models for suffix in suffixes]
    for file, own, rounded in said:
        low, high = (0.0, 0.01) if file.endswith("fp16.onnx") else (0.001, 0.1) if "quantized" in file else (0.05, 0.8)
        assert low < float(own) < 2 * float(rounded) < 2 * high, file


@pytest.mark.long
def test_the_distance_that_is_said(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """The distance holds for inputs of another length than the example's."""
    import transformers
    from onnxplug_transformers.export import export_folder

    folder = saved("llama")
    export_folder(folder, tmp_path / "onnx", layout="optimum", dtypes=("fp32", "fp16", "q8"), verify=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.randint(3, 100, (3, 11))
    with torch.no_grad():
        exact = model(tokens).logits
    distances = {}
    for suffix in ("", "_fp16", "_quantized"):
        session = onnxruntime.InferenceSession(tmp_path / "onnx" / f"model{suffix}.onnx")
        feed: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        for value in session.get_inputs():
            if value.name.startswith("past_key_values"):
                feed[value.name] = torch.zeros(3, value.shape[1], 0, value.shape[3])
            elif value.name == "position_ids":
                feed[value.name] = torch.arange(11).expand(3, -1)
        (logits,) = session.run(["logits"], {name: value.numpy() for name, value in feed.items()})
        distances[suffix] = float((torch.tensor(logits) - exact).norm() / exact.norm())
    assert distances[""] < 1e-5 < distances["_fp16"] < 0.01 < distances["_quantized"] < 0.1


def _scaled(model: ir.Model, factor: float, name: str) -> None:
    """Multiplies the largest constant whose name has a part, as a fault of a conversion would."""
    values = [v for v in model.graph.initializers.values() if name in str(v.name) and v.const_value is not None]
    value = max(values, key=lambda value: value.const_value.size if value.const_value is not None else 0)
    assert value.const_value is not None
    array = value.const_value.numpy()
    value.const_value = ir.tensor((array * array.dtype.type(factor)).astype(array.dtype), name=value.name)


@pytest.mark.parametrize(
    ("dtype", "module", "function", "name", "factor"),
    [
        ("fp16", "half.convert", "to_half_precision", "lm_head", 1.03),
        ("q8", "integers.quantize", "quantize", "scale", 1.3),
        ("q4", "integers.quantize", "quantize", "_scales", -1.0),
    ],
)
@pytest.mark.long
def test_a_wrong_file_is_refused(
    dtype: str,
    module: str,
    function: str,
    name: str,
    factor: float,
    saved: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
) -> None:
    place = f"onnxplug_precision.{module}.{function}"
    original: Any = pytest.importorskip(f"onnxplug_precision.{module}").__dict__[function]

    def wrong(model: ir.Model, *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        _scaled(result[0] if isinstance(result, tuple) else model, factor, name)
        return result

    monkeypatch.setattr(place, wrong)
    options = ["--for", "optimum", "--dtypes", dtype]
    export = ["export", f"transformers:{saved('llama')}", "-o", str(tmp_path / "onnx"), *options]
    assert run([*export, "--verify"]) == 1
    assert f"{dtype}: output 'logits' is" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "onnx").exists()

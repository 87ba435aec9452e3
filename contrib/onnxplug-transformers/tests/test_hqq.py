"""Checkpoints of HQQ, made here in their published layouts: numbers stay as they are, and logits are the dequantised model's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxplug.cli.app import run
from onnxplug.runtime import inference_session

#: Tolerances looser than torch.testing's, and why.
LOOSER = {"decoder": ({"rtol": 1e-4, "atol": 1e-4}, "two layers, their sums in another order")}


def packed(numbers: torch.Tensor, bits: int) -> tuple[torch.Tensor, str]:
    """Rows of numbers packed in words: the numbers of the first part of the rows are the highest bits."""
    if bits == 3:
        rows = nn.functional.pad(numbers.int(), (0, 0, 0, -len(numbers) % 10)).unflatten(0, (10, -1))
        return (rows << torch.arange(27, -1, -3, dtype=torch.int32)[:, None, None]).sum(0).int(), "3bit_32"
    rows = numbers.unflatten(0, (8 // bits, -1))
    words = (rows << torch.arange(8 - bits, -1, -bits, dtype=torch.uint8)[:, None, None]).sum(0)
    return words.to(torch.uint8), f"{bits}bit_u8"


def quantised(linear: nn.Linear, bits: int, size: int, axis: int) -> dict[str, Any]:
    """A random state of a layer, which gets the weight that it stands for."""
    count = linear.weight.numel() // size
    numbers = torch.randint(0, 1 << bits, (count, size), dtype=torch.uint8)
    scales, zeros = (torch.rand(count, 1) + 0.5) * 0.3 / (1 << bits), (torch.rand(count, 1) + 0.5) * (1 << bits) / 2
    scales, zeros = scales.half(), zeros.half()
    if axis == 0:
        numbers, scales, zeros = numbers.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous()
    with torch.no_grad():
        linear.weight.copy_(((numbers - zeros.float()) * scales.float()).reshape(linear.weight.shape))
    words, packing = packed(numbers, bits)
    about = {"nbits": bits, "group_size": size, "axis": axis, "packing": packing, "shape": linear.weight.shape}
    flags = {"view_as_float": False, "quant_scale": False, "quant_zero": False, "unpack_view_dtype": words.dtype}
    return {"W_q": words, "scale": scales, "zero": zeros, **about, **flags, "compute_dtype": torch.float16}


def as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, torch.dtype | str):
        return torch.tensor(list(str(value).encode()), dtype=torch.uint8)
    return torch.tensor(value, dtype=torch.uint8 if isinstance(value, bool) else torch.int32)


@pytest.fixture
def checkpoint(decoder: Any, tmp_path: Path, save_tokenizer: Callable[[Path], None]) -> Callable[..., Any]:
    """A dequantised model and the folder of its checkpoint."""

    def make(bits: int, size: int, axis: int = 1, *, by_hqq: bool = True, **about: Any) -> Any:
        from safetensors.torch import save_file

        model, folder = decoder("llama"), tmp_path / "hqq"
        model.save_pretrained(folder)
        save_tokenizer(folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.half())
        states: dict[str, dict[str, Any]] = {}
        for name, module in model.named_modules():
            if type(module) is nn.Linear and name != "lm_head":
                states[name] = {**quantised(module, bits, size, axis), **about}
            elif tensors := {key: tensor.half() for key, tensor in module.named_parameters(recurse=False)}:
                states[name] = tensors
        if by_hqq:
            (folder / "model.safetensors").unlink()
            torch.save(states, folder / "qmodel.pt")
        else:
            flat = {f"{name}.{key}": as_tensor(x) for name, state in states.items() for key, x in state.items()}
            save_file(flat, folder / "model.safetensors", {"format": "pt"})
            path = folder / "config.json"
            path.write_text(
                json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "hqq"}})
            )
        return model, folder

    return make


def check_logits(output: Path, model: nn.Module) -> None:
    session = inference_session(output / "model.onnx")
    for shape in ((2, 9), (1, 4)):
        tokens = torch.randint(3, 100, shape)
        feeds: dict[str, Any] = {"input_ids": tokens.numpy(), "attention_mask": torch.ones_like(tokens).numpy()}
        for value in session.get_inputs():
            if value.name == "position_ids":
                feeds[value.name] = torch.arange(shape[1]).expand(shape).numpy()
            elif value.name not in feeds:
                feeds[value.name] = np.zeros((shape[0], 2, 0, 16), "f4")
        with torch.no_grad():
            exact = model(tokens).logits
        torch.testing.assert_close(torch.from_numpy(session.run(["logits"], feeds)[0]), exact, **LOOSER["decoder"][0])


LONG = pytest.mark.long
CASES = [
    pytest.param(4, 32, {}, ("--fused",), 10, id="4 bits"),
    pytest.param(4, 64, {}, (), 8, id="4 bits, groups longer than rows", marks=LONG),  # down_proj's have 96
    pytest.param(3, 32, {"by_hqq": False}, (), 10, id="3 bits, safetensors"),
    pytest.param(8, 16, {}, (), 10, id="8 bits", marks=LONG),
    pytest.param(2, 16, {}, (), 10, id="2 bits", marks=LONG),
    pytest.param(1, 32, {}, (), 10, id="1 bit", marks=LONG),
    pytest.param(4, 64, {"axis": 0}, ("--fused",), 0, id="4 bits, across rows"),
    pytest.param(3, 64, {"axis": 0, "by_hqq": False}, (), 0, id="3 bits, across rows", marks=LONG),
    pytest.param(8, 8, {}, (), 0, id="8 bits, small groups", marks=LONG),
]


@pytest.mark.parametrize(("bits", "size", "about", "flags", "count"), CASES)
@pytest.mark.long
def test_numbers_stay(bits: int, size: int, about: Any, flags: Any, count: int, checkpoint: Any) -> None:
    model, folder = checkpoint(bits, size, **about)
    output = folder.parent / "onnx"
    arguments = ["-o", str(output), "--verify", "--accuracy-level", "1", *flags]
    assert run(["export", f"transformers:{folder}", *arguments]) == 0
    graph = ir.load(output / "model.onnx").graph
    assert sum(node.op_type == "MatMulNBits" for node in graph) == count
    tables = ("inv_freq.cos", "inv_freq.sin")
    stored = sum(v.const_value.nbytes for n, v in graph.initializers.items() if not n.endswith(tables))
    file = folder / ("model.safetensors" if about.get("by_hqq") is False else "qmodel.pt")
    assert stored < 1.1 * file.stat().st_size
    check_logits(output, model)


def test_checkpoints_saved_by_hqq_itself(saved: Callable[[str], Path], save_tokenizer: Callable[[Path], None]) -> None:
    """The reference is the model that HQQ restores."""
    hqq = pytest.importorskip("hqq.core.quantize")
    from hqq.models.hf.base import AutoHQQHFModel
    from transformers import AutoModelForCausalLM

    base = saved("llama")
    folder, output = base.parent / "hqq", base.parent / "onnx"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    settings = hqq.BaseQuantizeConfig(nbits=4, group_size=32, axis=1)
    AutoHQQHFModel.quantize_model(model, quant_config=settings, compute_dtype=torch.float32, device="cpu")
    AutoHQQHFModel.save_quantized(model, str(folder))
    save_tokenizer(folder)
    arguments = ["-o", str(output), "--verify", "--accuracy-level", "1"]
    assert run(["export", f"transformers:{folder}", *arguments]) == 0
    check_logits(output, model)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "scales in few bits": ({"quant_scale": True}, "has scales or zeros in few bits"),
    "packing": ({"packing": "5bit_u8"}, "numbers packed as '5bit_u8'"),
    "shape": ({"shape": torch.Size([64, 48])}, "and is said to be 64 by 48"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_checkpoints(case: str, checkpoint: Any, capsys: Any) -> None:
    about, message = BAD[case]
    _, folder = checkpoint(4, 32, **about)
    assert run(["export", f"transformers:{folder}", "-o", str(folder.parent / "onnx")]) in (1, 2)
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert "Traceback" not in said
    assert not (folder.parent / "onnx").exists()


def test_a_file_that_is_cut_off(checkpoint: Any, capsys: Any) -> None:
    _, folder = checkpoint(4, 32)
    (folder / "qmodel.pt").write_bytes((folder / "qmodel.pt").read_bytes()[:-1000])
    assert run(["export", f"transformers:{folder}", "-o", str(folder.parent / "onnx")]) == 1
    assert "the weights can't be loaded" in " ".join(capsys.readouterr().err.split())
    assert not (folder.parent / "onnx").exists()

"""`--int4` of a mixture of experts: ``QMoE``, whose weights give transformers' own model the same logits and text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnxplug_transformers.four_bit_experts import gate_of

from onnxplug.cli.app import run

og = pytest.importorskip("onnxruntime_genai")

#: Tolerances looser than torch.testing's, and why.
LOOSER: dict[str, tuple[dict[str, float], str]] = {
    "decoder": ({"rtol": 1e-4, "atol": 1e-4}, "rounding adds up over the layers of a model"),
}
KEPT = "*_proj,lm_head,*embed_tokens"
STEPS = 12


def nibbles(array: np.ndarray) -> np.ndarray:
    """The two numbers of each byte, the low half first."""
    return np.stack([array & 15, array >> 4], -1).reshape(*array.shape[:-1], -1).astype(np.float32)


def array_of(value: Any) -> np.ndarray:
    """The array of a weight, which may be stored in float16."""
    maker = value.producer()
    if maker is not None:
        assert maker.op_type == "Cast"
        value = maker.inputs[0]
    array: np.ndarray = value.const_value.numpy()
    return array


def weights_of(node: ir.Node, first: int, zeros: int) -> torch.Tensor:
    """[experts, N, K] of a QMoE node's levels, scales and zero points."""
    levels, scales = (array_of(node.inputs[first + i]) for i in (0, 1))
    middle: Any = 8.0
    value = node.inputs[zeros] if len(node.inputs) > zeros else None
    if value is not None:
        middle = nibbles(array_of(value))[..., : scales.shape[-1], None]
    blocks = nibbles(levels).reshape(*scales.shape, -1)
    return torch.tensor(((blocks - middle) * scales.astype(np.float32)[..., None]).reshape(*blocks.shape[:2], -1))


def with_weights(model: Any, graph: ir.Graph) -> Any:
    """transformers' model with the weights of a file's experts, in its own order."""
    nodes = [node for node in graph.all_nodes() if node.op_type == "QMoE"]
    assert len(nodes) == len(model.model.layers)
    for node, layer in zip(nodes, model.model.layers, strict=True):
        experts = layer.mlp.experts
        up, down = weights_of(node, 2, 11), weights_of(node, 5, 12)
        if experts.is_concatenated:  # rows of gates and ups are in turns in the file
            up = torch.cat([up[:, 0::2], up[:, 1::2]], 1)
        if experts.is_transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        with torch.no_grad():
            experts.gate_up_proj.copy_(up)
            experts.down_proj.copy_(down)
    return model


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a prompt, by ONNX Runtime."""
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    feed: dict[str, Any] = {"input_ids": tokens.numpy(), "attention_mask": np.ones(tokens.shape, np.int64)}
    for value in session.get_inputs():
        if value.name.startswith("past_key_values"):
            feed[value.name] = np.zeros((len(tokens), value.shape[1], 0, value.shape[3]), np.float32)
        elif value.name == "position_ids":
            feed[value.name] = np.arange(tokens.shape[1])[None].repeat(len(tokens), 0)
    return torch.tensor(session.run(["logits"], feed)[0])


@pytest.mark.parametrize(
    ("name", "flags"), [("qwen3_moe", ()), ("gpt_oss", ("--zero-points",)), ("gpt_oss", ("--block-size", "16"))]
)
@pytest.mark.long
def test_logits_are_those_of_the_rounded_weights(
    name: str, flags: tuple[str, ...], saved: Callable[[str], Path], exported: Any
) -> None:
    from transformers import AutoModelForCausalLM

    folder = saved(name)
    output = exported(folder, "--verify", "--int4", "--accuracy-level", "1", "--int4-keep", KEPT, *flags)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    for shape in ((2, 9), (1, 1)):
        tokens = torch.randint(3, 100, shape)
        with torch.no_grad():
            plain = model(tokens).logits
            exact = with_weights(
                AutoModelForCausalLM.from_pretrained(folder).eval(), ir.load(output / "model.onnx").graph
            )(tokens).logits
        torch.testing.assert_close(logits(output, tokens), exact, **LOOSER["decoder"][0])
        assert (exact - plain).abs().max() > 0.01


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.long)])
@pytest.mark.long
def test_text_and_notes(name: str, saved: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    """With everything in few bits, the fastest form, and onnxruntime-genai's loop."""
    folder, output = saved(name), tmp_path / "onnx"
    assert run(["export", f"transformers:{folder}", "-o", str(output), "--int4", "--fused"]) == 0
    assert "and so have 2 layers of experts" in " ".join(capsys.readouterr().err.split())
    nodes = [node for node in ir.load(output / "model.onnx").graph.all_nodes() if node.op_type == "QMoE"]
    assert [node.attributes.get_int("accuracy_level") for node in nodes] == [4, 4]
    model = og.Model(str(output))
    settings = og.GeneratorParams(model)
    settings.set_search_options(max_length=3 + STEPS)
    generator = og.Generator(model, settings)
    generator.append_tokens([5, 6, 7])
    while not generator.is_done():
        generator.generate_next_token()
    assert len(generator.get_sequence(0)) == 3 + STEPS


@pytest.mark.long
def test_experts_that_stay(saved: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    """Experts stay by name, and where blocks do not fit."""
    folder = saved("qwen3_moe")
    for number, flags in enumerate((["--int4-keep", "*experts"], ["--block-size", "64"])):
        output = tmp_path / f"onnx{number}"
        assert run(["export", f"transformers:{folder}", "-o", str(output), "--int4", *flags]) == 0
        assert not [node for node in ir.load(output / "model.onnx").graph.all_nodes() if node.op_type == "QMoE"]
        assert "layers of experts" not in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
def test_halves(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """The kernel for float16, within its rounding; ``--verify`` compares with PyTorch in float16."""
    options = ["--int4", "--dtype", "float16", "--accuracy-level", "1", "--verify"]
    output = tmp_path / "onnx"
    assert run(["export", f"transformers:{saved('gpt_oss')}", "-o", str(output), *options]) == 0
    nodes = [node for node in ir.load(output / "model.onnx").graph.all_nodes() if node.op_type == "QMoE"]
    assert {node.inputs[0].dtype for node in nodes if node.inputs[0] is not None} == {ir.DataType.FLOAT16}


@pytest.mark.parametrize("limit", [7.0, 1e4])
def test_limits_of_gates(limit: float) -> None:
    """The limit is found under each of its names, and one that no usual activation reaches too."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts: Any = GptOssExperts(GptOssConfig(num_local_experts=2, hidden_size=32, intermediate_size=32))
    experts.limit = limit
    assert gate_of(experts, 16) == [1.702, 1.0, limit]
    experts.limit, experts.__class__ = None, type("Renamed", (GptOssExperts,), {"_apply_gate": _limited})
    assert gate_of(experts, 16) is None
    experts.swiglu_limit = limit
    assert gate_of(experts, 16) == [1.702, 1.0, limit]


def _limited(experts: Any, gate_up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's gate, with a limit that the module may not have as an attribute."""
    limit = getattr(experts, "swiglu_limit", 1e4)
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(gate * experts.alpha)

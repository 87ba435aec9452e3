"""Weights of 4 bits with zero points: nearer to the weights than without, and than ONNX Runtime's k_quant; the files have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnxplug_transformers.rounding import Levels, rounded

from onnxplug.runtime import inference_session

#: Tolerances looser than torch.testing's, and why.
LOOSER = {"decoder": ({"rtol": 1e-4, "atol": 1e-4}, "two layers, their sums in another order")}


def weights(kind: str) -> torch.Tensor:
    """Weights of a kind, [64, 256]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        normal = torch.randn(64, 256)
        heavy = torch.distributions.StudentT(torch.tensor(4.0)).sample((64, 256))
        uniform = torch.rand(64, 256)
    return {"normal": normal, "heavy": heavy, "even": uniform - 0.5, "one-sided": uniform + 0.2, "below": -uniform}[
        kind
    ]


def restored(matrix: Levels, columns: int) -> torch.Tensor:
    """A matrix of 4 bits, by the definition."""
    numbers = torch.stack([matrix.levels & 15, matrix.levels >> 4], -1).flatten(2).double()
    zeros = torch.full(matrix.scales.shape, 8.0).double()
    if matrix.zeros is not None:
        zeros = torch.stack([matrix.zeros & 15, matrix.zeros >> 4], -1).flatten(1)[:, : zeros.shape[1]].double()
    return ((numbers - zeros[..., None]) * matrix.scales.double()[..., None]).flatten(1)[:, :columns]


@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("kind", ["normal", "heavy", "even", "one-sided", "below"])
def test_zero_points_bring_levels_nearer(kind: str, size: int) -> None:
    from onnxruntime.quantization.neural_compressor.weight_only import quant_tensor_k_quant_cpu

    exact = weights(kind)
    errors = [
        float((restored(rounded(exact, size, 4, zero_points=own), 256) - exact).square().mean())
        for own in (False, True)
    ]
    levels, scales, zeros = quant_tensor_k_quant_cpu(exact.numpy(), 4, size)
    peer = float(np.square((levels - zeros) * scales - exact.numpy().reshape(-1, size)).mean())
    assert errors[1] < 0.99 * min(errors[0], peer)


#: Blocks in which a scale or a zero point has no ordinary value; the error's bound as a share of the largest weight.
ODD = {
    "zeros": (torch.zeros(3, 40), 0.0),
    "constant": (torch.full((3, 40), -5.0), 1e-3),
    "one number": (torch.eye(3, 40), 1e-3),
    "far from zero": (torch.linspace(7, 8, 120).reshape(3, 40), 0.04),
    "small": (1e-7 * torch.linspace(-1, 2, 120).reshape(3, 40), 0.08),
    "large": (1e7 * torch.linspace(-2, 1, 120).reshape(3, 40), 0.08),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_blocks(case: str) -> None:
    """The error is within its bound; the second block of each row is filled up."""
    exact, bound = ODD[case]
    matrix = rounded(exact, 32, 4, zero_points=True)
    assert matrix.levels.shape == (3, 2, 16)
    assert matrix.zeros is None or matrix.zeros.shape == (3, 1)
    error = (restored(matrix, 40) - exact).abs().max()
    assert error <= bound * exact.abs().max()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("llama", ("--fused", "--block-size", "64")),  # rows of one block: half a byte of zero points
        pytest.param("llama", ("--dtype", "float32", "--int8-layers", "*.down_proj"), marks=pytest.mark.long),
        pytest.param("llama_tied", (), marks=pytest.mark.long),
        pytest.param("gpt_neox", ("--block-size", "16"), marks=pytest.mark.long),
    ],
)
def test_models_with_zero_points(
    name: str, flags: tuple[str, ...], saved: Callable[[str], Path], restore: Any, exported: Any
) -> None:
    """Logits are transformers' with the file's weights, which are nearer to the model's than without zero points."""
    from transformers import AutoModelForCausalLM

    folder, errors = saved(name), []
    exact = AutoModelForCausalLM.from_pretrained(folder)
    for zeros in ((), ("--zero-points",)):
        output = exported(folder, "--verify", "--int4", "--accuracy-level", "1", *flags, *zeros)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        restore(model, output / "model.onnx")
        both = zip(model.state_dict().values(), exact.state_dict().values(), strict=True)
        errors.append(sum(float((a - b).square().sum()) for a, b in both))
        for tokens in (torch.randint(3, 100, (2, 9)), torch.randint(3, 100, (1, 1))):
            with torch.no_grad():
                expected = model(tokens).logits
            torch.testing.assert_close(logits(output, tokens), expected, **LOOSER["decoder"][0])
    assert errors[1] < 0.95 * errors[0]
    nodes = list(ir.load(output / "model.onnx").graph)
    products = [node for node in nodes if node.op_type == "MatMulNBits" and node.attributes["bits"].as_int() == 4]
    assert products
    assert all(node.inputs[3] is not None for node in products)
    if name == "llama_tied":
        (gather,) = (node for node in nodes if node.op_type == "GatherBlockQuantized")
        assert gather.inputs[3] in [node.inputs[3] for node in products]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"]),
        ("gpt_neox", ["attention.query_key_value", "mlp.dense_4h_to_h"]),
    ],
)
@pytest.mark.long
def test_layers_whose_errors_count_most(name: str, layers: list[str], saved: Callable[[str], Path]) -> None:
    """Of ten layers: the first two, the last two (of 7 * 10 / 8), and every third layer from the fourth."""
    from onnxplug_transformers.four_bits import FourBitLinear, round_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(saved(name))
    config.num_hidden_layers = 10
    config.layer_types = None
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    base = "model.layers" if name == "llama" else "gpt_neox.layers"
    report = round_weights(model, 32, wide=["mixed", f"{base}.2.*"])
    wide = {f"{base}.{i}.{layer}" for i in (0, 1, 3, 6, 9) for layer in layers} | {"lm_head"}
    assert report.wide == len(wide) + sum(f"{base}.2." in path for path in model_names(config))
    for path in (f"{base}.0.{layers[-1]}", f"{base}.2.{layers[-1]}", f"{base}.4.{layers[-1]}", "lm_head"):
        module = model.get_submodule(path)
        assert isinstance(module, FourBitLinear)
        assert module.bits == (4 if ".4." in path else 8)


def model_names(config: Any) -> list[str]:
    """Names of the linear layers of a model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    return [path for path, module in model.named_modules() if type(module) is torch.nn.Linear]


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    session = inference_session(folder / "model.onnx")
    feeds: dict[str, Any] = {"input_ids": tokens.numpy(), "attention_mask": torch.ones_like(tokens).numpy()}
    for value in session.get_inputs():
        if value.name == "position_ids":
            feeds[value.name] = torch.arange(tokens.shape[1]).expand(len(tokens), -1).numpy()
        elif value.name not in feeds:
            feeds[value.name] = np.zeros((len(tokens), value.shape[1], 0, value.shape[3]), np.float32)
    return torch.from_numpy(session.run(["logits"], feeds)[0])

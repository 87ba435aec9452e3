"""Models of transformers for the packages under contrib: inputs, comparison, mixtures of experts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import onnxplug
from onnxplug.verification.outputs import Tolerances
from onnxplug.verification.verify import verify_inputs
from tests.support.contrib import plugged


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 100, shape)


def mask(batch: int, total: int) -> torch.Tensor:
    """Rows padded on the left to different lengths, the first row not at all."""
    starts = torch.randint(0, max(total // 2, 1), (batch, 1))
    starts[0] = 0
    return (torch.arange(total)[None] >= starts).long()


def compare(program: Any, **inputs: Any) -> None:
    """Compares every output with the eager model's, on copies of the inputs."""
    verify_inputs(program, [((), copy.deepcopy(inputs))], Tolerances())


EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 5, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
}


def mixture(name: str, implementation: str | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small mixture of experts, with weights large enough for the experts to matter."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        use_cache=False,
        **EXPERTS[name],
    )
    model: Any = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    if implementation is not None:
        model.set_experts_implementation(implementation)
    return model


def experts_program(model: nn.Module, opset: int = 21, **options: Any) -> Any:
    shapes = {name: {0: "batch", 1: "sequence"} for name in ("input_ids", "attention_mask")}
    inputs = {"input_ids": ids(2, 5), "attention_mask": mask(2, 5)}
    options = {"registry": plugged("onnxplug-transformers"), "opset_version": opset, **options}
    return onnxplug.to_onnx(model, kwargs=inputs, dynamic_shapes=shapes, **options)

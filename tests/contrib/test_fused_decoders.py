"""onnxplug-transformers and onnxplug-ort together: a decoder of ONNX Runtime's fused operators."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import onnxplug
from tests.support.contrib import plugged
from tests.support.vision_kernels import define_vision_kernels

REGISTRY = plugged("onnxplug-transformers", "onnxplug-ort")
OPSETS = {"": 21, "com.microsoft": 1}


@pytest.mark.parametrize("target", ["onnxruntime", "onnxruntime:cuda"])
@pytest.mark.long
def test_a_decoder_of_fused_operators(target: str) -> None:
    """Prompts in buffers longer than the prompts, and single steps; the attention does the rotary embedding itself."""
    define_vision_kernels()
    import transformers
    from onnxplug_transformers.decoders import Decoder, example_of, fused_cases_of, fused_example_of

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
    example = fused_example_of(example_of(Decoder(model).eval()))
    program = onnxplug.to_onnx(
        Decoder(model, fused=True).eval(),
        kwargs=example.kwargs,
        dynamic_shapes=example.dynamic_shapes,
        input_names=example.input_names,
        opset_version=OPSETS,
        registry=REGISTRY,
        target=target,
        mutations="ignore",
    )
    nodes = Counter(node.op_type for node in program.model.graph if node.domain == "com.microsoft")
    assert nodes == {"GroupQueryAttention": 2, "SkipSimplifiedLayerNormalization": 4}
    assert {n.attributes["do_rotary"].as_int() for n in program.model.graph if n.op_type == "GroupQueryAttention"} == {
        1
    }
    for case in fused_cases_of(example):
        program.verify(args=(), kwargs=case, seeds=())

"""CANINE's local attention: texts shorter than a chunk, of several chunks, and of a part of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

_CHUNK = 6
_TEXT = {0: "batch", 1: "sequence"}


def _canine(model_class: str = "CanineModel", **changes: Any) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    sizes |= {"max_position_embeddings": 64, "num_hash_functions": 4, "num_hash_buckets": 64, "downsampling_rate": 3}
    config = transformers.CanineConfig(**{**sizes, "local_transformer_stride": _CHUNK, **changes})
    model: nn.Module = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def _case(batch: int, length: int, masked: bool = True, **more: Any) -> dict[str, Any]:
    """Texts, the last of which is shorter than the others by more than a chunk, if they are that long."""
    ids = torch.randint(1, 1000, (batch, length))
    if not masked:
        return {"input_ids": ids, **more}
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, -(_CHUNK + 2) :] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.randint(0, 2, ids.shape), **more}


@pytest.mark.parametrize("example", [5, 15])
def test_texts_of_any_length(example: int) -> None:
    """From an example of less than a chunk, and from an example of several chunks."""
    torch.manual_seed(0)
    inputs = _case(2, example)
    program = onnxplug.to_onnx(_canine(), kwargs=inputs, dynamic_shapes=dict.fromkeys(inputs, _TEXT))
    for batch, length in ((2, example), (1, 3), (3, 5), (2, 6), (2, 7), (1, 12), (3, 13), (2, 41)):
        program.verify(kwargs=_case(batch, length), seeds=())


def test_a_text_of_one_character() -> None:
    """Without a mask and without downsampling of characters."""
    torch.manual_seed(0)
    model = _canine(downsampling_rate=1)
    program = onnxplug.to_onnx(model, kwargs=_case(2, 8, False), dynamic_shapes={"input_ids": _TEXT})
    for batch, length in ((1, 1), (3, 1), (1, 6), (2, 19)):
        program.verify(kwargs=_case(batch, length, False), seeds=())


def test_weights_of_attention() -> None:
    """The weights of local attention are the first chunk's, in transformers too."""
    torch.manual_seed(0)
    model = _canine(output_attentions=True, attn_implementation="eager")
    inputs = _case(2, 9)
    program = onnxplug.to_onnx(model, kwargs=inputs, dynamic_shapes=dict.fromkeys(inputs, _TEXT))
    for length in (4, 6, 14):
        program.verify(kwargs=_case(3, length), seeds=())


@pytest.mark.long
@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_tasks(task: str) -> None:
    torch.manual_seed(0)
    inputs = _case(2, 9)
    model = _canine(f"CanineFor{task}")
    program = onnxplug.to_onnx(model, kwargs=inputs, dynamic_shapes=dict.fromkeys(inputs, _TEXT))
    for batch, length in ((1, 4), (3, 17)):
        program.verify(kwargs=_case(batch, length), seeds=())

"""Longformer's and LED's windows: texts of any length, with padding, and with any number of global tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onnxplug

#: A limit of torch, not of the package.
_NOT_WITH_29 = pytest.mark.xfail(
    torch.__version__.startswith("2.9."),
    strict=True,
    reason="torch 2.9 asks which stride of a tensor of a data-dependent size is larger",
)
_TEXT = {0: "batch", 1: "sequence"}


def _longformer(model_class: str = "LongformerModel", **changes: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "max_position_embeddings": 128}
    config = transformers.LongformerConfig(**{**sizes, "attention_window": [4, 8], **changes})
    model: nn.Module = getattr(transformers, model_class)(config)
    return _stirred(model)


def _led(model_class: str = "LEDModel", **changes: Any) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 99, "d_model": 16, "max_encoder_position_embeddings": 128}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 24}
    config = transformers.LEDConfig(**{**sizes, "attention_window": [8, 4], "use_cache": False, **changes})
    model: nn.Module = getattr(transformers, model_class)(config)
    return _stirred(model)


def _stirred(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def _case(batch: int, length: int, of_global: float, seen: float = 0.8, target: int = 0) -> dict[str, Tensor]:
    """Texts of which about the parts ``of_global`` and ``seen`` are global and seen."""
    shape = batch, length
    masks = {"attention_mask": torch.rand(shape) < seen, "global_attention_mask": torch.rand(shape) < of_global}
    case = {"input_ids": torch.randint(3, 99, shape), **{name: mask.long() for name, mask in masks.items()}}
    return {**case, "decoder_input_ids": torch.randint(3, 99, (batch, target))} if target else case


def _pair(model: nn.Module, case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    from onnxplug_transformers.sliding_windows import windows_of_any_text

    with torch.no_grad():
        expected = model(**case)
        with windows_of_any_text():
            return dict(model(**case)), dict(expected)


@pytest.mark.parametrize("make", [_longformer, _led])
@pytest.mark.parametrize("of_global", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("seen", [0.0, 0.6, 1.0])
def test_numbers_are_those_of_transformers(make: Any, of_global: float, seen: float) -> None:
    """Also the numbers of all layers' states, and of padding."""
    torch.manual_seed(0)
    model = make()
    for batch, length in ((1, 1), (2, 3), (3, 8), (1, 16), (2, 21), (1, 40)):
        case: dict[str, Any] = _case(batch, length, of_global, seen, 3 if make is _led else 0)
        results, expected = _pair(model, {**case, "output_hidden_states": True})
        torch.testing.assert_close(results, expected)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 5e-3), (torch.bfloat16, 5e-2), (torch.float64, 1e-6)])
def test_other_types_of_numbers(dtype: torch.dtype, error: float) -> None:
    torch.manual_seed(0)
    model = _longformer().to(dtype)
    for of_global in (0.0, 0.2):
        results, expected = _pair(model, _case(2, 13, of_global))
        torch.testing.assert_close(results, expected, rtol=0, atol=error)


def test_embeddings_as_inputs() -> None:
    """Embeddings with positions and types of tokens, and without a mask."""
    torch.manual_seed(0)
    model = _longformer(type_vocab_size=2)
    case = {"inputs_embeds": torch.randn(2, 11, 16), "position_ids": torch.arange(2, 13).repeat(2, 1)}
    results, expected = _pair(model, {**case, "token_type_ids": torch.randint(0, 2, (2, 11))})
    torch.testing.assert_close(results, expected)


@pytest.mark.parametrize("make", [_longformer, _led])
def test_weights_of_attention_are_those_of_transformers(make: Any) -> None:
    """The size of the weights depends on the global tokens: a model that returns them is left as it is."""
    torch.manual_seed(0)
    for options, changes in (({"output_attentions": True}, {}), ({}, {"output_attentions": True})):
        case: dict[str, Any] = _case(2, 11, 0.2, target=3 if make is _led else 0)
        results, expected = _pair(make(**changes), {**case, **options})
        assert any("attentions" in name for name in results)
        torch.testing.assert_close(results, expected, rtol=0, atol=0)


@_NOT_WITH_29
@pytest.mark.parametrize(("batch", "length"), [(2, 9), (1, 8)])
def test_texts_of_any_length(batch: int, length: int) -> None:
    """From an example that is padded in PyTorch, and from one that isn't."""
    torch.manual_seed(0)
    example = _case(batch, length, 0.2)
    program = onnxplug.to_onnx(_longformer(), kwargs=example, dynamic_shapes=dict.fromkeys(example, _TEXT))
    for sizes in ((2, 9, 0.2), (1, 1, 0.0), (1, 1, 1.0), (3, 8, 0.0), (1, 17, 1.0), (3, 23, 0.1), (2, 64, 0.5)):
        program.verify(kwargs=_case(*sizes), seeds=())


@_NOT_WITH_29
def test_encoders_and_decoders() -> None:
    torch.manual_seed(0)
    example = _case(2, 9, 0.2, target=4)
    dynamic = {name: {0: "batch", 1: "target" if "decoder" in name else "sequence"} for name in example}
    program = onnxplug.to_onnx(_led(), kwargs=example, dynamic_shapes=dynamic)
    for batch, length, of_global in ((1, 3, 0.0), (1, 8, 1.0), (3, 21, 0.2)):
        program.verify(kwargs=_case(batch, length, of_global, target=6), seeds=())


def test_without_masks() -> None:
    torch.manual_seed(0)
    example = {"input_ids": torch.randint(3, 99, (2, 9))}
    program = onnxplug.to_onnx(_longformer(), kwargs=example, dynamic_shapes={"input_ids": _TEXT})
    for shape in ((1, 4), (3, 16), (2, 27)):
        program.verify(kwargs={"input_ids": torch.randint(3, 99, shape)}, seeds=())


def test_without_masks_of_known_size() -> None:
    """ONNX Runtime then knows that no token is global, and fuses operators that it can't run without tokens."""
    torch.manual_seed(0)
    onnxplug.to_onnx(_longformer(), kwargs={"input_ids": torch.randint(3, 99, (2, 9))}).verify()


def _of_questions(batch: int, length: int, question: int) -> dict[str, Tensor]:
    """Three separators in each text: behind the question, and at each end of the context."""
    ids = torch.randint(3, 99, (batch, length))
    ids[:, [question, question + 1, length - 1]] = 2
    return {"input_ids": ids}


@_NOT_WITH_29
@pytest.mark.long
def test_questions() -> None:
    """The question's tokens are global."""
    torch.manual_seed(0)
    model = _longformer("LongformerForQuestionAnswering", sep_token_id=2)
    program = onnxplug.to_onnx(model, kwargs=_of_questions(2, 11, 4), dynamic_shapes={"input_ids": _TEXT})
    for sizes in ((1, 9, 2), (3, 21, 11), (2, 4, 0)):
        program.verify(kwargs=_of_questions(*sizes), seeds=())


@_NOT_WITH_29
@pytest.mark.long
@pytest.mark.parametrize("task", ["MaskedLM", "SequenceClassification", "TokenClassification"])
def test_tasks(task: str) -> None:
    torch.manual_seed(0)
    ids = {"input_ids": torch.randint(3, 99, (2, 9))}
    program = onnxplug.to_onnx(_longformer(f"LongformerFor{task}"), kwargs=ids, dynamic_shapes={"input_ids": _TEXT})
    for shape in ((1, 4), (3, 17)):
        program.verify(kwargs={"input_ids": torch.randint(3, 99, shape)}, seeds=())

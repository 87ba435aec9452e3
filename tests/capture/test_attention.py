"""``nn.Transformer`` and its layers as models call them: masks of any values, in evaluation, with dynamic sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Transformer

import onnxplug
from tests.support.check import check

_WIDTH = 16
_causal = Transformer.generate_square_subsequent_mask
_X, _Y = {0: "batch", 1: "source"}, {0: "batch", 1: "target"}
_SQUARE, _TARGETS, _PADDING = {0: "source", 1: "source"}, {0: "target", 1: "target"}, {0: "batch", 1: "source"}


class _Calls(nn.Module):
    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *args: torch.Tensor) -> Any:
        return self.call(self.module, *args)


def _encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoder(_encoder_layer(), 2, **options)


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(_WIDTH, 2, 32, batch_first=True)


def _decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(_WIDTH, 2, 32, batch_first=True)


def _whole() -> nn.Module:
    return Transformer(_WIDTH, 2, 1, 1, 32, batch_first=True)


def _attention(**options: Any) -> nn.Module:
    return nn.MultiheadAttention(_WIDTH, 2, batch_first=True, **options)


def _x(batch: int, source: int, target: int) -> torch.Tensor:
    return torch.randn(batch, source, _WIDTH)


def _y(batch: int, source: int, target: int) -> torch.Tensor:
    return torch.randn(batch, target, _WIDTH)


def _mask(batch: int, source: int, target: int) -> torch.Tensor:
    """Causal at the size of the example, any numbers at others."""
    return _causal(source) if source == 5 else torch.randn(source, source)


def _hides(*sizes: int) -> torch.Tensor:
    return _causal(sizes[1]) < 0


def _target_mask(batch: int, source: int, target: int) -> torch.Tensor:
    return _causal(target) if target == 4 else torch.randn(target, target)


def _padding(batch: int, source: int, target: int) -> torch.Tensor:
    padding = torch.zeros(batch, source, dtype=torch.bool)
    padding[-1, (source + 1) // 2 :] = True
    return padding


_CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], list[Any], list[Any]]] = {
    "encoder with a mask": (_encoder, lambda m, x, mask: m(x, mask=mask), [_x, _mask], [_X, _SQUARE]),
    "encoder with a mask of bool": (_encoder, lambda m, x, mask: m(x, mask=mask), [_x, _hides], [_X, _SQUARE]),
    "encoder with padding": (
        _encoder,
        lambda m, x, padding: m(x, src_key_padding_mask=padding),
        [_x, _padding],
        [_X, _PADDING],
    ),
    "encoder without the check of masks": (
        lambda: _encoder(mask_check=False),
        lambda m, x, padding: m(x, src_key_padding_mask=padding),
        [_x, _padding],
        [_X, _PADDING],
    ),
    "encoder with a mask and padding": (
        _encoder,
        lambda m, x, mask, padding: m(x, mask, padding),
        [_x, _hides, _padding],
        [_X, _SQUARE, _PADDING],
    ),
    "encoder with a mask of its own": (_encoder, lambda m, x: m(x, mask=_causal(x.shape[1])), [_x], [_X]),
    "encoder with a causal mask": (
        _encoder,
        lambda m, x: m(x, mask=_causal(x.shape[1]), is_causal=True),
        [_x],
        [_X],
    ),
    "encoder layer": (_encoder_layer, lambda m, x, mask: m(x, mask), [_x, _mask], [_X, _SQUARE]),
    "decoder": (
        lambda: nn.TransformerDecoder(_decoder_layer(), 2),
        lambda m, x, y, mask: m(y, x, tgt_mask=mask),
        [_x, _y, _target_mask],
        [_X, _Y, _TARGETS],
    ),
    "decoder layer": (
        _decoder_layer,
        lambda m, x, y, mask, padding: m(y, x, tgt_mask=mask, memory_key_padding_mask=padding),
        [_x, _y, _target_mask, _padding],
        [_X, _Y, _TARGETS, _PADDING],
    ),
    "transformer": (
        _whole,
        lambda m, x, y, mask: m(x, y, tgt_mask=mask),
        [_x, _y, _target_mask],
        [_X, _Y, _TARGETS],
    ),
    "transformer with every mask": (
        _whole,
        lambda m, x, y, mask, target_mask, padding: m(
            x, y, mask, target_mask, src_key_padding_mask=padding, memory_key_padding_mask=padding
        ),
        [_x, _y, _hides, _target_mask, _padding],
        [_X, _Y, _SQUARE, _TARGETS, _PADDING],
    ),
    "attention with weights": (
        _attention,
        lambda m, x, mask: m(x, x, x, attn_mask=mask),
        [_x, _mask],
        [_X, _SQUARE],
    ),
    "attention with weights of each head": (
        lambda: _attention(add_bias_kv=True, add_zero_attn=True),
        lambda m, x, padding: m(x, x, x, key_padding_mask=padding, average_attn_weights=False),
        [_x, _padding],
        [_X, _PADDING],
    ),
    "attention without weights": (
        _attention,
        lambda m, x, y, mask: (m(x, x, x, attn_mask=mask, need_weights=False)[0], m(y, x, x, need_weights=False)[0]),
        [_x, _y, _mask],
        [_X, _Y, _SQUARE],
    ),
}


@pytest.mark.parametrize("name", _CASES)
def test_masks_of_any_values_and_sizes(name: str, seeded: None) -> None:
    make, call, draws, shapes = _CASES[name]
    model = _Calls(make(), call).eval()
    args, *others = (tuple(draw(*sizes) for draw in draws) for sizes in ((2, 5, 4), (3, 7, 2), (1, 1, 1)))
    before = torch.backends.mha.get_fastpath_enabled()
    check(model, *args, others=others, dynamic=(tuple(shapes),))
    assert torch.backends.mha.get_fastpath_enabled() is before


@pytest.mark.parametrize("name", ["encoder with a mask", "transformer"])
def test_masks_in_the_strict_mode(name: str, seeded: None) -> None:
    make, call, draws, _ = _CASES[name]
    args, other = (tuple(draw(2, 5, 4) for draw in draws) for _ in range(2))
    other = (*other[:-1], torch.randn_like(other[-1]))
    check(_Calls(make(), call).eval(), *args, others=[other], strict=True)


def test_a_transformer_is_restored_where_the_export_fails() -> None:
    def call(module: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> Any:
        module(x, mask=mask)
        return x if mask.sum() > 0 else x.flip(0)

    detect = nn.modules.transformer._detect_is_causal_mask
    with pytest.raises(onnxplug.CaptureError):
        onnxplug.to_onnx(_Calls(_encoder(), call).eval(), (_x(2, 5, 4), _causal(5)))
    assert nn.modules.transformer._detect_is_causal_mask is detect
    assert torch.backends.mha.get_fastpath_enabled()

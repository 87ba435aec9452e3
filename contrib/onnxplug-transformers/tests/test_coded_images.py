"""Images that become words of the text: any number of images, padded to one size, whose own sizes are an input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onnxplug

_TEXT = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}
#: Codes stand for words in another order; 9 ends a row.
_WORDS = {f"<|visual token {code:06}|>": 90 - 7 * code for code in range(11)}


class Embedded(nn.Module):
    """Emu3's embeddings of the words of images, or the words themselves."""

    def __init__(self, frames: int = 4, *, as_words: bool = False) -> None:
        super().__init__()
        from transformers import Emu3Config, Emu3Model

        codes = {"codebook_size": 11, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "num_res_blocks": 1}
        places = {
            "channel_multiplier": [1, 2],
            "attn_resolutions": [],
            "temporal_downsample_factor": frames,
            "hidden_size": 64,
        }
        config = Emu3Config(
            vq_config={**codes, **places},
            text_config={**_TEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
            vocabulary_map={**_WORDS, "<|extra_200|>": 9, "<image>": 98},
        )
        self.model = Emu3Model(config)
        self.as_words = as_words
        coder = self.model.vqmodel
        with torch.no_grad():  # codes as such images have
            states = coder.encoder(torch.randn(1, 1, 3, 8, 8).repeat(1, frames, 1, 1, 1))
            latents = coder.quant_conv(states.transpose(1, 2))[0, :, 0].flatten(1)
            coder.quantize.embedding.weight.copy_(latents[:, :11].T)

    def forward(self, pixel_values: Tensor, image_sizes: Tensor) -> Tensor:
        if self.as_words:
            found: Tensor = self.model.get_image_tokens(pixel_values, image_sizes)
            return found
        return torch.cat(self.model.get_image_features(pixel_values, image_sizes).pooler_output)


def _images(height: int, width: int, *sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return torch.randn(len(sizes), 3, height, width), torch.tensor(sizes)


_DYNAMIC = ({0: "images", 2: "2 * rows", 3: "2 * columns"}, {0: "sizes"})


@pytest.mark.parametrize(("frames", "as_words"), [(4, False), (2, True)])
def test_any_number_of_images(frames: int, as_words: bool) -> None:
    """Whole images, parts of images, a single code, odd sizes and an image without any code; other sizes are refused."""
    torch.manual_seed(0)
    model = Embedded(frames, as_words=as_words).eval()
    program = onnxplug.to_onnx(model, _images(12, 8, (12, 8), (6, 4)), dynamic_shapes=_DYNAMIC)
    cases = [
        _images(8, 16, (8, 16)),
        _images(16, 12, (16, 12), (2, 2), (7, 11)),
        _images(12, 12, (12, 4), (1, 6), (8, 1), (12, 12)),
    ]
    for case in cases:
        program.verify(args=case, seeds=())
        with torch.no_grad():
            assert len(model(*case).unique(dim=0)) > 4
    pixels, _ = _images(12, 8, (12, 8), (6, 4))
    for wrong in ([[14, 8], [6, 4]], [[12, 8], [6, 10]], [[12, 8], [6, 4], [6, 4]], [[12, 8]]):
        with pytest.raises(onnxplug.OnnxplugError, match=r"out of|invalid index"):
            program(pixels, torch.tensor(wrong))  # given fewer sizes, PyTorch leaves out the other images


def test_the_words_of_a_model_that_was_not_called() -> None:
    """A model keeps a table of words from its first call; here the first call is the capture."""
    torch.manual_seed(0)
    model, case = Embedded().eval(), _images(8, 8, (8, 8), (4, 6))
    program = onnxplug.to_onnx(model, case, dynamic_shapes=_DYNAMIC)
    assert "img2bpe_mapping_tensor" not in vars(model.model.vocabulary_mapping)
    program.verify(args=_images(8, 12, (8, 10)), seeds=())


class _Codes(Embedded):
    def forward(self, pixel_values: Tensor, image_sizes: Tensor) -> Any:
        return self.model.get_image_features(pixel_values, image_sizes).image_tokens


@pytest.mark.long
def test_the_codes_of_each_image_are_refused() -> None:
    """There may be any number of images, which an ONNX model can't return one by one."""
    with pytest.raises(onnxplug.CaptureError, match="of each image, of which there may be any number"):
        onnxplug.to_onnx(_Codes().eval(), _images(8, 8, (8, 8), (4, 6)), dynamic_shapes=_DYNAMIC)

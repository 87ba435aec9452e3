"""Inputs to test the operators with: tokenizers made of a few words. Importing it imports nothing heavy."""

from __future__ import annotations

from typing import Any

from onnxplug import OpSample

_TEXTS = ["the cat sat", "", "CATS, and dogs!", "a third, with an 😀", "Ñandú 猫 ①"]
#: The samples' processors, kept as long as the process runs.
_kept: list[Any] = []


def samples() -> list[OpSample]:
    """One sample for each operator."""
    about: dict[str, Any] = {"others": (), "opsets": (18, 21)}
    here = "onnxplug_extensions"
    return [
        OpSample(f"{here}::tokenize", lambda: _tokenize(_wordpiece), dynamic_shapes=_ROWS, **about),
        OpSample(f"{here}::detokenize", _detokenize, dynamic_shapes=({0: "texts", 1: "length"}, None), **about),
        OpSample(f"{here}::named", _named, dynamic_shapes=({0: "texts"}, None), **about),
        OpSample(f"{here}::decode_sound", _sound, dynamic_shapes=({0: "bytes"},), **about),
        OpSample(f"{here}::decode_image", _image, dynamic_shapes=({0: "bytes"},), **about),
    ]


#: Any number of texts; the other arguments are no tensors.
_ROWS = ({0: "texts"}, None, None, None)


def _tokenize(make: Any, max_length: int = 0) -> tuple[Any, ...]:
    from onnxplug import string_tensor
    from onnxplug_extensions.tokenizers import encoder_of

    encoder, name = encoder_of(make())
    _kept.append(encoder)
    return string_tensor(_TEXTS), name, max_length, 1


def _detokenize() -> tuple[Any, ...]:
    import torch

    from onnxplug_extensions.decoding import Detokenizer

    module = Detokenizer(_wordpiece())
    _kept.append(module)
    return torch.tensor([[2, 25, 26, 3, 0], [2, 5, 17, 18, 3]]), module._name


def _named() -> tuple[Any, ...]:
    import torch

    import onnxplug_extensions.operators  # noqa: F401  (defines the operator)

    return torch.tensor([2, 0, 1, 1]), '["bad", "neither", "good"]'


def _sound() -> tuple[Any, ...]:
    import io
    import wave

    import torch

    import onnxplug_extensions.sound  # noqa: F401

    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(bytes(range(200)))
    return (torch.tensor(list(content.getvalue()), dtype=torch.uint8),)


def _image() -> tuple[Any, ...]:
    import io

    import numpy as np
    import torch
    from PIL import Image

    import onnxplug_extensions.images  # noqa: F401

    content = io.BytesIO()
    Image.fromarray(np.arange(240, dtype=np.uint8).reshape(8, 10, 3)).save(content, "PNG")
    return (torch.tensor(list(content.getvalue()), dtype=torch.uint8),)


def _wordpiece() -> Any:
    from transformers import BertTokenizer

    pieces = [*"acdghnostu", *(f"##{letter}" for letter in "acdghnostu"), "the", "cat", "##s", ",", "!", "猫", "and"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(pieces)]
    return BertTokenizer(vocab={word: number for number, word in enumerate(words)})

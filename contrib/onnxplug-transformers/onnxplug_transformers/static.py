"""Decoders whose sizes are all fixed: a model of a piece of the prompt and a model of one token, over buffers of one length.

The buffers hold keys and values of all tokens; each call writes those of its tokens behind the past ones. A piece that
the prompt does not fill has any tokens at its end: later tokens overwrite their keys and values, and no token sees them
before.
"""

from __future__ import annotations

import inspect
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx.external_data_helper import ExternalDataInfo
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from onnxplug import UsageError
from onnxplug_transformers.caches import argument_of
from onnxplug_transformers.decoders import tolerance_of
from onnxplug_transformers.genai import context_length
from onnxplug_transformers.tasks import Part


@torch.library.custom_op("onnxplug_transformers::written", mutates_args=())
def written(buffer: torch.Tensor, new: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """A buffer with new rows in it.

    Args:
        buffer: [batch, heads, length, width].
        new: [batch, heads, sequence, width].
        start: int64 [batch], the place of the first new row; all rows have to fit.

    Returns:
        [batch, heads, length, width].
    """
    places = start[:, None] + torch.arange(new.shape[2])
    return buffer.scatter(2, places[:, None, :, None].expand(new.shape), new)


@written.register_fake
def _(buffer: torch.Tensor, new: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(buffer)


def convert(g: Any, node: Any) -> Any:
    """ScatterElements, with the place of each number."""
    buffer, new, start = node.args
    offsets = g.const([[[[place] for place in range(new.shape[2])]]])
    places = g.op.Add(g.op.Unsqueeze(start, g.const([1, 2, 3])), offsets)
    return g.op.ScatterElements(buffer, g.op.Expand(places, g.const([int(n) for n in new.shape])), new, axis=2)


def convert_at_once(g: Any, node: Any) -> Any:
    """TensorScatter, which runtimes may compute in place."""
    buffer, new, start = node.args
    return g.op.TensorScatter(buffer, new, start, axis=2, mode="linear")


class StaticDecoder(Part):
    """A step of a language model over buffers of a fixed length."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.config = model.config

    def forward(self, input_ids: torch.Tensor, past_length: torch.Tensor, past_key_values: Any) -> dict[str, Any]:
        """One step.

        Args:
            input_ids: [1, sequence] the new tokens.
            past_length: int64 [1], the number of tokens in the buffers.
            past_key_values: A cache with the buffers, keys and values [1, heads, length, width].

        Returns:
            ``logits`` [1, sequence, vocabulary], and ``past_key_values``, the buffers with the new tokens.
        """
        cache: Any = DynamicCache()
        for layer in past_key_values.layers:
            buffers: Any = _Buffers()
            buffers.lazy_initialization(layer.keys, layer.values)
            buffers.keys, buffers.values, buffers.start = layer.keys, layer.values, past_length
            cache.layers.append(buffers)
        positions = past_length[:, None] + torch.arange(input_ids.shape[1])
        result = self._model(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=self._masks(positions, past_key_values.layers[0].keys.shape[2]),
            use_cache=True,
            **{argument_of(self._model): cache},
        )
        after: Any = DynamicCache()
        for layer in cache.layers:
            kept: Any = DynamicLayer()
            kept.lazy_initialization(layer.keys, layer.values)
            kept.keys, kept.values = layer.keys, layer.values
            after.layers.append(kept)
        return {"logits": result.logits, "past_key_values": after}

    def _masks(self, positions: torch.Tensor, length: int) -> Any:
        """The mask to add to scores, [1, 1, sequence, length]; a mask for each kind of layer if there are several."""
        config, places = self.config.get_text_config(), torch.arange(length)
        kinds = set(getattr(config, "layer_types", None) or ())
        window: Any = getattr(config, "sliding_window", None)

        def mask(windowed: bool) -> torch.Tensor:
            seen = places <= positions[..., None]
            if windowed:
                seen = seen & (places > positions[..., None] - window)
            low = torch.finfo(self._model.dtype).min
            return torch.where(seen[:, None], 0.0, low).to(self._model.dtype)

        if len(kinds) > 1:
            return {kind: mask(kind == "sliding_attention") for kind in kinds}
        return mask(window is not None and kinds != {"full_attention"})


class _Buffers(DynamicLayer):
    """Buffers of a fixed length, into which new keys and values are written."""

    start: torch.Tensor

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """The whole buffers: the mask hides the places behind the new tokens."""
        self.keys = written(self.keys, key_states, self.start)
        self.values = written(self.values, value_states, self.start)
        return self.keys, self.values


def parse_sizes(text: str) -> tuple[int, int]:
    """Parses ``LENGTH,PROMPT``."""
    length, comma, prompt = text.partition(",")
    if not comma or not (length.strip().isdigit() and prompt.strip().isdigit()) or not 0 < int(prompt) <= int(length):
        raise UsageError(
            f"--static {text!r} is not LENGTH,PROMPT",
            hint="--static 2048,128: buffers for 2048 tokens, and a model that takes 128 of the prompt at once.",
        )
    return int(length), int(prompt)


def check_static(model: Any, length: int) -> None:
    """Checks that a model can have buffers of a length."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UsageError(f"--static: {type(model).__name__} computes positions from a mask over the whole cache")
    most = context_length(model.config.get_text_config())
    if length > most:
        raise UsageError(f"--static {length}: texts of {type(model).__name__} have {most} tokens at most")
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        raise UsageError(f"--static: {type(model).__name__} has layers of the kinds {', '.join(sorted(kinds))}")


def static_example(decoder: StaticDecoder, cache: Any, length: int, sequence: int, start: int) -> dict[str, Any]:
    """Inputs of a step: random tokens, after ``start`` tokens in the buffers.

    Args:
        cache: A cache of the model, of any length, for the shapes of its layers.
    """
    generator = torch.Generator().manual_seed(start)
    buffers: Any = DynamicCache()
    for layer in cache.layers:
        new: Any = DynamicLayer()
        heads, width = layer.keys.shape[1], layer.keys.shape[3]
        keys, values = (
            torch.randn(1, heads, length, width, generator=generator).to(layer.keys.dtype) for _ in range(2)
        )
        new.lazy_initialization(keys, values)
        new.keys, new.values = keys, values
        buffers.layers.append(new)
    tokens = torch.randint(0, decoder.config.get_text_config().vocab_size, (1, sequence), generator=generator)
    return {"input_ids": tokens, "past_length": torch.tensor([start]), "past_key_values": buffers}


def check_step(decoder: StaticDecoder, example: Mapping[str, Any]) -> None:
    """Compares a step over buffers with the model's own step over a cache of the tokens before it.

    Raises:
        UsageError: The logits differ: an attention of the model's own counts the places behind the tokens.
    """
    tokens, start = example["input_ids"], int(example["past_length"])
    past: Any = DynamicCache()
    for buffers in example["past_key_values"].layers:
        layer: Any = DynamicLayer()
        keys, values = (x[:, :, :start] for x in (buffers.keys, buffers.values))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        past.layers.append(layer)
    with torch.no_grad():
        cache = {argument_of(decoder._model): past}
        exact = decoder._model(input_ids=tokens, use_cache=True, **cache).logits.float()
        actual = decoder(**example)["logits"].float()
    # on average, as in decoders.check_pieces: rounding may choose another expert for a token
    if not bool((actual - exact).abs().mean() <= tolerance_of(exact, decoder._model.dtype)):
        raise UsageError(f"--static: {type(decoder._model).__name__} gives other logits over buffers of a fixed length")


def share_data(first: Path, second: Path) -> None:
    """Lets a model read its weights from another's data file in the same folder; weights that are not there stay."""
    models = [onnx.load(path, load_external_data=False) for path in (first, second)]
    stored = [
        {tensor.name: (tensor, ExternalDataInfo(tensor)) for tensor in model.graph.initializer if tensor.external_data}
        for model in models
    ]
    data = {
        name: _mapped(first.parent / name) for part in stored for name in {info.location for _, info in part.values()}
    }
    left, old = set(), set()
    for name, (tensor, info) in stored[1].items():
        old.add(info.location)
        named = [stored[0][name][1]] if name in stored[0] else []
        others = [*named, *(other for _, other in stored[0].values() if other.length == info.length)]
        same = next((other for other in others if _bytes(data, other) == _bytes(data, info)), None)
        if same is None:
            left.add(info.location)
            continue
        for entry in tensor.external_data:
            if entry.key in ("location", "offset", "length"):
                entry.value = str(getattr(same, entry.key))
    second.write_bytes(models[1].SerializeToString())
    for name in old - left:
        (first.parent / name).unlink()


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _bytes(data: Mapping[str, mmap.mmap], info: ExternalDataInfo) -> bytes:
    start = info.offset or 0
    return data[info.location][start : start + info.length if info.length else None]

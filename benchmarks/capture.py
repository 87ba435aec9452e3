"""``onnxplug.to_onnx`` of a model beside ``torch.export.export`` alone, and beside ``torch.onnx.export``.

Whole exports, in turns, processor time of the process. ``make bench`` prints the tables. Programs are compared, as each exporter
returns them: neither torch's nor onnxplug's copies the weights. The protocol buffer (``program.model_proto``) does; saving a file
does not need it. Its time, and the ratio with it, are columns of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.export import Dim

import onnxplug
from benchmarks.models import Decoder
from tests.support.vision import define_vision_schemas
from tests.support.zoo import transformers_model

console = Console(width=120)
Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]


def decoder(layers: int) -> Example:
    """The GPT-like decoder with dynamic batch and sequence."""
    shapes = ({0: Dim("batch"), 1: Dim("sequence", max=1000)},)
    return Decoder(layers).eval(), (torch.randint(0, 100, (2, 8)),), {}, shapes


def image(name: str) -> Example:
    """A model of timm; torchvision's resnet50 is among them."""
    define_vision_schemas()
    import timm

    return timm.create_model(name).eval(), (torch.randn(2, 3, 224, 224),), {}, ({0: Dim("batch")},)


def text(model: str, config: str, names: tuple[str, ...] = ("input_ids",), **settings: Any) -> Example:
    """A language model of transformers with as many layers as the published model, at a small width."""
    module = transformers_model(model, config, vocab_size=1000, **settings).eval()
    kwargs = {name: torch.randint(3, 900, (2, 16)) for name in names}
    shapes = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in names}
    return module, (), kwargs, shapes


def speech() -> Example:
    """Whisper with the layers of its large configuration."""
    settings = {
        "encoder_layers": 32,
        "decoder_layers": 32,
        "d_model": 64,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
    }
    settings |= {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "max_source_positions": 50,
        "vocab_size": 1000,
    }
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    module = transformers_model("WhisperModel", "WhisperConfig", use_cache=False, **settings, **ids).eval()
    kwargs = {"input_features": torch.randn(2, 80, 100), "decoder_input_ids": torch.randint(3, 900, (2, 5))}
    return (
        module,
        (),
        kwargs,
        {"input_features": {0: Dim.DYNAMIC}, "decoder_input_ids": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}},
    )


def qwen3() -> Example:
    """Qwen3 with the layers of its 0.6B and 1.7B."""
    settings = {"num_hidden_layers": 28, "num_key_value_heads": 2, "head_dim": 16, "use_cache": False}
    return text("Qwen3ForCausalLM", "Qwen3Config", **settings, **_SMALL)


_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
MODELS: Mapping[str, Callable[[], Example]] = {
    "resnet50": lambda: image("resnet50"),
    "vit_base": lambda: image("vit_base_patch16_224"),
    "swin_base": lambda: image("swin_base_patch4_window7_224"),
    "bert, 12 layers": lambda: text("BertModel", "BertConfig", num_hidden_layers=12, **_SMALL),
    "llama, 32 layers": lambda: text(
        "LlamaForCausalLM", "LlamaConfig", num_hidden_layers=32, num_key_value_heads=2, use_cache=False, **_SMALL
    ),
    "t5, 24 and 24 layers": lambda: text(
        "T5ForConditionalGeneration",
        "T5Config",
        ("input_ids", "decoder_input_ids"),
        num_layers=24,
        d_model=64,
        d_ff=128,
        d_kv=16,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
    ),
    "whisper, 32 and 32 layers": speech,
    "qwen3, 28 layers": qwen3,
    "deberta, 12 layers": lambda: text(
        "DebertaV2Model",
        "DebertaV2Config",
        num_hidden_layers=12,
        relative_attention=True,
        position_buckets=32,
        pos_att_type=["p2c", "c2p"],
        **_SMALL,
    ),
    "efficientnet_b4": lambda: image("efficientnet_b4"),
}
#: Times faster than torch.export alone; whisper has no goal of its own.
GOALS = {
    "decoder": 5.0,
    "resnet50": 1.2,
    "vit_base": 2.2,
    "swin_base": 2.0,
    "bert, 12 layers": 2.2,
    "llama, 32 layers": 4.0,
    "t5, 24 and 24 layers": 4.0,
    "whisper, 32 and 32 layers": 1.0,
    "qwen3, 28 layers": 3.5,
    "deberta, 12 layers": 3.5,
    "efficientnet_b4": 1.2,
}
MEAN_GOAL = 2.6


def cost(function: Callable[[], Any]) -> float:
    """Processor time of a call, in seconds."""
    gc.collect()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        started = time.process_time()
        function()
        return time.process_time() - started


def contenders(example: Example, peer: bool) -> dict[str, Callable[[], Any]]:
    """The calls that are compared."""
    module, args, kwargs, shapes = example
    program = onnxplug.to_onnx(module, args, kwargs=kwargs, dynamic_shapes=shapes)

    def export() -> Any:
        with torch.no_grad():
            return torch.export.export(module, args, kwargs, dynamic_shapes=shapes)

    found = {
        "torch.export": export,
        "onnxplug": lambda: onnxplug.to_onnx(module, args, kwargs=kwargs, dynamic_shapes=shapes),
        "protocol buffer": lambda: program.model_proto,
    }
    if peer:
        found["torch.onnx"] = lambda: torch.onnx.export(
            module, args, kwargs=kwargs, dynamic_shapes=shapes, dynamo=True, verbose=False
        )
    return found


def compare(name: str, example: Example, *, rounds: int, peer: bool) -> dict[str, float]:
    """The least cost of each contender, in turns."""
    calls = contenders(example, peer)
    costs = {contender: [cost(call)] for contender, call in calls.items()}
    for _ in range(rounds - 1):
        for contender, call in calls.items():
            if contender != "torch.onnx":  # minutes
                costs[contender].append(cost(call))
    return {contender: min(found) for contender, found in costs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["decoder", *MODELS])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true", help="without torch.onnx")
    options = parser.parse_args()
    table = Table(
        title="Whole export, processor seconds, and how many times faster than torch.export alone and than torch.onnx"
    )
    columns = (
        "model",
        "torch.export",
        "onnxplug",
        "times faster",
        "goal",
        "its buffer",
        "with it",
        "torch.onnx",
        "times faster",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    compare("decoder", decoder(1), rounds=1, peer=False)  # imports
    ratios = []
    for name in options.models:
        is_decoder = name == "decoder"
        example = decoder(options.layers) if is_decoder else MODELS[name]()
        found = compare(name, example, rounds=options.rounds, peer=is_decoder and not options.no_peer)
        ratio = found["torch.export"] / found["onnxplug"]
        row = [f"{name}, {options.layers} layers" if is_decoder else name]
        whole = found["onnxplug"] + found["protocol buffer"]
        row += [f"{found['torch.export']:.2f}", f"{found['onnxplug']:.2f}", f"{ratio:.2f}", f"{GOALS[name]:g}"]
        row += [f"{found['protocol buffer']:.2f}", f"{found['torch.export'] / whole:.2f}"]
        if "torch.onnx" in found:
            row += [f"{found['torch.onnx']:.1f}", f"{found['torch.onnx'] / found['onnxplug']:.0f}"]
        table.add_row(*row)
        ratios.append(ratio)
    console.print(table)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        console.print(
            f"geometric mean: {mean:.2f} times faster than torch.export alone (goal: {MEAN_GOAL}), least {min(ratios):.2f} (goal: 1)"
        )


if __name__ == "__main__":
    main()

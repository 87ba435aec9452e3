"""Decoders in float32 and in 4 bits beside those of onnxruntime-genai's own builder, of the same random checkpoint.

``python -m benchmarks.decoders`` prints the table, with the ratios of ours to the builder's. All folders are run by onnxruntime-genai
within one process, on one thread, in turns. A token's cost is processor time, the second decile of its runs, so that what else
runs on the machine counts for little. Perplexity is that of text which transformers draws from the float model; "equal tokens" is
the share of greedy ones, each after the float model's own text. The folders are kept in ``out/decoders`` (``--fresh`` makes them anew).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table

from tests.support.contrib import plugged
from tests.support.vision_kernels import define_vision_kernels

OUT = Path("out/decoders")
VOCABULARY, HEAD, PROMPT, TOKENS = 4096, 64, 128, 32
_CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": HEAD}),
}
#: Kind to our options; BUILDERS has the options of onnxruntime-genai's builder.
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int4": {"int4": True},
    "rtn": {"int4": True},
    "k_quant": {"int4": True, "zero_points": True},
    "rtn_last": {"int4": True, "int8_layers": ["lm_head"]},
    "k_quant_last": {"int4": True, "int8_layers": ["lm_head"], "zero_points": True},
    "mixed": {"int4": True, "int8_layers": ["mixed"]},
    "mixed-zeros": {"int4": True, "int8_layers": ["mixed"], "zero_points": True},
    **{f"int4-{size}": {"int4": True, "block_size": size} for size in (16, 64, 128, 256)},
}
BUILDERS: dict[str, list[str]] = {
    "fp32": ["-p", "fp32"],
    "int4": ["-p", "int4"],
    **{
        kind: ["-p", "int4", "--extra_options", f"algo_config={kind}"]
        for kind in ("rtn", "k_quant", "rtn_last", "k_quant_last")
    },
    **{kind: ["-p", "int4", "--extra_options", "algo_config=k_quant_mixed"] for kind in ("mixed", "mixed-zeros")},
    **{f"int4-{size}": ["-p", "int4", "--extra_options", f"block_size={size}"] for size in (16, 64, 128, 256)},
}
console = Console(width=140)


def checkpoint(name: str) -> Path:
    """The folder of a random model whose logits are far from flat, and its tokenizer."""
    import transformers
    from tokenizers import Tokenizer, models

    folder = OUT / name
    if folder.exists():
        return folder
    model_class, config, settings = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config)(**_CONFIG, **settings)).eval()
    with torch.no_grad():
        model.model.norm.weight.mul_(2.5)
    generation = model.generation_config
    generation.bos_token_id, generation.eos_token_id, generation.pad_token_id = 1, 2, 0
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def builders(source: Path, kind: str) -> Path:
    """The folder that onnxruntime-genai's builder makes of a checkpoint."""
    folder = source.with_name(f"{source.name}-builder-{kind}")
    if not folder.exists():
        module = (
            "import runpy; from tests.support.vision_kernels import define_vision_kernels; define_vision_kernels(); "
        )
        module += "runpy.run_module('onnxruntime_genai.models.builder', run_name='__main__')"
        arguments = ["-m", source, "-o", folder, "-e", "cpu", "-c", OUT / "cache", *BUILDERS[kind]]
        subprocess.run([sys.executable, "-c", module, *map(str, arguments)], check=True, capture_output=True)
    return folder


def ours(source: Path, kind: str) -> Path:
    """The folder that onnxplug makes of a checkpoint, with ``--fused``."""
    registry = plugged("onnxplug-transformers", "onnxplug-ort")
    from onnxplug_transformers.export import export_folder

    folder = source.with_name(f"{source.name}-onnxplug-{kind}")
    if not folder.exists():
        export_folder(source, folder, fused=True, external_data=True, options={"registry": registry}, **KINDS[kind])
    return folder


@dataclass
class Contender:
    """A folder under measurement.

    Attributes:
        folder: The folder.
        token_ms, prompt_ms: Milliseconds of each run, by onnxruntime-genai.
        perplexity: Perplexity of the float model's text.
        equal: The share of places where the most likely token is that of the float model.
    """

    folder: Path
    token_ms: list[float] = field(default_factory=list)
    prompt_ms: list[float] = field(default_factory=list)
    perplexity: float = 0.0
    equal: float = 0.0

    @property
    def megabytes(self) -> float:
        """Size of the model's files in MB."""
        return sum(path.stat().st_size for path in self.folder.glob("model.onnx*")) / 1e6

    @property
    def token(self) -> float:
        """Milliseconds a token, the second decile."""
        return float(np.quantile(self.token_ms, 0.2))

    @property
    def prompt(self) -> float:
        """Milliseconds a prompt, the second decile."""
        return float(np.quantile(self.prompt_ms, 0.2))


def run_in_turns(contenders: list[Contender], rounds: int) -> None:
    """Times a prompt and tokens after it, each contender once a round, in another order each time.

    Each round loads the model anew: where a model's memory lies changes its time by 2 to 4 %.
    """
    import onnxruntime_genai as og

    threads = {"intra_op_num_threads": 1, "inter_op_num_threads": 1}
    prompt = np.random.default_rng(0).integers(3, VOCABULARY, (1, PROMPT)).astype(np.int32)
    for turn in range(rounds):
        start = turn % len(contenders)
        for contender in contenders[start:] + contenders[:start]:
            config = og.Config(str(contender.folder))
            config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
            model = og.Model(config)
            settings = og.GeneratorParams(model)
            length = int(_CONFIG["max_position_embeddings"])
            settings.set_search_options(max_length=length, min_length=length)
            generator = og.Generator(model, settings)
            begin = time.process_time()
            generator.append_tokens(prompt)
            contender.prompt_ms.append(1e3 * (time.process_time() - begin))
            generator.generate_next_token()
            for _ in range(TOKENS):
                begin = time.process_time()
                generator.generate_next_token()
                contender.token_ms.append(1e3 * (time.process_time() - begin))
            del generator, settings, model


def drawn(source: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Text of the float model, [rows, tokens], and its logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source).eval()
    torch.manual_seed(0)
    start = torch.randint(3, VOCABULARY, (16, 1))
    with torch.no_grad():
        text = model.generate(start, do_sample=True, top_k=0, max_new_tokens=95, min_new_tokens=95)
        return text, model(text).logits


def score(contender: Contender, text: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares a folder's logits of a text with the float model's."""
    session = onnxruntime.InferenceSession(str(contender.folder / "model.onnx"), providers=["CPUExecutionProvider"])
    feeds: dict[str, np.ndarray] = {"input_ids": text.numpy(), "attention_mask": np.ones(text.shape, np.int64)}
    for value in session.get_inputs():
        if value.name not in feeds:
            feeds[value.name] = np.zeros((len(text), _CONFIG["num_key_value_heads"], 0, HEAD), np.float32)
    logits = torch.from_numpy(session.run(["logits"], feeds)[0])
    scores = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())
    contender.perplexity = float(scores.exp())
    contender.equal = float((logits.argmax(-1) == expected.argmax(-1)).float().mean())


def main() -> None:
    """Makes the missing folders, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--kinds", nargs="*", default=["fp32", "int4", "mixed"], choices=list(KINDS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fresh", action="store_true", help="make the folders anew")
    arguments = parser.parse_args()
    define_vision_kernels()
    if arguments.fresh:
        shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True, exist_ok=True)
    table = Table("model", "", "by", "ms a token", f"ms a prompt of {PROMPT}", "MB", "perplexity", "equal tokens")
    for name in arguments.models:
        source = checkpoint(name)
        text, expected = drawn(source)
        perplexity = float(
            torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), text[:, 1:].flatten()).exp()
        )
        table.add_row(name, "float32", "transformers", "", "", "", f"{perplexity:.3f}", "")
        for kind in arguments.kinds:
            pair = [Contender(builders(source, kind)), Contender(ours(source, kind))]
            for contender in pair:
                score(contender, text, expected)
            run_in_turns(pair, arguments.rounds)
            for contender, by in zip(pair, ("builder", "onnxplug"), strict=True):
                figures = [contender.token, contender.prompt, contender.megabytes, contender.perplexity]
                first = [pair[0].token, pair[0].prompt, pair[0].megabytes, pair[0].perplexity]
                cells = [f"{a:.3f} ({a / b:.3f})" for a, b in zip(figures, first, strict=True)]
                table.add_row("", kind, by, *cells, f"{100 * contender.equal:.1f} %")
    console.print(table)


if __name__ == "__main__":
    main()

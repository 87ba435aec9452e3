"""What becomes of onnxplug's files in the tools that people use after an export, beside torch.onnx's: ``make consumers``.

Each consumer runs in a process of its own; those that the environment lacks are installed into folders of their own under ``out/consumers``
(``--no-deps``: onnx, numpy and protobuf are the environment's). A file counts as taken where the consumer raises nothing and ONNX Runtime
loads and runs what it made. The table, and where ours fall behind, is written to ``docs/consumers.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.utils import _pytree

import onnxplug
from benchmarks.latency_models import LATENCY
from tests.support.zoo import ZOO, ZooModel, image_model, stirred, transformers_model

OUT = Path("out/consumers")
PAGE = Path("docs/consumers.md")
console = Console(width=140)

#: Consumer to its title and the noun that its figure counts; without a noun, a file is taken or not.
TITLES: dict[str, tuple[str, str]] = {
    "quantize_dynamic": ("`onnxruntime.quantization.quantize_dynamic`", "integer products"),
    "quantize_static": ("`onnxruntime.quantization.quantize_static`", ""),
    "qnn": ("QNN's preprocessing and QDQ", ""),
    "four_bits": ("`MatMulNBitsQuantizer`", "products in 4 bits"),
    "transformers_optimizer": ("`onnxruntime.transformers.optimizer`", "fused operators"),
    "float16": ("onnxconverter-common's float16", ""),
    "symbolic_shapes": ("`symbolic_shape_infer`", ""),
    "fixed_shapes": ("`make_dynamic_shape_fixed`", ""),
    "extract_model": ("`onnx.utils.extract_model`", ""),
    "ort_format": ("conversion to `.ort`", ""),
    "mobile": ("ONNX Runtime's checker for NNAPI and CoreML", "points: 2 where it advises one, 1 where it may"),
    "onnxslim": ("onnxslim", ""),
    "onnxsim": ("onnxsim", ""),
    "polygraphy": ("polygraphy's constant folding", ""),
    "openvino": ("OpenVINO, compared with ONNX Runtime", ""),
    "web_in_node": ("onnxruntime-web in Node, compared too", ""),
    "web_in_chromium": ("onnxruntime-web in Chromium, compared too", ""),
}
#: Consumer to the packages that pip installs for it.
PACKAGES: dict[str, Sequence[str]] = {
    "float16": ["onnxconverter-common==1.16.0"],
    "onnxslim": ["onnxslim==0.1.98"],
    "onnxsim": ["onnxsim==0.8.1"],
    "polygraphy": ["polygraphy==0.53.6", "onnx-graphsurgeon==0.6.1"],
    "openvino": ["openvino==2026.4.1", "openvino-telemetry==2025.2.0"],
}
#: Consumer to the package that npm installs for it.
NPM = dict.fromkeys(["web_in_node", "web_in_chromium"], "onnxruntime-web@1.30.0")
_BERT = {"model_type": "bert", "num_heads": 4, "hidden_size": 256}
#: Model to the arguments of ONNX Runtime's optimizer; other models get those of BERT, the default of its command.
OPTIMIZER: dict[str, dict[str, Any]] = {
    "gpt2": {**_BERT, "model_type": "gpt2"},
    "t5": {**_BERT, "model_type": "t5"},
    "vit": {"model_type": "vit", "num_heads": 4, "hidden_size": 32},
    "vit_tiny": {"model_type": "vit", "num_heads": 3, "hidden_size": 192},
    "swin_tiny": {"model_type": "swin", "num_heads": 0, "hidden_size": 0},
    "clip": {"model_type": "clip", "num_heads": 4, "hidden_size": 32},
    "llama": {**_BERT, "model_type": "gpt_neox"},
    "qwen3": {**_BERT, "model_type": "gpt_neox"},
}


#: Why quantisers find fewer products in our files.
TIED = "A weight that is tied to an embedding is stored once and read transposed; torch.onnx stores it twice, and quantisers take its product."


class Stages(nn.Module):
    """The parts of detectors: convolutions with batch norms, SiLU, split and joined channels, a pyramid."""

    def __init__(self, width: int = 16, stages: int = 3) -> None:
        super().__init__()
        self.first = self._block(3, width)
        self.down = nn.ModuleList(self._block(width << i, width << (i + 1), 2) for i in range(stages))
        self.inner = nn.ModuleList(self._block(width << i, width << i) for i in range(stages))
        self.merge = nn.ModuleList(self._block(3 * (width << i), width << (i + 1)) for i in range(stages))
        self.up = self._block(3 * (width << (stages - 1)), 20)

    @staticmethod
    def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [batch, 20, places]."""
        x, before = self.first(x), x
        for down, inner, merge in zip(self.down, self.inner, self.merge, strict=True):
            before, x = x, down(x)
            left, right = x.chunk(2, 1)
            x = merge(torch.cat([left, right, inner(right)], 1))
        wide = nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")
        skipped = nn.functional.interpolate(before, size=wide.shape[-2:])
        return self.up(torch.cat([wide, skipped], 1)).flatten(2).sigmoid()


def _detr() -> nn.Module:
    backbone = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "out_features": ["stage2"]}
    transformers = __import__("transformers")
    return transformers_model(
        "DetrForObjectDetection",
        "DetrConfig",
        use_timm_backbone=False,
        backbone=None,
        use_pretrained_backbone=False,
        backbone_config=transformers.ResNetConfig(**backbone),
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_queries=10,
    )


class Graphs(nn.Module):
    """Two layers of a graph network, each a sum over edges by ``index_add``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 8)])

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Nodes [N, 16] and edges [2, E] to [N, 8]."""
        source, target = edges[0], edges[1]
        for layer in self.layers:
            x = layer(x)
            degree = torch.zeros_like(x[:, 0]).index_add(0, target, torch.ones_like(target, dtype=x.dtype))
            weight = degree.clamp(min=1).pow(-0.5)
            messages = x[source] * (weight[source] * weight[target]).unsqueeze(-1)
            x = torch.zeros_like(x).index_add(0, target, messages).relu()
        return x


def _draw_graph(nodes: int, edges: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(nodes, 16), torch.randint(nodes, (2, edges))), {}


def _draw_pixels(batch: int, size: int = 64) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {"pixel_values": torch.randn(batch, 3, size, size)}


_IMAGES = {"batch": 2}, {"pixel_values": {0: "batch"}}
MODELS: dict[str, ZooModel] = {
    **LATENCY,
    **{name: ZOO[name] for name in ("vit", "clip", "whisper")},
    "resnet50": image_model("resnet50"),
    "detr": ZooModel(_detr, _draw_pixels, *_IMAGES),
    "detector": ZooModel(
        lambda: stirred(Stages()),
        lambda batch: ((torch.randn(batch, 3, 64, 64),), {}),
        {"batch": 2},
        {"x": {0: "batch"}},
    ),
    "graph": ZooModel(Graphs, _draw_graph, {"nodes": 20, "edges": 60}, {"x": {0: "nodes"}, "edges": {1: "edges"}}),
}


def installed(consumer: str) -> Path | None:
    """The folder of a consumer's own packages, installed if it isn't there; ``None`` where the environment has them."""
    packages = PACKAGES.get(consumer, [NPM[consumer]] if consumer in NPM else None)
    if packages is None:
        return None
    folder = OUT / "packages" / "-".join(packages)
    if consumer in NPM and not folder.exists():
        npm = ["npm", "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
        subprocess.run([*npm, *packages], check=True)
    elif not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages]
        subprocess.run(pip, check=True)
    return folder


def exported(name: str, who: str, fresh: bool, target: str | None) -> dict[str, Any] | None:
    """A model's file with its sample beside it; ``None`` where the exporter fails."""
    path = OUT / f"{name}.{who}.onnx"
    feed = OUT / f"{name}.npz"
    if fresh or not path.exists():
        case = MODELS[name]()
        inputs = [x for x in _pytree.tree_leaves((case.args, case.kwargs)) if isinstance(x, torch.Tensor)]
        try:
            with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
                program = torch.export.export(case.module, case.args, case.kwargs, dynamic_shapes=case.dynamic_shapes)
                if who == "onnxplug":
                    made: Any = onnxplug.to_onnx(program, plugins=[], target=target)
                else:
                    made = torch.onnx.export(program, dynamo=True, verbose=False)
                made.save(path, external_data=False)
        except Exception as error:
            console.print(f"{name}: {who} can't export it: {type(error).__name__}: {str(error)[:200]}")
            return None
        np.savez(feed, **{v.name: x.numpy() for v, x in zip(made.model.graph.inputs, inputs, strict=True)})
    return {"path": str(path.resolve()), "feed": str(feed.resolve()), "optimizer": OPTIMIZER.get(name, _BERT)}


def consume(consumer: str, files: Iterable[dict[str, Any]], seconds: float = 300) -> list[int | str]:
    """A consumer's outcome for each file: its figure, or its error. A process that dies is started anew."""
    extra = installed(consumer)
    path = os.pathsep.join(
        [
            *([str(extra.resolve())] if extra else []),
            *map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))),
        ]
    )
    script = Path(__file__).resolve().with_name("consumer_process.py")
    command = [sys.executable, "-W", "ignore", str(script), consumer, str(extra.resolve() if extra else "")]
    outcomes: list[int | str] = []
    files = list(files)
    while len(outcomes) < len(files):
        lines = "".join(json.dumps(file) + "\n" for file in files[len(outcomes) :])
        done = subprocess.run(
            command,
            input=lines,
            text=True,
            capture_output=True,
            cwd=OUT,  # some consumers leave files in the working directory
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            timeout=seconds * len(files),
        )
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        outcomes += [answer.get("figure", answer.get("error")) for answer in answers]
        if len(outcomes) < len(files):
            outcomes.append(f"the process died ({done.returncode}): {done.stderr[-200:]}")
    return outcomes


Outcomes = Mapping[str, Mapping[str, int | str]]  # by model, by exporter


def cell(outcomes: Outcomes, who: str, counted: str) -> str:
    """The number of an exporter's files that a consumer takes, and the sum of their figures."""
    results = [of_model[who] for of_model in outcomes.values() if who in of_model]
    taken = [result for result in results if isinstance(result, int)]
    return f"{len(taken)} of {len(results)}" + (f"; {sum(taken):,} {counted}" if counted else "")


def takes_fewer(outcomes: Outcomes) -> bool:
    """Whether a consumer takes fewer of our files than of torch.onnx's."""
    ours, theirs = (
        sum(isinstance(of_model.get(who), int) for of_model in outcomes.values()) for who in ("onnxplug", "torch.onnx")
    )
    return ours < theirs


def behind(consumer: str, outcomes: Outcomes) -> list[str]:
    """The models of which a consumer takes less of our file than of torch.onnx's, with both figures or our error."""
    lines = []
    for model, results in outcomes.items():
        ours, theirs = results.get("onnxplug", "not exported"), results.get("torch.onnx")
        if not isinstance(theirs, int):
            continue
        if isinstance(ours, str):
            lines.append(f"{model}: {' '.join(ours.split())}")
        elif TITLES[consumer][1] and ours < theirs:
            lines.append(f"{model}: {ours}, torch.onnx's {theirs}")
    return lines


def page(found: Mapping[str, Outcomes]) -> str:
    """The documentation's page."""
    import onnxruntime

    rows = [
        f"| {TITLES[consumer][0]} | {cell(outcomes, 'onnxplug', TITLES[consumer][1])} "
        f"| {cell(outcomes, 'torch.onnx', TITLES[consumer][1])} |"
        for consumer, outcomes in found.items()
    ]
    less = [
        f"| {TITLES[consumer][0]} | {line.replace('|', '/')} |"
        for consumer, outcomes in found.items()
        for line in behind(consumer, outcomes)
    ]
    count = len(next(iter(found.values())))
    packages = ", ".join(
        [*(package for packages in PACKAGES.values() for package in packages), *sorted({*NPM.values()})]
    )
    lines = [
        "# What other tools make of the files",
        "",
        f"`make consumers` exports {count} models with random weights by `onnxplug.to_onnx` and by `torch.onnx.export(dynamo=True)`,",
        "and gives the files to tools that people use after an export. A file is taken where the tool raises nothing and ONNX Runtime",
        f"loads and runs what it made. torch {torch.__version__}, ONNX Runtime {onnxruntime.__version__}, {packages}.",
        "",
        "| tool | onnxplug's files | torch.onnx's files |",
        "|---|---|---|",
        *rows,
        "",
        "Where a tool takes less of onnxplug's file:" if less else "No tool takes less of a file of onnxplug's.",
        *(["", TIED] if less else []),
        *(["", "| tool | model |", "|---|---|", *less] if less else []),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Command line; 1 where a consumer takes fewer of our files than of torch.onnx's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--consumers", nargs="+", default=list(TITLES), choices=list(TITLES), metavar="NAME")
    parser.add_argument("--target", default="onnxruntime", help="of our files; none for portable ones")
    parser.add_argument("--fresh", action="store_true", help="make torch.onnx's files anew")
    parser.add_argument(
        "--kept", action="store_true", help="take what is there: our files, and outcomes of other consumers"
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    OUT.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Any]] = {}
    for name in arguments.models:
        target = None if arguments.target == "none" else arguments.target
        made = {
            who: exported(name, who, fresh, target)
            for who, fresh in (("onnxplug", not arguments.kept), ("torch.onnx", arguments.fresh))
        }
        files[name] = {who: file for who, file in made.items() if file is not None}
    found: dict[str, dict[str, dict[str, int | str]]] = {}
    for consumer in arguments.consumers:
        places = [(name, who) for name, of_model in files.items() for who in of_model]
        outcomes = consume(consumer, [files[name][who] for name, who in places])
        found[consumer] = {name: {} for name in files}
        for (name, who), outcome in zip(places, outcomes, strict=True):
            found[consumer][name][who] = outcome
        of_consumer, counted = found[consumer], TITLES[consumer][1]
        console.print(
            f"{consumer}: {cell(of_consumer, 'onnxplug', counted)} / {cell(of_consumer, 'torch.onnx', counted)}"
        )
        for line in behind(consumer, of_consumer):
            console.print(f"    {line}", markup=False)
    kept = OUT / "outcomes.json"
    if arguments.kept and kept.exists():
        found = {**json.loads(kept.read_text()), **found}
    kept.write_text(json.dumps(found, indent=1))
    if arguments.write:
        PAGE.write_text(page(found))
    return int(any(takes_fewer(outcomes) for outcomes in found.values()))


if __name__ == "__main__":
    sys.exit(main())

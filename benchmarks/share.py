"""Conversion as a share of capture, for the models of the zoo, of the benchmark of captures, of timm and of torchvision.

Both are measured within one export, in processor time of the process, so that a busy machine matters little. ``make bench`` prints
the table. A model may be named by the beginning of its name: ``python benchmarks/share.py timm: zoo:bert``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table

import onnxplug
from benchmarks.capture import MODELS, Example
from onnxplug.functionalize.prepare import prepare
from tests.support.vision import define_vision_schemas
from tests.support.zoo import ZOO

console = Console(width=120)
#: Ratio of the time of conversion to the time of capture.
GOAL = 0.15

#: Models of timm with the size of their images: convolutions with and without in-place activations, transformers of every kind.
TIMM = {
    "cait_xxs24_224": 224,
    "coat_tiny": 224,
    "crossvit_tiny_240": 240,
    "densenet121": 224,
    "eva02_tiny_patch14_224": 224,
    "gmixer_24_224": 224,
    "halonet26t": 256,
    "hiera_tiny_224": 224,
    "hrnet_w18_small": 224,
    "levit_128": 224,
    "maxvit_tiny_tf_224": 224,
    "mobilevit_xxs": 256,
    "mvitv2_tiny": 224,
    "pit_ti_224": 224,
    "repvit_m0_9": 224,
    "tiny_vit_5m_224": 224,
    "tnt_s_legacy_patch16_224": 224,
    "tnt_s_patch16_224": 224,
    "twins_pcpvt_small": 224,
    "volo_d1_224": 224,
    "xcit_nano_12_p8_224": 224,
}
#: Models of torchvision, and the shape of their input.
TORCHVISION = {
    "models.mnasnet0_5": (2, 3, 224, 224),
    "models.shufflenet_v2_x0_5": (2, 3, 224, 224),
    "models.swin_v2_t": (2, 3, 224, 224),
    "models.vit_b_16": (2, 3, 224, 224),
    "models.video.mvit_v1_b": (1, 3, 16, 224, 224),
    "models.video.swin3d_t": (1, 3, 8, 112, 112),
}
#: Models of timm that are captured in training, whose norms write their running statistics.
TRAINED = ("efficientnet_b0", "mobilenetv3_small_050", "resnet18")


class Share(NamedTuple):
    """The cost of one export.

    Attributes:
        capture, conversion, functionalization: Processor time in seconds; the last is a part of conversion.
        nodes: The number of nodes of the functional graph.
        strategy: How writes were made functional.
    """

    capture: float
    conversion: float
    functionalization: float
    nodes: int
    strategy: str


def of_timm(name: str, size: int, training: bool = False) -> Example:
    define_vision_schemas()
    import timm

    return timm.create_model(name).train(training), (torch.randn(2, 3, size, size),), {}, None


def of_torchvision(path: str, shape: tuple[int, ...]) -> Example:
    define_vision_schemas()
    import torchvision

    make: Any = torchvision
    for part in path.split("."):
        make = getattr(make, part)
    return make(weights=None).eval(), (torch.randn(*shape),), {}, None


def of_zoo(name: str) -> Example:
    case = ZOO[name]()
    return case.module, case.args, case.kwargs, case.dynamic_shapes


def examples() -> Mapping[str, Callable[[], Example]]:
    """Every model by its name."""
    found: dict[str, Callable[[], Example]] = {f"zoo:{name}": partial(of_zoo, name) for name in ZOO}
    found |= {f"large:{name}": make for name, make in MODELS.items()}
    found |= {f"timm:{name}": partial(of_timm, name, size) for name, size in TIMM.items()}
    found |= {f"torchvision:{name}": partial(of_torchvision, name, shape) for name, shape in TORCHVISION.items()}
    return found | {f"training:{name}": partial(of_timm, name, 224, training=True) for name in TRAINED}


def measure(example: Example) -> Share:
    """Exports a model once."""
    module, args, kwargs, shapes = example
    stages: list[float] = []
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")
        gc.collect()
        program = onnxplug.to_onnx(
            module,
            args,
            kwargs=kwargs,
            dynamic_shapes=shapes,
            progress=lambda stage: stages.append(time.process_time()),
        )
        ended = time.process_time()
        functional = prepare(program.captured)
        again = time.process_time() - ended
    started, captured = stages
    return Share(captured - started, ended - captured, again, len(functional.graph.nodes), functional.strategy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="beginnings of names; all without any")
    parser.add_argument("--rounds", type=int, default=2, help="exports of each model, of which the least share counts")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    table = Table(title=f"Conversion as a share of capture, processor seconds (goal: {GOAL:.0%} at most)")
    for column in ("model", "nodes", "writes", "capture", "functional", "conversion", "share"):
        table.add_column(column, justify="left" if column in ("model", "writes") else "right")
    measure(of_zoo("bert"))  # imports
    over = []
    for name, make in examples().items():
        if options.models and not name.startswith(tuple(options.models)):
            continue
        found = min((measure(make()) for _ in range(options.rounds)), key=lambda s: s.conversion / s.capture)
        share = found.conversion / found.capture
        seconds = [f"{found.capture:.2f}", f"{found.functionalization:.3f}", f"{found.conversion:.3f}"]
        table.add_row(name, str(found.nodes), found.strategy, *seconds, f"{share:.1%}")
        if share > GOAL:
            over.append(f"{name} {share:.1%}")
    console.print(table)
    console.print(f"over {GOAL:.0%}: {', '.join(over) or 'none'}")


if __name__ == "__main__":
    main()

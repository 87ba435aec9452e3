"""One architecture: made small, captured, exported, run and compared with PyTorch, on the export's and on other sizes."""

from __future__ import annotations

import importlib
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import onnxplug
from onnxplug import CaptureError, VerificationError
from onnxplug.run.verify import verify_file
from tests.models.configurations import VOCABULARY, small_settings
from tests.support.vision import define_vision_schemas
from tests.support.zoo import stirred

#: Kinds of models, and transformers' tables of them.
TABLES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}


class Architecture(NamedTuple):
    """An architecture of transformers.

    Attributes:
        kind: A key of :data:`TABLES`.
        name: Its model type.
        model: Its class.
    """

    kind: str
    name: str
    model: str


@dataclass
class Outcome:
    """What became of an architecture.

    Attributes:
        status: ``pass``; ``unfit`` (no small model of it runs in PyTorch); ``capture`` (it can't be captured); ``convert``;
            ``wrong`` (another result than PyTorch); ``error``. The parent adds ``crash`` and ``timeout``.
        detail: The error's first lines.
        seconds: How long the export took.
        dynamic: Whether batch and length are dynamic.
    """

    status: str
    detail: str = ""
    seconds: float = 0.0
    dynamic: bool = True


def architectures() -> Iterator[Architecture]:
    """The architectures of the tables."""
    define_vision_schemas()
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    for kind, table in TABLES.items():
        for name, model in getattr(tables, table).items():
            yield Architecture(kind, name, model if isinstance(model, str) else model[0])


def small_model(architecture: Architecture) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """A small model with random weights, example inputs and their dynamic dimensions."""
    define_vision_schemas()
    transformers = importlib.import_module("transformers")
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[architecture.name]
    config = config_class(**small_settings(config_class(), architecture.name))
    model_class = getattr(transformers, architecture.model)
    if not isinstance(
        config, model_class.config_class or object
    ):  # of the text alone, as AutoModelForCausalLM takes it
        config = config.get_text_config(decoder=True)
    torch.manual_seed(0)
    model = stirred(model_class(config).eval())
    inputs: dict[str, Any]
    if architecture.kind == "image":
        size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 64)
        height, width = (size, size) if isinstance(size, int) else size
        inputs = {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), height, width)}
        dynamic: dict[str, Any] = {"pixel_values": {0: "batch"}}
    else:
        inputs = {"input_ids": torch.randint(4, VOCABULARY, (2, 9))}
        dynamic = {"input_ids": {0: "batch", 1: "sequence"}}
        if architecture.kind == "seq2seq":
            inputs["decoder_input_ids"] = torch.randint(4, VOCABULARY, (2, 7))
            dynamic["decoder_input_ids"] = {0: "batch", 1: "target"}
        for part in (config, config.get_text_config(decoder=True)):
            part.use_cache = False
    return model, inputs, dynamic


def measure(architecture: Architecture) -> Outcome:
    """Exports an architecture and compares it; static sizes are tried where dynamic ones can't be captured."""
    warnings.simplefilter("ignore")
    try:
        model, inputs, dynamic = small_model(architecture)
        with torch.no_grad():
            model(**inputs)
    except Exception as error:
        return Outcome("unfit", _said(error))
    outcome = _exported(model, inputs, dynamic)
    if outcome.status == "capture":
        static = _exported(model, inputs, None)
        static.dynamic = False
        if static.status != "capture":
            static.detail = static.detail or outcome.detail
            return static
    return outcome


def measure_peer(architecture: Architecture) -> Outcome:
    """The same by ``torch.onnx.export``: dynamic sizes, and static ones where it refuses those."""
    warnings.simplefilter("ignore")
    try:
        model, inputs, dynamic = small_model(architecture)
        with torch.no_grad():
            model(**inputs)
    except Exception as error:
        return Outcome("unfit", _said(error))
    outcome = _exported_by_peer(model, inputs, dynamic)
    if outcome.status == "convert":
        static = _exported_by_peer(model, inputs, None)
        if static.status != "convert":
            static.dynamic = False
            static.detail = static.detail or outcome.detail
            return static
    return outcome


def _exported_by_peer(model: nn.Module, inputs: dict[str, Any], dynamic: dict[str, Any] | None) -> Outcome:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "model.onnx")
        shapes = None
        if dynamic is not None:
            shapes = {name: dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for name, axes in dynamic.items()}
        try:
            torch.onnx.export(model, (), file, kwargs=inputs, dynamic_shapes=shapes, dynamo=True, verbose=False)
        except Exception as error:
            return Outcome("convert", _said(error))
        seconds = time.perf_counter() - started
        try:
            verify_file(file, model, (), inputs, dynamic or {})
        except VerificationError as error:
            return Outcome("wrong", _said(error), seconds)
        except Exception as error:
            return Outcome("error", _said(error), seconds)
    return Outcome("pass", seconds=seconds)


def _exported(model: nn.Module, inputs: dict[str, Any], dynamic: dict[str, Any] | None) -> Outcome:
    started = time.perf_counter()
    try:
        program = onnxplug.to_onnx(model, kwargs=inputs, dynamic_shapes=dynamic)
    except CaptureError as error:
        return Outcome("capture", _said(error))
    except onnxplug.OnnxplugError as error:
        return Outcome("convert", _said(error))
    except Exception as error:
        return Outcome("error", f"{_said(error)} | {traceback.format_exc()[-300:]}")
    seconds = time.perf_counter() - started
    try:
        program.verify()
    except VerificationError as error:
        return Outcome("wrong", _said(error), seconds)
    except Exception as error:
        return Outcome("error", f"{_said(error)} | {traceback.format_exc()[-300:]}", seconds)
    return Outcome("pass", seconds=seconds)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:400]}"

"""One architecture: made small, captured, exported, run and compared with PyTorch, on the export's and on other sizes."""

from __future__ import annotations

import importlib
import json
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir
import torch
from onnxplug_tools.verification import verify_file
from torch import nn

import onnxplug
from onnxplug import CaptureError, VerificationError
from onnxplug.verification.verify import ROUNDING_HINT
from tests.models.configurations import small_settings
from tests.models.examples import Example, fixed, numbered, run, sizes, widened
from tests.models.inputs import draw_inputs
from tests.models.libraries import OTHERS, PLUGINS_OF_OTHERS, other_model
from tests.models.lists import LISTS, WithoutList
from tests.models.multimodal import SIZES, depend_on_each_other, draw_images_and_text
from tests.models.shuffled import SORTED
from tests.models.vision import TIMM, TORCHVISION, timm_model, torchvision_model
from tests.support.contrib import plugged
from tests.support.vision import define_vision_schemas
from tests.support.zoo import stirred

#: Kinds of models of transformers, each with the names of its tables in transformers.
TABLES = {
    "causal": ("CAUSAL_LM",),
    "masked": ("MASKED_LM",),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "image": ("IMAGE_CLASSIFICATION",),
    "detection": ("OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION"),
    "segmentation": ("INSTANCE_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "SEMANTIC_SEGMENTATION", "MASK_GENERATION"),
    "depth": ("DEPTH_ESTIMATION", "NORMAL_ESTIMATION", "POINTMAP_ESTIMATION"),
    "keypoints": ("KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "POSE_ESTIMATION"),
    "pixels": ("IMAGE_MATTING", "IMAGE_TO_IMAGE", "MASKED_IMAGE_MODELING"),
    "reading": ("TEXT_RECOGNITION", "TABLE_RECOGNITION", "TABLE_QUESTION_ANSWERING", "DOCUMENT_QUESTION_ANSWERING"),
    "video": ("VIDEO_CLASSIFICATION",),
    "contrastive": ("ZERO_SHOT_IMAGE_CLASSIFICATION",),
    "audio": ("AUDIO_CLASSIFICATION", "AUDIO_FRAME_CLASSIFICATION", "AUDIO_XVECTOR"),
    "speech": ("CTC", "SPEECH_SEQ_2_SEQ", "RNNT", "TDT"),
    "synthesis": ("TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM"),
    "series": ("TIME_SERIES_PREDICTION", "TIME_SERIES_CLASSIFICATION", "TIME_SERIES_REGRESSION"),
    "multimodal": ("IMAGE_TEXT_TO_TEXT", "RETRIEVAL", "VISUAL_QUESTION_ANSWERING", "MULTIMODAL_LM"),
    "classification": (
        "SEQUENCE_CLASSIFICATION",
        "TOKEN_CLASSIFICATION",
        "QUESTION_ANSWERING",
        "NEXT_SENTENCE_PREDICTION",
    ),
    "choices": ("MULTIPLE_CHOICE",),
    "backbones": ("BACKBONE",),
    "pretraining": ("PRETRAINING",),
    "base": ("",),  # models without a head, codecs among them
}
_TEXT = ("causal", "masked", "seq2seq")
#: All kinds.
KINDS = (*TABLES, "timm", "torchvision", *OTHERS)
#: The exporters: onnxplug, ``torch.onnx.export(dynamo=True)``, and transformers' own, which patches torch's.
EXPORTERS = ("onnxplug", "torch.onnx", "OnnxExporter")


class Architecture(NamedTuple):
    """An architecture of transformers, a family of timm or torchvision, or a model of another library.

    Attributes:
        kind: One of :data:`KINDS`.
        name: Its model type; the family.
        model: Its class; the model that stands for the family.
    """

    kind: str
    name: str
    model: str


@dataclass
class Outcome:
    """The outcome of an architecture's measurement.

    Attributes:
        status: ``pass``; ``unfit`` (no small model of it runs in PyTorch); ``capture`` (it can't be captured); ``convert``
            (refused after capture; the others' refusals are all of this kind); ``wrong`` (another result than PyTorch);
            ``error``. The parent adds ``crash`` and ``timeout``.
        detail: The error's first lines; where a way round was needed, the first lines of the plain call's error.
        seconds: The time of the export.
        nodes: The number of the model's nodes, with the nodes of its subgraphs and functions.
        way: The way round: ``plugins``, ``torch.jit.trace`` or neither, then which sizes are static where not all can be dynamic;
            empty where the plain call was enough.
        dynamic: The names of the dynamic dimensions, among the dimensions that eager PyTorch takes in other sizes.
        commit: The commit of the checkout that measured it; the parent adds it.
    """

    status: str
    detail: str = ""
    seconds: float = 0.0
    way: str = ""
    nodes: int = 0
    dynamic: str = ""
    commit: str = ""


def architectures() -> Iterator[Architecture]:
    """The architectures of transformers' tables, the families of timm and torchvision, and the models of other libraries."""
    define_vision_schemas()
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    earlier: defaultdict[str, set[str]] = defaultdict(set)
    for kind, parts in TABLES.items():
        chosen = [
            Architecture(kind, name, model if isinstance(model, str) else model[0])
            for part in parts
            for name, model in getattr(tables, f"MODEL_{f'FOR_{part}_' if part else ''}MAPPING_NAMES").items()
        ]
        # Models that read pictures or sounds and write text are in the tables of text too, where they get text alone.
        again = _TEXT if kind == "multimodal" else ()
        yield from (a for a in dict.fromkeys(chosen) if kind in _TEXT or not earlier[a.model].difference(again))
        for a in chosen:
            earlier[a.model].add(kind)
    for kind, families in (("timm", TIMM), ("torchvision", TORCHVISION)):
        for name, small in sorted(families.items()):
            yield Architecture(kind, name, small.model)
    for kind, models in OTHERS.items():
        for name, other in sorted(models.items()):
            yield Architecture(kind, name, other.target.rpartition(":")[2])


def small_model(architecture: Architecture) -> Example:
    """A small model of an architecture, with its inputs."""
    define_vision_schemas()
    if architecture.kind in TABLES:
        return widened(_transformer(architecture))
    if architecture.kind in OTHERS:
        made, kwargs, axes = other_model(architecture.kind, architecture.name)
        return Example(made, (), kwargs, axes, plugins=PLUGINS_OF_OTHERS[architecture.kind])
    make = timm_model if architecture.kind == "timm" else torchvision_model
    module, args = make(architecture.name)
    dynamic = tuple({0: "batch"} for _ in args) if isinstance(args[0], torch.Tensor) else None
    return widened(Example(module, args, {}, dynamic))


def _transformer(architecture: Architecture) -> Example:
    transformers = importlib.import_module("transformers")
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[architecture.name]
    config = config_class(**small_settings(config_class, architecture.name, architecture.kind))
    model_class = getattr(transformers, architecture.model)
    text, known = config.get_text_config(decoder=True), model_class.config_class or object
    if architecture.kind in (*_TEXT, "base") and not isinstance(config, known) and isinstance(text, known):
        config = text  # the text's configuration alone, as AutoModelForCausalLM takes it
    for part in (config, config.get_text_config(decoder=True)):
        if architecture.kind == "classification" and getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0  # by which a model finds the last token of a text
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    torch.manual_seed(0)
    model = stirred(model_class(config).eval())
    more: tuple[Any, ...] = ()
    if depend_on_each_other(model, architecture.name, architecture.kind):
        (inputs, dynamic), *others = (
            draw_images_and_text(model, config, architecture.name, architecture.kind, size) for size in SIZES
        )
        more = tuple(((), drawn) for drawn, _ in others)
    else:
        inputs, dynamic = draw_inputs(model, config, architecture.name, architecture.kind)
    # A model may have a copy of its configuration.
    for part in (
        config,
        config.get_text_config(decoder=True),
        model.config,
        getattr(model, "generation_config", config),
    ):
        part.use_cache = False
    if (in_order := SORTED.get(architecture.model)) is not None:
        model = in_order(model)
    if (place := LISTS.get(architecture.model)) is not None:
        model = WithoutList(model, place)
    return Example(model, (), inputs, dynamic, more=more)


def measure(architecture: Architecture, exporter: str = "onnxplug") -> Outcome:
    """Exports an architecture and compares it.

    Where the plain call is refused, static sizes are tried too; onnxplug is also given the plugins for these libraries, and the
    model as torch.jit.trace records it.

    Args:
        exporter: One of :data:`EXPORTERS`.
    """
    warnings.simplefilter("ignore")
    try:
        example = small_model(architecture)
        run(example.module, (example.args, example.kwargs))
    except Exception as error:
        return Outcome("unfit", _said(error))
    peer = exporter != "onnxplug"
    export = {"onnxplug": _by_onnxplug, "torch.onnx": _by_torch, "OnnxExporter": _by_transformers}[exporter]
    first = export(example, False)
    if first.status == "wrong" and not peer:  # the library's code may compute something else where it is captured
        patched = export(example, True)
        if patched.status == "pass":
            return _known(replace(patched, way="plugins", detail=first.detail), example)
    if not _is_refused(first, example, peer):
        return _known(first, example)
    for way, attempt in _ways_round(example, peer):
        try:
            changed = attempt()
        except Exception:  # torch.jit.trace raises many kinds
            continue
        outcome = export(changed, way.startswith("plugins"))
        # A trace that lacks a branch of the model is no fault of the conversion: this way round leads nowhere.
        if not _is_refused(outcome, changed, peer) and (changed.eager is None or outcome.status == "pass"):
            return _known(replace(outcome, way=way, detail=outcome.detail or first.detail), changed)
    return first


def _is_refused(outcome: Outcome, example: Example, peer: bool) -> bool:
    """Whether an outcome is no export, or is wrong at other heights and widths, of onnxplug after a warning."""
    if outcome.status == "wrong" and example.narrow is not None:
        return peer or "as the export warned" in outcome.detail
    return outcome.status in ("convert", "capture")


def _known(outcome: Outcome, example: Example) -> Outcome:
    return replace(outcome, dynamic=", ".join(sorted(example.names)))


def _ways_round(example: Example, peer: bool) -> Iterator[tuple[str, Callable[[], Example]]]:
    """The ways round a refusal, each with a function that makes its example."""
    if not peer:
        yield "plugins", lambda: example
    smaller = {"static height and width": example.narrow, "sizes of images as numbers, static batch": numbered(example)}
    if {"batch"} < example.names:
        smaller["static batch"] = fixed(example, {"batch"})
    if example.dynamic is not None:
        smaller["static sizes"] = fixed(example.narrow or example)
    for static, changed in smaller.items():
        if changed is not None:
            yield static, lambda made=changed: made
            if not peer:
                yield f"plugins, {static}", lambda made=changed: made
    if not peer:
        known = example.narrow or example
        yield "torch.jit.trace", lambda: _traced(known)
        if example.dynamic is not None:
            yield "torch.jit.trace, static sizes", lambda: fixed(_traced(known))


class _FirstOutput(nn.Module):
    """A model with inputs by position, and one output."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.names = list(names)

    def forward(self, *args: Any) -> Any:
        outputs: tuple[Any, ...] = self.module(**dict(zip(self.names, args, strict=True)), return_dict=False)
        return outputs[0]


def _traced(example: Example) -> Example:
    """A transformer as torch.jit.trace records it, with the example's branches: the comparison finds wrong ones."""
    if not example.kwargs:
        return example
    args = tuple(example.kwargs.values())
    eager = _FirstOutput(example.module, list(example.kwargs)).eval()
    with torch.no_grad():
        script = torch.jit.trace(eager, args, check_trace=False)
    more = tuple((tuple(kwargs.values()), {}) for _, kwargs in example.more)
    dynamic = tuple(example.dynamic.get(name) for name in example.kwargs)
    return Example(script, args, {}, dynamic, eager, more)


def _by_onnxplug(example: Example, plugins: bool) -> Outcome:
    options: dict[str, Any] = {}
    if plugins:
        options["registry"] = plugged(*example.plugins)
    started = time.process_time()
    try:
        program = onnxplug.to_onnx(
            example.module, example.args, kwargs=example.kwargs, dynamic_shapes=example.dynamic, **options
        )
    except CaptureError as error:
        return Outcome("capture", _said(error))
    except onnxplug.OnnxplugError as error:
        return Outcome("convert", _said(error))
    except Exception as error:
        return Outcome("error", f"{_said(error)} | {traceback.format_exc()[-300:]}")
    seconds = time.process_time() - started
    nodes = _count_nodes(program.model)
    if bound := _bound(program, example):
        return Outcome("convert", bound)
    if example.eager is None:
        seeds = (1,) if example.narrow else ()
        compare = partial(_verify_each, example, program.verify, seeds) if example.more else program.verify
        return _compared(compare, seconds, nodes)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "model.onnx")
        program.save(file)
        return _compared(lambda: _verify(file, example), seconds, nodes)


def _bound(program: onnxplug.OnnxProgram, example: Example) -> str:
    """The bound of the model's code that excludes the images of a further call, in words; empty where there is none."""
    ranges = json.loads(program.model.graph.metadata_props.get("onnxplug.dimensions", "{}"))
    for call in example.more if example.narrow else ():
        for name, size in sizes(example, call).items():
            low, high = (ranges.get(name, {}).get(side) for side in ("min", "max"))
            if (low is not None and size < low) or (high is not None and size > high):
                return f"{name} is {low} to {high} in the export, and PyTorch takes {size}"
    return ""


def _verify_each(example: Example, compare: Callable[..., Any], seeds: Sequence[int] = ()) -> None:
    """Compares on the example and on more; calls whose results rounding alone decides don't count, if three others do.

    Args:
        seeds: Seeds of random sizes and values, for further calls like the example.
    """
    uncertain: list[VerificationError] = []
    for number, (args, kwargs) in enumerate(((example.args, example.kwargs), *example.more)):
        try:
            compare(args=args, kwargs=kwargs, seeds=() if number else seeds)
        except VerificationError as error:
            if error.hint != ROUNDING_HINT:
                raise
            uncertain.append(error)
    if uncertain and len(example.more) - len(uncertain) < 2:
        raise uncertain[0]


def _count_nodes(model: ir.Model) -> int:
    return sum(1 for graph in (model.graph, *model.functions.values()) for _ in graph.all_nodes())


def _verify(file: str, example: Example) -> None:
    """Compares a file; its inputs may have other names than the arguments."""
    model = example.eager or example.module
    if example.more:
        _verify_each(example, partial(verify_file, file, model))
        return
    dynamic = example.dynamic or {}
    if not isinstance(dynamic, dict):
        names = [value.name for value in onnx.load(file, load_external_data=False).graph.input]
        dynamic = dict(zip(names, dynamic, strict=False))
    verify_file(file, model, example.args, example.kwargs, dynamic)


def _by_torch(example: Example, plugins: bool) -> Outcome:
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "model.onnx")
        shapes: Any = None
        if isinstance(example.dynamic, dict):
            shapes = {
                name: dict.fromkeys(axes or (), torch.export.Dim.DYNAMIC) for name, axes in example.dynamic.items()
            }
        elif example.dynamic is not None:
            shapes = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in example.dynamic)
        try:
            torch.onnx.export(
                example.module,
                example.args,
                file,
                kwargs=example.kwargs,
                dynamic_shapes=shapes,
                dynamo=True,
                verbose=False,
            )
        except Exception as error:
            return Outcome("convert", _said(error))
        seconds = time.process_time() - started
        return _compared(lambda: _verify(file, example), seconds, _count_nodes(ir.load(file)))


def _by_transformers(example: Example, plugins: bool) -> Outcome:
    """Exports as the exporter's authors do; a dynamic size that it fixes without a word is a refusal."""
    exporter = importlib.import_module("transformers.exporters.exporter_onnx")
    config = exporter.OnnxConfig(dynamic=example.dynamic is not None)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "model.onnx")
        try:
            exporter.OnnxExporter().export(example.module, dict(example.kwargs), config=config).save_pretrained(folder)
        except Exception as error:
            return Outcome("convert", _said(error))
        seconds = time.process_time() - started
        model = ir.load(file)
        shapes = {value.name: value.shape for value in model.graph.inputs}
        for name, axes in (example.dynamic or {}).items():
            shape = shapes.get(name)
            fixed = [axis for axis in axes if shape is not None and isinstance(shape[axis], int)]
            if fixed:
                return Outcome("convert", f"axis {fixed[0]} of the input {name} came out as {shape[fixed[0]]}", seconds)
        return _compared(lambda: _verify(file, example), seconds, _count_nodes(model))


def _compared(compare: Callable[[], Any], seconds: float, nodes: int) -> Outcome:
    try:
        compare()
    except VerificationError as error:
        return Outcome("wrong", _said(error), seconds, nodes=nodes)
    except Exception as error:
        return Outcome("error", f"{_said(error)} | {traceback.format_exc()[-300:]}", seconds, nodes=nodes)
    return Outcome("pass", seconds=seconds, nodes=nodes)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:600]}"

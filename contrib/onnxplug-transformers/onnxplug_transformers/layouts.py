"""Layouts of folders for the programs that load them: names of files and dimensions, and files beside the models."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import ExternalDataInfo

from onnxplug import OnnxplugError, OnnxProgram, UsageError
from onnxplug.run.save import LARGE_MODEL_BYTES, save_model, weight_bytes
from onnxplug_transformers.folders import preprocessor_of, read_json

#: The largest size of a data file in bytes, which browsers take as one buffer.
_CHUNK_BYTES = 2_000_000_000
#: The largest number of data files that transformers.js loads for a model.
_MAX_CHUNKS = 100

#: The name of the layout for browsers in ``--for``.
BROWSERS = "transformers.js"
_DIMENSIONS = {
    "batch": "batch_size",
    "sequence": "sequence_length",
    "past": "past_sequence_length",
    "source": "encoder_sequence_length",
    "samples": "num_samples",
    "frames": "num_frames",
    "texts": "text_batch_size",
    "images": "image_batch_size",
}


@dataclass(frozen=True)
class Layout:
    """A kind of folder.

    Attributes:
        name: Its name in ``--for``.
        models: The folder of the models in it.
        dimensions: Names of dynamic dimensions here to their names in the program.
        merged: Whether the decoder computes the keys and values of the encoder's states in its first step.
        tasks_without: Tasks that the program has no models for.
    """

    name: str
    models: str = "."
    dimensions: Mapping[str, str] = field(default_factory=dict)
    merged: bool = False
    tasks_without: Sequence[str] = ()

    def check_task(self, task: str) -> None:
        """Checks that the program has models for a task."""
        if task in self.tasks_without:
            raise UsageError(f"{self.name} has no model for {task}", hint="--for transformers.js has one.")

    def named(self, dynamic_shapes: Any) -> Any:
        """Dynamic shapes with the names of dimensions that the program knows."""
        if isinstance(dynamic_shapes, str):
            return re.sub(r"[A-Za-z_]\w*", lambda word: self.dimensions.get(word[0], word[0]), dynamic_shapes)
        if isinstance(dynamic_shapes, Mapping):
            return {key: self.named(value) for key, value in dynamic_shapes.items()}
        if isinstance(dynamic_shapes, list | tuple):
            return type(dynamic_shapes)(self.named(value) for value in dynamic_shapes)
        return dynamic_shapes


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("genai"),
        Layout(BROWSERS, "onnx", _DIMENSIONS, merged=True),
        Layout("optimum", ".", _DIMENSIONS, merged=True, tasks_without=("object-detection",)),
    )
}


def layout_of(name: str) -> Layout:
    """The layout of a name."""
    if name not in LAYOUTS:
        raise UsageError(f"--for {name!r} is unknown", hint=f"It takes {', '.join(LAYOUTS)}.")
    return LAYOUTS[name]


def check_for_browsers(source: Path, *, texts: bool, others: bool) -> None:
    """Checks that a folder has the files that transformers.js reads beside a model.

    Args:
        texts, others: Whether the model takes texts, and images or sound.
    """
    if texts and not (source / "tokenizer.json").is_file():
        raise UsageError(
            f"{source} has no tokenizer.json, which is the form of a tokenizer that transformers.js reads",
            hint="AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes it; --no-tokenizer does without.",
        )
    if others and not preprocessor_of(source):
        raise UsageError(
            f"{source} has no preprocessor_config.json, by which transformers.js prepares images and sound",
            hint="AutoProcessor's save_pretrained(FOLDER) writes it; --no-tokenizer does without.",
        )


def write_browser_configuration(source: Path, folder: Path, config: Any, dtypes: Sequence[str]) -> None:
    """Writes the configurations that transformers.js reads into a folder.

    Args:
        folder: The folder that is written, with the models.
        dtypes: The number formats of the models; the first is the default.
    """
    about = read_json(source / "config.json")
    if config.id2label:
        about["id2label"] = {str(number): label for number, label in config.id2label.items()}
    chunks = {path.name: len(_data_files(path)) for path in sorted((folder / "onnx").glob("*.onnx"))}
    chunks = {name: count for name, count in chunks.items() if count}
    about["transformers.js_config"] = {
        "dtype": dtypes[0],
        **({"use_external_data_format": chunks} if chunks else {}),
    }
    (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    processor = preprocessor_of(source)
    if processor:
        text = json.dumps(processor, indent=2) + "\n"
        (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")


def save_in_chunks(program: OnnxProgram, path: Path, external_data: bool | None) -> None:
    """Saves a model; weights beside it are in ``NAME_data``, ``NAME_data_1`` and so on, which browsers can hold.

    Args:
        path: The file, in a folder of its own save.
        external_data: Whether weights are beside the model; ``None`` decides by size.
    """
    model = program.model
    if external_data is None:
        external_data = weight_bytes(model) > LARGE_MODEL_BYTES
    if not external_data:
        save_model(model, path, external_data=False)
        return
    tensors = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
    save_model(model, path, shard=max([_CHUNK_BYTES, *(tensor.nbytes for tensor in tensors)]))
    proto = onnx.load(path, load_external_data=False)
    stored = [tensor for tensor in proto.graph.initializer if tensor.external_data]
    old = sorted({ExternalDataInfo(tensor).location for tensor in stored})
    if len(old) > _MAX_CHUNKS:
        raise OnnxplugError(f"{path.name} has {len(old)} data files, and transformers.js loads {_MAX_CHUNKS}")
    names = {name: f"{path.name}_data{f'_{number}' if number else ''}" for number, name in enumerate(old)}
    for tensor in stored:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = names[entry.value]
    for name, new in names.items():
        path.with_name(name).rename(path.with_name(new))
    path.write_bytes(proto.SerializeToString())


def _data_files(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}_data*"))

"""GGUF files of llama.cpp, with weights in blocks of few bits, which stay in these blocks."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from onnxplug import OnnxplugError, UsageError
from onnxplug_transformers.blocks import BlockLinear, Blocks, embed_blocks
from onnxplug_transformers.folders import COMPANIONS, TOKENIZER_FILES, gguf_of
from onnxplug_transformers.four_bits import joint_layers, place
from onnxplug_transformers.ggml import FORMATS, take_blocks
from onnxplug_transformers.weightless import load_around

#: Formats with a float for each weight.
_FLOATS = ("F32", "F16", "BF16")


@contextlib.contextmanager
def as_folder(source: Path, *, tokenizer: bool = True) -> Iterator[Path]:
    """A temporary folder for a GGUF file, with configuration, tokenizer and a link to it; another source itself.

    The tokenizer is copied from beside the file, or made of the file's contents.
    """
    file = gguf_of(source)
    if file is None:
        yield source
        return
    _check_libraries(file)
    import transformers

    with tempfile.TemporaryDirectory(prefix="onnxplug-gguf-") as name:
        folder = Path(name)
        try:
            config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        except Exception as error:
            raise OnnxplugError(f"{file} can't be read: {type(error).__name__}: {error}") from error
        for companion in COMPANIONS:
            if (file.parent / companion).is_file():
                shutil.copyfile(file.parent / companion, folder / companion)
        if not config.architectures:
            kind: Any = transformers.AutoModelForCausalLM._model_mapping[type(config)]
            config.architectures = [kind.__name__]
        config.save_pretrained(folder)
        if tokenizer and not any((folder / known).is_file() for known in TOKENIZER_FILES):
            _write_tokenizer(file, folder)
        (folder / file.name).symlink_to(file.absolute())
        yield folder


def _check_libraries(file: Path) -> None:
    from transformers.utils.import_utils import is_gguf_available

    if not is_gguf_available():
        raise UsageError(f"{file} is a file of GGUF, which the package gguf reads", hint="pip install gguf")


def _write_tokenizer(file: Path, folder: Path) -> None:
    import transformers

    try:
        made = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        made.save_pretrained(folder)
    except Exception as error:
        raise UsageError(
            f"{file} has no tokenizer that transformers reads ({type(error).__name__}: {error})",
            hint="Save one beside the file: tokenizer.save_pretrained(FOLDER). --no-tokenizer exports the model without one.",
        ) from error


def load_gguf(file: Path, config: Any, loader: Any, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a file, its linear layers and its embedding in the file's blocks.

    Args:
        dtype: Element type of the tensors that are not in blocks.

    Returns:
        The model, and transformers' information on the loading.
    """
    with torch.device("meta"):
        skeleton = loader.from_config(config)
    blocks, tensors = _read(file, skeleton)
    head, embedding = skeleton.get_output_embeddings(), skeleton.get_input_embeddings()
    names = {module: name for name, module in skeleton.named_modules()}
    tied = config.tie_word_embeddings and head is not None and names[embedding] in blocks
    if tied:
        blocks[names[head]] = blocks[names[embedding]]
        config.tie_word_embeddings = False  # neither has a weight of its own
    loaded, about = load_around(type(skeleton), config, tensors, blocks, dtype)
    layers = {name: block for name, block in blocks.items() if not isinstance(loaded.get_submodule(name), nn.Embedding)}
    made: dict[str, BlockLinear] = {}
    kinds = {name: (block.form, block.tensors["numbers"].shape[1:]) for name, block in layers.items()}
    for group in joint_layers(kinds):
        joint = BlockLinear([layers[name] for name in group], [loaded.get_submodule(name).bias for name in group])
        made |= dict.fromkeys(group, joint)
        place(loaded, group, joint)
    for name in blocks.keys() - layers.keys():
        embed_blocks(loaded.get_submodule(name), blocks[name], dtype, made[names[head]] if tied else None)
    return loaded, about


def _read(file: Path, model: Any) -> tuple[dict[str, Blocks], dict[str, torch.Tensor]]:
    """The matrices in blocks by their modules' names, and the other tensors by their own names."""
    from gguf import GGUFReader, dequantize
    from transformers import modeling_gguf_pytorch_utils as gguf_of_transformers

    reader, modules = GGUFReader(file), dict(model.named_modules())
    architecture = reader.fields["general.architecture"].contents()
    about = gguf_of_transformers.load_gguf_checkpoint(file, return_tensors=False)["config"]
    kind = gguf_of_transformers.TENSOR_PROCESSORS.get(architecture, gguf_of_transformers.TensorProcessor)
    processor = kind(config=about)
    names = gguf_of_transformers.get_gguf_hf_weights_map(model, processor)
    blocks: dict[str, Blocks] = {}
    parsed: dict[str, Any] = {"tensors": {}}
    mapping = {"tensor_key_mapping": names, "parsed_parameters": parsed}
    for tensor in reader.tensors:
        form = tensor.tensor_type.name
        if form not in _FLOATS and tensor.name in names:
            module = names[tensor.name].removesuffix(".weight")
            order = _order(processor, tensor, modules.get(module), names)
            blocks[module] = take_blocks(form, torch.from_numpy(np.array(tensor.data))).rows(order)
            continue
        processed = processor.process(weights=dequantize(tensor.data, tensor.tensor_type), name=tensor.name, **mapping)
        if processed.name in names:
            parsed["tensors"][names[processed.name]] = torch.from_numpy(np.copy(processed.weights))
    return blocks, parsed["tensors"]


def _order(processor: Any, tensor: Any, module: Any, names: dict[str, str]) -> torch.Tensor:
    """The index, in a tensor of the file, of each row of a layer's weight."""
    from transformers.pytorch_utils import Conv1D

    form = tensor.tensor_type.name
    if form not in FORMATS:
        raise OnnxplugError(
            f"{tensor.name} is in blocks of {form}, which are not taken", hint=f"{', '.join(FORMATS)} are."
        )
    if isinstance(module, nn.Linear | nn.Embedding | Conv1D):
        width, rows = (int(size) for size in tensor.shape)
        numbers = np.broadcast_to(np.arange(rows, dtype=np.int64)[:, None], (rows, width))
        mapping = {"tensor_key_mapping": names, "parsed_parameters": {"tensors": {}}}
        moved = processor.process(weights=numbers, name=tensor.name, **mapping).weights
        moved = moved.T if isinstance(module, Conv1D) else moved
        if moved.shape == numbers.shape and (moved == moved[:, :1]).all():
            return torch.from_numpy(np.array(moved[:, 0]))
    raise OnnxplugError(
        f"{tensor.name} is in blocks of {form}, and what takes it in {names[tensor.name]} is no linear layer or embedding",
        hint="transformers' from_pretrained(…, gguf_file=…) loads it in floats, and --int4 rounds what it has saved.",
    )

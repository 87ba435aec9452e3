"""Models of a folder: which task they are for, and how they are loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onnxplug import OnnxplugError, UsageError
from onnxplug_transformers.folders import check_folder, gguf_of, sentence_modules, transformer_folder

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

#: The task of a folder of sentence-transformers.
SENTENCES = "sentence-similarity"
#: The task of models that read images and text.
IMAGES_AND_TEXT = "image-text-to-text"
#: Kinds of such models in which the tokens of an image see the whole image.
BETWEEN_IMAGES = ("gemma3",)
#: Kinds whose images are tiles of one size, with a mask of pixels.
TILED = ("idefics3", "smolvlm")
#: Kinds whose images are patches in one row, with their sizes as an input, and whose tokens have three positions.
PACKED = ("qwen2_vl", "qwen2_5_vl")
#: Kinds that transformers.js calls by embeddings alone, and whose configuration it reads.
IN_BROWSERS = (*BETWEEN_IMAGES, *TILED, "qwen2_5_vl")
KINDS_WITH_IMAGES = (*BETWEEN_IMAGES, *TILED, *PACKED)
#: Task to the class that loads its models, and the table of transformers that names their classes.
TASKS: dict[str, tuple[str, str]] = {
    "text-generation": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "text2text-generation": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "automatic-speech-recognition": ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    "speech-ctc": ("AutoModelForCTC", "MODEL_FOR_CTC_MAPPING_NAMES"),
    "text-classification": ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    "token-classification": ("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    "question-answering": ("AutoModelForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
    "fill-mask": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "image-classification": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    "object-detection": ("AutoModelForObjectDetection", "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES"),
    "zero-shot-image-classification": (
        "AutoModelForZeroShotImageClassification",
        "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "audio-classification": ("AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
    "feature-extraction": ("AutoModel", "MODEL_MAPPING_NAMES"),
    SENTENCES: ("AutoModel", "MODEL_MAPPING_NAMES"),
    IMAGES_AND_TEXT: ("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
}


def task_of(config: Any, asked: str | None, folder: Path) -> str:
    """The task of a model: the task asked for, or the task of the class that its configuration names.

    A folder of sentence-transformers is for sentences.
    """
    if asked is not None:
        if asked not in TASKS:
            raise UsageError(f"--task {asked!r} is unknown", hint=f"The tasks are {', '.join(TASKS)}.")
        if asked == SENTENCES and not sentence_modules(folder):
            raise UsageError(
                f"--task {SENTENCES} is for a folder of sentence-transformers, and {folder} has no modules.json"
            )
        return asked
    if sentence_modules(folder):
        return SENTENCES
    classes = list(getattr(config, "architectures", None) or ())
    with_images = _names_of(IMAGES_AND_TEXT) if config.model_type in KINDS_WITH_IMAGES else set()
    if with_images.intersection(classes):  # transformers has them among the language models too
        return IMAGES_AND_TEXT
    for name in classes:
        for task in TASKS:
            if name in _names_of(task):
                return task
    said = f"the class {', '.join(classes)}, which is for none of the tasks known here" if classes else "no class"
    raise UsageError(f"config.json names {said}", hint=f"--task names one: {', '.join(TASKS)}.")


def _names_of(task: str) -> set[str]:
    """The classes of a task's models."""
    from transformers.models.auto import modeling_auto

    entries = getattr(modeling_auto, TASKS[task][1]).values()
    return {name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry)}


def load_config(folder: Path, *, random: bool = False) -> Any:
    """The configuration of a folder, after its files have been checked."""
    check_folder(folder, random=random)
    folder = transformer_folder(folder)
    import transformers

    with _transformers(f"{folder / 'config.json'} can't be read"):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if gguf_of(folder) is not None:
        config.quantization_config = {"quant_method": "gguf"}
    elif (folder / "qmodel.pt").is_file():
        config.quantization_config = {"quant_method": "hqq"}
    return config


def is_packed(config: Any) -> bool:
    """Whether a configuration belongs to a checkpoint of GPTQ, AWQ, HQQ or torchao, or to a GGUF file."""
    return method_of(config) in ("gptq", "awq", "hqq", "torchao", "gguf")


def method_of(config: Any) -> str | None:
    """The method by which a checkpoint's weights are quantised, by transformers' name."""
    about = getattr(config, "quantization_config", None)
    return about.get("quant_method") if isinstance(about, dict) else None


def load_model(
    folder: Path, config: Any, task: str, *, dtype: str = "float32", random: bool = False, halves: bool = True
) -> nn.Module:
    """The model of a folder, in evaluation mode.

    Args:
        folder: The folder of the model; of sentence-transformers, the folder of the transformer.
        random: Random weights, of the configuration alone.
        halves: Whether, in a checkpoint of few bits, weights that float16 holds without loss are stored in it.
    """
    import transformers

    from onnxplug_transformers.gguf_files import load_gguf
    from onnxplug_transformers.hqq_files import load_hqq
    from onnxplug_transformers.packed import store_halves, take_packed, take_torchao

    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r} is unknown", hint=f"The dtypes are {', '.join(DTYPES)}.")
    # as sentence-transformers does: of an encoder and a decoder, the encoder
    of_encoder = task == SENTENCES and config.is_encoder_decoder
    loader = getattr(transformers, "AutoModelForTextEncoding" if of_encoder else TASKS[task][0])
    if type(config) not in loader._model_mapping:
        raise UsageError(f"transformers has no model of {config.model_type} for {task}")
    if random:
        with _transformers(f"{folder}: the model can't be made"):
            made: nn.Module = loader.from_config(config, dtype=DTYPES[dtype])
        return made.eval()
    packed, of_torchao = take_packed(config, folder), method_of(config) == "torchao"
    of_hqq = method_of(config) == "hqq"
    file = gguf_of(folder)
    shown = folder if file is None else file.resolve()
    with _transformers(f"{shown}: the weights can't be loaded"):
        if file is not None:
            loaded, about = load_gguf(file, config, loader, DTYPES[dtype])
        elif of_hqq:
            loaded, about = load_hqq(folder, config, loader, DTYPES[dtype])
        else:
            loaded, about = loader.from_pretrained(
                folder, config=config, dtype=DTYPES[dtype], local_files_only=True, output_loading_info=True
            )
    missing = sorted(about["missing_keys"])
    if task == SENTENCES:  # the vector is made of the states
        missing = [name for name in missing if not name.startswith("pooler.")]
    if missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise OnnxplugError(
            f"{shown} has no weights for {names}, which {type(loaded).__name__} needs; they would be random",
            hint="--task names the head that the model was trained with.",
        )
    if of_torchao:
        take_torchao(loaded)
    if halves and (packed or of_torchao or of_hqq or file is not None):
        store_halves(loaded)
    return loaded.eval()


@contextlib.contextmanager
def _transformers(what: str) -> Iterator[None]:
    """Raises errors of transformers and safetensors as :class:`~onnxplug.OnnxplugError`."""
    try:
        yield
    except OnnxplugError:
        raise
    except Exception as error:
        raise OnnxplugError(f"{what}: {type(error).__name__}: {error}") from error

"""Folders: models are read from folders of ``save_pretrained``, and written complete or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxplug import OnnxplugError, SaveError, UsageError

#: Files that belong to a model beside its weights, tokenizers' first; they are copied as they are.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
COMPANIONS = (
    *TOKENIZER_FILES,
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "normalizer.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
#: Files of weights, and their indices.
_WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True)
class SentenceModule:
    """A module of a folder of sentence-transformers.

    Attributes:
        type: The class that ``modules.json`` names.
        path: Its folder, relative to the folder of ``modules.json``.
    """

    type: str
    path: str

    @property
    def kind(self) -> str:
        """The name of a class of sentence-transformers; the whole path of another class."""
        package, _, rest = self.type.partition(".")
        return rest.rpartition(".")[2] if package == "sentence_transformers" else self.type


def sentence_modules(folder: Path) -> list[SentenceModule]:
    """The modules in ``modules.json`` of sentence-transformers, the transformer first; none without that file."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        modules = [SentenceModule(str(row["type"]), str(row["path"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OnnxplugError(f"{path} can't be read as sentence-transformers writes it: {error}") from error
    if not modules or modules[0].kind != "Transformer":
        kind = modules[0].type if modules else "none"
        raise UsageError(f"the first module of {path} is {kind}, and no Transformer of sentence-transformers")
    return modules


def transformer_folder(folder: Path) -> Path:
    """The folder of the transformer, which may lie within a folder of sentence-transformers."""
    modules = sentence_modules(folder)
    return folder / modules[0].path if modules else folder


def check_folder(folder: Path, *, random: bool) -> None:
    """Checks the contents of a model's folder before anything is loaded."""
    file = gguf_of(folder)
    if file is not None and not (folder / "config.json").is_file():
        return
    if not folder.exists():
        raise UsageError(
            f"there is no {'file' if folder.suffix == '.gguf' else 'folder'} {folder}",
            hint="transformers:FOLDER is a folder of save_pretrained; none is downloaded.",
        )
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="transformers:FOLDER is a folder of save_pretrained.")
    folder = transformer_folder(folder)
    if not (folder / "config.json").is_file():
        hint = "transformers:FOLDER is a folder of save_pretrained."
        if (folder / "adapter_config.json").is_file():
            hint = f"It is an adapter of PEFT: transformers:BASE --adapter {folder}"
        raise UsageError(f"{folder} has no config.json", hint=hint)
    read_json(folder / "config.json")
    if not random and file is None:
        _check_weights(folder)


def gguf_of(source: Path) -> Path | None:
    """The GGUF file that a source is, or the only GGUF file in a folder without other weights; else ``None``."""
    if source.suffix == ".gguf" and source.is_file():
        files = [source]
    elif source.is_dir() and not any((source / name).is_file() for name in _WEIGHTS):
        files = sorted(source.glob("*.gguf"))
    else:
        return None
    if len(files) > 1:
        raise UsageError(
            f"{source} has {len(files)} files of GGUF: {', '.join(path.name for path in files[:3])}…",
            hint=f"Name one: transformers:{files[0]}; parts of one model are put together by llama.cpp's gguf-split --merge.",
        )
    for path in files:
        with path.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                raise OnnxplugError(f"{path} is no file of GGUF: it does not begin with these letters")
    return files[0] if files else None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OnnxplugError(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise OnnxplugError(f"{path} is not a JSON object")
    return content


def _check_weights(folder: Path) -> None:
    single = [name for name in _WEIGHTS[:2] if (folder / name).is_file()]
    indices = [name for name in _WEIGHTS[2:] if (folder / name).is_file()]
    if single[:1] == ["model.safetensors"]:
        check_safetensors(folder / single[0])
    elif indices and not single:
        index = read_json(folder / indices[0])
        table = index.get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
            raise OnnxplugError(f"{folder / indices[0]} has no weight_map from parameters to files")
        for name in sorted(set(table.values())):
            if not (folder / name).is_file():
                raise OnnxplugError(
                    f"{folder / indices[0]} names the file {name}, which is not there",
                    hint="Copy the whole folder; every file that the index names is needed.",
                )
            if name.endswith(".safetensors"):
                check_safetensors(folder / name)
    elif not single and not (folder / "qmodel.pt").is_file():
        raise UsageError(
            f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json",
            hint="--random makes random ones, of the configuration alone.",
        )


def check_safetensors(path: Path) -> None:
    """Opens a safetensors file, which compares its length with its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise OnnxplugError(
            f"{path} is not a whole safetensors file: {error}", hint="Was it copied or downloaded to its end?"
        ) from error


def check_tokenizer(folder: Path) -> None:
    """Checks that a folder has a tokenizer."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UsageError(
            f"{folder} has no tokenizer (tokenizer.json, tokenizer.model, ...)",
            hint="Save it there: tokenizer.save_pretrained(folder). --no-tokenizer exports the model without one.",
        )


def preprocessor_of(source: Path) -> dict[str, Any]:
    """The contents of ``preprocessor_config.json``, which are a part of ``processor_config.json`` in transformers 5."""
    if (source / "preprocessor_config.json").is_file():
        return read_json(source / "preprocessor_config.json")
    whole = read_json(source / "processor_config.json") if (source / "processor_config.json").is_file() else {}
    for name in ("image_processor", "feature_extractor"):
        part = whole.get(name)
        if isinstance(part, dict):
            return part
    return {}


def copy_companions(source: Path, destination: Path, *, tokenizer: bool) -> None:
    """Copies the files that belong to a model beside its weights."""
    for name in COMPANIONS:
        if (source / name).is_file() and (tokenizer or name not in TOKENIZER_FILES):
            shutil.copyfile(source / name, destination / name)


def check_output(folder: Path, *, overwrite: bool) -> None:
    """Checks that a folder may be written, before anything is loaded."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"{folder} is not a folder", hint="--output names the folder to write.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise UsageError(f"{folder} is not empty", hint="Name a new folder, or replace this one by --overwrite.")
    above = folder.absolute().parent
    if not above.is_dir():
        raise SaveError(f"can't write {folder}: there is no folder {above}", hint=f"Make it: mkdir -p {above}")
    if not os.access(above, os.W_OK | os.X_OK):
        raise SaveError(f"can't write {folder}: no permission to write in {above}")


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A temporary folder beside the target, which takes the target's name at the end, or is removed after an error.

    A folder that has the name stays whole until then.
    """
    target = folder.absolute()
    try:
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise SaveError(f"can't write {folder}: {error}") from error
    try:
        yield beside
        beside.chmod(0o777 & ~_umask())
        _replace(beside, target)
    except OSError as error:
        raise SaveError(f"can't write {folder}: {error}", hint="What was there before is untouched.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _replace(beside: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        beside.rename(target)  # also over an empty folder
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
    target.rename(old)
    try:
        beside.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask

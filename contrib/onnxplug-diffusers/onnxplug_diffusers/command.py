"""``onnxplug export diffusers:FOLDER -o DIR``."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import onnxplug
from onnxplug import ExportedFile, ExportRequest, OnnxplugError, UsageError

if TYPE_CHECKING:
    from onnxplug_diffusers.parts import Part

INDEX = "model_index.json"
#: The models that denoise, one of which a pipeline needs, and the autoencoder.
_MODELS = ("unet", "transformer", "vae")
#: Folders without weights, which are copied.
_COPIED = ("scheduler", "tokenizer", "tokenizer_2", "tokenizer_3", "feature_extractor")
_TEXTS = ("text_encoder", "text_encoder_2", "text_encoder_3")


def export(
    request: ExportRequest,
    *,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what the output folder holds")] = False,
) -> list[ExportedFile]:
    """Exports a pipeline's folder."""
    from onnxplug_transformers.folders import check_output, staged

    source, output = Path(request.name), Path(request.output)
    index = read_index(source)
    check_output(output, overwrite=overwrite)
    components = _components(source, index)
    files: list[ExportedFile] = []
    with staged(output) as folder:
        for name in components:
            files += _write(request, _parts(source, index, name), source / name, folder)
        left_out = [name for name, entry in index.items() if _is_component(entry) and not (folder / name).exists()]
        for name in _COPIED:
            if name in left_out and (source / name).is_dir():
                shutil.copytree(source / name, folder / name)
                left_out.remove(name)
        left_out = [name for name in left_out if name not in components]
        index |= {name: [None, None] for name in left_out}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    notes = (f"no graph is made of {', '.join(left_out)}, which {INDEX} does not name any more",) if left_out else ()
    return [
        ExportedFile(output / file.path.relative_to(folder), file.program, file.report, notes if place == 0 else ())
        for place, file in enumerate(files)
    ]


def read_index(source: Path) -> dict[str, Any]:
    """The contents of ``model_index.json``.

    Raises:
        UsageError: There is no such folder, or no such file in it.
        OnnxplugError: The file can't be read.
    """
    from onnxplug_transformers.folders import read_json

    if not source.is_dir():
        raise UsageError(
            f"there is no folder {source}", hint="diffusers:FOLDER is one of a pipeline's save_pretrained."
        )
    path = source / INDEX
    if not path.is_file():
        known = (source / "config.json").is_file()
        hint = f"It may be one for transformers:{source}." if known else "A pipeline's save_pretrained writes it."
        raise UsageError(f"{source} has no {INDEX}", hint=hint)
    return read_json(path)


def _is_component(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None


def _components(source: Path, index: dict[str, Any]) -> list[str]:
    """Names of the models to export.

    Raises:
        UsageError: No model denoises, a model is of a class that is not known here, or its folder is missing.
    """
    from onnxplug_diffusers.parts import KINDS

    names = [name for name in (*_TEXTS, *_MODELS) if _is_component(index.get(name))]
    if not {"unet", "transformer"}.intersection(names):
        raise UsageError(f"{source / INDEX} names neither unet nor transformer")
    for name in names:
        if index[name][1] not in KINDS:
            raise UsageError(
                f"{name} of {source} is a {index[name][1]}, which is not taken", hint=f"{', '.join(KINDS)} are."
            )
        if not (source / name / "config.json").is_file():
            raise UsageError(f"{source} has no {name}/config.json, which {INDEX} names")
    return names


def load(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model of a pipeline that denoises, with example inputs: for the other commands."""
    source = Path(name)
    index = read_index(source)
    denoiser = next(component for component in _components(source, index) if component in ("unet", "transformer"))
    (part,) = _parts(source, index, denoiser).values()
    return part.model.eval(), (), {key: tensor for key, (tensor, _) in part.inputs.items()}


def _parts(source: Path, index: dict[str, Any], name: str) -> dict[str, Part]:
    """The parts of a model of the pipeline, by the names of their folders."""
    from onnxplug_diffusers.parts import KINDS

    return KINDS[index[name][1]](name, _loaded(source / name, index[name]), index)


def _loaded(folder: Path, entry: tuple[str, str]) -> Any:
    """A model of a pipeline, in evaluation mode.

    Args:
        folder: Its folder.
        entry: Library and class.

    Raises:
        OnnxplugError: Weights are missing, or can't be loaded.
    """
    library, name = entry
    try:
        kind = getattr(import_module(library), name)
        settings = {"local_files_only": True, "output_loading_info": True}
        dtype = {"dtype" if library == "transformers" else "torch_dtype": _float()}
        model, about = kind.from_pretrained(folder, **dtype, **settings)
    except Exception as error:
        raise OnnxplugError(f"{folder}: the weights can't be loaded: {type(error).__name__}: {error}") from error
    missing = sorted(about["missing_keys"])
    if missing:
        raise OnnxplugError(f"{folder} has no weights for {missing[0]}, which {name} needs; they would be random")
    return model.eval()


def _float() -> Any:
    import torch

    return torch.float32


def _write(request: ExportRequest, parts: dict[str, Part], source: Path, folder: Path) -> list[ExportedFile]:
    """Exports a model of the pipeline, of a VAE both halves."""
    files = []
    for name, part in parts.items():
        request.stage(name)
        program = onnxplug.to_onnx(
            part.model.eval(),
            kwargs={key: tensor for key, (tensor, _) in part.inputs.items()},
            dynamic_shapes={key: dict(sizes) for key, (_, sizes) in part.inputs.items()},
            progress=request.stage,
            **request.options,
        )
        report = None
        if request.verify:
            request.stage("verification")
            report = program.verify()
        (folder / name).mkdir()
        program.save(folder / name / "model.onnx", external_data=request.external_data)
        program.release()
        shutil.copyfile(source / "config.json", folder / name / "config.json")
        files.append(ExportedFile(folder / name / "model.onnx", program, report))
    return files

"""A folder of transformers becomes a folder of ONNX models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnxplug
from onnxplug import ExportedFile, UsageError
from onnxplug_transformers.decoders import Decoder, example_of
from onnxplug_transformers.folders import check_output, check_tokenizer, copy_companions, staged
from onnxplug_transformers.genai import genai_config
from onnxplug_transformers.models import load_config, load_model, task_of

_WITH_TEXT = ("text", "token", "question", "fill")


def export_folder(
    source: Path,
    output: Path,
    *,
    task: str | None = None,
    random: bool = False,
    dtype: str = "float32",
    last_logits: bool = False,
    tokenizer: bool = True,
    overwrite: bool = False,
    verify: bool = False,
    external_data: bool | None = None,
    options: Mapping[str, Any] | None = None,
    stage: Callable[[str], None] = lambda _: None,
) -> list[ExportedFile]:
    """Exports the model of a folder into another, which is written whole or not at all.

    Args:
        source: A folder of ``save_pretrained``.
        output: The folder to write.
        task: What the model is for; by default what its configuration says.
        random: Random weights; the folder needs a configuration alone.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        last_logits: Logits of each row's last token alone, of a model for text generation.
        tokenizer: Copy the tokenizer; ``False`` does without.
        overwrite: Replace what the folder holds.
        verify: Compare with PyTorch.
        external_data: Weights in a file of their own; ``None`` decides by size.
        options: Further keyword arguments of ``onnxplug.to_onnx``.
        stage: Called with the name of each stage as it begins.

    Returns:
        The models written.

    Raises:
        UsageError: An argument is malformed, two contradict one another, or the folder lacks something.
        OnnxplugError: A file is damaged, or the export failed.
        SaveError: The folder can't be written.
    """
    check_output(output, overwrite=overwrite)
    config = load_config(source, random=random)
    kind = task_of(config, task)
    if last_logits and kind != "text-generation":
        raise UsageError(f"--last-logits is for text generation, and this is {kind}")
    if tokenizer and kind.startswith(_WITH_TEXT):
        check_tokenizer(source)
    model = load_model(source, config, kind, dtype=dtype, random=random)
    given = dict(options or {})
    with staged(output) as folder:
        if kind == "text-generation":
            decoder = Decoder(model, last_logits=last_logits).eval()
            example = example_of(decoder)
            program = onnxplug.to_onnx(
                decoder,
                kwargs=example.kwargs,
                dynamic_shapes=example.dynamic_shapes,
                input_names=example.input_names,
                present_names=True,
                mutations="ignore",
                progress=stage,
                **given,
            )
            about = genai_config(
                model,
                positions=decoder.takes_positions,
                layers=example.layers,
                heads=example.heads,
                head_size=example.head_size,
            )
            (folder / "genai_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        else:
            raise UsageError(f"{kind} is not exported yet")
        report = None
        if verify:
            stage("verification")
            report = program.verify()
        stage("saving")
        program.save(folder / "model.onnx", external_data=external_data)
        copy_companions(source, folder, tokenizer=tokenizer)
    return [ExportedFile(output / "model.onnx", program, report)]


def model_with_inputs(source: Path) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model of a folder as it is exported, and example inputs.

    Raises:
        UsageError: It is no folder of ``save_pretrained``.
        OnnxplugError: A file is damaged or missing.
    """
    config = load_config(source)
    kind = task_of(config, None)
    model = load_model(source, config, kind)
    if kind == "text-generation":
        decoder = Decoder(model).eval()
        return decoder, (), example_of(decoder).kwargs
    raise UsageError(f"{kind} is not exported yet")

"""A folder of transformers becomes a folder of ONNX models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnxplug
from onnxplug import ExportedFile, UsageError
from onnxplug_transformers import encoder_decoders
from onnxplug_transformers.caches import register
from onnxplug_transformers.decoders import Decoder, decoder_of, example_of, fused_cases_of
from onnxplug_transformers.folders import check_output, check_tokenizer, copy_companions, staged
from onnxplug_transformers.four_bits import DOMAIN, check_settings, round_weights, set_accuracy_level
from onnxplug_transformers.genai import genai_config
from onnxplug_transformers.models import is_packed, load_config, load_model, task_of
from onnxplug_transformers.tasks import Task, task_example

TEXT_GENERATION = "text-generation"
ENCODER_DECODERS = ("text2text-generation", "automatic-speech-recognition")


def export_folder(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    task: str | None = None,
    random: bool = False,
    dtype: str = "float32",
    last_logits: bool = False,
    int4: bool = False,
    block_size: int | None = None,
    int4_keep: Sequence[str] | None = None,
    accuracy_level: int | None = None,
    fused: bool = False,
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
        int4: Linear layers with weights of four bits and embeddings with weights of eight, of a model for text generation.
        block_size: Numbers that share a scale, 32 unless given.
        int4_keep: Names of linear layers, or of the embedding, that stay as they are, with ``*`` for anything; by default none.
        accuracy_level: 4, unless given: ONNX Runtime rounds what these layers read to bytes, which is fast; 1: it does not.
        fused: Attention by ``GroupQueryAttention``, of a model for text generation; the cache is in buffers of the text's
            greatest length, which onnxruntime-genai shares between past and present. Other attention stays, and a note says so.
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
    source, output = Path(source), Path(output)
    check_output(output, overwrite=overwrite)
    config = load_config(source, random=random)
    kind = task_of(config, task)
    if last_logits and kind != TEXT_GENERATION:
        raise UsageError(f"--last-logits is for text generation, and this is {kind}")
    if int4 and kind != TEXT_GENERATION:
        raise UsageError(f"--int4 is for text generation, and this is {kind}")
    if fused and kind != TEXT_GENERATION:
        raise UsageError(f"--fused is for text generation, and this is {kind}")
    if (int4 or fused) and dtype == "bfloat16":
        raise UsageError(
            f"--{'int4' if int4 else 'fused'} has no kernel for bfloat16", hint="--dtype float16 or float32."
        )
    if not int4 and ((block_size, int4_keep) != (None, None) or (accuracy_level is not None and not is_packed(config))):
        raise UsageError("--block-size, --int4-keep and --accuracy-level are for --int4")
    size, level = block_size if block_size is not None else 32, accuracy_level if accuracy_level is not None else 4
    check_settings(size, level)
    given = dict(options or {})
    packed = is_packed(config) and not random
    if int4 or fused or packed:
        given["opset_version"] = _with_domain(given.get("opset_version"))
    model = load_model(source, config, kind, dtype=dtype, random=random)
    if tokenizer and model.main_input_name == "input_ids":
        check_tokenizer(source)
    notes = []
    if int4:
        stage("rounding to 4 bits")
        notes.append(str(round_weights(model, size, int4_keep or (), level)))
    call = _Call(verify, external_data, stage, given, tuple(notes), level)
    with staged(output) as folder:
        if kind == TEXT_GENERATION:
            decoder, example, reason = decoder_of(model, last_logits=last_logits, fused=fused)
            fused = decoder.fused
            if reason:
                call.notes += (f"the attention is not fused: {reason}",)
            file = call.write(
                folder / "model.onnx",
                decoder,
                fused_cases_of(example) if fused else None,
                kwargs=example.kwargs,
                dynamic_shapes=example.dynamic_shapes,
                input_names=example.input_names,
                present_names=True,
            )
            about = genai_config(
                model,
                positions=decoder.takes_positions,
                layers=example.layers,
                heads=example.heads,
                head_size=example.head_size,
                shared_buffers=fused,
            )
            (folder / "genai_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
            files = [file]
        elif kind in ENCODER_DECODERS:
            both = encoder_decoders.examples_of(model, task_example(model, source))
            parts = (encoder_decoders.Encoder(model).eval(), encoder_decoders.Decoder(model).eval())
            files = [
                call.write(folder / f"{name}_model.onnx", part, **about.arguments())
                for name, part, about in zip(("encoder", "decoder"), parts, both, strict=True)
            ]
        else:
            inputs = task_example(model, source)
            files = [
                call.write(
                    folder / "model.onnx",
                    Task(model).eval(),
                    kwargs=inputs.kwargs,
                    dynamic_shapes=inputs.dynamic_shapes,
                )
            ]
        copy_companions(source, folder, tokenizer=tokenizer)
    return [replace(file, path=output / file.path.name) for file in files]


@dataclass
class _Call:
    """How each model of a folder is exported.

    Attributes:
        accuracy_level: What products with weights of four bits get once they are verified: with 4 they are not PyTorch's.
    """

    verify: bool
    external_data: bool | None
    stage: Callable[[str], None]
    options: dict[str, Any]
    notes: tuple[str, ...] = ()
    accuracy_level: int = 1

    def write(
        self, path: Path, model: Any, cases: Sequence[Mapping[str, Any]] | None = None, **about: Any
    ) -> ExportedFile:
        """Exports one model, verifies it where that was asked for, and saves it.

        Args:
            path: Where to.
            model: The model.
            cases: Inputs to compare on; ``None``: the example's, and others drawn at random.
            about: Keyword arguments of ``to_onnx``.
        """
        program = onnxplug.to_onnx(model, mutations="ignore", progress=self.stage, **about, **self.options)
        report = None
        if self.verify:
            self.stage("verification")
            report = program.verify() if cases is None else _verified(program, cases)
        set_accuracy_level(program.model, self.accuracy_level)
        self.stage("saving")
        program.save(path, external_data=self.external_data)
        return ExportedFile(path, program, report, self.notes)


def _verified(program: Any, cases: Sequence[Mapping[str, Any]]) -> Any:
    """One report on several inputs."""
    reports = [program.verify(args=(), kwargs=case, seeds=()) for case in cases]
    return replace(reports[0], cases=[case for report in reports for case in report.cases])


def _with_domain(opsets: Any) -> dict[str, int]:
    """The opsets asked for, and ONNX Runtime's domain."""
    asked = {"": opsets} if isinstance(opsets, int) else dict(opsets or {})
    return {**asked, DOMAIN: asked.get(DOMAIN, 1)}


def model_with_inputs(source: Path) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model of a folder as it is exported, and example inputs.

    Raises:
        UsageError: It is no folder of ``save_pretrained``.
        OnnxplugError: A file is damaged or missing.
    """
    register()  # whoever takes the inputs apart knows caches
    config = load_config(source)
    kind = task_of(config, None)
    model = load_model(source, config, kind)
    if kind == TEXT_GENERATION:
        decoder = Decoder(model).eval()
        return decoder, (), example_of(decoder).kwargs
    if kind in ENCODER_DECODERS:
        example = encoder_decoders.examples_of(model, task_example(model, source))[1]
        return encoder_decoders.Decoder(model).eval(), (), example.kwargs
    return Task(model).eval(), (), dict(task_example(model, source).kwargs)

"""A folder of transformers becomes a folder of ONNX models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import onnxplug
from onnxplug import ExportedFile, UsageError
from onnxplug_transformers import encoder_decoders, generated, images_and_text
from onnxplug_transformers.adapters import Adapters, merge_adapter, read_adapter
from onnxplug_transformers.caches import names, register
from onnxplug_transformers.decoders import (
    Decoder,
    adapted_example_of,
    cases_of,
    check_one_shape,
    decoder_of,
    example_of,
    padded_prompt_of,
)
from onnxplug_transformers.dtypes import FORMATS, check_dtypes, in_format
from onnxplug_transformers.folders import (
    check_output,
    check_tokenizer,
    copy_companions,
    preprocessor_of,
    staged,
    transformer_folder,
)
from onnxplug_transformers.four_bits import DOMAIN, check_settings, round_weights, set_accuracy_level
from onnxplug_transformers.genai import (
    SPEECH_FRAMES,
    genai_config,
    images_config,
    patches_processor,
    speech_config,
    speech_processor,
)
from onnxplug_transformers.gguf_files import as_folder
from onnxplug_transformers.layouts import (
    BROWSERS,
    Layout,
    check_for_browsers,
    layout_of,
    save_in_chunks,
    write_browser_configuration,
)
from onnxplug_transformers.merged import merge, merged_samples
from onnxplug_transformers.models import (
    IMAGES_AND_TEXT,
    IN_BROWSERS,
    PACKED,
    SENTENCES,
    is_packed,
    load_config,
    load_model,
    task_of,
)
from onnxplug_transformers.packed import store_halves
from onnxplug_transformers.processors import with_processor
from onnxplug_transformers.rounded import Sample, results_of
from onnxplug_transformers.sentences import Sentences
from onnxplug_transformers.static import StaticDecoder, check_static, check_step, share_data, static_example
from onnxplug_transformers.tasks import Task, TaskExample, task_example

TEXT_GENERATION = "text-generation"
ENCODER_DECODERS = ("text2text-generation", "automatic-speech-recognition")


def export_folder(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    task: str | None = None,
    layout: str = "genai",
    dtypes: Sequence[str] = ("fp32",),
    random: bool = False,
    dtype: str = "float32",
    last_logits: bool = False,
    int4: bool = False,
    block_size: int | None = None,
    int4_keep: Sequence[str] | None = None,
    int8_layers: Sequence[str] | None = None,
    zero_points: bool = False,
    accuracy_level: int | None = None,
    fused: bool = False,
    static: tuple[int, int] | None = None,
    merged_adapter: str | os.PathLike[str] | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    tokenizer: bool = True,
    processor: bool = False,
    overwrite: bool = False,
    verify: bool = False,
    external_data: bool | None = None,
    options: Mapping[str, Any] | None = None,
    stage: Callable[[str], None] = lambda _: None,
) -> list[ExportedFile]:
    """Exports the model of a folder into another folder, which is written whole or not at all.

    Args:
        source: A folder of ``save_pretrained``, or a file of GGUF.
        output: The folder to write.
        task: The task of the model; by default the task of the class that its configuration names.
        layout: The program that loads the folder: ``"genai"``, ``"transformers.js"`` or ``"optimum"``.
        dtypes: Number formats of the files, one or several of ``"fp32"``, ``"fp16"``, ``"q8"``, ``"int8"``,
            ``"uint8"``, ``"q4"`` and ``"q4f16"``; for ``"genai"`` ``"fp32"`` alone.
        random: Random weights; the folder needs a configuration alone.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        last_logits: Logits of each row's last token alone, of a model for text generation.
        int4: Linear layers with weights of four bits and embeddings with weights of eight, of a model for text generation.
        block_size: Numbers that share a scale, 32 unless given.
        int4_keep: Names of linear layers, or of the embedding, that stay as they are, with ``*`` for anything; by default none.
        int8_layers: Names of linear layers whose weights get eight bits instead of four, with ``*`` for anything; ``"mixed"``
            stands for the layers whose errors count most. By default none.
        zero_points: Blocks of four bits have a zero point of their own, beside the scale.
        accuracy_level: 4, unless given: ONNX Runtime rounds the inputs of these layers to bytes, which is fast; 1: they
            stay floats.
        fused: Attention by ``GroupQueryAttention``, of a model for text generation; the cache is in buffers of the
            text's greatest length, which onnxruntime-genai shares between past and present. Attention that can't be
            replaced stays, and a note says so.
        static: For text generation, instead of a model with dynamic sizes: the length of the cache, and the number of
            the prompt's tokens that ``prefill.onnx`` takes at once; ``decode.onnx`` takes one token.
        merged_adapter: A folder of PEFT whose adapter is merged into the weights.
        adapters: Folders of PEFT by name, of a model for text generation: the adapters' factors are inputs of the graph, and each
            adapter is in a file ``NAME.onnx_adapter``.
        tokenizer: Whether the tokenizer is copied, which must then be in the folder.
        processor: Put the tokenizer or the image processor of a model with one call into the file, whose input is then
            strings or images, and the names of classes; for text generation, all steps from prompts to texts.
        overwrite: Replace the contents of the folder.
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
    source, output, chosen = Path(source), Path(output), layout_of(layout)
    check_dtypes(dtypes)
    check_output(output, overwrite=overwrite)
    with as_folder(source, tokenizer=tokenizer) as source:
        config = load_config(source, random=random)
        kind, whole = task_of(config, task, source), source
        source = transformer_folder(source)
        chosen.check_task(kind)
        if processor:
            _check_processor(kind, chosen, tokenizer=tokenizer)
        flags = {
            "--static": static is not None,
            "--last-logits": last_logits,
            "--int4": int4,
            "--fused": fused,
            "--adapter NAME=DIR": bool(adapters),
        }
        _check_decoder(config, kind, chosen, dtypes, dtype, [flag for flag, value in flags.items() if value], processor)
        of_int4 = zero_points or any(value is not None for value in (block_size, int4_keep, int8_layers))
        if not int4 and (of_int4 or (accuracy_level is not None and not is_packed(config))):
            options_of_int4 = "--block-size, --int4-keep, --int8-layers, --zero-points and --accuracy-level"
            raise UsageError(f"{options_of_int4} are for --int4")
        size, level = block_size if block_size is not None else 32, accuracy_level if accuracy_level is not None else 4
        check_settings(size, level)
        given = dict(options or {})
        if int4 or fused or (is_packed(config) and not random):
            given["opset_version"] = _with_domain(given.get("opset_version"))
        to_merge = None if merged_adapter is None else read_adapter(Path(merged_adapter))
        to_give = {name: read_adapter(Path(folder)) for name, folder in (adapters or {}).items()}
        of_few_bits = is_packed(config) and not random
        model = load_model(source, config, kind, dtype=dtype, random=random, halves=not int4)
        if tokenizer:
            _check_companions(source, chosen, model)
        if to_merge is not None:
            merge_adapter(model, to_merge)
        given_apart = Adapters(model, to_give) if to_give else None
        notes = []
        if int4:
            # A model without a loop of text generation is refused before it is rounded.
            example_of(Decoder(model).eval())
            stage("rounding to 4 bits")
            changed = round_weights(model, size, int4_keep or (), level, int8_layers or (), zero_points=zero_points)
            notes.append(str(changed))
            if of_few_bits:
                store_halves(model)  # weights that are neither packed nor rounded
        with staged(output) as folder:
            call = _Call(
                folder / chosen.models, chosen, dtypes, verify, external_data, stage, given, tuple(notes), level
            )
            call.folder.mkdir(exist_ok=True)
            if kind == TEXT_GENERATION:
                if static is not None:
                    _write_static(call, model, *static)
                elif processor:
                    _write_generation(call, model, source, fused=fused)
                else:
                    _write_decoder(call, model, given_apart, last_logits=last_logits, fused=fused)
            elif kind == IMAGES_AND_TEXT:
                _write_images_and_text(call, model, source)
            elif kind in ENCODER_DECODERS:
                (_write_merged if chosen.merged else _write_parts)(call, model, source)
            else:
                single = _of_one_call(model, kind, whole)
                if processor:
                    _write_model(call, *with_processor(single, model, kind, source))
                else:
                    _write_model(call, single, task_example(model, source))
            copy_companions(source, folder, tokenizer=tokenizer)
            if chosen.name == BROWSERS:
                write_browser_configuration(source, folder, config, dtypes)
        return [replace(file, path=output / file.path.relative_to(folder)) for file in call.files]


def _check_decoder(
    config: Any,
    kind: str,
    layout: Layout,
    dtypes: Sequence[str],
    dtype: str,
    flags: Sequence[str],
    processor: bool,
) -> None:
    """Checks that options fit the task and the layout.

    Args:
        config, kind, layout, dtypes, dtype, processor: As in :func:`export_folder`.
        flags: The given options that are for text generation.

    Raises:
        UsageError: An option does not fit.
    """
    if kind == IMAGES_AND_TEXT and layout.merged and (layout.name != BROWSERS or config.model_type not in IN_BROWSERS):
        raise UsageError(f"{config.model_type} for {kind} is for --for genai, and not for {layout.name}")
    beside = [flag for flag in flags if flag not in ("--static", "--int4")]
    if "--static" in flags and beside:
        raise UsageError(f"--static and {beside[0]} exclude one another")
    whole = [flag for flag in flags if processor and flag not in ("--int4", "--fused")]
    if whole:
        raise UsageError(f"--with-processor and {whole[0]} exclude one another")
    for flag in flags:
        if kind != TEXT_GENERATION:
            raise UsageError(f"{flag} is for text generation, and this is {kind}")
        if layout.merged and (flag, layout.name) != ("--last-logits", BROWSERS):
            hint = "--dtypes q4 writes weights of 4 bits." if flag == "--int4" else None
            raise UsageError(f"{flag} is for --for genai, and not for {layout.name}", hint=hint)
        if flag in ("--int4", "--fused") and dtype == "bfloat16":
            raise UsageError(f"{flag} has no kernel for bfloat16", hint="--dtype float16 or float32.")
    if layout.merged and dtype != "float32":
        raise UsageError(f"--dtype is for --for genai, and not for {layout.name}", hint="--dtypes fp16 does the same.")
    if not layout.merged and tuple(dtypes) != ("fp32",):
        raise UsageError("--dtypes is for --for transformers.js and optimum", hint="--dtype float16, or --int4.")


def _check_processor(kind: str, layout: Layout, *, tokenizer: bool) -> None:
    if kind in (IMAGES_AND_TEXT, *ENCODER_DECODERS) or layout.name != "genai":
        raise UsageError(
            "--with-processor is for text generation and for models of text or images with one call, without --for"
        )
    if not tokenizer:
        raise UsageError("--with-processor and --no-tokenizer exclude one another")


def _check_companions(source: Path, layout: Layout, model: Any) -> None:
    texts = model.main_input_name == "input_ids"
    if texts:
        check_tokenizer(source)
    if layout.name == BROWSERS:
        check_for_browsers(
            source, texts=texts, others=not texts or "pixel_values" in signature(model.forward).parameters
        )


def _write_decoder(call: _Call, model: Any, adapters: Adapters | None, *, last_logits: bool, fused: bool) -> None:
    """Writes a language model: one step, its configuration for onnxruntime-genai, and the files of its adapters."""
    decoder, example, reason = decoder_of(model, last_logits=last_logits, fused=fused)
    fused = decoder.fused
    if call.layout.merged:
        check_one_shape(example.reason, type(model).__name__, call.layout.name)
    elif example.heads is None:
        call.notes += (f"{type(model).__name__} has {example.reason.format('onnxruntime-genai')}: the loop is yours",)
    elif any(name.endswith("recurrent_state") for name in example.input_names):
        call.notes += ("onnxruntime-genai does not reorder states of recurrences by beams: num_beams has to be 1",)
    if reason:
        call.notes += (f"the attention is not fused: {reason}",)
    cases = cases_of(decoder, example)
    samples = [example.kwargs, padded_prompt_of(example)]
    if adapters is not None:
        given = [adapters.tensors(name) for name in (None, *adapters.adapters)]
        cases = [{**case, "adapter": tensors} for case in cases or samples for tensors in given]
        example = adapted_example_of(example, adapters)
        call.notes += tuple(adapters.write(call.folder))
    program, report = call.program(
        decoder,
        cases,
        kwargs=example.kwargs,
        dynamic_shapes=example.dynamic_shapes,
        input_names=example.input_names,
        present_names=True,
    )
    if adapters is not None:
        adapters.make_optional(program.model)
    call.store("model", program, report, decoder, [] if adapters else call.samples(program, decoder, samples))
    if not call.layout.merged and example.heads is not None:
        about = genai_config(
            model,
            positions=decoder.takes_positions,
            layers=example.layers,
            heads=example.heads,
            head_size=example.head_size,
            shared_buffers=fused,
        )
        _write_json(call.folder, {"genai_config.json": about})


def _write_generation(call: _Call, model: Any, source: Path, *, fused: bool) -> None:
    """Writes a model from texts to texts in one file: tokenizer, a loop over a language model's steps, detokenizer."""
    last = model.get_output_embeddings() is not None
    decoder, example, reason = decoder_of(model, last_logits=last, fused=fused)
    check_one_shape(example.reason, type(model).__name__, "--with-processor")
    if reason:
        call.notes += (f"the attention is not fused: {reason}",)
    parts, notes = generated.parts_of(model, decoder, example, source)
    call.notes += notes
    programs, reports = zip(*(call.program(part, cases, **about) for part, cases, about in parts), strict=True)
    generated.join(*(program.model for program in programs))
    for program in programs:
        program.release()
    call.store("model", programs[1], _joined(reports), model, [])


def _write_static(call: _Call, model: Any, length: int, prompt: int) -> None:
    """Writes two models of fixed sizes, for a piece of the prompt and for one token, with one file of weights."""
    example = example_of(Decoder(model).eval())
    check_one_shape(example.reason, type(model).__name__, "--static")
    cache = example.kwargs["past_key_values"]
    check_static(model, length)
    decoder = StaticDecoder(model).eval()
    for name, sequence in (("prefill", prompt), ("decode", 1)):
        starts = {0, (length - sequence) // 2, length - sequence}
        cases = [static_example(decoder, cache, length, sequence, start) for start in sorted(starts)]
        for case in cases:
            check_step(decoder, case)
        inputs = ["input_ids", "past_length", *names(cache, "past_key_values")]
        about = {"dynamic_shapes": None, "input_names": inputs, "present_names": True}
        program, report = call.program(decoder, cases, kwargs=cases[-1], **about)
        call.store(name, program, report, decoder, [])
    if list(call.folder.glob("prefill.onnx.data")) and list(call.folder.glob("decode.onnx.data")):
        share_data(call.folder / "prefill.onnx", call.folder / "decode.onnx")


def _write_images_and_text(call: _Call, model: Any, source: Path) -> None:
    """Writes three models, for the program that loads them: images, embeddings, and the decoder's step."""
    in_browsers = call.layout.name == BROWSERS
    parts = images_and_text.parts_of(model, in_browsers=in_browsers)
    models = {
        "vision_encoder" if in_browsers else "vision": parts.images,
        "embed_tokens" if in_browsers else "embedding": parts.tokens if in_browsers else parts.embeddings,
        "decoder_model_merged" if in_browsers else "model": parts.step,
    }
    for name, part in models.items():
        checks = {"is_drawn": part.is_drawn, "has_layers": part is not parts.tokens}
        call.write(name, part.model, *part.cases, **checks, **part.example.arguments())
    if in_browsers:
        return
    processor = preprocessor_of(source) if model.config.model_type in PACKED else {}
    files = {"vision_processor.json": patches_processor(processor)} if processor else {}
    files["genai_config.json"] = images_config(model, parts, next(iter(files), None))
    _write_json(call.folder, files)


def _write_parts(call: _Call, model: Any, source: Path) -> None:
    """Writes an encoder that gives the keys and values of the cross-attention, and a decoder that takes them."""
    first, second = encoder_decoders.examples_of(model, task_example(model, source))
    if model.config.model_type != "whisper":
        call.write("encoder_model", encoder_decoders.Encoder(model).eval(), **first.arguments())
        call.write("decoder_model", encoder_decoders.Decoder(model).eval(), **second.arguments())
        return
    frames = first.kwargs[model.main_input_name].shape[-1]
    if frames != SPEECH_FRAMES:
        call.notes += (
            f"onnxruntime-genai takes {SPEECH_FRAMES} frames of sound, and this model {frames}: the loop is yours",
        )
    first = replace(first, output_names=["last_hidden_state", *first.output_names])
    settings = model.generation_config
    suppressed = [list(tokens or ()) for tokens in (settings.suppress_tokens, settings.begin_suppress_tokens)]
    call.write("encoder_model", encoder_decoders.SpeechEncoder(model).eval(), **first.arguments())
    first_step = {**second.kwargs, "past_key_values": encoder_decoders.without_past(second.kwargs["past_key_values"])}
    decoder = encoder_decoders.SpeechDecoder(model, *suppressed).eval()
    call.write("decoder_model", decoder, first_step, **second.arguments())
    about = {"genai_config.json": speech_config(model)} if frames == SPEECH_FRAMES else {}
    processor = preprocessor_of(source)
    if about and processor:
        about["audio_processor_config.json"] = speech_processor(processor)
    _write_json(call.folder, about)


def _write_json(folder: Path, files: Mapping[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_merged(call: _Call, model: Any, source: Path) -> None:
    """Writes an encoder, and a decoder whose first step computes the keys and values of the cross-attention."""
    encoder, projections, decoder = encoder_decoders.merged_examples_of(model, task_example(model, source))
    call.write("encoder_model", encoder_decoders.States(model).eval(), **encoder.arguments())
    step, report = call.program(encoder_decoders.Decoder(model).eval(), **decoder.arguments())
    first, other = call.program(encoder_decoders.Projections(model).eval(), **projections.arguments())
    feeds = merged_samples(step.feed((), decoder.kwargs), first.feed((), projections.kwargs))
    exact = encoder_decoders.Merged(model, decoder, projections)
    merge(step.model, first.model)
    step.release()
    samples = [Sample(feed, partial(exact.results, branch)) for feed, branch in zip(feeds, (False, True), strict=True)]
    call.store("decoder_model_merged", step, _joined([report, other]), model, samples)


def _of_one_call(model: Any, kind: str, folder: Path) -> Any:
    """A model as it is exported; a model of sentences with the modules that make vectors."""
    return (Sentences(model, folder) if kind == SENTENCES else Task(model)).eval()


def _write_model(call: _Call, model: Any, example: TaskExample) -> None:
    """Writes a model of one call."""
    call.write("model", model, kwargs=example.kwargs, dynamic_shapes=example.dynamic_shapes)


@dataclass
class _Call:
    """The settings by which the models of a folder are exported.

    Attributes:
        dtypes: Number formats; each model is written in each of them.
        verify, external_data, stage, options: As in :func:`export_folder`.
        notes: Lines about the export, for the user.
        accuracy_level: The accuracy level that products with weights of four bits get after the verification: at level
            4 their results are not PyTorch's.
        files: The files written so far.
    """

    folder: Path
    layout: Layout
    dtypes: Sequence[str]
    verify: bool
    external_data: bool | None
    stage: Callable[[str], None]
    options: dict[str, Any]
    notes: tuple[str, ...] = ()
    accuracy_level: int = 1
    files: list[ExportedFile] = field(default_factory=list)

    def write(
        self,
        name: str,
        model: Any,
        *cases: Mapping[str, Any],
        is_drawn: bool = True,
        has_layers: bool = True,
        **about: Any,
    ) -> None:
        """Exports one model, verifies it where that was asked for, and saves it.

        Args:
            name: The name of its file, without the ending.
            model: The model.
            cases: Inputs to compare on beside the example's.
            is_drawn: Whether inputs drawn at random are compared too.
            has_layers: Whether the model has layers that can be quantised.
            about: Keyword arguments of ``to_onnx``.
        """
        program, report = self.program(model, None if is_drawn else [about["kwargs"], *cases], **about)
        if self.verify and is_drawn:
            report = _joined([report, *(program.verify(args=(), kwargs=case, seeds=()) for case in cases)])
        samples = self.samples(program, model, [about["kwargs"]])
        self.store(name, program, report, model, samples, has_layers=has_layers)

    def program(self, model: Any, cases: Sequence[Mapping[str, Any]] | None = None, **about: Any) -> tuple[Any, Any]:
        """A model exported, and the report of its verification.

        Args:
            cases: Inputs to compare on; ``None``: the example's, and others drawn at random.
            about: Keyword arguments of ``to_onnx``.
        """
        about["dynamic_shapes"] = self.layout.named(about["dynamic_shapes"])
        program = onnxplug.to_onnx(model, mutations="ignore", progress=self.stage, **about, **self.options)
        if not self.verify:
            return program, None
        self.stage("verification")
        if cases is None:
            return program, program.verify()
        return program, _joined([program.verify(args=(), kwargs=case, seeds=()) for case in cases])

    @staticmethod
    def samples(program: Any, model: Any, calls: Sequence[Mapping[str, Any]]) -> list[Sample]:
        """Inputs of a program for calls of PyTorch's model by keywords, with PyTorch's results."""
        names = [value.name for value in program.model.graph.outputs]
        return [Sample(program.feed((), call), partial(results_of, model, call, names)) for call in calls]

    def store(
        self,
        name: str,
        program: Any,
        report: Any,
        model: Any,
        samples: Sequence[Sample],
        *,
        has_layers: bool = True,
    ) -> None:
        """Saves a program in each number format.

        Args:
            samples: Inputs on which the program runs in other formats, with PyTorch's results.
            has_layers: Whether the model has layers that can be quantised.
        """
        set_accuracy_level(program.model, self.accuracy_level)
        for dtype in self.dtypes:
            self.stage(f"saving {dtype}" if len(self.dtypes) > 1 else "saving")
            new, moved = in_format(program, dtype, samples, model if self.verify else None, has_layers=has_layers)
            path = self.folder / f"{name}{FORMATS[dtype].suffix}.onnx"
            if self.layout.name == BROWSERS:
                save_in_chunks(new, path, self.external_data)
            else:
                new.save(path, external_data=self.external_data)
            notes = self.notes if moved is None else (*self.notes, f"{path.name}: {moved}")
            self.files.append(ExportedFile(path, new, report if moved is None else None, notes))


def _joined(reports: Sequence[Any]) -> Any:
    """One report of several; ``None`` where nothing was verified."""
    if reports[0] is None:
        return None
    return replace(reports[0], cases=[case for report in reports for case in report.cases])


def _with_domain(opsets: Any) -> dict[str, int]:
    """The opsets asked for, and ONNX Runtime's domain."""
    asked = {"": opsets} if isinstance(opsets, int) else dict(opsets or {})
    return {**asked, DOMAIN: asked.get(DOMAIN, 1)}


def model_with_inputs(source: Path) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model of a folder as it is exported, and example inputs."""
    register()  # so that the inputs' caches can be taken apart
    with as_folder(source, tokenizer=False) as source:
        config = load_config(source)
        kind, whole = task_of(config, None, source), source
        source = transformer_folder(source)
        model = load_model(source, config, kind)
        if kind == TEXT_GENERATION:
            decoder = Decoder(model).eval()
            return decoder, (), example_of(decoder).kwargs
        if kind == IMAGES_AND_TEXT:
            step = images_and_text.parts_of(model).step
            return step.model, (), step.example.kwargs
        if kind in ENCODER_DECODERS:
            example = encoder_decoders.examples_of(model, task_example(model, source))[1]
            return encoder_decoders.Decoder(model).eval(), (), example.kwargs
        return _of_one_call(model, kind, whole), (), dict(task_example(model, source).kwargs)

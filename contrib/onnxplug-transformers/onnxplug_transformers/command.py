"""``onnxplug export transformers:FOLDER -o DIR``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onnxplug import ExportedFile, ExportRequest


def export(
    request: ExportRequest,
    *,
    task: Annotated[
        str | None,
        typer.Option("--task", help="text-generation, feature-extraction, …; by default what config.json says"),
    ] = None,
    layout: Annotated[
        str, typer.Option("--for", help="The program that loads the folder: genai, transformers.js or optimum")
    ] = "genai",
    dtypes: Annotated[
        str,
        typer.Option(
            "--dtypes",
            help="transformers.js, optimum: a file of each number format: fp32,fp16,q8,int8,uint8,q4,q4f16",
        ),
    ] = "fp32",
    random: Annotated[bool, typer.Option("--random", help="Random weights: FOLDER needs a config.json alone")] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, float16 or bfloat16")] = "float32",
    last_logits: Annotated[
        bool, typer.Option("--last-logits", help="Text generation: logits of each row's last token alone")
    ] = False,
    int4: Annotated[
        bool, typer.Option("--int4", help="Text generation: linear layers with weights of 4 bits (MatMulNBits)")
    ] = False,
    block_size: Annotated[
        int | None,
        typer.Option("--block-size", help="With --int4: numbers that share a scale: 16, 32 (default), 64, 128, 256"),
    ] = None,
    int4_keep: Annotated[
        str | None,
        typer.Option(
            "--int4-keep",
            help="With --int4: linear layers, or the embedding, that stay, separated by commas, * for anything",
        ),
    ] = None,
    int8_layers: Annotated[
        str | None,
        typer.Option(
            "--int8-layers",
            help="With --int4: linear layers whose weights get 8 bits, separated by commas, * for anything; mixed: those whose "
            "errors count most",
        ),
    ] = None,
    zero_points: Annotated[
        bool,
        typer.Option(
            "--zero-points", help="With --int4: blocks of 4 bits have a zero point too, and are nearer to the weights"
        ),
    ] = False,
    accuracy_level: Annotated[
        int | None,
        typer.Option("--accuracy-level", help="With --int4: 4 (default) rounds activations to bytes, 1 keeps floats"),
    ] = None,
    fused: Annotated[
        bool,
        typer.Option(
            "--fused",
            help="Text generation: attention by GroupQueryAttention, its cache in buffers that are written in place",
        ),
    ] = False,
    static: Annotated[
        str | None,
        typer.Option(
            "--static",
            help="Text generation: LENGTH,PROMPT: prefill.onnx for PROMPT tokens and decode.onnx for one, all sizes fixed, over a "
            "cache of LENGTH tokens",
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            help="A folder of PEFT: DIR is merged into the weights; NAME=DIR, also several times, becomes NAME.onnx_adapter "
            "beside the model (text generation)",
        ),
    ] = None,
    tokenizer: Annotated[
        bool, typer.Option("--tokenizer/--no-tokenizer", help="Copy the tokenizer, which must be there; or do without")
    ] = True,
    processor: Annotated[
        bool,
        typer.Option(
            "--with-processor",
            help="The tokenizer or image processor in the file: strings or pixels as inputs, names of classes as a result; text "
            "generation: prompts to texts",
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what the output folder holds")] = False,
) -> list[ExportedFile]:
    """Exports a folder of ``save_pretrained``."""
    from onnxplug_transformers.folders import check_folder

    check_folder(Path(request.name), random=random)  # before transformers is imported, which takes seconds
    from onnxplug_transformers.adapters import parse_adapters
    from onnxplug_transformers.export import export_folder
    from onnxplug_transformers.static import parse_sizes

    merged_adapter, adapters = parse_adapters(adapter or ())
    return export_folder(
        Path(request.name),
        request.output,
        task=task,
        layout=layout,
        dtypes=[name.strip() for name in dtypes.split(",")],
        random=random,
        dtype=dtype,
        last_logits=last_logits,
        int4=int4,
        block_size=block_size,
        int4_keep=None if int4_keep is None else [name for name in int4_keep.split(",") if name],
        int8_layers=None if int8_layers is None else [name for name in int8_layers.split(",") if name],
        zero_points=zero_points,
        accuracy_level=accuracy_level,
        fused=fused,
        static=None if static is None else parse_sizes(static),
        merged_adapter=merged_adapter,
        adapters=adapters,
        tokenizer=tokenizer,
        processor=processor,
        overwrite=overwrite,
        verify=request.verify,
        external_data=request.external_data,
        options=request.options,
        stage=request.stage,
    )


def load(name: str) -> Any:
    """The model of a folder, or of a configuration where the weights are missing, with example inputs: for the other commands."""
    from onnxplug_transformers.export import model_with_inputs

    return model_with_inputs(Path(name))

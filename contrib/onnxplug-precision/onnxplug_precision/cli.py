"""``onnxplug convert``: an ONNX file in half precision, or quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onnxplug.cli.options import plugin_options, registry
from onnxplug.errors import UsageError


@plugin_options
def convert(
    model: Annotated[Path, typer.Argument(help="The ONNX file")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="File to write")],
    to: Annotated[str | None, typer.Option("--to", metavar="TYPE", help="float16 or bfloat16")] = None,
    keep_io: Annotated[
        bool, typer.Option("--keep-io/--no-keep-io", help="Inputs and outputs stay in float32, with --to")
    ] = True,
    quantize: Annotated[
        str | None,
        typer.Option("--quantize", metavar="KIND", help="dynamic, qdq or int4; int4:block_size=64,symmetric=no"),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option("--calibrate", metavar="DATA", help="A .npz file with inputs by name, or a folder of such"),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="'x=FILE.npy', FILE.npz, 'ids=int64[2,8]{0..99}' or 'k=3': what the model runs on; made up where it is not given",
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option("--sizes", help="'batch=4,length=128': sizes of dynamic dimensions of inputs that are made up"),
    ] = None,
    target: Annotated[
        str, typer.Option("--target", metavar="NAME", help="Runtime that runs the model; none: portable ONNX")
    ] = "onnxruntime",
    external: Annotated[
        bool | None,
        typer.Option("--external-data/--single-file", help="Store the weights in a file beside the model"),
    ] = None,
) -> None:
    """Convert an ONNX file to half precision, or quantise it; the report names what stays in float32."""
    from onnxplug_tools.cli.models import parse_feed, parse_sizes

    from onnxplug.arguments import check_destination
    from onnxplug.cli.report import note, out, progress, size_text
    from onnxplug_precision.files import convert_file

    if to is None and quantize is None:
        raise UsageError(
            "convert needs --to or --quantize", hint="onnxplug convert model.onnx --to float16 -o half.onnx"
        )
    check_destination(output)
    host = registry()[1]
    with progress() as shown:
        shown("conversion")
        done = convert_file(
            model,
            output,
            dtype=to,
            keep_io=keep_io,
            quantize=quantize,
            calibrate=calibrate,
            given=parse_feed(inputs or []),
            sizes=parse_sizes(sizes),
            target=None if target.lower() == "none" else target,
            external_data=external,
            host=host,
        )
    if done.assumed:
        note(
            f"the model ran on inputs that were made up, with the size 1 for {', '.join(done.assumed)}: --sizes, --input"
        )
    for report in done.reports:
        out.print(str(report), markup=False)
    out.print(f"{output} ({size_text(output)})", markup=False)

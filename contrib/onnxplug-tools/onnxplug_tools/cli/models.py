"""Options and functions that the commands on ONNX files share."""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnxplug.cli.options import choice
from onnxplug.errors import OnnxplugError, UsageError

if TYPE_CHECKING:
    import onnx_ir as ir

#: Bytes of an archive's content above which they are compared with the archive's own size.
_LARGE_ARCHIVE = 1 << 28
SizesOption = Annotated[str | None, typer.Option("--sizes", help="'batch=4,length=128': sizes of dynamic dimensions")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables")]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page of HTML")]
FeedOption = Annotated[
    list[str] | None,
    typer.Option("--input", help="'x=FILE.npy', FILE.npz, 'ids=int64[2,8]{0..99}' or 'k=3'; repeat for each input"),
]
ModelArgument = Annotated[Path, typer.Argument(help="The ONNX file")]


def loaded(path: Path) -> ir.Model:
    """A model to be looked at, with the shapes that can be worked out."""
    from onnxplug.cli.report import progress
    from onnxplug_tools.inspection.load import check_is_onnx, load_model

    check_is_onnx(path)
    with progress() as shown:
        shown("loading")
        return load_model(path, infer=True)


def parse_sizes(text: str | None) -> dict[str, int]:
    """The sizes in a text such as ``batch=4,length=128``."""
    sizes: dict[str, int] = {}
    for part in text.split(",") if text is not None else ():
        name, separator, size = part.rpartition("=")
        if not separator or not name.strip() or not re.fullmatch("[0-9]{1,18}", size.strip()) or name.strip() in sizes:
            raise UsageError(f"--sizes {text!r} can't be read", hint="Write it as batch=4,length=128; each name once.")
        sizes[name.strip()] = int(size)
    return sizes


@contextlib.contextmanager
def trouble_is_two() -> Iterator[None]:
    """For commands whose status 1 is an answer, such as ``diff``: errors end them with status 2."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if choice.debug or isinstance(error, UsageError):
            raise
        from onnxplug.cli.report import failure

        if isinstance(error, OnnxplugError):
            failure(error.message, error.hint)
        else:
            failure(
                f"{type(error).__name__}: {error}",
                "onnxplug did not expect this error; run with --debug for the traceback.",
            )
        raise typer.Exit(2) from error


def parse_feed(texts: Sequence[str]) -> list[tuple[str | None, Any]]:
    """The inputs in ``--input`` options: ``x=FILE.npy``, ``FILE.npz`` (inputs by their names), or as for ``export``."""
    from onnxplug.cli.inputs import parse_input

    feed: list[tuple[str | None, Any]] = []
    for text in texts:
        name, separator, file = text.partition("=")
        if not separator:
            name, file = "", text
        if file.lower().endswith((".npy", ".npz")):
            feed += _read(Path(file), name or None, text)
        else:
            spec = parse_input(text)
            feed.append((spec.name, spec.value))
    return feed


def _check_size(path: Path) -> None:
    """Checks that a large archive of arrays does not hold more than a hundred times its own size."""
    if path.suffix.lower() != ".npz":
        return
    with zipfile.ZipFile(path) as archive:
        whole = sum(entry.file_size for entry in archive.infolist())
    if whole > _LARGE_ARCHIVE and whole > 100 * path.stat().st_size:
        raise ValueError(f"it holds {whole / 1e9:.1f} GB, more than a hundred times its own size")


def _read(path: Path, name: str | None, text: str) -> list[tuple[str | None, Any]]:
    import numpy as np
    import torch

    if not path.is_file():
        raise UsageError(f"--input {text!r}: there is no file {path}")
    try:
        _check_size(path)
        content = np.load(path, allow_pickle=False)  # pickled objects are code
        if path.suffix.lower() == ".npy":
            return [(name, torch.from_numpy(np.array(content)))]
        if name is not None:
            raise UsageError(f"--input {text!r}: a .npz file has its own names", hint=f"Write --input {path}")
        return [(key, torch.from_numpy(np.array(content[key]))) for key in content.files]
    except OnnxplugError:
        raise
    except Exception as error:
        raise UsageError(f"--input {text!r} can't be read: {error}") from error

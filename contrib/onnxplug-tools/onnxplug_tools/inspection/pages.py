"""Pages of HTML, each one file that needs nothing else: styles are within it, and there are no scripts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxplug.errors import SaveError
from onnxplug.run.files import write_whole
from onnxplug.text import printable
from onnxplug_tools.inspection.words import bytes_text, count_text, flops_text

_TEMPLATES = Path(__file__).parent / "templates"


def environment(templates: Path) -> Any:
    """jinja2 with the templates of a folder. Values are escaped, and invisible characters are spelled out."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if hasattr(value, "__html__") else printable(str(value)),
    )


def page(template: str, values: Mapping[str, Any]) -> str:
    """A page.

    Args:
        template: Name of a template of this package, ``"model.html.jinja"``.
    """
    made = environment(_TEMPLATES)
    made.filters.update(count=count_text, bytes=bytes_text, flops=flops_text)
    text: str = made.get_template(template).render(values)
    return text


def check_writable(path: Path, what: str, read: Sequence[Path] = ()) -> None:
    """Checks the path of a file to write, before anything that takes long.

    Args:
        what: The kind of file, for the message: ``"page"``.
        read: The files that it is made from, which it must not replace.
    """
    if path.is_dir():
        raise SaveError(f"can't write the {what} {path}: it is a folder", hint="Give the name of a file.")
    if path.exists() and not path.is_file():
        raise SaveError(f"can't write the {what} {path}: it is not a regular file", hint="Give the name of a file.")
    if not path.absolute().parent.is_dir():
        raise SaveError(f"can't write the {what} {path}: there is no folder {path.parent}")
    if path.exists() and any(each.exists() and path.samefile(each) for each in read):
        raise SaveError(f"can't write the {what} {path}: it is the model itself", hint="Give another name.")


def save_text(path: Path, text: str, what: str) -> None:
    """Writes a file, complete or not at all.

    Args:
        what: The kind of file, for the message: ``"page"``.
    """
    try:
        check_writable(path, what)
        destination = Path(os.path.realpath(path))
        write_whole(destination, lambda file: file.write(text.encode(errors="backslashreplace")))
    except (OSError, ValueError) as error:
        raise SaveError(f"can't write the {what} {path}: {error}") from error

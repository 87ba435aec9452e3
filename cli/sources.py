"""``SCHEME:NAME``: kinds of models from plugins."""

from __future__ import annotations

import inspect
import re
from typing import Any

from onnxplug.cli.inputs import check_file
from onnxplug.cli.options import registry
from onnxplug.errors import OnnxplugError, UsageError
from onnxplug.plugins.api import ModelSource
from onnxplug.registry.rule import object_of

SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9-]+):(?P<name>.*)", re.DOTALL)


def find_source(text: str) -> tuple[ModelSource, str] | None:
    """The plugin's source that TARGET names, and the argument of its ``load``; ``None`` where TARGET is of another kind."""
    if SCHEME.fullmatch(text):
        return find_scheme(text)
    source = registry()[1].only_source(text, lambda source: text.endswith(tuple(source.suffixes)))
    if source is None:
        return None
    check_file(text)
    return source, text


def find_scheme(text: str) -> tuple[ModelSource, str] | None:
    """The plugin's source of a text ``SCHEME:NAME``, and NAME; ``None`` for other texts, or where no plugin has the scheme."""
    match = SCHEME.fullmatch(text)
    if match is None:
        return None
    source = registry()[1].only_source(f"{match['scheme']}:", lambda source: source.scheme == match["scheme"])
    return None if source is None else (source, match["name"])


def load_from(source: ModelSource, name: str, *, pretrained: bool) -> Any:
    """The result of a source's ``load``.

    Raises:
        UsageError: ``--pretrained`` for a source that has no choice, or the name is empty.
        OnnxplugError: The source raised.
    """
    if not name:
        raise UsageError(f"{source.scheme}: needs a name after it", hint=source.help or None)
    load = object_of(source.load, f"the load of {label(source)}")
    takes = takes_pretrained(source)
    if pretrained and not takes:
        of = f"{source.scheme}:NAME, which decides by itself" if source.scheme else "files"
        raise UsageError(f"--pretrained is not for {of}")
    try:
        return load(name, pretrained=pretrained) if takes else load(name)
    except OnnxplugError:
        raise
    except ImportError as error:
        raise not_importable(source, error) from error
    except Exception as error:
        target = f"{source.scheme}:{name}" if source.scheme else name
        raise OnnxplugError(f"{target} can't be loaded: {type(error).__name__}: {error}") from error


def takes_pretrained(source: ModelSource) -> bool:
    """Whether a source has a choice between random and trained weights."""
    load = object_of(source.load, f"the load of {label(source)}")
    return "pretrained" in inspect.signature(load).parameters


def not_importable(source: ModelSource, error: ImportError) -> OnnxplugError:
    """The error for a library that is missing or broken; libraries that import lazily name the cause at the end of a chain."""
    cause: BaseException = error
    while (below := cause.__cause__ or cause.__context__) is not None:
        cause = below
    why = "" if cause is error else f", because of {type(cause).__name__}: {cause}"
    return OnnxplugError(
        f"{source.scheme}: needs what can't be imported: {str(error).splitlines()[0]}{why}",
        hint="Install it, or another version of it that fits the other libraries; --debug shows where it fails.",
    )


def label(source: ModelSource) -> str:
    """A source's name in messages: its scheme, or the files that it loads."""
    return f"{source.scheme}:" if source.scheme else f"files that end in {' or '.join(source.suffixes)}"

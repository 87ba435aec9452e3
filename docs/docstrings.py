"""Docstrings as Markdown: the roles of reStructuredText that they hold become code."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

import onnxplug

_ROLE = re.compile(r":(?:class|func|meth|data|attr|mod|exc):`~?([^`]+)`")


class Roles(griffe.Extension):
    """``:class:`Rule``` is shown as code."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """griffe calls it with every object that it has read."""
        if obj.docstring is None:
            return
        if "{options}" in obj.docstring.value and obj.name in onnxplug.__all__:
            _with_options(obj, getattr(onnxplug, obj.name))
        obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)


def _with_options(obj: Any, function: Any) -> None:
    """Gives a function the signature and the docstring that it has where it runs: ``ExportOptions`` has its options."""
    obj.docstring.value = inspect.getdoc(function)
    obj.parameters = griffe.Parameters(
        *(
            griffe.Parameter(
                p.name,
                annotation=p.annotation,
                kind=griffe.ParameterKind(p.kind.description),
                default=None if p.default is p.empty else repr(p.default),
            )
            for p in inspect.signature(function).parameters.values()
        )
    )

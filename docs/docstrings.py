"""Docstrings as Markdown: the roles of reStructuredText that they hold become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|data|attr|mod|exc):`~?([^`]+)`")


class Roles(griffe.Extension):
    """``:class:`Rule``` is shown as code."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """griffe calls it with every object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)

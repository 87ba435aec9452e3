"""An observer that adds to the error of a failed capture which package of onnxplug is for the libraries at which it failed."""

from __future__ import annotations

import re
import traceback
from typing import Any

import torch

from onnxplug.errors import CaptureError
from onnxplug.observers import Observer, Span
from onnxplug.plugins.libraries import LIBRARIES


class LibraryAdvice(Observer):
    """Says what to install for a library that a model is of."""

    stays = False

    def end(self, span: Span) -> None:
        """Looks at a capture that failed, at once or as its tensors were read."""
        if span.name in ("capture", "conversion") and span.kind == "stage" and isinstance(span.error, CaptureError):
            host, model = span.subject.host, span.subject.model
            advice = [host.explain_missing(library) for library in _known_libraries(span.error, model)]
            span.error.hint = "\n".join(text for text in [*advice, span.error.hint] if text) or None


def _known_libraries(error: BaseException, model: Any) -> list[str]:
    """The libraries with an onnxplug package that a failed capture involves, one for each package.

    Args:
        error: The error of the capture, caused by torch's own error.
        model: The model.

    Returns:
        Namespaces of operators that the error names, libraries whose code it came through, and libraries of the model's modules.
    """
    # vLLM's namespace is called as torch's own module torch._C is.
    found = re.findall(r"\b([A-Za-z_]\w*)(::|\.)\w", str(error))
    names = [name for name, mark in found if mark == "::" or name != "_C"]
    cause: BaseException | None = error
    while cause is not None:
        names += [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(cause.__traceback__)]
        cause = cause.__cause__
    if isinstance(model, torch.nn.Module):
        names += [type(module).__module__ for module in model.modules()]
    libraries = dict.fromkeys(name.partition(".")[0] for name in names)
    return list({LIBRARIES[name]: name for name in reversed(libraries) if name in LIBRARIES}.values())[::-1]

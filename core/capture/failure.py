"""The error for a model that torch.export can't capture: it names the submodule, the user's line and the error of each attempt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from onnxplug.capture.data_dependent import is_data_dependent
from onnxplug.capture.dynamic import DynamicShapes
from onnxplug.capture.locations import frames_of_model, is_torch_file
from onnxplug.capture.refusals import Doubt
from onnxplug.errors import CaptureError, FixedDimensionError
from onnxplug.torch_private import UnsupportedOperatorException

_WIDTH = 200


class Try(NamedTuple):
    """An attempt that failed.

    Attributes:
        way: The mode and the reading of the dynamic shapes, in words.
    """

    way: str
    error: Exception

    def text(self) -> str:
        """One line: the way, the class of the error and the first line of its message."""
        line = first_lines(self.error).splitlines()[0]
        shortened = line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"
        return f"{self.way}: {type(self.error).__name__}: {shortened}"


def explained(
    tries: Sequence[Try], model: torch.nn.Module, shapes: DynamicShapes, doubt: Doubt | None = None
) -> CaptureError:
    """The error with the place where capture stopped, the reason, and the error of each attempt.

    Args:
        tries: The attempts; the first error tells most.
        doubt: What the model raised on one side of a check of values.
    """
    error = tries[0].error
    submodule, place = _module_of_error(model, error), place_in_user_code(error)
    path = next((name for name, module in model.named_modules() if module is submodule), None)
    where = f" in {path} ({type(submodule).__name__})" if path else ""
    raised = capture_error(error, shapes, where + (f" at {place}" if place else ""))
    if doubt is not None and is_data_dependent(error):
        raised.message += (
            f"\nFor some values the model raises at {doubt.place} ({doubt.text}), but other code runs between the check and that "
            "line, which may go another way when PyTorch runs: so the check can't be left out."
        )
        raised.hint = (
            "Ask first what is known before the model runs, and the values last (`if self.strict: if (x < 0).any(): raise …`), or "
            "state it by torch._check((x >= 0).all().item())."
        )
    raised.submodule, raised.place = path, place
    raised.tries = [attempt.text() for attempt in tries]
    if len(tries) > 1:
        raised.message += "\nTried:" + "".join(f"\n  {text}" for text in raised.tries)
    return raised


def _module_of_error(model: torch.nn.Module, error: BaseException) -> torch.nn.Module | None:
    """The innermost submodule in whose code an error was raised; ``None`` where the traceback has none of the model's."""
    # torch's tracer calls stand-ins of modules, which share their attributes.
    own = {id(vars(module)): module for module in model.modules()}
    current: BaseException | None = error
    while current is not None:
        innermost = None
        step = current.__traceback__
        while step is not None:
            candidate = step.tb_frame.f_locals.get("self")
            if isinstance(candidate, torch.nn.Module):
                innermost = own.get(id(vars(candidate)), innermost)
            step = step.tb_next
        if innermost is not None:
            return innermost
        current = current.__cause__ or current.__context__
    return None


def capture_error(error: Exception, shapes: DynamicShapes, where: str) -> CaptureError:
    """torch.export's error as a CaptureError.

    Args:
        shapes: The model's dynamic dimensions.
        where: Submodule and line, in words that follow "the model".
    """
    text = first_lines(error)
    if is_data_dependent(error):
        return CaptureError(
            f"torch.export can't capture the model{where}: its Python code depends on values that are known only when the model "
            f"runs: {type(error).__name__}: {text}",
            hint="Use torch.where or torch.cond instead of `if`, keep the number in a tensor instead of .item(), or state what "
            "is known of it by torch._check(...).",
        )
    if any(words in text for words in ("Constraints violated", "specialized", "inferred a static shape")):
        requested = shapes.describe()
        return FixedDimensionError(
            f"a dimension that was declared dynamic is fixed by the model{where}: {text}"
            + (f"\nDeclared dynamic: {requested}" if requested else ""),
            hint="Make that dimension static in dynamic_shapes, or change the code that depends on its value.",
        )
    if (op := _without_fake(error, text)) is not None:
        return CaptureError(
            f"torch.export can't capture the model{where}: the operator {op} has no fake kernel, which says its results' shapes "
            "and dtypes",
            hint=f'Register one with @torch.library.register_fake("{op}").',
        )
    return CaptureError(
        f"torch.export can't capture the model{where}: {type(error).__name__}: {text}",
        hint="The line named is where torch.export stopped. onnxplug.diagnose(model, args) captures each submodule by itself and "
        "shows more.",
    )


#: torch's text about an operator of ``torch.library.custom_op`` without a fake kernel.
_NO_FAKE = re.compile(r"There was no fake impl registered for <CustomOpDef\(([\w:.]+)\)>")


def _without_fake(error: Exception, text: str) -> str | None:
    """The operator that torch can't trace because it has no fake kernel."""
    if isinstance(error, UnsupportedOperatorException):
        func: Any = error.func
        return str(func._schema.name)
    match = _NO_FAKE.search(text)
    return match[1] if match is not None else None


#: Beginnings of lines that torch writes for its developers, not for the user.
_NOISE = (
    "Caused by:",
    "For extended logs",
    "If you suspect the guard was triggered from C++",
    "For more debugging help",
    "For C++ stack trace",
    "For more details about this graph break",
    "Developer debug context",
    "consider using data-dependent friendly APIs",
    "Hint: This graph break is fundamental",
)
#: Beginnings of torch's advice on longer messages; the message ends there.
_ENDS = (
    "For more information, run with",
    "The error above occurred",
    "from user code:",
    "Set TORCH",
    "The following call raised",
)


#: torch's notation for the size of an input.
_SIZE = re.compile(r"L\['(\w+)'\]((?:\[[^\]]*\])*)\.size\(\)\[(\d+)\]")


def first_lines(error: BaseException) -> str:
    """torch's message without the advice on how to get a longer message, and with the inputs in words."""
    lines: list[str] = []
    for line in _SIZE.sub(r"axis \3 of the input \1\2", str(error)).strip().splitlines():
        if not line.strip() and lines and len(lines) > 12:
            break
        if any(end in line for end in _ENDS):
            line = line.partition("For more information, run with")[0].rstrip()
            if any(end in line for end in _ENDS):
                break
        if line.strip() and not line.strip().startswith(_NOISE):
            lines.append(line.rstrip())
    return "\n".join(lines[:16]) or type(error).__name__


def place_in_user_code(error: BaseException) -> str | None:
    """``file:line`` of the user's innermost frame that the error came through."""
    frame = next((f for f in frames_of_model(error) if not is_torch_file(f.filename)), None)
    return f"{frame.filename}:{frame.lineno}" if frame is not None and frame.name != "<module>" else None

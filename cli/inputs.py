"""``--input``, ``--dynamic`` and other descriptions on the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxplug.errors import UsageError
from onnxplug.text import shortened

if TYPE_CHECKING:
    import torch

    from onnxplug.metadata import Metadata

#: The largest number of digits: Python reads at most 4300, and no size has as many.
_LONGEST_NUMBER = 30
_INPUT = re.compile(
    r"(?:(?P<name>\w+)=)?(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,\s]*)\](?:\{(?P<low>-?\d+)\.\.(?P<high>-?\d+)\})?"
)
_NUMBER = re.compile(r"(?P<name>\w+)=(?P<value>true|false|-?\d+(\.\d*)?([eE][-+]?\d+)?)", re.IGNORECASE)


@dataclass(frozen=True)
class InputSpec:
    """An ``--input``.

    Attributes:
        name: The input's name; ``None`` for the next positional input.
        value: The tensor or number.
    """

    name: str | None
    value: Any


def check_file(path: str | os.PathLike[str], hint: str | None = None) -> None:
    """Checks that a file is there.

    Args:
        path: The file.
        hint: The hint where there is none.

    Raises:
        UsageError: There is none, or it is no regular file: a folder, a device, a FIFO.
    """
    if os.path.isfile(path):  # False, too, for names that the system refuses: with a null character, or too long
        return
    name = os.fspath(path)
    if os.path.isdir(path):
        raise UsageError(f"{name} is a folder", hint="Give the name of a file.")
    if os.path.exists(path):
        raise UsageError(f"{name} is not a regular file", hint="Give the name of a file.")
    raise UsageError(f"there is no file {name}", hint=hint)


def parse_input(text: str) -> InputSpec:
    """``x=float32[2,3,224,224]``, ``ids=int64[2,8]{0..99}``, ``float32[2,3]`` or ``k=3``.

    Floats are normal, integers drawn from the range (0 to 9 unless given), bools random; always the same.

    Raises:
        UsageError: The text is none of these.
    """
    if re.search(rf"\d{{{_LONGEST_NUMBER + 1}}}", text):
        raise UsageError(f"--input {shortened(text, 80)!r} has a number of more than {_LONGEST_NUMBER} digits")
    number = _NUMBER.fullmatch(text.strip())
    if number is not None:
        word = number["value"]
        if word.lower() in ("true", "false"):
            return InputSpec(number["name"], word.lower() == "true")
        return InputSpec(number["name"], int(word) if re.fullmatch(r"-?\d+", word) else float(word))
    match = _INPUT.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--input {text!r} can't be read",
            hint="Write it as 'x=float32[2,3,224,224]', 'ids=int64[2,8]{0..99}' or 'k=3'.",
        )
    import torch

    dtype = getattr(torch, match["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"--input {text!r}: torch has no dtype {match['dtype']!r}", hint="float32, int64, bool …")
    shape = [int(s) for s in match["shape"].split(",") if s.strip()]
    low, high = int(match["low"] or 0), int(match["high"] or 9)
    if low > high:
        raise UsageError(f"--input {text!r}: the range {low}..{high} is empty", hint="Write it as {0..99}.")
    try:
        return InputSpec(match["name"], _random(dtype, shape, low, high))
    except (RuntimeError, ValueError, TypeError, OverflowError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"--input {shortened(text, 200)!r}: torch can't make this tensor: {reason}") from error


def _random(dtype: torch.dtype, shape: Sequence[int], low: int, high: int) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(0)
    if dtype is torch.bool:
        return torch.randint(0, 2, list(shape), generator=generator).bool()
    if dtype.is_floating_point:
        return torch.randn(list(shape), generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(list(shape), generator=generator, dtype=torch.complex64).to(dtype)
    return torch.randint(low, high + 1, list(shape), generator=generator).to(dtype)


def parse_dynamic(texts: Sequence[str]) -> dict[str, dict[int, str | None]] | None:
    """``x=batch,_,_,_``: a name for each dynamic axis, ``_`` (``None`` in the result) for a static axis.

    Raises:
        UsageError: A text can't be read, names an input twice, or a dimension by a number.
    """
    shapes: dict[str, dict[int, str | None]] = {}
    for text in texts:
        name, separator, axes = text.partition("=")
        words = [w.strip() for w in axes.split(",")]
        if not separator or not name.strip().isidentifier() or not all(re.fullmatch(r"\w+", w) for w in words):
            raise UsageError(f"--dynamic {text!r} can't be read", hint="Write it as 'x=batch,_,_,_'.")
        if name.strip() in shapes:
            raise UsageError(f"--dynamic names {name.strip()!r} twice")
        number = next((word for word in words if word.isdigit()), None)
        if number is not None:
            raise UsageError(
                f"--dynamic {text!r} names a dimension {number!r}, which is a number",
                hint="Give a dynamic dimension a name; _ stands for a static one.",
            )
        shapes[name.strip()] = {axis: None if word == "_" else word for axis, word in enumerate(words)}
    return shapes or None


def parse_opset(text: str | None) -> int | dict[str, int] | None:
    """``21``, or ``21,com.microsoft=1``.

    Raises:
        UsageError: The text can't be read.
    """
    if text is None:
        return None
    opsets: dict[str, int] = {}
    for part in text.split(","):
        name, separator, version = part.rpartition("=")
        if re.fullmatch(r"[0-9]{1,9}", version.strip()) is None:
            raise UsageError(
                f"--opset {shortened(text, 80)!r} can't be read", hint="Write it as 21, or 21,com.microsoft=1."
            )
        domain = name.strip() if separator else ""
        if domain in opsets:
            raise UsageError(f"--opset {text!r} has two versions of {domain or 'ai.onnx'}")
        opsets[domain] = int(version)
    return opsets[""] if list(opsets) == [""] else opsets


def parse_functions(is_requested: bool, classes: str | None, domain: str | None) -> Any:
    """``--functions``, ``--function-classes Block,Attention`` and ``--function-domain my.blocks``; each requests functions.

    Raises:
        UsageError: A class has no name, or the domain is malformed.
    """
    if not is_requested and classes is None and domain is None:
        return None
    names = [name.strip() for name in classes.split(",")] if classes is not None else None
    if names is not None and not all(names):
        raise UsageError(f"--function-classes {classes!r} can't be read", hint="Write it as Block,Attention.")
    from onnxplug.packages import load

    return load("Functions", "--functions")(names, **({} if domain is None else {"domain": domain}))


def parse_metadata(level: str | None, *, absolute_paths: bool) -> Metadata:
    """``--metadata full --absolute-paths``.

    Raises:
        UsageError: There is no such level.
    """
    from onnxplug.metadata import Metadata

    return Metadata(Metadata.of_option(level).level, absolute_paths)

"""Words of messages: numbers with nouns, articles, and values by dtype and shape."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

#: Beginnings of nouns that are spoken with a vowel first: "int", and "LSTM" by the name of its first letter.
_VOWEL_SOUND = re.compile("[AEIOaeio](?!u[a-z])|un(?!i)|[FHLMNRSX](?=[A-Z])")

#: Control characters of terminals, characters that turn or break a line or are invisible, and surrogates; not tabs and newlines.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def printable(text: str) -> str:
    """A text with its invisible characters as escapes, as in Python's strings; the text itself if it has none."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


def shortened(text: str, longest: int = 2000) -> str:
    """A text of at most ``longest`` characters, without its middle where it has more."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} … ({len(text) - 2 * half} characters) … {text[-half:]}"


def in_a_line(error: object) -> str:
    """The message of another library's error, in one line: names in it may look like onnxplug's own lines."""
    return shortened(" ".join(str(error).split("\n")))


def counted(count: int, noun: str) -> str:
    """A number with its noun: ``"1 result"``, ``"2 results"``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def with_article(noun: str) -> str:
    """A noun with its indefinite article: ``"a list"``, ``"an int"``, ``"an LSTM"``."""
    return f"{'an' if _VOWEL_SOUND.match(noun) else 'a'} {noun}"


def type_with_article(item: object) -> str:
    """The name of an object's type with its indefinite article: ``"an int"`` for 1."""
    return with_article(type(item).__name__)


def did_you_mean(name: object, known: Iterable[str], count: int = 1, otherwise: str | None = None) -> str | None:
    """A hint with known names that resemble an unknown name.

    Args:
        name: The unknown name.
        known: The known names.
        count: The largest number of names in the hint.
        otherwise: The hint when no name resembles it.
    """
    near = difflib.get_close_matches(str(name), list(known), count)
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else otherwise


def value_text(value: ir.Value) -> str:
    """Dtype and shape of a value: ``"float[batch, 3]"``; ``?`` for unknown parts."""
    dtype = value.dtype.name.lower() if value.dtype is not None else "?"
    dims = ", ".join(str(d) for d in value.shape) if value.shape is not None else "?"
    return f"{dtype}[{dims}]"

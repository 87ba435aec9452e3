"""One bad input, and how it is to be answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Exit statuses of the command line.
DONE, FAILED, USAGE = 0, 1, 2
#: Bytes of memory that no case may take, and seconds.
MEMORY, SECONDS = 2 << 30, 120


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        id: Its name.
        make: Makes the case's files in the current folder, which is empty, and returns a command line, or a function that is
            called. Whatever it does itself is not judged.
        expected: The allowed exit statuses; of a function the names of the errors that it may raise, ``""`` for none.
        words: Words that the message must have.
        writes: Patterns of files that may come into being, below the current folder.
    """

    id: str
    make: Callable[[Path], Sequence[str] | Callable[[], Any]]
    expected: tuple[int | str, ...]
    words: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


#: The model of most cases: two inputs, one of a dynamic size where that is asked for.
MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x, y):
        return self.linear(x) + y

def make():
    return Model().eval(), (torch.ones(3, 4), torch.ones(3, 2))

def bare():
    return Model().eval()
"""


def cli(
    id: str,
    *argv: str,
    expected: int | tuple[int, ...] = USAGE,
    words: str | tuple[str, ...] = (),
    files: Callable[[Path], Any] | None = None,
    writes: tuple[str, ...] = (),
) -> Case:
    """A case of a command line; ``m.py:make`` in it is the model of the case."""

    def make(folder: Path) -> Sequence[str]:
        if any("m.py" in text for text in argv):
            (folder / "m.py").write_text(MODEL)
        if files is not None:
            files(folder)
        return argv

    return Case(
        id,
        make,
        (expected,) if isinstance(expected, int) else expected,
        (words,) if isinstance(words, str) else words,
        ("__pycache__/*", *writes) if any(".py" in text for text in argv) else writes,
    )


def call(
    id: str,
    function: Callable[..., Any],
    expected: str | tuple[str, ...] = "UsageError",
    words: str | tuple[str, ...] = (),
    files: Callable[[Path], Any] | None = None,
    writes: tuple[str, ...] = (),
) -> Case:
    """A case of a call; the function takes nothing, or the current folder."""

    def make(folder: Path) -> Callable[[], Any]:
        if files is not None:
            files(folder)
        return (lambda: function(folder)) if function.__code__.co_argcount else function

    return Case(
        id,
        make,
        (expected,) if isinstance(expected, str) else expected,
        (words,) if isinstance(words, str) else words,
        writes,
    )

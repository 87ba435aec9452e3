"""The text of a run: nodes, their inputs and their outputs."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onnxplug_reference.engine import Step

#: Levels of ``verbose``; each writes the text of the lower levels, too.
NODES, RANGES, FIRST, ALL = 1, 2, 3, 10
_SHOWN = 5


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")


class Trace:
    """Writes a run as text.

    Args:
        verbose: 0 nothing; 1 each node; 2 also dtype, shape and range of inputs, constants and results; 3 their first five
            elements; 10 all elements.
        write: A function that takes each line; the standard output when ``None``.
    """

    def __init__(self, verbose: int, write: Callable[[str], None] | None = None) -> None:
        self.verbose = verbose
        self._write = write if write is not None else _line
        self._running = threading.local()

    @property
    def frame(self) -> Any:
        """The frame whose values a kernel of this thread that runs subgraphs itself may read."""
        return getattr(self._running, "frame", None)

    @contextlib.contextmanager
    def captured(self, frame: Any) -> Iterator[None]:
        """A context in which kernels that run subgraphs themselves see a frame."""
        before, self._running.frame = self.frame, frame
        try:
            yield
        finally:
            self._running.frame = before

    def start(self, constants: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Writes the constants and inputs of a graph."""
        if self.verbose >= RANGES:
            for sign, values in (("C", constants), ("I", inputs)):
                for name, value in values.items():
                    self._write(f" +{sign} {name}: {describe(value, self.verbose)}")

    def node(self, step: Step) -> None:
        """Writes a node before its run."""
        if self.verbose >= NODES:
            node = step.node
            self._write(f"{'  ' * len(step.path)}{node.op_type}({', '.join(node.input)}) -> {', '.join(node.output)}")

    def result(self, step: Step, name: str, value: Any) -> None:
        """Writes an output of a node."""
        if self.verbose >= RANGES:
            self._write(f"{'  ' * len(step.path)} + {name}: {describe(value, self.verbose)}")


def describe(value: Any, verbose: int = RANGES) -> str:
    """A value as text, in the detail of a level of ``verbose``."""
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return f"sequence of {len(value)}: [{', '.join(describe(v, verbose) for v in value)}]"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return f"{type(value).__name__}: {value}"
    head = f"{str(dtype).removeprefix('torch.')}:{tuple(shape)}"
    array = _readable(value)
    if not array.size:
        return f"{head} (empty)"
    if verbose < FIRST:
        return f"{head} in {_range(array)}" if array.dtype.kind in "biuf" else head
    shown = array.size if verbose >= ALL else _SHOWN
    elements = ",".join(str(v) for v in array.reshape(-1)[:shown].tolist())
    return f"{head}:{elements}{'...' if array.size > shown else ''}"


def _readable(value: Any) -> np.ndarray:
    """A value as an array of a dtype that NumPy itself knows."""
    if hasattr(value, "detach"):
        from onnxplug.build.dtypes import as_array

        value = as_array(value)
    array = np.asarray(value)
    return (
        array.astype(np.float32)
        if array.dtype.kind == "V" or array.dtype.name.startswith(("float8", "int4", "uint4"))
        else array
    )


def _range(array: np.ndarray) -> str:
    """The smallest and largest element, and the number of NaN, as text."""
    if array.dtype.kind != "f":
        return f"[{array.min()}, {array.max()}]"
    bad = np.isnan(array)
    count = int(bad.sum())
    if count == array.size:
        return "nothing but NaN"
    low, high = array[~bad].min(), array[~bad].max()
    return f"[{low}, {high}]" + (f", {count} NaN" if count else "")


def short(value: Any) -> str:
    """Dtype and shape of a value, for messages."""
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return f"sequence of {len(value)}"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return type(value).__name__
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"

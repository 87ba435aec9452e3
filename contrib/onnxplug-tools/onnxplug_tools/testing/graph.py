"""``expect_graph``: a readable expectation on a model's operators and their order."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from onnxplug.errors import UsageError
from onnxplug.kinds import check_kind

_TOKEN = re.compile(r"(?P<names>[\w.:]+(?:\|[\w.:]+)*)(?:\*(?P<count>\d+))?")


class GraphExpectation:
    """A sequence of operators to find in a graph.

    Args:
        text: Operators in order, between blanks or line ends: ``Gemm``, ``com.acme::NMS``; ``Relu|Clip`` is either,
            ``Add*3`` three in a row, ``...`` any operators or none, ``#`` begins a comment. The whole graph must fit.

    Raises:
        UsageError: A word has none of these forms.
    """

    def __init__(self, text: str) -> None:
        #: Each an operator or ``...``.
        self.lines: list[str] = []
        for line in text.splitlines():
            for word in line.partition("#")[0].replace("->", " ").split():
                match = _TOKEN.fullmatch(word)
                if match is None and word != "...":
                    raise UsageError(
                        f"expect_graph can't read {word!r}",
                        hint="Operators are written Gemm, com.acme::NMS, Relu|Clip, Add*3, or ... for anything.",
                    )
                self.lines += [word] if match is None else [match["names"]] * int(match["count"] or 1)
        runs = "".join("..." if line == "..." else f"(?:{re.escape(line)}) " for line in self.lines)
        first, *others = runs.replace(r"\|", "|").split("...")
        # A run between two "..." fits best where it fits first: without backtracking, as in fnmatch.
        inner = "".join(rf"(?>(?:\S+ )*?{run})" for run in others[:-1])
        self._pattern = re.compile(rf"{first}{inner}(?:\S+ )*{others[-1]}" if others else first)

    def matches(self, operators: Sequence[str]) -> bool:
        """Whether the operators fit the expectation, from the first to the last."""
        return self._pattern.fullmatch("".join(f"{operator} " for operator in operators)) is not None


def operators_of(model: Any) -> list[str]:
    """The operators of a model's graph in order, ``domain::name`` for operators outside of ai.onnx.

    Args:
        model: An ``OnnxProgram``, an ``onnx_ir.Model``, a ``ModelProto`` or a file's path.
    """
    import onnx
    import onnx_ir as ir

    if isinstance(model, str | os.PathLike):
        model = ir.load(model)
    elif isinstance(model, onnx.ModelProto):
        model = ir.from_proto(model)
    graph = getattr(model, "model", model).graph
    return [f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in graph]


def expect_graph(model: Any, text: str | None = None, *, absent: str | Iterable[str] = ()) -> None:
    """Compares a model's operators with an expectation.

    Args:
        model: An ``OnnxProgram``, an ``onnx_ir.Model``, a ``ModelProto`` or a file's path.
        text: The expectation, as :class:`GraphExpectation` reads it; ``None`` to check only ``absent``.
        absent: Operators that must not occur.

    Raises:
        AssertionError: The graph differs, or has an operator of ``absent``; the message shows the operators.
        UsageError: The expectation can't be read.
    """
    check_kind("text", text, (str, type(None)), "the expected operators as text")
    operators = operators_of(model)
    unwanted = absent.split() if isinstance(absent, str) else list(absent)
    there = [name for name in unwanted if name in operators]
    if there:
        raise AssertionError(f"the graph has {', '.join(there)}, which it must not have: {' '.join(operators)}")
    if text is None:
        return
    expected = GraphExpectation(text)
    if not expected.matches(operators):
        difference = "\n".join(difflib.ndiff(expected.lines, operators))
        raise AssertionError(f"the graph differs from the expected one (- expected, + found):\n{difference}")

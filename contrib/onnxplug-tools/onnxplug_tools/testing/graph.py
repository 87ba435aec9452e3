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
        UsageError: A word is none of these.
    """

    def __init__(self, text: str) -> None:
        self._steps: list[frozenset[str] | None] = []
        for line in text.splitlines():
            for word in line.partition("#")[0].replace("->", " ").split():
                if word == "...":
                    self._steps.append(None)
                    continue
                match = _TOKEN.fullmatch(word)
                if match is None:
                    raise UsageError(
                        f"expect_graph can't read {word!r}",
                        hint="Operators are written Gemm, com.acme::NMS, Relu|Clip, Add*3, or ... for anything.",
                    )
                self._steps += [frozenset(match["names"].split("|"))] * int(match["count"] or 1)

    def matches(self, operators: Sequence[str]) -> bool:
        """Whether the operators are what is expected, from the first to the last."""
        reached = self._skip({0})
        for operator in operators:
            following = set()
            for position in reached:
                if position >= len(self._steps):
                    continue
                step = self._steps[position]
                if step is None:
                    following.add(position)
                elif operator in step:
                    following.add(position + 1)
            reached = self._skip(following)
        return len(self._steps) in reached

    def _skip(self, positions: set[int]) -> set[int]:
        """The positions, and those after a ``...`` that matches no operator."""
        reachable = set(positions)
        for position in sorted(positions):
            while position < len(self._steps) and self._steps[position] is None:
                position += 1
                reachable.add(position)
        return reachable

    def lines(self) -> list[str]:
        """The expectation, an operator a line."""
        return ["..." if step is None else "|".join(sorted(step)) for step in self._steps]


def operators_of(model: Any) -> list[str]:
    """The operators of a model's graph in order, ``domain::name`` for those that aren't ai.onnx's.

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
    """Holds a model's operators against an expectation.

    Args:
        model: An ``OnnxProgram``, an ``onnx_ir.Model``, a ``ModelProto`` or a file's path.
        text: What :class:`GraphExpectation` reads; ``None`` when only ``absent`` is asked.
        absent: Operators that must not occur.

    Raises:
        AssertionError: The graph is another; the message shows both side by side.
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
        difference = "\n".join(difflib.ndiff(expected.lines(), operators))
        raise AssertionError(f"the graph differs from the expected one (- expected, + found):\n{difference}")

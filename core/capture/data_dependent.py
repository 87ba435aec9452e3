"""torch.export's errors about values of tensors: the code that needed a value, and whether the strict mode may do without it."""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import linecache
import re
from collections.abc import Iterator
from types import FrameType

from onnxplug.capture.locations import frames_of_model, is_torch_file

_DATA_DEPENDENT = {"GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException"}
#: Files of torch that are a part of models, not of capture.
_OF_MODELS = re.compile(r"[/\\]torch[/\\](nn|distributions)[/\\]|[/\\]torch[/\\]functional\.py$")


def is_data_dependent(error: BaseException) -> bool:
    """Whether capture failed because the model's Python code depends on a tensor's values."""
    current: BaseException | None = error
    while current is not None:
        if type(current).__name__ in _DATA_DEPENDENT or "data-dependent" in str(current).lower():
            return True
        current = current.__cause__
    return False


def asks_of_a_size(error: BaseException) -> bool:
    """Whether a data-dependent error is about an input's size too: it may be decided where sizes are at least 2.

    ``Eq(s0 + u0, 0)`` is never true then. torch writes ``s`` for a size and ``u`` for a number that depends on data.
    """
    expression = re.search(r"unhinted: (.*?)\)\.", str(error))
    return expression is not None and re.search(r"\bs\d+\b", expression.group(1)) is not None


def is_of_models(file: str) -> bool:
    """Whether a file is a model's, or a part of torch that belongs to models."""
    return bool(_OF_MODELS.search(file)) or not is_torch_file(file)


def is_computed_with(error: BaseException) -> bool:
    """Whether the model only computes with the number that a data-dependent error is about, as in ``max(float(x), 1.0)``.

    The strict mode keeps such a number in the graph. Like the non-strict mode it can't decide a branch or count a loop by it.
    """
    innermost = (f for f in frames_of_model(error) if is_of_models(f.filename))
    frame = next(innermost, None)
    if frame is None or frame.lineno is None or frame.colno is None:
        return False
    place = frame.lineno, frame.colno
    return not any(start <= place < end for start, end in _deciding(frame.filename))


@functools.lru_cache(maxsize=64)
def _deciding(file: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Start and end, as line and column in bytes, of a file's expressions that decide which code runs."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    deciding: list[tuple[ast.stmt | ast.expr, ast.expr]] = []
    starts: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.Assert):
            deciding.append((node, node.test))  # the jump itself has the position of the statement
        elif isinstance(node, ast.IfExp):
            deciding.append((node.test, node.test))
        elif isinstance(node, ast.For):
            deciding.append((node, node.iter))  # so has the call of __iter__
        elif isinstance(node, ast.comprehension):
            deciding += [(e, e) for e in (node.iter, *node.ifs)]
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            # In Python 3.11 the call of __iter__ for the first of its loops has the position of the whole; its element has its own.
            first = node.key if isinstance(node, ast.DictComp) else node.elt
            starts.append(((node.lineno, node.col_offset), (first.lineno, first.col_offset)))
        elif isinstance(node, ast.BoolOp):
            deciding += [(e, e) for e in node.values[:-1]]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            deciding.append((node, node))
    return starts + [
        ((first.lineno, first.col_offset), (last.end_lineno or last.lineno, last.end_col_offset or last.col_offset))
        for first, last in deciding
    ]


def is_only_tested(frame: FrameType | None) -> bool:
    """Whether code only branches on the value that its current instruction computes, or asserts it by ``torch._check``.

    A function of torch's own that asserts a condition reads it by itself.
    """
    while frame is not None and is_torch_file(frame.f_code.co_filename):
        if frame.f_code.co_name.startswith("_check"):
            return True
        frame = frame.f_back
    if frame is None:
        return False
    positions = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    return positions in _tested(frame.f_code.co_filename)


def is_unpacked(frame: FrameType | None) -> bool:
    """Whether code unpacks the value that its current instruction computes, into a number of parts that it names."""
    if frame is None:
        return False
    after = (i.opname for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti)
    return next((name for name in after if name not in ("CACHE", "EXTENDED_ARG")), None) == "UNPACK_SEQUENCE"


@functools.lru_cache(maxsize=64)
def _tested(file: str) -> frozenset[tuple[int | None, ...]]:
    """Lines and columns, in bytes, of a file's expressions whose truth is all that is asked for."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return frozenset()
    return frozenset(
        (part.lineno, part.end_lineno, part.col_offset, part.end_col_offset)
        for node in ast.walk(tree)
        for test in _tests(node)
        for part in _parts(test)
    )


def _tests(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.While | ast.Assert | ast.IfExp):
        return [node.test]
    if isinstance(node, ast.comprehension):
        return node.ifs
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [node.operand]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("_check"):
        return node.args[:1] if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch" else []
    return []


def _parts(test: ast.expr) -> Iterator[ast.expr]:
    """A condition, and the conditions that it joins by ``and`` and ``or``."""
    yield test
    for part in test.values if isinstance(test, ast.BoolOp) else ():
        yield from _parts(part)

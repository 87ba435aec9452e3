"""Branches on values of tensors as selections: both sides run, and the condition selects among the tensors that they assign.

torch.export can't go on where Python branches on a tensor's values. A function of the model whose ``if`` fails so is compiled anew
for the next trace:

    if not torch.isfinite(x).all():              condition = torch.isfinite(x).all().logical_not()
        x = torch.clamp(x, -limit, limit)        x = onnxplug::selected(condition, torch.clamp(x, -limit, limit), x)

This is the same model only if the side that PyTorch does not run has no effect and no error. A side qualifies if it does
nothing but assign variables, calls only operators of torch and Python's functions of numbers, and adds only total operators to
the graph: views, and operators that have a result for all operands (:mod:`onnxplug.capture.sides`). A side may write a tensor
where a mask is true, if the condition is that the mask is true somewhere. Any other side keeps torch's error.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import gc
import itertools
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from onnxplug.capture.mentions import Mentions
from onnxplug.capture.patching import CODE_CHANGES
from onnxplug.capture.sides import Sides, Unselectable

#: The largest number of branches of a model that become selections: each is a trace of the model up to its place.
LIMIT = 64
#: The line and the column of an ``if``.
Position = tuple[int, int]

_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.If, ast.Pass)
_EXPRESSIONS = (
    *(ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.BinOp, ast.UnaryOp),
    *(ast.Compare, ast.Call, ast.keyword, ast.IfExp, ast.BoolOp),
    *(ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop),
)

_OF_OTHER_CODE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
#: The beginning of variables for the result of a function whose branches return.
_RESULT = "onnxplug_result"
#: The functions that a compiled selection calls in the function's own frame.
_OF_SELECTIONS = ("__import__", "locals")


class Branches:
    """The branches of one model that are selections in its next trace.

    Args:
        mentions: The functions of the model's code.
    """

    def __init__(self, mentions: Mentions) -> None:
        self._mentions = mentions
        #: By file and code: equal code may be of another file.
        self._functions: dict[tuple[str, CodeType], _Function] = {}
        self._found: tuple[_Function, Position] | None = None

    def note(self, frame: FrameType) -> bool:
        """Records the branch at which code asks for a tensor's truth; returns whether the next trace can select there."""
        count = sum(len(function.chosen) for function in self._functions.values())
        function = self._function_of(frame.f_code) if count < LIMIT else None
        position = _branch_at(frame, function.code) if function is not None else None
        if function is None or position is None or position in function.chosen | function.refused:
            return False
        if not function.instances:
            # The garbage collector does not tell of objects that it was made to freeze, and code does not mention all functions.
            objects = (*self._mentions.functions, *gc.get_referrers(frame.f_code))
            found = {id(f): f for f in objects if isinstance(f, FunctionType) and f.__code__ is frame.f_code}
            function.instances += found.values()
        if not function.instances:
            return False
        self._found = function, position
        return True

    def change(self, error: BaseException) -> bool:
        """Makes the branch that ended a trace a selection, or a branch again if its sides don't qualify.

        Returns:
            Whether another trace is worth a try.
        """
        found, self._found = self._found, None
        ended = list(Sides.opened[-1:])
        unbound = list(Sides.dropped) if isinstance(error, NameError) else []
        Sides.forget()
        if found is not None:
            function, position = found
            function.chosen.add(position)
            return True
        for compiled, position in (*((sides.code, sides.position) for sides in ended), *unbound):
            self._functions[compiled.co_filename, compiled].refuse(position)
        return bool(ended or unbound)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """While it holds, the functions select.

        Raises:
            Unselectable: The model's code has handled an error of a side.
        """
        Sides.forget()
        before: list[tuple[FunctionType, CodeType]] = []
        for function in set(self._functions.values()):
            compiled = function.compiled()
            self._functions[compiled.co_filename, compiled] = function
            for instance in function.instances:
                before.append((instance, instance.__code__))
                instance.__code__ = compiled
        try:
            yield
        finally:
            for instance, code in before:
                instance.__code__ = code
        if Sides.opened:
            raise Unselectable("the model's code handled an error of a side")

    def _function_of(self, code: CodeType) -> _Function | None:
        """The function of a frame's code, which may be compiled with selections."""
        key = code.co_filename, code
        if key not in self._functions:
            source = _source_of(code)
            if source is None:
                return None
            self._functions[key] = _Function(source, source != code)
        return self._functions[key]


@dataclass(eq=False)
class _Function:
    """A function of the model.

    Attributes:
        code: Its code, as Python compiles it.
        is_changed: Whether patches have changed it.
        instances: The functions that have this code.
        chosen: The branches that are selections.
        refused: The branches that are none.
    """

    code: CodeType
    is_changed: bool
    instances: list[FunctionType] = field(default_factory=list)
    chosen: set[Position] = field(default_factory=set)
    refused: set[Position] = field(default_factory=set)

    def refuse(self, position: Position) -> None:
        """Makes a selection a branch again, for good."""
        self.chosen.discard(position)
        self.refused.add(position)

    def compiled(self) -> CodeType:
        """The code with its selections."""
        code = _with_selections(self.code.co_filename, self.code, frozenset(self.chosen))
        return functools.reduce(lambda c, change: change(c), CODE_CHANGES, code) if self.is_changed else code


# -- the source --------------------------------------------------------------------------------------------------------


def _branch_at(frame: FrameType, code: CodeType) -> Position | None:
    """The place of the ``if`` whose condition the frame's current instruction computes, if its sides may qualify."""
    positions = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    line, last, column, end = positions
    parsed = _parsed(code.co_filename)
    function = _definition(parsed[0], code) if parsed is not None else None
    if line is None or last is None or column is None or end is None or function is None:
        return None
    if any(isinstance(node, ast.Compare) and _compares_objects(node) for node in _own_nodes(function)):
        return None  # a selected tensor is none of the two
    variables = {*code.co_varnames, *code.co_cellvars, _RESULT}
    for block in _blocks_of(function):
        for index, statement in enumerate(block):
            branch = _as_if(block, index)
            if branch is not None and branch.is_at((line, column), (last, end)):
                if _returns(branch.sides[0]) != _returns(branch.sides[1]):
                    return None  # the code goes on somewhere outside of the block
                sides = (_without_returns(side, _RESULT) for side in branch.sides)
                assigns = all(_assigns(part, variables) for part in itertools.chain(*sides))
                return _begins(statement) if assigns else None
    return None


class _Branch(NamedTuple):
    """A branch in a block of code.

    Attributes:
        node: The statement or expression whose place the jump has.
        sides: The statements of both sides, which both return or both do not.
        taken: The number of statements of the block that it takes.
    """

    node: ast.If | ast.IfExp
    sides: tuple[list[ast.stmt], list[ast.stmt]]
    taken: int = 1

    def is_at(self, begin: Position, end: Position) -> bool:
        """Whether an instruction computes the condition, or jumps by it."""
        is_part = _begins(self.node.test) <= begin < _ends(self.node.test)
        return is_part or (begin, end) == (_begins(self.node), _ends(self.node))


def _as_if(block: Sequence[ast.stmt], index: int) -> _Branch | None:
    """The branch that a statement is: an ``if``, or the assignment or return of ``a if condition else b``.

    Where one side returns, the statements after the branch are a part of the other side.
    """
    statement, rest = block[index], list(block[index + 1 :])
    if isinstance(statement, ast.If):
        body, orelse = statement.body, statement.orelse
        if not _returns(body) and not _returns(orelse):
            return _Branch(statement, (body, orelse))
        sides = (side if _returns(side) else [*side, *rest] for side in (body, orelse))
        first, second = map(_nested, sides)
        return _Branch(statement, (first, second), 1 + len(rest))
    value = getattr(statement, "value", None)
    if isinstance(value, ast.IfExp) and isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return):
        one, other = copy.copy(statement), copy.copy(statement)
        one.value, other.value = value.body, value.orelse
        return _Branch(value, ([one], [other]))
    return None


def _nested(block: Sequence[ast.stmt]) -> list[ast.stmt]:
    """A block in which the statements behind a branch that returns on one side are the other side."""
    for index, statement in enumerate(block):
        branch = _as_if(block, index) if isinstance(statement, ast.If) else None
        if branch is not None and branch.taken > 1:
            return [*block[:index], ast.copy_location(ast.If(branch.node.test, *branch.sides), statement)]
    return list(block)


def _returns(side: Sequence[ast.stmt]) -> bool:
    """Whether a side ends by a ``return`` in each way."""
    last = side[-1] if side else None
    return isinstance(last, ast.Return) or (isinstance(last, ast.If) and _returns(last.body) and _returns(last.orelse))


def _without_returns(side: Sequence[ast.stmt], name: str) -> list[ast.stmt]:
    """A side that assigns a variable instead of its last ``return``."""
    before, last = side[:-1], side[-1] if side else None
    if isinstance(last, ast.Return):
        value = last.value or ast.copy_location(ast.Constant(None), last)
        target = ast.copy_location(ast.Name(name, ast.Store()), last)
        return [*before, ast.copy_location(ast.Assign([target], value), last)]
    if isinstance(last, ast.If) and _returns(side):
        sides = _without_returns(last.body, name), _without_returns(last.orelse, name)
        return [*before, ast.copy_location(ast.If(last.test, *sides), last)]
    return list(side)


def _compares_objects(node: ast.Compare) -> bool:
    """Whether a comparison is by ``is``, with anything but a constant."""
    pairs = zip(node.ops, node.comparators, strict=True)
    return any(isinstance(op, ast.Is | ast.IsNot) and not isinstance(other, ast.Constant) for op, other in pairs)


def _begins(node: Any) -> Position:
    return node.lineno, node.col_offset


def _ends(node: Any) -> Position:
    return node.end_lineno, node.end_col_offset


def _assigns(statement: ast.stmt, variables: set[str]) -> bool:
    """Whether a statement does nothing but assign variables of its function, and items of objects."""
    nodes = list(ast.walk(statement))
    if not all(isinstance(n, (*_STATEMENTS, *_EXPRESSIONS)) for n in nodes):
        return False
    targets = (n for n in nodes if isinstance(getattr(n, "ctx", None), ast.Store | ast.Del))
    are_variables = all(
        isinstance(n, ast.Tuple | ast.List | ast.Subscript)
        or (isinstance(n, ast.Name) and n.id in variables and n.id[:2] != "__")
        for n in targets
    )
    return are_variables and not any(isinstance(n, ast.Name) and n.id in _OF_SELECTIONS for n in nodes)


def _blocks_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The blocks of statements of a function, without the blocks of functions and classes within it."""
    for _, part in ast.iter_fields(node):
        parts = [child for child in part if isinstance(child, ast.AST)] if isinstance(part, list) else []
        if parts and isinstance(parts[0], ast.stmt):
            yield part
        for child in parts:
            if not isinstance(child, _OF_OTHER_CODE):
                yield from _blocks_of(child)


def _own_nodes(function: ast.AST) -> Iterator[Any]:
    """The nodes of a function without the nodes of functions and classes within it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, _OF_OTHER_CODE):
            yield from _own_nodes(child)


@functools.lru_cache(maxsize=64)
def _parsed(file: str) -> tuple[ast.Module, CodeType] | None:
    try:
        tree = ast.parse("".join(linecache.getlines(file)), file)
        return tree, compile(tree, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None


def _source_of(code: CodeType) -> CodeType | None:
    """A function's code as its file has it; ``None`` where the file is not there, or has other code now.

    Patches may have changed the function's own code.
    """
    parsed = _parsed(code.co_filename)
    source = _part_of(parsed[1], code) if parsed is not None else None
    if parsed is None or source is None or _definition(parsed[0], source) is None:
        return None
    if source == code:
        return source
    changed = functools.reduce(lambda c, change: change(c), CODE_CHANGES, source)
    return source if changed == code else None


def _definition(tree: ast.Module, code: CodeType) -> ast.FunctionDef | None:
    def first_line(node: ast.FunctionDef) -> int:
        lines: list[int] = [part.lineno for part in (*node.decorator_list, node)]  # type: ignore[attr-defined]
        return min(lines)

    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == code.co_name)
    return next((node for node in functions if first_line(node) == code.co_firstlineno), None)


def _part_of(module: CodeType, code: CodeType) -> CodeType | None:
    """The code within a module's that has the name and the line of another code."""
    for part in module.co_consts:
        if isinstance(part, CodeType):
            if (part.co_qualname, part.co_firstlineno) == (code.co_qualname, code.co_firstlineno):
                return part
            if (found := _part_of(part, code)) is not None:
                return found
    return None


# -- the source with selections ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _with_selections(file: str, code: CodeType, positions: frozenset[Position]) -> CodeType:
    """A function's code with selections at the ``if`` of these positions."""
    tree = ast.parse("".join(linecache.getlines(file)), file)
    function = _definition(tree, code)
    assert function is not None
    function.body = _Selecting(positions).block(function.body)
    compiled = _part_of(compile(tree, file, "exec", dont_inherit=True), code)
    assert compiled is not None
    assert compiled.co_freevars == code.co_freevars
    return compiled


_TEMPLATE = """
{sides} = __import__("onnxplug.capture.sides", fromlist=["Sides"]).Sides(TEST, {names!r}, locals(), {position!r})
{taken} = {sides}.undecided or (True if {sides}.value else False)
if {taken}:
    BODY
    if {sides}.undecided:
        {sides}.end(locals())
        BIND
if {sides}.undecided or not {taken}:
    OTHER
    if {sides}.undecided:
        {sides}.end(locals())
        BIND
del {sides}, {taken}
"""
_BIND = """
if {sides}.binds({name!r}):
    {name} = {sides}.values[{name!r}]
elif {name!r} in locals():
    del {name}
"""
_NEGATED = (
    '(x.negated(y) if (x := __import__("onnxplug.capture.sides", fromlist=["Sides"]).Sides).waits(y := X) else not y)'
)


class _Selecting:
    """Replaces the branches at some positions."""

    def __init__(self, positions: frozenset[Position]) -> None:
        self._positions = positions
        self._numbers = itertools.count()

    def block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        """A block with its selections."""
        result: list[ast.stmt] = []
        index = 0
        while index < len(statements):
            statement = statements[index]
            branch = _as_if(statements, index) if _begins(statement) in self._positions else None
            if branch is not None:
                result += self._selection(branch, _begins(statement))
            else:
                self._visit(statement)
                result.append(statement)
            index += branch.taken if branch is not None else 1
        return result

    def _visit(self, node: ast.AST) -> None:
        for name, part in ast.iter_fields(node):
            parts = [child for child in part if isinstance(child, ast.AST)] if isinstance(part, list) else []
            if parts and isinstance(parts[0], ast.stmt) and not isinstance(node, _OF_OTHER_CODE):
                setattr(node, name, self.block(part))
            elif not isinstance(node, ast.expr):
                for child in parts:  # handlers of errors, cases of a match
                    self._visit(child)

    def _selection(self, branch: _Branch, position: Position) -> list[ast.stmt]:
        number = next(self._numbers)
        words = {"sides": f"_onnxplug_sides_{number}", "taken": f"_onnxplug_taken_{number}"}
        result = f"{_RESULT}_{number}"
        returns = _returns(branch.sides[0])
        sides = [self.block(side) for side in branch.sides]
        sides = [_without_returns(side, result) for side in sides] if returns else sides
        nodes = itertools.chain(*(ast.walk(statement) for side in sides for statement in side))
        stored = (n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        names = tuple(dict.fromkeys(name for name in stored if not name.startswith("_onnxplug_")))
        text = _TEMPLATE.format(**words, names=names, position=position)
        bind = "".join(_BIND.format(**words, name=name) for name in names)
        called = _Called(words["sides"])
        body, other = ([called.visit(statement) for statement in side] for side in sides)
        parts = {
            "BODY": body or _located("pass", branch.node.test),
            "OTHER": other or _located("pass", branch.node.test),
            "BIND": _located(bind, branch.node.test),
            "TEST": self._condition(branch.node.test),
        }
        statements = [_Filled(parts).visit(statement) for statement in _located(text, branch.node.test)]
        return [*statements, *(_located(f"return {result}", branch.node.test) if returns else [])]

    def _condition(self, test: ast.expr) -> ast.expr:
        """A condition that has a tensor for its value, where Python would ask the last tensor in it for a number."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            number = next(self._numbers)
            names = {"x": f"_onnxplug_class_{number}", "y": f"_onnxplug_value_{number}"}
            (statement,) = _located(_NEGATED, test)
            for part in ast.walk(statement):
                if isinstance(part, ast.Name):
                    part.id = names.get(part.id, part.id)
            return _Filled({"X": self._condition(test.operand)}).visit(statement.value)  # type: ignore[attr-defined]
        if isinstance(test, ast.BoolOp):
            return ast.copy_location(ast.BoolOp(test.op, [*test.values[:-1], self._condition(test.values[-1])]), test)
        return test


class _Called(ast.NodeTransformer):
    """Checks the functions that a side calls as it calls them, and the objects that it may change."""

    def __init__(self, sides: str) -> None:
        self._sides = sides

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        names = [n.id for n in ast.walk(node.func) if isinstance(n, ast.Name)]
        if any(name in _OF_SELECTIONS or name.startswith("_onnxplug_") for name in names):
            return node  # of a branch within the side
        node.func = self._checked("called", node.func)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.Subscript:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Store):
            node.value = self._checked("written", node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        before = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
        result = ast.copy_location(ast.BinOp(self._checked("number", before), node.op, node.value), node)
        return ast.copy_location(ast.Assign([node.target], result), node)

    def _checked(self, method: str, value: ast.expr) -> ast.expr:
        name = ast.copy_location(ast.Name(self._sides, ast.Load()), value)
        check = ast.copy_location(ast.Attribute(name, method, ast.Load()), value)
        return ast.copy_location(ast.Call(check, [value], []), value)


class _Filled(ast.NodeTransformer):
    """Puts code in place of the names that stand for it."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self._parts = parts

    def visit_Expr(self, node: ast.Expr) -> Any:
        return self._parts.get(node.value.id, node) if isinstance(node.value, ast.Name) else self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        return self._parts.get(node.id, node)


def _located(text: str, place: ast.expr) -> list[ast.stmt]:
    """Statements that are all at one place of the source."""
    statements = ast.parse(text.strip()).body
    for statement in statements:
        for node in ast.walk(statement):
            if hasattr(node, "lineno"):
                ast.copy_location(node, place)
    return statements

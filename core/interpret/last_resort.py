"""The last resort: torch's ``run_decompositions`` on the whole program, for operators without a rule or a decomposition.

It costs more than everything else after capture together, so that it runs only where something needs it: functorch's
transforms (``torch.vmap``, ``torch.func.jvp``), which are calls in a captured graph that have a meaning only as a whole;
regions under ``torch.autocast``, whose operators are captured with the dtypes from before the casts; and operators without a rule
whose single decomposition fails. Guards on sizes that torch adds meanwhile are treated like the guards of capture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from onnxplug.capture.composites import composites_kept
from onnxplug.capture.quiet import quiet
from onnxplug.capture.shape_env import new_conditions, restore, shape_env_of, state_of
from onnxplug.capture.signature import Captured
from onnxplug.capture.transforms import transforms_closed
from onnxplug.errors import CaptureError, MissingRuleError, OnnxplugError, UsageError
from onnxplug.functionalize.subgraphs import subgraph_at
from onnxplug.interpret.autocast import autocast_region, with_casts
from onnxplug.observers import stage
from onnxplug.registry.names import qualified_name, without_prefix
from onnxplug.registry.registry import Layer, OnnxRegistry
from onnxplug.text import type_with_article
from onnxplug.torch_private import OpOverload, fx_config

Table = Mapping[Any, Callable[..., Any]]

#: The module of the functions that represent functorch's transforms in a captured graph.
_TRANSFORMS = "torch._functorch.predispatch"


def checked_table(decompositions: Any) -> Table | None:
    """The table of the argument ``decompositions`` of ``to_onnx``; ``None`` without the argument.

    Raises:
        UsageError: It is neither a table nor ``"core"``.
    """
    if decompositions is None:
        return None
    if isinstance(decompositions, str):
        if decompositions != "core":
            raise UsageError(
                f"decompositions={decompositions!r} is unknown",
                hint='Give "core", or a table from operators to functions, as torch.export.default_decompositions() is one.',
            )
        core: Table = torch.export.default_decompositions()
        return core
    if not isinstance(decompositions, Mapping):
        raise UsageError(
            f"decompositions must be a table from operators to functions or 'core', got {type_with_article(decompositions)}",
            hint="{torch.ops.aten.gelu.default: my_gelu}",
        )
    for operator, function in decompositions.items():
        if not isinstance(operator, OpOverload):
            raise UsageError(
                f"decompositions has {operator!r} as a key, which is no overload of an operator",
                hint="Name one overload: torch.ops.aten.gelu.default, not torch.ops.aten.gelu.",
            )
        if not callable(function):
            raise UsageError(f"decompositions has {function!r} for {operator}, which is no function")
    return decompositions


def dissolving(program: torch.export.ExportedProgram) -> list[str]:
    """The operators that only torch's decomposition of the whole program removes: transforms, and autocast regions.

    Returns:
        Their names, each once, in the order of the graph.
    """
    nodes = _nodes(program.graph_module)
    names = (name for node in nodes if node.users and (name := _dissolves(node)) is not None)
    return list(dict.fromkeys(names))


def _dissolves(node: torch.fx.Node) -> str | None:
    target = node.target
    if node.op != "call_function" or isinstance(target, OpOverload):
        return None
    if getattr(target, "__module__", "") == _TRANSFORMS:
        return qualified_name(target)
    region = autocast_region(node)
    return None if region is None or region.dtype is None else qualified_name(target)


class LastResort:
    """The programs to convert, one after the other: as captured, then decomposed more and more while operators have no rule.

    Args:
        registry: The rules. An operator with a rule from outside onnxplug is not decomposed.
        table: The caller's decompositions, applied first.

    Attributes:
        captured: The capture to convert now.
        reasons: The operators because of which its program was decomposed.

    Raises:
        CaptureError: torch can't decompose the program, or a dynamic dimension comes out static.
    """

    def __init__(self, captured: Captured, *, registry: OnnxRegistry, table: Table | None = None) -> None:
        self.captured = captured
        self.reasons: tuple[str, ...] = ()
        self._registry = registry
        self._tables: Iterator[Table] = iter(())
        self._undo: Callable[[], None] | None = None
        self._first: MissingRuleError | None = None
        if table is not None:
            self.reasons = tuple(_of_table(captured.program, table))
        else:
            self.reasons = tuple(dissolving(captured.program))
        if table is not None or self.reasons:
            program = with_casts(captured.program)
            self.captured = decomposed(
                dataclasses.replace(captured, program=program), table if table is not None else {}
            )

    def decompose_again(self, error: OnnxplugError) -> None:
        """Decomposes more of the program, after its conversion failed because operators have no rule.

        Raises:
            OnnxplugError: The error itself if it is of another kind; the first error, once no table is left to try.
        """
        if self._first is None:
            if not isinstance(error, MissingRuleError):
                raise error
            self._first = error
            kept = {rule.op for layer, rule in self._registry.rules() if layer is not Layer.BUILTIN}
            self._start, env = self.captured, shape_env_of(self.captured.program)
            self._undo = partial(restore, env, state_of(env)) if env is not None else None
            self._tables = tables(self.captured.program, error.missing, kept)
            self._all_reasons = tuple(dict.fromkeys((*self.reasons, *map(without_prefix, error.missing))))
        else:
            self._first.add_note(f"Decomposing the whole program did not help: {error}")
        for table in self._tables:
            if self._undo is not None:
                self._undo()
            try:
                self.captured = decomposed(self._start, table)
            except CaptureError as failure:
                self._first.add_note(f"Decomposing the whole program did not help: {failure}")
                continue
            self.reasons = self._all_reasons
            return
        raise self._first


def tables(program: torch.export.ExportedProgram, missing: Collection[str], kept: Collection[str]) -> Iterator[Table]:
    """The tables to decompose a program by; the table that decomposes least comes first.

    Args:
        missing: Names of its operators that have neither rule nor decomposition. No table is returned that lacks some of them.
        kept: Names of the operators, or of their packets, that are not to be decomposed.
    """
    names = {without_prefix(name) for name in missing}
    targets = {n.target for n in _nodes(program.graph_module) if n.op == "call_function"}
    wanted = {t for t in targets if isinstance(t, OpOverload) and qualified_name(t) in names}
    if not wanted or {qualified_name(t) for t in wanted} < names:
        return
    core = torch.export.default_decompositions()
    if not all(target in core for target in wanted):
        return
    yield {target: core[target] for target in wanted}
    yield {
        target: core[target]
        for target in list(core.keys())
        if target in wanted
        or (isinstance(target, OpOverload) and not {qualified_name(target), target._schema.name} & set(kept))
    }


def _of_table(program: torch.export.ExportedProgram, table: Table) -> list[str]:
    """The names of a program's operators that a table has, each once."""
    calls = (node.target for node in _nodes(program.graph_module) if node.op == "call_function")
    return list(dict.fromkeys(qualified_name(t) for t in calls if isinstance(t, OpOverload) and t in table))


def decomposed(captured: Captured, table: Table) -> Captured:
    """The capture with its program decomposed by torch.

    Args:
        captured: The capture; it stays as it is.
        table: Operator to the function that computes it by others. Composite operators that are not in it stay whole,
            where torch can keep them.

    Raises:
        CaptureError: torch can't decompose the program, or a dynamic dimension comes out static.
    """
    program = captured.program
    env = shape_env_of(program)
    known = len(env.guards) if env is not None else 0
    kept = {node.target for node in _nodes(program.graph_module)} - table.keys()
    try:
        # As in capture: sizes 0 and 1 of the example inputs imply nothing about other sizes.
        with (
            stage("decomposition of the program", "convert", operators=len(table)),
            quiet(),
            composites_kept(kept),
            transforms_closed(),
            torch.no_grad(),
            fx_config.patch(backed_size_oblivious=True),
        ):
            reduced = program.run_decompositions(dict(table))
    except Exception as error:
        text = (str(error).strip() or "no message").splitlines()[0]
        raise CaptureError(
            f"torch can't decompose the program: {type(error).__name__}: {text}",
            hint="torch.export.export(...).run_decompositions(...) shows torch's whole error.",
        ) from error
    conditions = [*captured.conditions, *new_conditions(captured, known)]
    reference = captured.reference
    return dataclasses.replace(
        captured,
        program=reduced,
        conditions=conditions,
        reference=reference if reference is not None else program.module(),
    )


def _nodes(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The nodes of a graph and of every graph within it."""
    for node in module.graph.nodes:
        inner = subgraph_at(node, module)
        if inner is not None:
            yield from _nodes(inner)
        yield node

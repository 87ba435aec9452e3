"""DynamoInterpreter: walks the functional FX graph and lets the registry's rules emit ONNX."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
from torch.fx.immutable_collections import immutable_list

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import COMPLEX_PREFIX, PART_DTYPE, Complex, complex_constant, touches_complex
from onnxplug.build.dtypes import to_onnx_dtype
from onnxplug.build.quantized import QUANTIZED_PREFIX, is_quantized
from onnxplug.capture.locations import raised_at, source_location
from onnxplug.capture.quantised import QUANTIZERS
from onnxplug.errors import (
    ConversionError,
    Decline,
    MissingRuleError,
    OnnxplugError,
    OutputMismatchError,
    Unsupported,
)
from onnxplug.functionalize.subgraphs import functional_subgraph
from onnxplug.interpret.checks import checked
from onnxplug.interpret.decompose import Decompositions, find_decompositions, trace_decomposition
from onnxplug.interpret.failures import Explain, MissingRules, defect, place_of, quantized_argument, refused
from onnxplug.interpret.graphs import ASSERTIONS, survey
from onnxplug.interpret.node import UNKNOWN_SOURCE, FxNode, are_empty, output_specs
from onnxplug.interpret.operators import Operator, Operators
from onnxplug.interpret.provenance import Context, Describer, FxProvenance
from onnxplug.interpret.symbols import Dim, SymbolNames
from onnxplug.metadata import Metadata
from onnxplug.plugin_api import PROJECT_NAME
from onnxplug.registry.registry import BoundRegistry
from onnxplug.registry.rule import Rule
from onnxplug.torch_private import FakeTensor
from onnxplug.warn import warn

_SYMBOLIC = frozenset({torch.SymInt, torch.SymFloat, torch.SymBool})
_NUMBERS = frozenset({int, float, bool})
#: How deep decompositions nest before the search ends.
_DEEPEST = 16

MissingHandler = Callable[[FxNode], "Callable[..., Any] | None"]
#: PyTorch's error for a call, ``(fx, *, is_doubtful, is_unused)``; ``None`` where it accepts the call, or that is not known.
Refusal = Callable[..., "str | None"]


class _Frame(NamedTuple):
    """One graph under conversion, and its context.

    Attributes:
        values: FX node to its value in ONNX.
        owner: The module whose attributes its ``get_attr`` nodes read.
        context: Module, line and call of nodes that lack their own.
    """

    values: dict[torch.fx.Node, Any]
    owner: torch.nn.Module | None
    context: Context = Context()


class DynamoInterpreter:
    """Converts an FX graph node by node.

    Args:
        builder: Where the rules emit.
        registry: The rules of this export, bound to its target.
        symbols: Names of dynamic sizes.
        decompositions: Plugins' own decompositions; ``None`` as value forbids the decomposition.
        missing: Supplies a converter for an operator that has neither rule nor decomposition.
        explain_missing: The reason why a namespace's plugin supplied no rule, if it is known.
        describer: Writes the nodes' metadata; the default describer when ``None``.
        applied: Receives the rule that translated each FX node.
        module_calls: Gives the call of a module that a node comes from, of its ``nn_module_stack``.
        assertions: Receives the graph's assertions about its data, with their messages; ``None`` leaves assertions out.
        refusals: Tell why eager PyTorch refuses a call that fake tensors accept.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        registry: BoundRegistry,
        symbols: SymbolNames,
        *,
        decompositions: Decompositions | None = None,
        missing: MissingHandler | None = None,
        explain_missing: Explain | None = None,
        describer: Describer | None = None,
        applied: dict[torch.fx.Node, Rule] | None = None,
        module_calls: Callable[[Any], str | None] | None = None,
        assertions: list[tuple[ir.Value, str]] | None = None,
        refusals: Sequence[Refusal] = (),
    ) -> None:
        self._builder = builder
        self._registry = registry
        self._symbols = symbols
        self._decompositions = decompositions
        self._missing_handler = missing
        self._missing = MissingRules(explain_missing)
        self._has_complex = False
        #: Whether a quantised tensor was made so far.
        self._has_quantized = False
        self._applied = applied
        self._module_calls = module_calls
        self._assertions = assertions
        self._refusals = refusals
        self._describer = describer if describer is not None else Describer(Metadata())
        self._says_rules = self._describer.metadata.is_full
        self._operators = Operators()
        self._frame = _Frame({}, None)
        #: Receives the events of nodes and rules; ``None`` without an observer.
        self._events = builder.events
        builder.interpreter = self

    # -- graphs --------------------------------------------------------------------------------------------------------

    def run(self, graph: torch.fx.Graph, values: Mapping[torch.fx.Node, Any]) -> dict[torch.fx.Node, Any]:
        """Converts a graph.

        Args:
            graph: The functional FX graph.
            values: The value of each placeholder.

        Returns:
            The value of every FX node.

        Raises:
            MissingRuleError: Operators have no rule; all of them are listed.
            ConversionError: A converter failed.
        """
        frame = _Frame(dict(values), graph.owning_module)
        with self._within(frame):
            self._walk(graph, self._assertions)
        self._missing.raise_any()
        return frame.values

    def inline(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """Converts a subgraph in place.

        Args:
            module: The subgraph.
            inputs: The values of its placeholders, in order.

        Returns:
            The values of its output node, an item for each result.

        Raises:
            ConversionError: It writes its inputs in place, or has no functional form.
        """
        call = self._builder.provenance.call
        graph = functional_subgraph(module.graph, str(call))
        context = self._within_call(call.fx) if call is not None else self._frame.context
        return self._inline(graph, inputs, self._frame._replace(owner=module, context=context))

    def _inline(self, graph: torch.fx.Graph, inputs: Sequence[Any], frame: _Frame) -> list[Any]:
        values = dict(zip((node for node in graph.nodes if node.op == "placeholder"), inputs, strict=True))
        for placeholder, value in values.items():
            if isinstance(value, ir.Value):
                self._builder.weights.add_readers(value, len(placeholder.users) - 1)
        with self._within(frame._replace(values=values)):
            self._walk(graph)
            results = self.value_of(graph.output_node().args[0])
        return list(results) if isinstance(results, list | tuple) else [results]

    @contextmanager
    def _within(self, frame: _Frame) -> Iterator[None]:
        outer, self._frame = self._frame, frame
        try:
            yield
        finally:
            self._frame = outer

    def _walk(self, graph: torch.fx.Graph, assertions: list[tuple[ir.Value, str]] | None = None) -> None:
        values = self._frame.values
        live, has_complex = survey(graph, assertions is not None)
        self._has_complex = self._has_complex or has_complex
        operator_of = self._operators.of
        for fx in graph.nodes:
            kind = fx.op
            if kind == "call_function":
                called = operator_of(fx.target)
                if called.writes:
                    raise ConversionError(f"the FX graph writes in place, {fx.format_node()}; it should be functional")
                if fx not in live:
                    if called.target in ASSERTIONS and self._assertions is not None:
                        place = source_location(fx) or UNKNOWN_SOURCE
                        warn(
                            f"checks=True does not check the assertion at {place}: it is in a branch or the body of a loop"
                        )
                    self._check_taken(fx, called, is_unused=True)
                    continue
                if called.target in ASSERTIONS and assertions is not None:
                    condition, *message = (self.value_of(argument) for argument in fx.args)
                    text = message[0] if message else f"the assertion at {source_location(fx) or UNKNOWN_SOURCE}"
                    assertions.append((condition, str(text)))
                    continue
                if called.target is operator.getitem and isinstance(values.get(fx.args[0]), (list, tuple)):
                    values[fx] = values[fx.args[0]][fx.args[1]]
                else:
                    values[fx] = self._call(fx, called)
                if called.quantizes:
                    self._has_quantized = True
            elif kind == "get_attr":
                values[fx] = self._attribute(fx)
            elif kind not in ("placeholder", "output") and fx.users:
                raise ConversionError(
                    f"the FX graph has a {kind} node, {fx.format_node()}; only exported graphs convert"
                )

    def _attribute(self, fx: torch.fx.Node) -> Any:
        attribute: Any = self._frame.owner
        for part in str(fx.target).split("."):
            attribute = getattr(attribute, part)
        if isinstance(attribute, torch.Tensor) and not isinstance(attribute, FakeTensor):
            if attribute.is_complex():
                return complex_constant(self._builder, attribute, PART_DTYPE[to_onnx_dtype(attribute.dtype)])
            return self._builder.const(attribute)
        return attribute

    def value_of(self, argument: Any) -> Any:
        """An FX argument with its nodes replaced by their values. Its lists can't be changed."""
        if type(argument) is torch.fx.Node:
            return self._frame.values[argument]
        if isinstance(argument, list | tuple):
            return immutable_list([self.value_of(a) for a in argument])
        if isinstance(argument, slice):
            return slice(*(self.value_of(a) for a in (argument.start, argument.stop, argument.step)))
        return argument

    def dims(self, tensor: torch.Tensor) -> tuple[Dim, ...]:
        """The ONNX dimensions of a fake tensor."""
        return self._symbols.dims(tensor)

    def dim(self, size: int | torch.SymInt) -> Dim:
        """The ONNX dimension of a torch size."""
        return self._symbols.dim(size)

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _call(self, fx: torch.fx.Node, called: Operator) -> Any:
        """Converts a node of the graph."""
        symbol = None
        val = fx.meta.get("val")
        kind = type(val)
        if kind in _SYMBOLIC:
            number = self._symbols.number(val)
            if not isinstance(number, str):
                return number
            symbol = number
            size = self._size(fx, symbol)
            if size is not None:
                return size
        elif kind in _NUMBERS:
            return val
        is_models = self._check_taken(fx, called)
        name = called.name
        args = self._bind(fx, called)
        if self._has_complex and called.is_overload and touches_complex(val, args):
            name = COMPLEX_PREFIX + name
        if self._has_quantized and is_quantized(args):
            name = QUANTIZED_PREFIX + name
        only = self._registry.only_rule(name)
        try:
            if only is None:
                results = self.convert_alone(self.new_call(fx, name, args))
            else:  # most calls: nothing to choose from, and no rules that remain
                results = self.convert_alone(self.new_call(fx, name, args, ()), (only,))
        except ConversionError as error:
            if is_models and not isinstance(error, Unsupported):
                self._check_refusals(fx, error, is_doubtful=True)
            raise
        if "unbacked_bindings" in fx.meta:
            self._builder.sizes.add_sources(results)
            self._add_static_sources(val, results)
        if type(results) is ir.Value:
            if symbol is not None:
                self._builder.sizes.add(symbol, results)
            if results.name is None and results.producer() is not None:
                results.name = fx.name
        return results

    def _check_taken(self, fx: torch.fx.Node, called: Operator, *, is_unused: bool = False) -> bool:
        """Whether a call is the model's own; then PyTorch must accept its dtypes, even if nothing reads its result.

        Raises:
            CaptureError: PyTorch refuses them.
        """
        is_models = called.is_overload and not self._frame.context.decomposing
        if is_models:
            self._check_refusals(fx, is_unused=is_unused)
        return is_models

    def _check_refusals(
        self, fx: torch.fx.Node, cause: Exception | None = None, *, is_doubtful: bool = False, is_unused: bool = False
    ) -> None:
        for refusal in self._refusals:
            message = refusal(fx, is_doubtful=is_doubtful, is_unused=is_unused)
            if message is not None:
                location = source_location(fx) or self._frame.context.location or UNKNOWN_SOURCE
                raise refused(fx, location, message, self._symbols) from cause

    def _add_static_sources(self, val: Any, results: Any) -> None:
        """Records the sizes that depend on data for torch and are constants here, because the data are."""
        pairs = zip(val, results, strict=True) if isinstance(val, list | tuple) else [(val, results)]
        for tensor, value in pairs:
            if not isinstance(tensor, torch.Tensor) or not isinstance(value, ir.Value):
                continue
            for axis, (size, dim) in enumerate(zip(tensor.shape, value.shape or (), strict=False)):
                name = self._symbols.number(size) if isinstance(dim, int) else None
                if isinstance(name, str):
                    self._builder.sizes.add_source(ir.SymbolicDim(name), value, axis)

    def _bind(self, fx: torch.fx.Node, called: Operator) -> tuple[Any, ...]:
        """A node's arguments in schema order, defaults filled in."""
        values = self._frame.values
        value_of = self.value_of
        args = [values[a] if type(a) is torch.fx.Node else value_of(a) for a in fx.args]
        kwargs = fx.kwargs
        count = len(args)
        if not called.is_overload:
            args.extend(value_of(v) for v in kwargs.values())
        elif not kwargs:
            args += called.defaults[count:]
        else:
            for parameter in called.parameters[count:]:
                is_named = parameter.name in kwargs
                args.append(value_of(kwargs[parameter.name]) if is_named else parameter.default)
        return tuple(args)

    def new_call(
        self, fx: torch.fx.Node, name: str, args: tuple[Any, ...], rules: Sequence[Rule] | None = None
    ) -> FxNode:
        """The call of an FX node, with the values of its arguments."""
        location = source_location(fx) or self._frame.context.location or UNKNOWN_SOURCE
        return FxNode(fx, fx.target, name, args, output_specs(fx.meta.get("val"), self._symbols), location, rules)

    def convert_alone(self, call: FxNode, rules: Sequence[Rule] | None = None) -> Any:
        """Converts an outermost call: errors name it, and it is the origin of the nodes that it emits.

        Args:
            call: The call.
            rules: The rules to try where they are known already.
        """
        if self._events is None:
            return self._convert_alone(call, rules)
        with self._events.span(call.fx.name, "node", op=call.op_name, location=call.location):
            return self._convert_alone(call, rules)

    def _convert_alone(self, call: FxNode, rules: Sequence[Rule] | None) -> Any:
        own = self._builder.provenance
        outer = own.call, own.current
        own.call, own.current = call, self._provenance_of(call.fx, call.location)
        try:
            if are_empty(call.outputs):
                results = self._empty_results(call)
                if results is not None:
                    return results
            return self.convert(call) if rules is None else self._convert_by(rules, call)
        finally:
            own.call, own.current = outer

    def _provenance_of(self, fx: torch.fx.Node, location: str | None) -> FxProvenance:
        context = self._frame.context
        scope = self._describer.scope_of(fx) or context.scope
        if location == UNKNOWN_SOURCE:
            location = None
        call = self._module_call(fx)
        return FxProvenance(self._describer, fx, context, scope, location, call)

    def _size(self, fx: torch.fx.Node, symbol: str) -> ir.Value | None:
        """The value of a dynamic size, if it is known or can be computed."""
        own = self._builder.provenance
        outer = own.current
        own.current = self._provenance_of(fx, source_location(fx) or self._frame.context.location)
        try:
            return self._builder.sizes.find(symbol)
        finally:
            own.current = outer

    def _module_call(self, fx: torch.fx.Node) -> str | None:
        """The module call that a node belongs to; ``None`` where module calls aren't needed."""
        if self._module_calls is None:
            return None
        return self._module_calls(fx.meta.get("nn_module_stack")) or self._frame.context.call

    def _within_call(self, fx: torch.fx.Node, decomposed: str | None = None) -> Context:
        """The context of a graph that replaces an FX node, or that the node runs.

        Args:
            fx: The FX node.
            decomposed: The operator, if the graph is its decomposition.
        """
        outer = self._frame.context
        return Context(
            self._describer.scope_of(fx) or outer.scope,
            source_location(fx) or outer.location,
            fx.meta.get("stack_trace") or outer.trace,
            self._module_call(fx),
            outer.decomposing if decomposed is None else (*outer.decomposing, decomposed),
        )

    def _empty_results(self, call: FxNode) -> Any:
        """The results of a torch operator that are known to hold no element; ``None`` for any other operator.

        Constants: ONNX Runtime's kernels are at their weakest over axes of size 0, and there is nothing to compute.
        """
        val = call.fx.meta.get("val")
        items = val if isinstance(val, list | tuple) else (val,)
        if getattr(call.target, "namespace", None) not in ("aten", "prims") or call.target in QUANTIZERS:
            return None
        if call.op_name.startswith(QUANTIZED_PREFIX):
            return None
        if not all(isinstance(item, torch.Tensor) for item in items):
            return None
        builder = self._builder
        results = []
        for spec in call.outputs:
            assert spec is not None
            try:
                sizes = [builder.size(size) for size in spec.shape]
            except Unsupported:
                return None
            zero = builder.const(0, PART_DTYPE.get(spec.dtype, spec.dtype))
            part = builder.op.Expand(zero, builder.vector(sizes))
            results.append(Complex(part, part) if spec.dtype in PART_DTYPE else part)
        rule = Rule(call.op_name, DynamoInterpreter._empty_results)
        return checked(call, rule, results if items is val else results[0], self._symbols)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def has_rule(self, call: FxNode) -> bool:
        """Whether some rule applies to a call."""
        return bool(self._candidates(call))

    def convert(self, call: FxNode) -> Any:
        """Converts a call by the first of its rules that doesn't decline, else by its decomposition.

        Raises:
            Decline: It was derived from another call (:attr:`FxNode.derived`), and no rule is left for it.
            ConversionError: The rule fails.
        """
        return self._convert_by(self._candidates(call) if call.rules is None else call.rules, call)

    def _convert_by(self, rules: Sequence[Rule], call: FxNode) -> Any:
        declined: list[str] = []
        for position, rule in enumerate(rules, 1):
            mark = self._builder.mark()
            rest = rules[position:]
            try:
                results = self._apply(rule, call if call.rules is rest else call.with_rules(rest))
            except Decline as decline:
                self._builder.rollback(mark)
                declined.append(f"{rule.name} declined: {decline.reason or 'no reason given'}")
                continue
            return self._checked(call, rule, results)
        if call.derived:
            raise Decline("; ".join(declined) or f"no rule for {call.op_name}")
        return self._without_rule(call, declined)

    def _candidates(self, call: FxNode) -> Sequence[Rule]:
        """The rules to try in order; in the common case a single rule, found without ranking the others."""
        try:
            return self._registry.candidates(call)
        except OnnxplugError:
            raise
        except Exception as error:  # a plugin's predicate
            raise ConversionError(
                f"a condition (`when`) of a rule for {call} raised {type(error).__name__}: {error}{raised_at(error)}"
            ) from error

    def _apply(self, rule: Rule, call: FxNode) -> Any:
        events = self._events
        if events is None:
            return self._results_of(rule, call)
        if not rule.is_imported:
            started = time.perf_counter_ns()
            with suppress(Exception):  # raised again where its place is known
                rule.resolve()
            events.count("part", "imports of converters, once a process", started)
        subject = call, partial(self._registry.reason, rule, call)
        about = {"rule": rule.name, "package": rule.source or "rules of the call"}
        with events.span(call.op_name, "rule", subject=subject, **about) as span:
            try:
                return self._results_of(rule, call)
            except Decline as decline:
                span.about["declined"] = decline.reason
                raise

    def _results_of(self, rule: Rule, call: FxNode) -> Any:
        own = self._builder.provenance
        outer = own.package, own.current
        own.package = _package_of(rule)
        if self._says_rules and isinstance(own.current, FxProvenance):
            own.current = own.current.by(rule)
        try:
            return rule.resolve()(self._builder, call)
        except Decline:
            raise
        except (MissingRuleError, OutputMismatchError):
            raise
        except OnnxplugError as error:
            if not error.located:
                error.add_place(place_of(call, rule, self._builder.opset))
            error.place = error.place or call.location
            raise
        except Exception as error:
            raise defect(error, call, rule, self._builder.opset) from error
        finally:
            own.package, own.current = outer

    def _without_rule(self, call: FxNode, declined: Sequence[str]) -> Any:
        if call.op_name.startswith(QUANTIZED_PREFIX):
            raise quantized_argument(call, declined)
        results, failures = self._decompose(call)
        if results is not None:
            return results
        if self._missing_handler is not None:
            converter = self._missing_handler(call)
            if converter is not None:
                rule = Rule(call.op_name, converter)
                rule.source = "the hook onnxplug_missing"
                return self._checked(call, rule, self._apply(rule, call.with_rules(())))
        return self._missing.stand_ins(call, self._frame.context.decomposing, [*declined, *failures])

    def _decompose(self, call: FxNode) -> tuple[Any, list[str]]:
        """The results of the first decomposition that torch can trace, or ``None``; and the reasons why others failed."""
        failures: list[str] = []
        if len(self._frame.context.decomposing) > _DEEPEST:
            return None, failures
        for function in find_decompositions(call.target, call.op_name, self._decompositions):
            try:
                module, inputs = trace_decomposition(call.fx, function)
            except Exception as error:
                first_line = (str(error).strip() or "no message").splitlines()[0]
                failures.append(f"its decomposition raised {type(error).__name__}: {first_line}")
                continue
            if any(n.target is call.target for n in module.graph.nodes):
                continue
            return self._inline_decomposition(call, function, module, inputs), failures
        return None, failures

    def _inline_decomposition(
        self, call: FxNode, function: Callable[..., Any], module: torch.fx.GraphModule, inputs: Sequence[torch.fx.Node]
    ) -> Any:
        inner = self._frame._replace(owner=module, context=self._within_call(call.fx, call.op_name))
        bound = _bound_nodes(call)
        results = self._inline(module.graph, [bound[fx] for fx in inputs], inner)
        rule = Rule(call.op_name, function)
        rule.source = "torch's decomposition"
        single = not isinstance(call.fx.meta.get("val"), list | tuple)
        return self._checked(call, rule, results[0] if single else results)

    def _checked(self, call: FxNode, rule: Rule, results: Any) -> Any:
        """A rule's results for a call, checked against torch's."""
        if self._applied is not None:
            self._applied[call.fx] = rule
        return checked(call, rule, results, self._symbols)


def _bound_nodes(call: FxNode) -> dict[torch.fx.Node, Any]:
    """The FX nodes among a call's arguments, each with its value."""
    fx = call.fx
    bound: dict[torch.fx.Node, Any] = {}
    pending: list[tuple[Any, Any]] = list(zip(fx.args, call.args, strict=False))
    if call.parameters:
        named = call.kwargs
        pending += ((argument, named[name]) for name, argument in fx.kwargs.items())
    else:
        pending += zip(fx.kwargs.values(), call.args[len(fx.args) :], strict=True)
    while pending:
        argument, value = pending.pop()
        if isinstance(argument, torch.fx.Node):
            bound[argument] = value
        elif isinstance(argument, list | tuple):
            pending += zip(argument, value, strict=True)
    return bound


def _package_of(rule: Rule) -> str | None:
    """The package of a rule, as a summary names it; ``None`` for builtin rules."""
    return None if rule.source == PROJECT_NAME else rule.source or "rules of the call"

"""DynamoInterpreter: walks the functional FX graph and lets the registry's rules emit ONNX."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import (
    COMPLEX_PREFIX,
    PART_DTYPE,
    Complex,
    complex_constant,
    touches_complex,
)
from onnxplug.build.dtypes import to_onnx_dtype
from onnxplug.capture.inplace import mutates
from onnxplug.capture.locations import module_path, raised_at
from onnxplug.errors import (
    ConversionError,
    Decline,
    MissingRuleError,
    OnnxplugError,
    OutputMismatchError,
    RuleConflictError,
)
from onnxplug.interpret.decompose import Decompositions, find_decompositions, trace_decomposition
from onnxplug.interpret.mutating import convert_functionalized, is_functionalized
from onnxplug.interpret.node import FxNode, OutputSpec, schema_parameters
from onnxplug.interpret.symbols import SymbolNames
from onnxplug.registry.names import qualified_name
from onnxplug.registry.rule import Rule

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

MissingHandler = Callable[[FxNode], "Callable[..., Any] | None"]
Explain = Callable[[str], "str | None"]


class DynamoInterpreter:
    """Converts an FX graph node by node.

    Args:
        builder: Where the rules emit.
        registry: The rules of this export, bound to its target (``find(node)``, ``candidates(node)``).
        symbols: Names of dynamic sizes.
        decompositions: Plugins' own decompositions; ``None`` as value forbids one.
        missing: Asked for a converter when an operator has neither rule nor decomposition.
        explain_missing: Says why a namespace's plugin supplied nothing, if that is known.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        registry: Any,
        symbols: SymbolNames,
        *,
        decompositions: Decompositions | None = None,
        missing: MissingHandler | None = None,
        explain_missing: Explain | None = None,
    ) -> None:
        self.builder = builder
        self.registry = registry
        self.symbols = symbols
        self.outer_location: str | None = None
        self.has_complex = False
        self.has_empty = False
        self._decompositions = decompositions
        self._missing_handler = missing
        self._explain_missing = explain_missing
        self._missing: dict[str, list[str]] = {}
        self._env: dict[torch.fx.Node, Any] = {}
        self._decomposing: list[str] = []

    # -- graphs --------------------------------------------------------------------------------------------------------

    def run(self, graph: torch.fx.Graph, values: Mapping[torch.fx.Node, Any]) -> dict[torch.fx.Node, Any]:
        """Converts a graph whose placeholders are bound to ``values``.

        Returns:
            What every FX node became.

        Raises:
            MissingRuleError: Operators have no rule; all of them are listed.
            ConversionError: A converter failed.
        """
        self._env = dict(values)
        self._walk(graph, None)
        self.raise_missing()
        return self._env

    def inline(self, graph: torch.fx.Graph, inputs: Sequence[Any], owner: torch.nn.Module | None = None) -> list[Any]:
        """Converts another graph in place, its placeholders bound to ``inputs``; returns what its output node returns."""
        outer = self._env
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self._env = dict(zip(placeholders, inputs, strict=True))
        try:
            self._walk(graph, owner)
            results = self._resolve(graph.output_node().args[0])
        finally:
            self._env = outer
        return list(results) if isinstance(results, list | tuple) else [results]

    def _walk(self, graph: torch.fx.Graph, owner: torch.nn.Module | None) -> None:
        env = self._env
        builder = self.builder
        has_complex, has_empty = _features(graph)
        self.has_complex, self.has_empty = self.has_complex or has_complex, self.has_empty or has_empty
        live = _live(graph)
        for fx in graph.nodes:
            kind = fx.op
            if kind == "call_function":
                target = fx.target
                if mutates(fx):
                    raise ConversionError(f"the FX graph writes in place, {fx.format_node()}; it should be functional")
                if fx not in live:
                    continue
                if target is operator.getitem and type(env.get(fx.args[0])) in (list, tuple):
                    env[fx] = env[fx.args[0]][fx.args[1]]
                elif is_functionalized(target):
                    env[fx] = convert_functionalized(self, fx)
                else:
                    env[fx] = self._call(fx)
            elif kind == "get_attr":
                env[fx] = self._attribute(fx, owner if owner is not None else graph.owning_module)
            elif kind not in ("placeholder", "output") and fx.users:
                raise ConversionError(
                    f"the FX graph has a {kind} node, {fx.format_node()}; only exported graphs convert"
                )
        builder.current = None
        builder.metadata = None

    def _attribute(self, fx: torch.fx.Node, owner: torch.nn.Module | None) -> Any:
        found: Any = owner
        for part in str(fx.target).split("."):
            found = getattr(found, part)
        if isinstance(found, torch.Tensor) and not isinstance(found, torch._subclasses.FakeTensor):
            if found.is_complex():
                return complex_constant(self.builder, found, PART_DTYPE[to_onnx_dtype(found.dtype)])
            return self.builder.const(found)
        return found

    def _resolve(self, argument: Any) -> Any:
        kind = type(argument)
        if kind is torch.fx.Node:
            return self._env[argument]
        if kind is list or isinstance(argument, list | tuple):
            resolve = self._resolve
            return [resolve(a) for a in argument]
        if isinstance(argument, slice):
            return slice(*(self._resolve(a) for a in (argument.start, argument.stop, argument.step)))
        return argument

    def value_of(self, node: torch.fx.Node) -> Any:
        """What a node of the graph under conversion became."""
        return self._env[node]

    def set_value(self, node: torch.fx.Node, value: Any) -> None:
        """Says what a node that stands in no graph is."""
        self._env[node] = value

    def resolve(self, argument: Any) -> Any:
        """An FX argument with its nodes replaced by what they became."""
        return self._resolve(argument)

    def convert_node(self, node: FxNode) -> Any:
        """Converts a node that was made for another one."""
        self.builder.current = node
        self.builder.metadata = {
            "namespace": f"{module_path(node.fx)}/{node.fx.name}: {node.op_name}",
            "pkg.onnxplug.source": node.location,
        }
        return self._apply(node, self._candidates(node))

    # -- one node ------------------------------------------------------------------------------------------------------

    def _bind(self, fx: torch.fx.Node, target: Any) -> list[Any]:
        env = self._env
        resolve = self._resolve
        args = [env[a] if type(a) is torch.fx.Node else resolve(a) for a in fx.args]
        if isinstance(target, torch._ops.OpOverload):
            parameters = schema_parameters(target)
            if len(args) < len(parameters):
                kwargs = fx.kwargs
                for parameter in parameters[len(args) :]:
                    if parameter.name in kwargs:
                        args.append(resolve(kwargs[parameter.name]))
                    else:
                        args.append(parameter.default)
        else:
            args.extend(resolve(v) for v in fx.kwargs.values())
        return args

    def _call(self, fx: torch.fx.Node) -> Any:
        builder = self.builder
        symbol = None
        val = fx.meta.get("val")
        if isinstance(val, _SYMBOLIC):
            number = self.symbols.number(val)
            if not isinstance(number, str):
                return number
            symbol = number
            found = builder.known_symbol(symbol)
            if found is not None:
                return found
        elif type(val) in (int, float, bool):
            return val
        target: Any = fx.target
        name = qualified_name(target)
        args = self._bind(fx, target)
        if self.has_complex and isinstance(target, torch._ops.OpOverload) and touches_complex(val, args):
            name = COMPLEX_PREFIX + name
        node = FxNode(fx, name, args, self)
        builder.current = node
        builder.metadata = {"namespace": f"{module_path(fx)}/{fx.name}: {name}", "pkg.onnxplug.source": node.location}
        if self.has_empty:
            nothing = self._nothing(node, val)
            if nothing is not None:
                return nothing
        rules = self._candidates(node)
        results = self._apply(node, rules)
        if "unbacked_bindings" in fx.meta:
            builder.add_symbol_sources(results)
        if type(results) is ir.Value:
            if symbol is not None:
                builder.set_symbol(symbol, results)
            if results.name is None and results.const_value is None:
                results.name = fx.name
        return results

    def _nothing(self, node: FxNode, val: Any) -> Any:
        """The result of an operator of torch that is known to hold no element.

        A constant: ONNX Runtime's kernels are at their weakest over axes of size 0, and there is nothing to compute.
        """
        items = val if isinstance(val, list | tuple) else (val,)
        if not items or not all(isinstance(item, torch.Tensor) and _is_empty(item) for item in items):
            return None
        if getattr(node.target, "namespace", None) not in ("aten", "prims"):
            return None
        results = []
        for spec in node.outputs:
            assert spec is not None
            found = [size if isinstance(size, int) else self.builder.symbol(size) for size in spec.shape]
            sizes = [size for size in found if size is not None]
            if len(sizes) < len(found):
                return None
            zero = self.builder.const(0, PART_DTYPE.get(spec.dtype, spec.dtype))
            part = self.builder.op.Expand(zero, self.builder.vector(sizes))
            results.append(Complex(part, part) if spec.dtype in PART_DTYPE else part)
        return self._check(
            node, Rule(node.op_name, DynamoInterpreter._nothing), results if items is val else results[0]
        )

    def _candidates(self, node: FxNode) -> Sequence[Rule]:
        """The rules to try in order; for a plain case just one, found without looking at the rest."""
        try:
            found: Sequence[Rule] = self.registry.candidates(node)
        except RuleConflictError:
            raise
        except OnnxplugError:
            raise
        except Exception as error:  # a plugin's predicate
            raise ConversionError(
                f"a condition (`when`) of a rule for {node} raised {type(error).__name__}: {error}{raised_at(error)}"
            ) from error
        return found

    def _apply(self, node: FxNode, rules: Sequence[Rule]) -> Any:
        declined: list[str] = []
        for position, rule in enumerate(rules):
            node._rest = rules[position + 1 :]
            mark = self.builder.mark()
            try:
                results = self._convert(node, rule)
            except Decline as decline:
                self.builder.rollback(mark)
                declined.append(f"{rule.name} declined: {decline.reason or 'no reason given'}")
                continue
            return self._check(node, rule, results)
        return self._without_rule(node, declined)

    def _convert(self, node: FxNode, rule: Rule) -> Any:
        try:
            return rule.resolve()(self.builder, node)
        except Decline:
            raise
        except (MissingRuleError, OutputMismatchError):
            raise
        except OnnxplugError as error:
            if not error.located:
                error.add_place(self._describe(node, rule))
            raise
        except Exception as error:
            place = raised_at(error, rule.resolve())
            wrapped = ConversionError(
                f"{self._describe(node, rule)}: the converter raised {type(error).__name__}: {error}{place}",
                hint=f"This is a defect of {rule.source or 'the rule'}; report it there with the lines above.",
            )
            wrapped.located = True
            raise wrapped from error

    def _describe(self, node: FxNode, rule: Rule) -> str:
        shapes = ", ".join(_describe_value(a) for a in node.args)
        source = f" of {rule.source}" if rule.source else ""
        return f"cannot convert {node.op_name}({shapes}) at {node.location} (rule {rule.name}{source}, opset {self.builder.opset})"

    def convert_part(self, node: FxNode) -> Any:
        """Converts a node whose complex arguments were replaced by one of their parts, by the rules for real ones."""
        return self._apply(node, self._candidates(node))

    def convert_as(self, node: FxNode, op_name: str) -> Any:
        """Converts a node by the rules of another overload, whose first parameters are the node's arguments."""
        packet, _, overload = op_name.partition("::")[2].partition(".")
        target = getattr(getattr(torch.ops.aten, packet), overload)
        args = [*node.args, *(p.default for p in schema_parameters(target)[len(node.args) :])]
        other = FxNode(node.fx, op_name, args, self)
        other.target = target
        rules = self._candidates(other)
        if not rules:
            raise Decline(f"no rule for {op_name}")
        return self._apply(other, rules)

    def call_next(self, node: FxNode) -> Any:
        """What the next rule for the node returns, else its decomposition's result."""
        rest = node._rest
        try:
            return self._apply(node, rest)
        finally:
            node._rest = rest

    # -- no rule -------------------------------------------------------------------------------------------------------

    def _without_rule(self, node: FxNode, declined: Sequence[str]) -> Any:
        results, failures = self._decompose(node)
        if results is not None:
            return results
        if self._missing_handler is not None:
            converter = self._missing_handler(node)
            if converter is not None:
                rule = Rule(node.op_name, converter)
                rule.source = "the hook onnxplug_missing"
                return self._check(node, rule, self._convert(node, rule))
        place = node.location
        if declined or failures:
            place = f"{place} ({'; '.join([*declined, *failures])})"
        name = node.op_name
        if self._decomposing:
            name, place = self._decomposing[0], f"{place} (its decomposition needs {node.op_name})"
        self._missing.setdefault(name, []).append(place)
        # Stand-ins let the walk go on, so that every operator without a rule is found at once.
        stand_ins = [_stand_in(spec) for spec in node.outputs]
        return stand_ins if isinstance(node.fx.meta.get("val"), list | tuple) else stand_ins[0]

    def _decompose(self, node: FxNode) -> tuple[Any, list[str]]:
        """What the first decomposition that torch can trace gives; ``None`` and why each failed when none does."""
        failures: list[str] = []
        if len(self._decomposing) > 16:
            return None, failures
        for function in find_decompositions(node.target, node.op_name, self._decompositions):
            try:
                module, inputs = trace_decomposition(node.fx, function)
            except Exception as error:
                first_line = (str(error).strip() or "no message").splitlines()[0]
                failures.append(f"its decomposition raised {type(error).__name__}: {first_line}")
                continue
            if any(n.target is node.target for n in module.graph.nodes):
                continue
            return self._inline_decomposition(node, function, module, inputs), failures
        return None, failures

    def _inline_decomposition(
        self, node: FxNode, function: Callable[..., Any], module: torch.fx.GraphModule, inputs: Sequence[torch.fx.Node]
    ) -> Any:
        outer, self.outer_location = self.outer_location, node.location
        self._decomposing.append(node.op_name)
        try:
            results = self.inline(module.graph, [self._env[fx] for fx in inputs], module)
        finally:
            self._decomposing.pop()
            self.outer_location = outer
        self.builder.current = node
        rule = Rule(node.op_name, function)
        rule.source = "torch's decomposition"
        single = not isinstance(node.fx.meta.get("val"), list | tuple)
        return self._check(node, rule, results[0] if single else results)

    def raise_missing(self) -> None:
        """Raises if operators without a rule were met.

        Raises:
            MissingRuleError: Lists all of them, each with its source lines and what could supply it.
        """
        if not self._missing:
            return
        lines = []
        hints = []
        for name, places in self._missing.items():
            where = ", ".join(dict.fromkeys(places[:3])) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
            lines.append(f"  {name}: {where}")
            namespace = name.partition("::")[0]
            told = self._explain_missing(namespace) if self._explain_missing is not None else None
            if told and told not in hints:
                hints.append(told)
        count = len(self._missing)
        raise MissingRuleError(
            f"{count} operator{'s have' if count > 1 else ' has'} no rule and no decomposition:\n" + "\n".join(lines),
            missing=self._missing,
            hint="\n".join(
                [*hints, "Install a plugin that translates them, or pass rules=[Rule('namespace::op', converter)]."]
            ),
        )

    # -- the check against torch's own result --------------------------------------------------------------------------

    def _check(self, node: FxNode, rule: Rule, results: Any) -> Any:
        val = node.fx.meta.get("val")
        if isinstance(val, torch.Tensor):
            if type(results) in (list, tuple) and len(results) == 1:
                results = results[0]
            self._check_value(node, rule, results, node.outputs[0], 0)
            return results
        if isinstance(val, list | tuple):
            specs = node.outputs
            if isinstance(results, ir.Value):
                results = [results]
            if not isinstance(results, list | tuple) or len(_leaves(results)) < _needed(node.fx, len(specs)):
                got = len(results) if isinstance(results, list | tuple) else repr(results)
                raise self._mismatch(node, rule, f"returned {got} results where torch has {len(specs)}")
            if len(results) > len(specs):
                raise self._mismatch(node, rule, f"returned {len(results)} results where torch has {len(specs)}")
            if any(isinstance(result, list | tuple) for result in results):
                # A list among the results, (Tensor, Tensor[]): checked leaf by leaf.
                for leaf, spec in zip(_leaves(results), specs, strict=False):
                    self._check_value(node, rule, leaf, spec, 0)
                return list(results)
            used = _used_indices(node.fx)
            for index, result in enumerate(results):
                if result is not None or used is None or index in used:
                    self._check_value(node, rule, result, specs[index], index)
            return list(results)
        if isinstance(val, _SYMBOLIC) and type(results) in (int, float, bool):
            return results
        if isinstance(val, _SYMBOLIC):
            self._check_value(node, rule, results, node.outputs[0], 0)
            return results
        if val is None and results is None:
            return None
        return results

    def _check_value(self, node: FxNode, rule: Rule, value: Any, spec: OutputSpec | None, index: int) -> None:
        if spec is None:
            return
        if type(value) is Complex and spec.dtype in PART_DTYPE:
            part = OutputSpec(PART_DTYPE[spec.dtype], spec.shape)
            self._check_value(node, rule, value.real, part, index)
            self._check_value(node, rule, value.imag, part, index)
            return
        if type(value) is not ir.Value:
            what = "None" if value is None else f"a {type(value).__name__} ({value!r})"
            raise self._mismatch(node, rule, f"returned {what} as result {index} where torch has a {_text(spec)}")
        dtype, dims = spec
        if value.dtype is None:
            value.type = ir.TensorType(dtype)
        elif value.dtype != dtype:
            raise self._mismatch(
                node, rule, f"returned {value.dtype.name.lower()} as result {index} where torch has a {_text(spec)}"
            )
        shape = value.shape
        if shape is None:
            value.shape = ir.Shape(dims)
            return
        given = shape.dims
        if given == dims:
            return
        if len(given) != len(dims):
            raise self._mismatch(
                node,
                rule,
                f"returned rank {len(given)} (shape {list(map(str, given))}) as result {index} where torch has a {_text(spec)}",
            )
        changed = False
        for got, expected in zip(given, dims, strict=True):
            if got is expected:
                continue
            if isinstance(got, int):
                if isinstance(expected, int) and got != expected:
                    raise self._mismatch(
                        node,
                        rule,
                        f"returned the shape {list(map(str, given))} as result {index} where torch has a {_text(spec)}",
                    )
            elif got != expected:
                changed = True
        if changed:
            value.shape = ir.Shape([g if isinstance(g, int) else e for g, e in zip(given, dims, strict=True)])

    def _mismatch(self, node: FxNode, rule: Rule, what: str) -> OutputMismatchError:
        source = f" of {rule.source}" if rule.source else ""
        return OutputMismatchError(
            f"rule {rule.name}{source} for {node.op_name} {what}; at {node.location}",
            hint="The converter is wrong, not the model: it must return what torch computes, in count, dtype and shape.",
        )


def _used_indices(fx: torch.fx.Node) -> set[int] | None:
    """Which results of a node are read, ``None`` when that can't be told."""
    used = set()
    for user in fx.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], int):
            return None
        if user.users:
            used.add(user.args[1])
    return used


def _leaves(results: Any) -> list[Any]:
    if isinstance(results, list | tuple):
        return [leaf for item in results for leaf in _leaves(item)]
    return [results]


def _live(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes that an output needs. What only assertions read (sizes, offsets) isn't converted."""
    live: set[torch.fx.Node] = set()
    for fx in reversed(graph.nodes):
        if fx.op == "output":
            live.add(fx)
            live.update(fx.all_input_nodes)
        elif fx in live:
            live.update(fx.all_input_nodes)
    return live


def _features(graph: torch.fx.Graph) -> tuple[bool, bool]:
    """Whether any value of a graph is complex, and whether any is empty. (A complex number shows where it is given.)"""
    is_complex = empty = False
    for fx in graph.nodes:
        val = fx.meta.get("val")
        for item in val if isinstance(val, list | tuple) else (val,):
            if isinstance(item, torch.Tensor):
                is_complex = is_complex or item.dtype.is_complex
                empty = empty or _is_empty(item)
    return is_complex, empty


def _is_empty(tensor: torch.Tensor) -> bool:
    """Whether a size is known to be 0; dynamic sizes are not asked, which would fix them."""
    return any(type(size) is int and size == 0 for size in tensor.shape)


def _stand_in(spec: OutputSpec | None) -> Any:
    """A value of the dtype and shape that an operator without a rule has."""
    if spec is None:
        return None
    dtype = PART_DTYPE.get(spec.dtype, spec.dtype)
    parts = [ir.Value(type=ir.TensorType(dtype), shape=ir.Shape(spec.shape)) for _ in range(2)]
    return Complex(*parts) if spec.dtype in PART_DTYPE else parts[0]


def _needed(fx: torch.fx.Node, count: int) -> int:
    """How many results at least must be returned: up to the last one that is read."""
    used = _used_indices(fx)
    if used is None:
        return count
    return max(used, default=-1) + 1


def _text(spec: OutputSpec) -> str:
    return f"{spec.dtype.name.lower()}[{', '.join(str(d) for d in spec.shape)}]"


def _describe_value(argument: Any) -> str:
    if isinstance(argument, ir.Value):
        dims = ", ".join(str(d) for d in argument.shape) if argument.shape is not None else "?"
        return f"{argument.dtype.name.lower() if argument.dtype is not None else '?'}[{dims}]"
    if isinstance(argument, list | tuple):
        return "[" + ", ".join(_describe_value(a) for a in argument) + "]"
    return repr(argument)

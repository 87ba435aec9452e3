"""The stages of an export in their order, functions with typed results: plan, capture, functionalize, interpret, rewrite, finish.

Where nothing translates an operator, torch decomposes the whole program, and functionalization and the later stages begin again
(:func:`_converted`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from onnxplug import arguments, logs, packages
from onnxplug.build.assemble import assemble
from onnxplug.build.builder import GraphBuilder
from onnxplug.build.collection import collection_held
from onnxplug.build.kernels import Kernels
from onnxplug.build.scope import nodes_of
from onnxplug.capture.ambient import autocast_inside
from onnxplug.capture.capture import capture as capture_model
from onnxplug.capture.eager import full_float32
from onnxplug.capture.signature import Captured, FunctionalGraph
from onnxplug.errors import OnnxplugError, UsageError
from onnxplug.finish.describe import describe, forget
from onnxplug.finish.finish import finish as finish_model
from onnxplug.functionalize.prepare import prepare
from onnxplug.host import CallChecks, PluginHost, RuntimeHost, plugins_of_call
from onnxplug.interpret import ranges
from onnxplug.interpret.bindings import bind_inputs, bind_outputs
from onnxplug.interpret.interpreter import DynamoInterpreter
from onnxplug.interpret.last_resort import LastResort, checked_table
from onnxplug.interpret.provenance import Describer
from onnxplug.interpret.symbols import SymbolNames
from onnxplug.metadata import Metadata
from onnxplug.observers import Observer, Span, events, observed, span, stage
from onnxplug.opsets import resolve_opsets
from onnxplug.options import ExportOptions
from onnxplug.plugin_api import PROJECT_NAME, CaptureRequest
from onnxplug.program import ExportStatistics, OnnxProgram
from onnxplug.progress import StageNames, showing
from onnxplug.registry.registry import OnnxRegistry
from onnxplug.registry.rule import Rule
from onnxplug.registry.target import Target, check_runtime
from onnxplug.rewrite.driver import run_rewrites
from onnxplug.run.alignment import Alignment, Recipe
from onnxplug.run.kernels import checked_items
from onnxplug.run.session import TARGET
from onnxplug.torch_private import unset_fake_temporarily

if TYPE_CHECKING:
    from onnxplug import Functions

#: The key of a model's ``meta`` with the nodes that rules of other packages emitted.
_MADE_BY = "onnxplug.made_by"


# -- plan: the checked arguments of the call ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A call of ``to_onnx`` whose arguments are checked, and its plugins.

    Attributes:
        model, args, kwargs: The model and its example inputs.
        calls: Inputs of other calls, from ``examples=``.
        options: The options.
        registry, host: The rules and the plugins.
        runners: The plugins that run custom operators.
        rules: The rules of the call.
        target: The model's target.
        functions: The request for functions: which modules become functions.
        metadata: The level of metadata.
        checks: Holds the call against what torch, the plugins and the model know.
    """

    model: Any
    args: Any
    kwargs: Mapping[str, Any] | None
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    options: ExportOptions
    registry: OnnxRegistry
    host: PluginHost
    runners: RuntimeHost
    rules: Sequence[Rule]
    target: Target
    functions: Functions | None
    metadata: Metadata
    checks: CallChecks


def plan(model: Any, args: Any, f: Any, options: ExportOptions) -> Plan:
    """Checks everything that can be checked before the model is captured, and loads the plugins.

    Raises:
        UsageError: An argument is malformed, or two contradict each other.
        OnnxplugError: It can't be verified or saved as requested.
    """
    opsets = resolve_opsets(options.opset_version)
    functions: Functions | None = None
    if options.functions is not None and options.functions is not False:
        functions = packages.load("Functions", "functions=").of_call(options.functions, model)
    metadata = Metadata.of_option(options.metadata)
    items = checked_items(options.runtime)
    rules = arguments.rules_of_call(options.rules, options.custom_translation_table)
    checked_table(options.decompositions)
    args, kwargs = arguments.positional_and_named(model, args, options.kwargs)
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = ()
    if options.examples is not None:
        args, kwargs, calls = packages.load("examples=").with_examples(model, args, kwargs, options.examples)
    arguments.check_inputs((args, kwargs))
    arguments.check_names(options.input_names, options.output_names, (args, kwargs) if args or kwargs else None)
    arguments.check_destination(f)
    for name, is_needed in {"checks=": options.checks, "metadata=full": metadata.is_full}.items():
        if is_needed:  # before anything takes time
            packages.load(name)
    registry, host = _selected(options, rules)
    runtime = check_runtime(options.target, registry.targets() | host.targets())
    own = {functions.domain} if functions is not None else set()
    checks = host.checks(registry, rules, opsets, items, own)
    if options.verify:
        host.check_verifiable(opsets[""])
    if options.strict and any(rule.patches() for rule in rules):
        raise UsageError("rules for autograd functions need torch.export's non-strict mode, but strict=True is given")
    target = Target(opsets[""], opsets, runtime, bool(options.exact))
    runners = host.with_runtime(items) if items else host
    return Plan(
        model, args, kwargs, calls, options, registry, host, runners, rules, target, functions, metadata, checks
    )


def _selected(options: ExportOptions, rules: Sequence[Rule]) -> tuple[OnnxRegistry, PluginHost]:
    registry = options.registry
    if registry is None:
        with stage("plugins", "plugins") as loading:
            selected = plugins_of_call(plugins=options.plugins, call_rules=rules, prefer=options.prefer)
            loading.result = selected
        return selected
    if options.plugins is not None or options.prefer or (rules and not callable(registry)):
        raise UsageError("registry= can't be given together with rules=, plugins= or prefer=, which it replaces")
    if callable(registry):
        return registry(rules)
    if not (isinstance(registry, tuple) and len(registry) == 2 and isinstance(registry[0], OnnxRegistry)):
        raise UsageError(f"registry= takes a registry with its plugin manager, or a function, got {registry!r}")
    return registry


# -- capture and functionalize -----------------------------------------------------------------------------------------


def capture(plan: Plan) -> Captured:
    """Captures the model by torch.export.

    Raises:
        CaptureError: torch.export can't capture it, or a dynamic dimension came out static.
    """
    options, host = plan.options, plan.host
    patches = [patch for rule in plan.rules for patch in rule.patches()]
    is_program = isinstance(plan.model, torch.export.ExportedProgram)
    captured = capture_model(
        plan.model,
        plan.args,
        plan.kwargs,
        dynamic_shapes=options.dynamic_shapes,
        input_names=options.input_names,
        strict=False if patches else options.strict,
        examples=plan.calls,
        make_module=host.module_maker(plan.model),
        patches=[*host.patches(), *patches] if not is_program else (),
        request=CaptureRequest(options=options, registry=plan.registry),
    )
    plan.checks.captured()
    return captured


def functionalize(plan: Plan, captured: Captured) -> FunctionalGraph:
    """Replaces the writes and views in a captured program by values.

    Raises:
        ConversionError: There is no functional form.
    """
    with stage("functionalization", "functionalize") as work:
        functional = prepare(
            captured,
            input_names=plan.options.input_names,
            output_names=plan.options.output_names,
            mutations=plan.options.mutations == "outputs",
            present_names=plan.options.present_names,
        )
        work.about["writes"] = functional.strategy
        work.result = functional
    return functional


# -- interpret, rewrite and finish: from the functional graph to the model ---------------------------------------------


@dataclass(frozen=True)
class Conversion:
    """The conversion of a functional graph to a model: the common arguments of its stages.

    Attributes:
        captured: The capture of the graph.
        registry, host: The rules and the plugins.
        target: The model's target.
        optimize: As ``to_onnx`` takes it.
        without: Names of rewrites that are left out.
        calls: The call of a module that a node comes from, of its ``nn_module_stack``, where modules become functions.
        checks: Whether the model checks its sizes.
        metadata: The level of metadata.
        describes_all: Whether its nodes get full metadata, whatever the level is.
    """

    captured: Captured
    registry: OnnxRegistry
    host: PluginHost
    target: Target
    optimize: bool = True
    without: Collection[str] = ()
    calls: Callable[[Any], str | None] | None = None
    checks: bool = False
    metadata: Metadata = field(default_factory=Metadata)
    describes_all: bool = False

    def model(self, functional: FunctionalGraph, alignment: Alignment | None = None) -> ir.Model:
        """The model of a graph; ``alignment`` records the values of FX nodes.

        Raises:
            MissingRuleError: Operators have no rule.
            ConversionError: A converter or a rewrite failed.
        """
        translated = interpret(self, functional, alignment)
        if self.optimize:
            rewrite(self, translated, alignment)
        return finish(self, translated)

    def recipe(self, functional: FunctionalGraph) -> Recipe:
        """The recipe for converting the graph, or a part of it, again, without functions and checks."""
        plain = replace(self, calls=None, checks=False, describes_all=False)

        def build(
            graph: FunctionalGraph, optimize: bool, without: Collection[str], alignment: Alignment | None
        ) -> ir.Model:
            with collection_held():
                return replace(plain, optimize=optimize, without=without).model(graph, alignment)

        return Recipe(functional, build, self.optimize, frozenset(self.without))


@dataclass(frozen=True)
class Translated:
    """A graph of ONNX nodes as emitted by the rules.

    Attributes:
        builder: The builder.
        graph: The graph.
        tensors: The weights by name.
        functional: The FX graph that it translates.
        inputs: The values of its placeholders.
        full: Writes full metadata, where the model has them.
        assertions: The messages of the graph's assertions about its data; their conditions are its last outputs.
    """

    builder: GraphBuilder
    graph: ir.Graph
    tensors: Any
    functional: FunctionalGraph
    inputs: Mapping[torch.fx.Node, Any]
    full: Any
    assertions: Sequence[str]


def interpret(conversion: Conversion, functional: FunctionalGraph, alignment: Alignment | None = None) -> Translated:
    """Applies the rule of each node of a functional graph.

    Raises:
        MissingRuleError: Operators have no rule; all are listed.
        ConversionError: A converter failed.
    """
    captured, host, target = conversion.captured, conversion.host, conversion.target
    domains = list(host.domains())
    symbols = SymbolNames(captured.dim_names)
    builder = GraphBuilder(
        target.opsets,
        optimize=conversion.optimize,
        runtime=target.runtime,
        exact=target.exact,
        kernels=_kernels_of(host, target.runtime),
        domains={d.name: d.version for d in domains},
        schemas={d.name: d.schemas for d in domains},
        expressions=symbols.expressions,
        operators=host.operators(),
        events=events().details,
    )
    bound = conversion.registry.bind(target)
    metadata = conversion.metadata
    full = packages.load("metadata=full")(captured.program, functional) if metadata.is_full else None
    level = Metadata("full", metadata.absolute_paths) if conversion.describes_all else metadata
    asserted: list[tuple[ir.Value, str]] = []
    interpreter = DynamoInterpreter(
        builder,
        bound,
        symbols,
        decompositions=host.decompositions(),
        missing=host.missing,
        explain_missing=host.explain_missing,
        describer=Describer(level, full.line if full is not None else None),
        applied=alignment.rules if alignment is not None else None,
        module_calls=conversion.calls,
        assertions=asserted if conversion.checks else None,
        refusals=host.refusals(),
    )
    values, inputs, state = bind_inputs(builder, symbols, functional.inputs)
    with stage("interpretation", "convert"):
        env = interpreter.run(functional.graph, values)
    host.warn_of_unused_rules(conversion.registry, bound.operators())
    outputs = bind_outputs(builder, env, functional.outputs)
    # They are outputs until the rewrites are done, so that they don't count as dead.
    outputs += [(builder.names.unique("assertion"), condition) for condition, _ in asserted]
    with span("assembly"):
        graph, tensors = assemble(builder, inputs, outputs, state)
    if alignment is not None:
        alignment.record(graph, env)
    return Translated(builder, graph, tensors, functional, values, full, [message for _, message in asserted])


def rewrite(conversion: Conversion, translated: Translated, alignment: Alignment | None = None) -> Counter[str]:
    """Replaces patterns of nodes until none is left, in place; returns how often each rewrite fired.

    Raises:
        ConversionError: A rewrite failed.
    """
    host = conversion.host
    with stage("rewrites", "rewrite") as work:
        wanted = [item for item in host.rewrites() if item.name not in conversion.without]
        fired = run_rewrites(translated.builder, translated.graph, wanted, packages_of_rewrites(host))
        work.about["replacements"] = fired.total()
        work.result = fired
    if alignment is not None:
        alignment.fired = fired
    return fired


def finish(conversion: Conversion, translated: Translated) -> ir.Model:
    """Makes the model of a graph: checks of sizes, names, opset imports, metadata."""
    captured, target, metadata = conversion.captured, conversion.target, conversion.metadata
    builder, graph, functional = translated.builder, translated.graph, translated.functional
    facts = {
        "onnxplug.torch_version": torch.__version__,
        TARGET: f"{target.runtime or 'portable'}{', exact' if target.exact else ''}",
        **ranges.metadata(captured),
    }
    if conversion.checks:
        packages.load("checks=")(graph, builder, captured, functional.inputs, translated.assertions)
    with stage("finish", "finish") as work:
        model = finish_model(builder, graph, translated.tensors, metadata=None if metadata.is_none else facts)
        writer = translated.full
        values = writer.write(builder, graph, translated.inputs) if writer is not None else None
        full = True if conversion.describes_all else metadata.nodes
        describe(model, builder.provenance.of, full=full, values=values)
        work.result = model
    model.meta[_MADE_BY] = builder.provenance.packages
    model.meta[TARGET] = facts[TARGET]
    return model


# -- the whole pipeline ------------------------------------------------------------------------------------------------


def run(model: Any, args: Any, f: Any, options: ExportOptions) -> OnnxProgram:
    """Exports a model: the stages one after the other."""
    with autocast_inside(model) as under:
        return _run(under, args, f, options)


def _run(model: Any, args: Any, f: Any, options: ExportOptions) -> OnnxProgram:
    plan_of_export = plan(model, args, f, options)
    convert_precision = _precision(options)
    now = events()
    now.add(plan_of_export.host.observers(options))
    with stage("capture", "capture", subject=plan_of_export) as work:
        captured = work.result = capture(plan_of_export)
    with stage("conversion", "convert", subject=plan_of_export) as work:
        program = work.result = convert(plan_of_export, captured, describes_all=now.describes)
    if now.describes:
        forget(program.model, full=plan_of_export.metadata.nodes)
    program.observers = [observer for observer in now.observers if observer.stays]
    if convert_precision is not None:
        with stage("precision", "convert", subject=program) as work:
            work.result = convert_precision(program, plan_of_export.host.kernels(plan_of_export.target.runtime))
    if options.verify:
        program.verify()
    if f is not None:
        program.save(f, external_data=options.external_data)
    return program


def _precision(options: ExportOptions) -> Callable[[OnnxProgram, Mapping[str, str] | None], Any] | None:
    """The function that converts a program to half precision or quantises it, if requested.

    Raises:
        UsageError: The request is unknown.
        MissingPackageError: The package for it is not installed.
    """
    name = next((name for name in ("dtype", "quantize") if getattr(options, name) is not None), None)
    if name is None:
        if options.calibrate is not None:
            raise UsageError("calibrate= is data for quantize= or dtype=, of which neither is given")
        return None
    convert_precision: Callable[[OnnxProgram, Mapping[str, str] | None], Any] = packages.load(f"{name}=")(options)
    return convert_precision


def observers_of(options: ExportOptions) -> list[Observer]:
    """The observers that the options of a call ask for.

    Raises:
        UsageError: An option that makes one is malformed.
        MissingPackageError: The package that serves an option is not installed.
        SaveError: An observer's file can't be written.
    """
    requested = {"report": options.report, "profile": options.profile}
    observers = [packages.load(f"{name}=")(value) for name, value in requested.items() if value is not False]
    return [*(observer for observer in observers if observer is not None), *options.observers]


@contextmanager
def export(
    options: ExportOptions, subject: tuple[Mapping[str, Any], Callable[..., Any]] | None = None
) -> Iterator[Span]:
    """A call of ``to_onnx`` and its observers, as long as the context lasts; its span receives the result of the call.

    Args:
        options: The options of the call.
        subject: The arguments of the call and the function that was called.
    """
    logs.configure()
    with (
        observed(*observers_of(options)),
        showing(options.progress) as shown,
        observed(*([StageNames(shown)] if shown is not None else [])),
        full_float32,
        stage("export", subject=subject) as whole,
    ):
        yield whole


def convert(plan: Plan, captured: Captured, *, describes_all: bool) -> OnnxProgram:
    """Converts a captured model.

    Args:
        plan: The call.
        captured: The capture.
        describes_all: Whether the nodes get full metadata, whatever the level is.

    Raises:
        MissingRuleError: Operators have no rule, and torch can't decompose them either.
        ConversionError: A converter or a rewrite failed.
    """
    functions, target = plan.functions, plan.target
    calls = functions.calls(captured.program, plan.model) if functions is not None else None
    started = time.perf_counter()
    with collection_held(), unset_fake_temporarily():
        conversion = Conversion(
            captured,
            plan.registry,
            plan.host,
            target,
            optimize=plan.options.optimize,
            calls=calls.of if calls is not None else None,
            checks=plan.options.checks,
            metadata=plan.metadata,
            describes_all=describes_all,
        )
        model, functional, conversion, decomposed = _converted(plan, conversion)
        outlined: dict[str, int] = {}
        if functions is not None and calls is not None:
            with stage("functions", "finish") as work:
                version = target.opsets.get(functions.domain, 1)
                full = True if describes_all else plan.metadata.nodes
                outlined = packages.load("functions=")(model, calls, functions, version, full=full)
                work.about["functions"] = len(outlined)
    seconds = time.perf_counter() - started
    plan.checks.converted(model)
    captured = conversion.captured
    operators = Counter(n.op_type for n in nodes_of(model.graph))
    return OnnxProgram(
        model,
        captured.program,
        inputs=functional.inputs,
        outputs=functional.outputs,
        captured=captured,
        statistics=ExportStatistics(
            capture_seconds=captured.seconds,
            conversion_seconds=seconds,
            fx_nodes=len(functional.graph.nodes),
            onnx_nodes=operators.total(),
            operators=dict(operators.most_common()),
            opset=target.opset,
            repeated=captured.repeated,
            strategy=captured.strategy,
            decomposed=decomposed,
            functions=outlined,
            packages=_packages(model, operators.total()),
        ),
        host=plan.runners,
        recipe=conversion.recipe(functional),
    )


def _converted(plan: Plan, conversion: Conversion) -> tuple[ir.Model, FunctionalGraph, Conversion, Sequence[str]]:
    """Functionalizes and converts; as long as operators have no translation, torch decomposes the program, and both begin again.

    Returns:
        The model, its functional graph, the conversion, and the operators because of which torch decomposed the program.

    Raises:
        OnnxplugError: The error of the first attempt, where no decomposition helps.
    """
    table = checked_table(plan.options.decompositions)
    resort = LastResort(conversion.captured, registry=plan.registry, table=table)
    recipe = None
    while True:
        conversion = replace(conversion, captured=resort.captured)
        try:
            functional = functionalize(plan, conversion.captured)
            recipe = conversion.recipe(functional)
            return conversion.model(functional), functional, conversion, resort.reasons
        except OnnxplugError as error:
            if recipe is not None:
                error.export = (conversion.captured, recipe, plan.runners)
            resort.decompose_again(error)


def _packages(model: ir.Model, nodes: int) -> dict[str, int]:
    """Distribution to the number of nodes that its rules emitted; the remaining nodes are onnxplug's own."""
    made_by: Mapping[ir.Node, str] = model.meta.get(_MADE_BY) or {}
    packages = Counter(made_by[n] for n in nodes_of(model.graph) if n in made_by) if made_by else Counter[str]()
    packages[PROJECT_NAME] = nodes - packages.total()
    return dict(packages.most_common())


def packages_of_rewrites(host: PluginHost) -> dict[str, str]:
    """Rewrite to its distribution, as far as the host knows it."""
    return dict(getattr(host, "sources_of_rewrites", dict)())


def _kernels_of(host: PluginHost, runtime: str | None) -> Kernels | None:
    table = host.kernels(runtime)
    return Kernels(table) if table is not None else None

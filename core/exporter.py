"""``to_onnx``: from a PyTorch model to an :class:`~onnxplug.program.OnnxProgram`."""

from __future__ import annotations

import inspect
import logging
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never, TypedDict, Unpack, overload

import onnx_ir as ir
import torch

from onnxplug import arguments, logs
from onnxplug.build.assemble import assemble
from onnxplug.build.builder import GraphBuilder
from onnxplug.build.collection import collect_if_due, collection_held
from onnxplug.build.kernels import Kernels, lacking
from onnxplug.build.module_calls import ModuleCalls
from onnxplug.build.observed import ObservedBuilder
from onnxplug.build.quantized import QUANTIZED_PREFIX
from onnxplug.build.scope import nodes_of
from onnxplug.capture.capture import capture as capture_model
from onnxplug.capture.signature import Captured, FunctionalGraph
from onnxplug.diagnosis.alignment import Alignment, Recipe
from onnxplug.errors import OnnxplugError, UsageError
from onnxplug.finish.describe import describe, forget
from onnxplug.finish.finish import finish
from onnxplug.finish.outline.outline import outline
from onnxplug.finish.outline.wanted import Functions
from onnxplug.functionalize.prepare import prepare
from onnxplug.host import PluginHost
from onnxplug.interpret import size_checks
from onnxplug.interpret.bindings import bind_inputs, bind_outputs
from onnxplug.interpret.interpreter import DynamoInterpreter
from onnxplug.interpret.io_metadata import graph_metadata, value_metadata
from onnxplug.interpret.last_resort import LastResort, checked_table
from onnxplug.interpret.observed import LOGGER, ObservedInterpreter
from onnxplug.interpret.provenance import Describer
from onnxplug.interpret.symbols import SymbolNames
from onnxplug.kinds import check_flags, check_kind, check_lists, check_mappings
from onnxplug.metadata import Metadata
from onnxplug.opsets import resolve_opsets
from onnxplug.plugin_api import PROJECT_NAME
from onnxplug.profiling.recorder import active, span
from onnxplug.profiling.watch import watched
from onnxplug.program import ExportStatistics, OnnxProgram
from onnxplug.registry.registry import OnnxRegistry
from onnxplug.registry.rule import Rule, load_object
from onnxplug.registry.target import DEFAULT_RUNTIME, Target, check_runtime
from onnxplug.report.active import reported
from onnxplug.rewrite.driver import run_rewrites
from onnxplug.run.kernels import CallHost
from onnxplug.run.session import TARGET
from onnxplug.torch_private import unset_fake_temporarily

if TYPE_CHECKING:
    from onnxplug.pieces.pieces import OnnxPieces

Progress = Callable[[str], None]
#: A registry, and the plugin manager that it comes from.
Selected = tuple[OnnxRegistry, PluginHost]

#: core knows the plugin host by this name alone; everything that plugins supply, the builtin rules too, comes from it.
_PLUGIN_HOST = "onnxplug.plugins.manager:registry_for"
#: The key of a model's ``meta`` that holds which nodes were made by rules of other packages.
_MADE_BY = "onnxplug.made_by"
#: It calls `to_onnx` for each piece.
_PIECES = "onnxplug.pieces.pieces:export_pieces"


class ExportOptions(TypedDict, total=False):
    """The keyword arguments of :func:`to_onnx` but ``pieces``, for type checkers."""

    kwargs: Mapping[str, Any] | None
    examples: Sequence[Any] | None
    dynamic_shapes: Any
    input_names: Sequence[str] | None
    output_names: Sequence[str] | None
    present_names: bool
    opset_version: int | Mapping[str, int] | None
    rules: Iterable[Rule]
    runtime: Iterable[Any]
    plugins: Sequence[str] | None
    prefer: Mapping[str, str] | None
    custom_translation_table: Mapping[Any, Any] | None
    target: str | None
    exact: bool
    optimize: bool
    functions: Functions | Iterable[type[Any] | str] | bool | None
    verify: bool
    report: bool | str | os.PathLike[str]
    profile: bool | str | os.PathLike[str]
    strict: bool | None
    capture: str
    mutations: str
    checks: bool
    metadata: str | Metadata | None
    external_data: bool | None
    decompositions: Mapping[Any, Callable[..., Any]] | str | None
    progress: Progress | bool | None
    registry: Selected | Callable[[Sequence[Rule]], Selected] | None


@overload
def to_onnx(
    model: Any,
    args: Any = (),
    f: str | os.PathLike[str] | None = None,
    *,
    pieces: None = None,
    **options: Unpack[ExportOptions],
) -> OnnxProgram: ...


@overload
def to_onnx(
    model: Any,
    args: Any = (),
    f: str | os.PathLike[str] | None = None,
    *,
    pieces: Sequence[str],
    **options: Unpack[ExportOptions],
) -> OnnxPieces: ...


def to_onnx(
    model: Any,
    args: Any = (),
    f: str | os.PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    examples: Sequence[Any] | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    present_names: bool = False,
    opset_version: int | Mapping[str, int] | None = None,
    rules: Iterable[Rule] = (),
    runtime: Iterable[Any] = (),
    plugins: Sequence[str] | None = None,
    prefer: Mapping[str, str] | None = None,
    custom_translation_table: Mapping[Any, Any] | None = None,
    target: str | None = DEFAULT_RUNTIME,
    exact: bool = False,
    optimize: bool = True,
    functions: Functions | Iterable[type[Any] | str] | bool | None = None,
    verify: bool = False,
    report: bool | str | os.PathLike[str] = False,
    profile: bool | str | os.PathLike[str] = False,
    strict: bool | None = None,
    capture: str = "calls",
    mutations: str = "outputs",
    checks: bool = False,
    metadata: str | Metadata | None = None,
    external_data: bool | None = None,
    decompositions: Mapping[Any, Callable[..., Any]] | str | None = None,
    pieces: Sequence[str] | None = None,
    progress: Progress | bool | None = None,
    registry: Selected | Callable[[Sequence[Rule]], Selected] | None = None,
    **unknown: Never,
) -> OnnxProgram | OnnxPieces:
    """Exports a PyTorch model to ONNX.

    Args:
        model: A Module, a function, an ``ExportedProgram``, a ``GraphModule``, a ScriptModule or a ScriptFunction.
        args: Example positional inputs; a dict at the end holds keyword inputs, as in ``torch.onnx.export``.
        f: File to save to; not saved when ``None``.
        kwargs: Example keyword inputs.
        examples: Inputs of several calls, each as ``args`` takes them or a dict of keyword inputs: sizes and ints that differ
            among them are dynamic, all others static, and verification runs on them too. ``args`` and ``kwargs`` count as
            the first one where they are given.
        dynamic_shapes: Dynamic dimensions, in every form that ``torch.export.export`` takes; a dimension may also be
            named by a string (``{"x": {0: "batch"}}``), and an int that is to stay an input too (``{"start": "past"}``). The keys
            are names of the model's arguments, or those of ``input_names``.
        input_names, output_names: Names of the graph's inputs and outputs, in order: one for each, or one for each argument or
            result, whose parts are called ``past_0_key`` and so on. Fewer are an error, but for results that are no nested ones.
        present_names: Call an output that is the new value of an input after it: that of ``past_key_values.0.key`` is
            ``present.0.key``, that of ``state`` is ``present_state``. It is one that the model returns under the input's name,
            or an input that the model writes.
        opset_version: Version of ai.onnx, or of several domains (``{"": 21, "com.microsoft": 1}``). The opset asked for
            is the opset emitted.
        rules: Rules of this export alone; they go before every plugin's and the builtin ones.
        runtime: ``OrtLibrary`` and ``ReferenceOp`` objects that run this export's custom operators; they go before the
            plugins'.
        plugins: Names of the plugins to use; ``None`` means all that are installed, ``[]`` the builtin rules alone.
        prefer: Qualified operator name to the distribution whose rule wins where two claim it.
        custom_translation_table: Operator to function (or several, tried in order), as ``torch.onnx.export`` takes it:
            onnxscript functions, plain ones over an onnxscript opset, or converters ``(g, node)``. Each becomes a rule.
        target: The runtime that the model is made for: ``"onnxruntime"``, or one part of it, ``"onnxruntime:cpu"`` (what
            its CPU kernels lack for a dtype is computed in float32), or a name that a plugin knows. ``None`` gives portable
            ONNX, without the forms that are there for one runtime's kernels alone.
        exact: NaN, infinities, ties and integers beyond 2**53 as in PyTorch also where that takes more than the plain ONNX
            operator; docs/numerics.md lists what differs without it, and both costs.
        optimize: Fold, share and rewrite; ``False`` gives the plain translation.
        functions: ``True``: modules that the model repeats become ONNX functions, called with their weights; classes of modules, or
            their names: these do. ``Functions(classes, domain)`` also says in which domain.
        verify: Compare the result with eager PyTorch, on these inputs and on others.
        report: Collect what was done: ``program.report``, or ``error.report`` of an export that fails. The path of a folder: it is
            written there too, as Markdown, HTML, SARIF and JSON; docs/reports.md says what it has.
        profile: Record where the time goes: ``program.profile``, or ``error.profile`` of an export that fails. The name of a file:
            it is written there too, for Perfetto and speedscope; docs/profiling.md says how to read it.
        strict: ``torch.export``'s mode; ``None`` tries the non-strict one first.
        capture: ``"calls"`` traces one of the operator calls that are equal in kind, and repeats its nodes for the others;
            ``"whole"`` traces each. The program is the same.
        mutations: ``"outputs"``: the new values of buffers and inputs that the model writes are outputs, ``NAME_out``, after
            its results. ``"ignore"`` leaves them away, as ``torch.onnx.export`` does.
        checks: Put what is known of the sizes into the graph too: ranges, equal names, expressions, and the conditions on sizes
            that the model's code branches on. The model fails at run time where one does not hold, and the message says which.
        metadata: What the model says of where it comes from: ``"none"``, ``"short"`` (modules, operators and source lines), or
            ``"full"`` (all that ``torch.onnx.export`` writes, and the rules); ``Metadata("full", absolute_paths=True)`` names
            files by their whole paths. ``None``: what the environment variable ``ONNXPLUG_METADATA`` says, else ``"short"``.
        external_data: Save weights beside the model; ``None`` decides by size.
        decompositions: Operators that torch decomposes in the captured program before it is converted: a table from overloads to
            functions, as ``ExportedProgram.run_decompositions`` takes it, or ``"core"`` for torch's own table of everything
            outside of Core ATen. ``None`` decomposes the program only where nothing else translates it.
        pieces: Paths of submodules: each becomes a model of its own, with the inputs that it gets when the model runs; ``f`` is
            then a folder, which also gets the program that chains them.
        progress: ``True`` shows the stage at work and its seconds on standard error, if that is a terminal. A function is called
            with the name of each stage as it begins.
        registry: A registry and the plugin manager that it comes from, instead of what ``plugins`` and ``prefer`` select; or a
            function that makes them with the rules of the call.
        unknown: Takes no argument: a name that isn't one of these is refused with the one that is meant.

    Returns:
        The exported program; it runs, saves and verifies itself. With ``pieces`` the programs and their chain, which does so too.

    Raises:
        UsageError: An argument is malformed, or nothing knows the target.
        OpsetError: The opset is unknown.
        OnnxplugError: ``verify=True``, and ONNX Runtime is missing or too old for the opset.
        CaptureError: torch.export can't capture the model, or a dynamic dimension came out static.
        MissingRuleError: Operators have no rule; all are listed.
        ConversionError: A converter failed, or returned something else than torch computes.
        VerificationError: ``verify=True`` and the results differ, or the model does not run.
        SaveError: ``f`` can't be written.
    """
    given = dict(locals()) if report is not False else {}
    arguments.refuse_unknown(unknown, inspect.signature(to_onnx).parameters)
    check_flags(present_names=present_names, exact=exact, optimize=optimize, verify=verify, checks=checks)
    check_kind("report", report, (bool, str, os.PathLike), "True, False or a folder")
    for name, value in (("strict", strict), ("external_data", external_data)):
        check_kind(name, value, (bool, type(None)), "True, False or None")
    check_mappings(kwargs=kwargs, prefer=prefer, custom_translation_table=custom_translation_table)
    check_lists(plugins=() if plugins is None else plugins)
    if pieces is not None:
        if input_names or output_names or examples is not None:
            raise UsageError(
                "input_names=, output_names= and examples= can't be given together with pieces=",
                hint="A piece's inputs and outputs have the names that it gives them; dynamic_shapes= names dynamic dimensions.",
            )
        args, kwargs = arguments.positional_and_named(model, args, kwargs)
        with reported(report), watched(profile, None) as watch:
            chain: OnnxPieces = load_object(_PIECES, "the exporter of pieces")(
                model,
                args,
                kwargs,
                pieces,
                folder=f,
                dynamic_shapes=dynamic_shapes,
                verify=verify,
                external_data=external_data,
                export=to_onnx,
                options={
                    "opset_version": opset_version,
                    "rules": tuple(rules),
                    "runtime": tuple(runtime),
                    "plugins": plugins,
                    "prefer": prefer,
                    "custom_translation_table": custom_translation_table,
                    "target": target,
                    "exact": exact,
                    "optimize": optimize,
                    "functions": functions,
                    "report": report is not False,
                    "present_names": present_names,
                    "mutations": mutations,
                    "checks": checks,
                    "metadata": metadata,
                    "strict": strict,
                    "capture": capture,
                    "decompositions": decompositions,
                    "progress": progress,
                    "registry": registry,
                },
            )
            chain.profile = watch.profile
        return chain
    with reported(report, given, to_onnx) as told, watched(profile, progress) as stage:
        opsets = resolve_opsets(opset_version)
        repeats = arguments.repeats_calls(capture)
        wanted = arguments.functions_asked(functions, model)
        keep_mutations = arguments.keeps_mutations(mutations)
        said = Metadata.asked(metadata)
        items = tuple(CallHost.checked(runtime))
        call_rules = arguments.rules_of_call(rules, custom_translation_table)
        decomposition_table = checked_table(decompositions)
        args, kwargs, further = arguments.with_examples(model, args, kwargs, examples)
        arguments.check_inputs((args, kwargs))
        arguments.check_names(input_names, output_names, (args, kwargs) if args or kwargs else None)
        arguments.check_destination(f)
        if verify:
            arguments.check_verifiable(opsets[""])
        table, host = _selected(registry, plugins=plugins, call_rules=call_rules, prefer=prefer)
        if told is not None:
            told.selected(host)
        runtime_name = check_runtime(target, table.targets() | host.targets())
        domains = arguments.unknown_domains(opsets, table, host, items, {wanted.domain} if wanted is not None else ())
        call_patches = [patch for rule in call_rules for patch in rule.patches()]
        if call_patches and strict:
            raise UsageError(
                "rules for autograd functions need torch.export's non-strict mode, but strict=True is given"
            )
        stage("capture")
        collect_if_due()
        captured = capture_model(
            model,
            args,
            kwargs,
            dynamic_shapes=dynamic_shapes,
            input_names=input_names,
            strict=False if call_patches else strict,
            repeats=repeats,
            examples=further,
            make_module=host.module_maker(model),
            patches=[*host.patches(), *call_patches] if not isinstance(model, torch.export.ExportedProgram) else (),
            quantised=not exact and not table.has_own_rules(QUANTIZED_PREFIX),
        )
        if told is not None:
            told.captured(captured)
        arguments.check_operators(call_rules, late=True)
        calls = arguments.module_calls(wanted, captured.program, model) if wanted is not None else None
        stage("conversion")
        started = time.perf_counter()
        runners = CallHost(host, items) if items else host
        with collection_held(), unset_fake_temporarily():
            chosen = Target(opsets[""], opsets, runtime_name, bool(exact))
            recipe = None
            resort = LastResort(captured, registry=table, table=decomposition_table)
            while True:
                captured = resort.captured
                try:
                    with logs.stage("functionalization", logs.logger("functionalize")) as about:
                        functional = prepare(
                            captured,
                            input_names=input_names,
                            output_names=output_names,
                            mutations=keep_mutations,
                            present_names=present_names,
                        )
                        about["writes"] = functional.strategy
                    recipe = recipe_of(captured, functional, table, host, chosen, optimize=optimize, said=said)
                    converted = convert(
                        captured,
                        functional,
                        table,
                        host,
                        chosen,
                        optimize=optimize,
                        calls=calls,
                        checks=checks,
                        said=said,
                        describes_all=told is not None,
                    )
                    break
                except OnnxplugError as error:
                    if recipe is not None:
                        error.export = (captured, recipe, runners)
                    resort.further(error)
            made: dict[str, int] = {}
            if wanted is not None and calls is not None:
                with logs.stage("functions", logs.logger("finish")) as about:
                    made = outline(
                        converted,
                        calls,
                        wanted,
                        opsets.get(wanted.domain, 1),
                        full=said.nodes if told is None else True,
                    )
                    about["functions"] = len(made)
        seconds = time.perf_counter() - started
        arguments.check_domains_used(converted, domains)
        _warn_of_bfloat16(converted, host, chosen)
        operators = Counter(n.op_type for n in nodes_of(converted.graph))
        made_by = converted.meta.get(_MADE_BY) or {}
        packages = Counter(made_by[n] for n in nodes_of(converted.graph) if n in made_by) if made_by else Counter()
        packages[PROJECT_NAME] = operators.total() - packages.total()
        program = OnnxProgram(
            converted,
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
                opset=opsets[""],
                repeated=captured.repeated,
                strategy=captured.strategy,
                decomposed=resort.reasons,
                functions=made,
                packages=dict(packages.most_common()),
            ),
            host=runners,
            recipe=recipe,
        )
        program.profile = stage.profile
        if told is not None:
            told.exported(program, _packages_of_rewrites(host))
            forget(converted, full=said.nodes)
        if verify:
            stage("verification")
            program.verify()
        if f is not None:
            stage("saving")
            program.save(f, external_data=external_data)
        return program


def _packages_of_rewrites(host: PluginHost) -> dict[str, str]:
    """Rewrite to the distribution that it is of, as far as the host knows it."""
    return dict(getattr(host, "sources_of_rewrites", dict)())


def _selected(
    registry: Selected | Callable[[Sequence[Rule]], Selected] | None,
    *,
    plugins: Sequence[str] | None,
    call_rules: Sequence[Rule],
    prefer: Mapping[str, str] | None,
) -> Selected:
    if registry is None:
        with logs.stage("plugins", logs.logger("plugins")):
            return plugins_of_call(plugins=plugins, call_rules=call_rules, prefer=prefer)
    if plugins is not None or prefer or (call_rules and not callable(registry)):
        raise UsageError("registry= can't be given together with rules=, plugins= or prefer=, which it replaces")
    if callable(registry):
        return registry(call_rules)
    if not (isinstance(registry, tuple) and len(registry) == 2 and isinstance(registry[0], OnnxRegistry)):
        raise UsageError(f"registry= takes a registry with its plugin manager, or a function, got {registry!r}")
    return registry


def plugins_of_call(
    *, plugins: Sequence[str] | None, call_rules: Sequence[Rule], prefer: Mapping[str, str] | None
) -> Selected:
    """The registry and the plugin manager that the arguments of a call select."""
    selected: Selected = load_object(_PLUGIN_HOST, "the plugin manager")(
        plugins=plugins, call_rules=call_rules, prefer=prefer
    )
    return selected


def convert(
    captured: Captured,
    functional: FunctionalGraph,
    registry: OnnxRegistry,
    host: PluginHost,
    target: Target,
    *,
    optimize: bool = True,
    without: Collection[str] = (),
    alignment: Alignment | None = None,
    calls: ModuleCalls | None = None,
    checks: bool = False,
    said: Metadata | None = None,
    describes_all: bool = False,
) -> ir.Model:
    """Converts a prepared graph: interpretation, simplification, rewrites (but those named in ``without``), names, metadata.

    ``alignment`` takes what FX nodes became, ``calls`` the calls of modules that nodes come from; ``said`` is what the model
    says of where it comes from. With ``describes_all`` its nodes say everything, whatever that is.
    """
    domains = list(host.domains())
    recorder = active()
    symbols = SymbolNames(captured.dim_names)
    builder = (GraphBuilder if recorder is None else ObservedBuilder)(
        target.opsets,
        optimize=optimize,
        runtime=target.runtime,
        exact=target.exact,
        kernels=_kernels_of(host, target.runtime),
        domains={d.name: d.version for d in domains},
        schemas={d.name: d.schemas for d in domains},
        expressions=symbols.expressions,
    )
    bound = registry.bind(target)
    said = said if said is not None else Metadata()
    describer = Describer(Metadata("full", said.absolute_paths) if describes_all else said)
    if said.is_full:
        describer.of_copy(functional.graph, captured.program.graph)
    asserted: list[tuple[ir.Value, str]] = []
    observed = recorder is not None or LOGGER.isEnabledFor(logging.DEBUG)
    interpreter = (ObservedInterpreter if observed else DynamoInterpreter)(
        builder,
        bound,
        symbols,
        decompositions=host.decompositions(),
        missing=host.missing,
        explain_missing=host.explain_missing,
        describer=describer,
        applied=alignment.rules if alignment is not None else None,
        module_calls=calls,
        assertions=asserted if checks else None,
    )
    values, inputs, state = bind_inputs(builder, symbols, functional.inputs)
    with logs.stage("interpretation", LOGGER):
        env = interpreter.run(functional.graph, values)
    arguments.warn_of_unused_rules(registry, bound.asked())
    outputs = bind_outputs(builder, env, functional.outputs)
    # Outputs until the rewrites are done, so that nothing takes them for dead.
    outputs += [(builder.names.unique("assertion"), condition) for condition, _ in asserted]
    with span("assembly"):
        graph, tensors = assemble(builder, inputs, outputs, state)
    if alignment is not None:
        alignment.record(graph, env)
    if optimize:
        with logs.stage("rewrites", logs.logger("rewrite")) as about:
            wanted = [rewrite for rewrite in host.rewrites() if rewrite.name not in without]
            fired = run_rewrites(builder, graph, wanted, _packages_of_rewrites(host))
            about["replacements"] = fired.total()
        if alignment is not None:
            alignment.fired = fired
    metadata = {
        "onnxplug.torch_version": torch.__version__,
        TARGET: f"{target.runtime or 'portable'}{', exact' if target.exact else ''}",
        **size_checks.metadata(captured),
    }
    if checks:
        size_checks.insert_assertions(graph, builder, [message for _, message in asserted])
        size_checks.insert_checks(graph, builder, captured, functional.inputs)
    with logs.stage("finish", logs.logger("finish")):
        model = finish(builder, graph, tensors, metadata=None if said.is_none else metadata)
        of_values = None
        if said.is_full:
            graph.metadata_props.update(graph_metadata(captured.program, describer))
            of_values = value_metadata(builder, graph, values, functional)
        describe(model, builder.provenance.of, full=True if describes_all else said.nodes, values=of_values)
    model.meta[_MADE_BY] = builder.provenance.packages
    model.meta[TARGET] = metadata[TARGET]
    return model


def recipe_of(
    captured: Captured,
    functional: FunctionalGraph,
    registry: OnnxRegistry,
    host: PluginHost,
    target: Target,
    *,
    optimize: bool = True,
    without: Collection[str] = (),
    said: Metadata | None = None,
) -> Recipe:
    """How a graph is converted again: the arguments are those of :func:`convert`."""

    def build(
        graph: FunctionalGraph, optimize: bool, without: Collection[str], alignment: Alignment | None
    ) -> ir.Model:
        with collection_held():
            return convert(
                captured,
                graph,
                registry,
                host,
                target,
                optimize=optimize,
                without=without,
                alignment=alignment,
                said=said,
            )

    return Recipe(functional, build, optimize, frozenset(without))


def _warn_of_bfloat16(model: ir.Model, host: PluginHost, target: Target) -> None:
    """Says which operators keep ONNX Runtime from loading a model of bfloat16 on the CPU, and which target does not have them."""
    kernels = _kernels_of(host, "onnxruntime:cpu") if target.runtime == "onnxruntime" else None
    found = lacking(kernels, model.graph, target.opset, ir.DataType.BFLOAT16) if kernels is not None else []
    if found:
        warnings.warn(
            f"ONNX Runtime's CPU provider can't load this model: it has no kernel for bfloat16 of {', '.join(found)}. "
            'target="onnxruntime:cpu" has them computed in float32.',
            stacklevel=3,
        )


def _kernels_of(host: PluginHost, runtime: str | None) -> Kernels | None:
    table = host.kernels(runtime)
    return Kernels(table) if table is not None else None

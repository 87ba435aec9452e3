"""PluginManager: finds plugins among installed distributions, loads each by itself, and collects the results of their hooks."""

from __future__ import annotations

import functools
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy
from packaging.requirements import Requirement

from onnxplug import logs
from onnxplug.errors import PluginError
from onnxplug.host import CustomOperators, Kernels
from onnxplug.observers import Observer, step
from onnxplug.plugin_api import API_VERSION, ENTRY_POINT_GROUP, PROJECT_NAME, Evaluator, OnnxOperator, Verifier
from onnxplug.plugins import hookspecs
from onnxplug.plugins.api import ModelSource, PluginInfo, TargetInfo
from onnxplug.plugins.call import CallChecks, warn_of_unused_rules
from onnxplug.plugins.explain import explain_domain, explain_missing
from onnxplug.plugins.later import decomposers, function_of, hook_result, merged
from onnxplug.plugins.loading import (
    CHECKS,
    LATE_HOOKS,
    LIST_HOOKS,
    LoadedPlugin,
    check_rules,
    load_plugin,
    made_observer,
    unmet,
)
from onnxplug.plugins.patches import PluginPatch
from onnxplug.plugins.records import PluginRecord, Selection, check_selection, distribution_of
from onnxplug.plugins.runtime import CallHost, PluginRuntime, kernels_for
from onnxplug.plugins.stamps import stamp_of
from onnxplug.plugins.timeout import TimedThread, timeout
from onnxplug.registry.registry import OnnxRegistry
from onnxplug.registry.rule import Rule, object_of
from onnxplug.registry.target import checked_names, closeness
from onnxplug.text import type_with_article
from onnxplug.verification.ready import check_verifiable
from onnxplug.warn import warn

#: Hooks of the builtin plugin that import the converters.
_TABLES = ("onnxplug_rules", "onnxplug_decompositions")

_LOGGER = logs.logger("plugins")


class PluginWarning(UserWarning):
    """A plugin was refused; everything else goes on."""


class PluginManager:
    """The plugins of one selection.

    Args:
        selection: Which plugins to use.
        points: Entry points; the installed distributions' when ``None``.

    Raises:
        PluginError: A name is not installed, or a required plugin is missing, too old or broken.
    """

    def __init__(self, selection: Selection, points: Iterable[EntryPoint] | None = None) -> None:
        self.selection = selection
        rows = [(p, *distribution_of(p)) for p in (points if points is not None else _discover())]
        rows.sort(key=lambda row: (row[1] != PROJECT_NAME, row[1], row[0].name))
        self._points = [point for point, _, _ in rows]
        self._records = [PluginRecord(p.name, name, version, p.value) for p, name, version in rows]
        self._host = pluggy.PluginManager(PROJECT_NAME)
        self._host.add_hookspecs(hookspecs)
        self._sources: dict[int, PluginRecord] = {}
        self._results: dict[str, list[tuple[PluginRecord, Any]]] = {}
        self._builtin: list[tuple[PluginRecord, Any]] = []
        self._rule_patches: list[Any] | None = None
        self._operators: dict[tuple[str, str], OnnxOperator] | None = None
        self._stamps: tuple[str, ...] | None = None
        self._lock = threading.RLock()
        self._loaded = False
        check_selection(selection, self._records)

    # -- choosing and loading ------------------------------------------------------------------------------------------

    def _wanted(self, record: PluginRecord) -> bool:
        names = {record.name, record.distribution}
        if names & set(self.selection.without):
            return False
        return record.is_builtin or self.selection.only is None or bool(names & set(self.selection.only))

    def load(self, *, seconds: float | None = None, commands: bool = False) -> None:
        """Imports the selected plugins, each by itself; a broken plugin is refused whole and kept as a failure.

        Args:
            seconds: How long each may take; a plugin that hangs is named on standard error, and then given up. The default is
                ``ONNXPLUG_PLUGIN_TIMEOUT``.
            commands: Import them only for their commands: no other hook is called, and the builtin plugin is not loaded.

        Raises:
            PluginError: A required plugin is broken; with ``strict``, any.
        """
        logs.configure()
        with self._lock:
            if not self._loaded:
                timed = TimedThread(timeout() if seconds is None else seconds)
                self._loaded = True
                try:
                    self._load_all(timed, commands)
                except BaseException:  # an interrupt, or a warning as an error: the next call loads them all
                    self._unload()
                    raise
                finally:
                    timed.close()
            self._check_broken()

    def _load_all(self, timed: TimedThread, commands: bool) -> None:
        later = LIST_HOOKS if commands else ()
        seen: dict[int, str] = {}
        for point, record in zip(self._points, self._records, strict=True):
            if not self._wanted(record) or (commands and record.is_builtin):
                record.status = "blocked"
                _LOGGER.debug("%s: left out", record.label)
                continue
            step(record.name)
            self._load_one(point, record, seen, None if record.is_builtin else timed, later)

    def _unload(self) -> None:
        self._loaded = False
        self._results, self._builtin = {}, []
        for plugin in self._host.get_plugins():
            self._host.unregister(plugin)
        self._records = [PluginRecord(r.name, r.distribution, r.version, r.value) for r in self._records]

    def _check_broken(self) -> None:
        for broken in self._records:
            if broken.status != "failed":
                continue
            for text in self.selection.require:
                if Requirement(text).name in (broken.name, broken.distribution):
                    raise PluginError(f"the required plugin {text} is broken:\n{broken.error}")
            if self.selection.strict:
                raise PluginError(
                    f"the plugin {broken.name} of {broken.distribution} {broken.version} is broken:\n{broken.error}",
                    hint="Without --strict-plugins it is left out with a warning; --no-plugin leaves it out silently.",
                )

    def _load_one(
        self,
        point: EntryPoint,
        record: PluginRecord,
        seen: dict[int, str],
        timed: TimedThread | None,
        later: Collection[str],
    ) -> None:
        started, record.loaded = time.perf_counter(), time.time()
        plugin: Any = None
        try:
            if timed is None:
                loaded = load_plugin(point, seen, later={*later, *_TABLES} if record.is_builtin else later)
            else:
                loading = functools.partial(load_plugin, point, dict(seen), later)
                loaded = timed.call(loading, f"the plugin {record.label}")
            plugin = loaded.plugin
            if id(plugin) in seen:
                record.status, record.error = "blocked", f"the same module as {seen[id(plugin)]}"
                return
            record.hooks = loaded.hooks
            if not LATE_HOOKS.isdisjoint(record.hooks):
                self._host.register(plugin, name=f"{record.distribution}:{record.name}")
                self._host.check_pending()
            self._accept(loaded, record)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin may even call sys.exit
            if plugin is not None and self._host.is_registered(plugin):
                self._host.unregister(plugin)
            for hook in self._results:
                self._results[hook] = [(r, v) for r, v in self._results[hook] if r is not record]
            record.status = "failed"
            record.error = "".join(traceback.format_exception(error)).strip()
            warn(
                f"the plugin {record.name} of {record.distribution} {record.version} is not used: "
                f"{type(error).__name__}: {error}",
                PluginWarning,
            )
        else:
            seen[id(plugin)] = f"{record.distribution}:{record.name}"
            record.status = "loaded"
            for problem in unmet(record.requires):
                warn(
                    f"the plugin {record.name} of {record.distribution} {record.version} is used and may fail: it asks for "
                    f"{problem}",
                    PluginWarning,
                )
        finally:
            record.seconds = time.perf_counter() - started
            _LOGGER.debug(
                "%s: %s, %.3f s, rules: %s%s",
                record.label,
                record.status,
                record.seconds,
                "not read yet" if record.rules is None else record.rules,
                f"; {record.error.splitlines()[-1]}" if record.error else "",
            )

    def _accept(self, loaded: LoadedPlugin, record: PluginRecord) -> None:
        """Checks the results of the plugin's hooks, and keeps them."""
        info = loaded.info
        if not isinstance(info, PluginInfo):
            raise PluginError(f"onnxplug_info returned {info!r}, not a PluginInfo")
        record.namespaces, record.requires = tuple(info.namespaces), tuple(info.requires)
        record.libraries, record.replaced = tuple(info.libraries), tuple(info.replaced)
        record.targets = tuple(t if isinstance(t, TargetInfo) else TargetInfo(t) for t in info.targets)
        checked_names("PluginInfo", [target.name for target in record.targets])
        if info.api != API_VERSION:
            raise PluginError(f"it is written for plugin API {info.api!r}; this onnxplug has {API_VERSION}")
        if record.is_builtin and "onnxplug_rules" in record.hooks:
            record.rules = None
            self._builtin.append((record, loaded.plugin))
        for hook, value in loaded.values.items():
            if hook == "onnxplug_decompositions":
                if not isinstance(value, Mapping):
                    raise PluginError(f"{hook} returned {type_with_article(value)}, not a mapping")
            elif not isinstance(value, list):
                raise PluginError(f"{hook} returned {value!r}, not an iterable")
            if hook == "onnxplug_rules":
                check_rules(value, record)
                # A rule stated twice in a distribution would make every registry with it impossible.
                others = [
                    rule
                    for r, rules in self._results.get(hook, ())
                    for rule in rules
                    if r.distribution == record.distribution
                ]
                OnnxRegistry((), [*others, *value])
            elif hook in CHECKS:
                CHECKS[hook](value)
            self._results.setdefault(hook, []).append((record, value))

    def _collect_builtin_tables(self) -> None:
        """Imports the builtin tables of rules and decompositions, once: discovery does without them."""
        with self._lock:
            self.load()
            while self._builtin:
                record, plugin = self._builtin.pop()
                rules = list(plugin.onnxplug_rules())
                check_rules(rules, record)
                self._results.setdefault("onnxplug_rules", []).append((record, rules))
                if "onnxplug_decompositions" in record.hooks:
                    decompositions = plugin.onnxplug_decompositions()
                    # First: later entries, of plugins, replace the builtin decompositions.
                    self._results.setdefault("onnxplug_decompositions", []).insert(0, (record, decompositions))

    # -- results of the hooks ------------------------------------------------------------------------------------------

    def records(self) -> list[PluginRecord]:
        """Every entry point of the group, loaded or not."""
        return list(self._records)

    def stamps(self) -> tuple[str, ...] | None:
        """The stamps of the plugins' code, which differ between any two states; ``None`` when a plugin's stamp is not known."""
        self._collect_builtin_tables()
        with self._lock:
            if self._stamps is None:
                stamps = []
                for point, record in zip(self._points, self._records, strict=True):
                    if record.status == "loaded":
                        stamp = stamp_of(point, record.loaded)
                        if stamp is None:
                            return None
                        stamps.append(f"{record.label} {record.value} {stamp}")
                self._stamps = tuple(stamps)
            return self._stamps

    def supplied(self, record: PluginRecord) -> dict[str, Any]:
        """The results of a plugin's hooks, by the hook's name."""
        self._collect_builtin_tables()
        return {hook: value for hook, results in self._results.items() for r, value in results if r is record}

    def _all(self, hook: str) -> list[Any]:
        self.load()
        return [item for _, value in self._results.get(hook, ()) for item in value]

    def rules(self) -> tuple[list[Rule], list[Rule]]:
        """The builtin rules and the rules of the plugins, as two lists."""
        self._collect_builtin_tables()
        builtin: list[Rule] = []
        plugin: list[Rule] = []
        for record, rules in self._results.get("onnxplug_rules", ()):
            (builtin if record.is_builtin else plugin).extend(rules)
        return builtin, plugin

    def domains(self) -> list[Any]:
        """Domains that plugins declare."""
        return self._all("onnxplug_domains")

    def operators(self) -> Mapping[tuple[str, str], OnnxOperator]:
        """The records of ONNX operators by domain and name; a plugin's goes before onnxplug's own."""
        if self._operators is None:
            self._operators = {(item.domain, item.name): item for item in self._all("onnxplug_operators")}
        return self._operators

    def rewrites(self) -> list[Any]:
        """Rewrites, the builtin rewrites first."""
        return self._all("onnxplug_rewrites")

    def sources_of_rewrites(self) -> dict[str, str]:
        """Name of each rewrite to its distribution."""
        self.load()
        rows = self._results.get("onnxplug_rewrites", ())
        return {getattr(item, "name", ""): record.distribution for record, items in rows for item in items}

    def targets(self) -> set[str]:
        """Names of the runtimes that plugins know: the runtimes that they declare, and the targets of their rewrites."""
        declared = {target.name for target in self._declared_targets()}
        return declared | {name for rewrite in self.rewrites() for name in getattr(rewrite, "targets", ())}

    def _declared_targets(self) -> Iterator[TargetInfo]:
        self.load()
        for record in self._records:
            if record.status == "loaded":
                yield from record.targets

    def kernels(self, runtime: str | None) -> Mapping[str, str] | None:
        """The table of a runtime's kernels, if a plugin declares it: the table of the closest target name.

        Raises:
            PluginError: The table can't be imported.
        """
        matches = [
            (close, target)
            for target in self._declared_targets()
            if target.kernels is not None and (close := closeness([target.name], runtime)) is not None
        ]
        if not matches:
            return None
        target = max(matches, key=lambda row: row[0])[1]
        return object_of(target.kernels, f"the kernels of {target.name}")

    def patches(self) -> list[PluginPatch]:
        """The patches that hold during capture: of the hook, and of rules that need a patch (autograd functions)."""
        if self._rule_patches is None:
            self._rule_patches = [
                PluginPatch(patch, rule.source or "?") for rule in self.rules()[1] for patch in rule.patches()
            ]
        self.load()
        rows = self._results.get("onnxplug_patches", ())
        return [*(PluginPatch(patch, record.label) for record, items in rows for patch in items), *self._rule_patches]

    def observers(self, options: Any) -> list[Observer]:
        """Plugins' observers of an export with these options.

        Raises:
            PluginError: A plugin's function raised, or returned something else.
        """
        self.load()
        rows = self._results.get("onnxplug_observers", ())
        observers = (made_observer(item, options, record.label) for record, items in rows for item in items)
        return [observer for observer in observers if observer is not None]

    def runtimes(self) -> list[PluginRuntime]:
        """The libraries and kernels of each plugin."""
        self.load()
        rows = self._results.get("onnxplug_runtime", ())
        return [PluginRuntime(record.label, self._domains_of(record), tuple(items)) for record, items in rows]

    def kernels_for(self, custom: CustomOperators, providers: Sequence[str] | None = None) -> Kernels:
        """The libraries and kernels for a model's operators."""
        return kernels_for(custom, self, providers)

    def with_runtime(self, items: Sequence[Any]) -> CallHost:
        """These plugins, behind the libraries and kernels of a call."""
        return CallHost(self, items)

    def evaluators(self) -> list[Evaluator]:
        """The evaluators that run models node by node; onnx's own comes last."""
        self.load()
        rows = sorted(self._results.get("onnxplug_evaluators", ()), key=lambda row: row[0].is_builtin)
        return [item for _, items in rows for item in items]

    def _domains_of(self, record: PluginRecord) -> tuple[str, ...]:
        return tuple(d.name for r, ds in self._results.get("onnxplug_domains", ()) if r is record for d in ds)

    def explain_domain(self, domain: str) -> str:
        """The plugin that could run the operators of a domain, and why none does."""
        self.load()
        with_kernels = [record for record, items in self._results.get("onnxplug_runtime", ()) if items]
        declaring = [record for record in self._records if domain in self._domains_of(record)]
        return explain_domain(domain, self._records, declaring, with_kernels)

    def samples(self) -> list[Any]:
        """Operator samples."""
        return self._all("onnxplug_samples")

    def decompositions(self) -> dict[str, Callable[..., Any] | None]:
        """Plugins' decompositions by qualified name, and the builtin decompositions that no plugin replaces."""
        self._collect_builtin_tables()
        return merged(self._results.get("onnxplug_decompositions", ()))

    def decomposers(self, op: str) -> dict[str, str]:
        """Each overload of an operator that a plugin decomposes, to that plugin's distribution."""
        self._collect_builtin_tables()
        return decomposers(op, self._results.get("onnxplug_decompositions", ()))

    def refusals(self) -> list[Callable[..., str | None]]:
        """The functions that tell why eager PyTorch refuses a call that fake tensors accept."""
        self.load()
        rows = self._results.get("onnxplug_refusals", ())
        return [
            function_of(item, "a function of onnxplug_refusals", record) for record, items in rows for item in items
        ]

    def checks(self, *call: Any) -> CallChecks:
        """The checks of a call: its registry, rules, opsets, runtime and own domains."""
        return CallChecks(self, *call)

    def warn_of_unused_rules(self, registry: OnnxRegistry, operators: Collection[str]) -> None:
        """Warns of rules of the call that are for none of the operators for which rules were looked up."""
        warn_of_unused_rules(registry, operators)

    def check_verifiable(self, opset: int) -> None:
        """Checks that a model of an opset can be verified here."""
        check_verifiable(opset)

    def missing(self, node: Any) -> Callable[..., Any] | None:
        """The first plugin's converter for an operator without a rule.

        Raises:
            PluginError: A plugin's hook raised, or returned no converter.
        """
        self.load()
        converter = hook_result(self._host.hook.onnxplug_missing, node=node)
        if converter is not None and not callable(converter) and not isinstance(converter, str):
            raise PluginError(f"onnxplug_missing returned {converter!r}, which is not a function")
        return converter

    def verifier(self, program: Any) -> Verifier:
        """The first plugin's function that compares a program with PyTorch.

        Raises:
            PluginError: There is none, a plugin's is no function, or its hook raised.
        """
        self.load()
        verifier = hook_result(self._host.hook.onnxplug_verifier, program=program)
        if verifier is None:
            raise PluginError("no plugin verifies programs: onnxplug's own is left out")
        if not callable(verifier):
            raise PluginError(f"onnxplug_verifier returned {verifier!r}, which is not a function")
        return verifier

    def module_maker(self, model: Any) -> Callable[[Any], Any] | None:
        """The function that makes a Module of the argument ``model`` of ``to_onnx``: of the first source that accepts it.

        Raises:
            PluginError: A source's function raised, or can't be imported.
        """
        self.load()
        for record, sources in self._results.get("onnxplug_sources", ()):
            for source in sources:
                accepts = source.accepts
                if accepts is not None and function_of(accepts, "the function accepts of a source", record)(model):
                    return function_of(source.module, "the function module of a source", record)
        return None

    def only_source(self, text: str, is_meant: Callable[[ModelSource], bool]) -> ModelSource | None:
        """The source that a text means; ``None`` where no plugin has one.

        Raises:
            PluginError: Two plugins have one.
        """
        self.load()
        matches = [
            (record, source)
            for record, sources in self._results.get("onnxplug_sources", ())
            for source in sources
            if is_meant(source)
        ]
        if len(matches) > 1:
            labels = " and ".join(record.label for record, _ in matches[:2])
            raise PluginError(f"{text} is a kind of model of {labels}", hint="--no-plugin leaves one of them out.")
        return matches[0][1] if matches else None

    def commands(self, app: Any) -> None:
        """Lets plugins add subcommands to the command line; no other hook is called.

        Args:
            app: A ``typer.Typer``. A plugin whose hook fails is named by a warning.
        """
        self.load(commands=True)
        for name, plugin in self._host.list_name_plugin():
            others = {other for other in self._host.get_plugins() if other is not plugin}
            try:
                self._host.subset_hook_caller("onnxplug_commands", others)(app=app)
            except Exception as error:
                text = f"the commands of the plugin {name} can't be read: {type(error).__name__}: {error}"
                warn(text, PluginWarning)

    def explain_missing(self, namespace: str) -> str | None:
        """Why a namespace has no rules, or nothing serves a library: the plugin for it is broken, left out or not installed."""
        self.load()
        return explain_missing(namespace, self._records)


_managers: dict[Any, PluginManager] = {}
_registries: dict[Any, OnnxRegistry] = {}
_lock = threading.Lock()
_test_points: list[Callable[[], Iterable[Any]]] = []


def _discover() -> Iterable[EntryPoint]:
    """The entry points of installed distributions, or a test's replacement."""
    return _test_points[-1]() if _test_points else entry_points(group=ENTRY_POINT_GROUP)


def forget() -> None:
    """Drops the loaded plugins, so that the next export discovers plugins anew."""
    with _lock:
        _managers.clear()
        _registries.clear()


@contextmanager
def discovering(points: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """Within the context, plugins come from ``points`` instead of installed distributions; for tests."""
    saved = dict(_managers), dict(_registries)
    forget()
    _test_points.append(points)
    try:
        yield
    finally:
        _test_points.pop()
        forget()
        _managers.update(saved[0])
        _registries.update(saved[1])


def manager_for(selection: Selection) -> PluginManager:
    """The plugins of a selection, loaded once a process."""
    with _lock:
        if selection not in _managers:
            _managers[selection] = PluginManager(selection)
        return _managers[selection]


def host_for(plugins: Sequence[str] | None = None) -> PluginManager:
    """The plugins of a process: all installed plugins, or the named ones.

    Raises:
        PluginError: A named plugin is not installed.
    """
    return manager_for(Selection.from_environment(plugins))


def registry_for(
    plugins: Sequence[str] | None = None,
    call_rules: Sequence[Rule] = (),
    prefer: Mapping[str, str] | None = None,
    selection: Selection | None = None,
) -> tuple[OnnxRegistry, PluginManager]:
    """The rules of an export and the plugins that supply them.

    Args:
        plugins: Names of the plugins to use; ``None`` is all installed plugins, ``[]`` only the builtin rules.
        call_rules: Rules of the call, which go before all others.
        prefer: Qualified operator name to the distribution whose rule wins.
        selection: Which plugins to use, instead of ``plugins``.

    Returns:
        The registry, and its plugin manager.

    Raises:
        PluginError: A requested plugin is not installed.
        UsageError: ``prefer`` names a distribution without a rule for the operator.
    """
    chosen = selection if selection is not None else Selection.from_environment(plugins)
    manager = manager_for(chosen)
    builtin, plugin = manager.rules()
    key = (chosen, tuple(sorted((prefer or {}).items())))
    registry = None if call_rules else _registries.get(key)
    if registry is None:
        registry = OnnxRegistry(builtin, plugin, call_rules, prefer=prefer)
        if not call_rules:
            _registries[key] = registry
    if chosen.strict and registry.refused:
        rule = registry.refused[0]
        raise PluginError(
            f"the rule {rule.name} of {rule.source} for {rule.op} shadows a builtin rule without override=True",
            hint="Without --strict-plugins it is ignored with a warning.",
        )
    return registry, manager

"""Imports one plugin, calls its hooks and checks their results."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from onnxplug.errors import OnnxplugError, PluginError
from onnxplug.observers import Observer
from onnxplug.plugin_api import (
    API_VERSION,
    PROJECT_NAME,
    Domain,
    Evaluator,
    LibraryPatch,
    OnnxOperator,
    OrtLibrary,
    ReferenceOp,
)
from onnxplug.plugins import hookspecs
from onnxplug.plugins.api import ModelSource, OpSample, PluginInfo
from onnxplug.plugins.records import PluginRecord
from onnxplug.registry.rule import Rule

#: Hooks that are called while something runs, by pluggy; the others are called once, at load.
LATE_HOOKS = {"onnxplug_missing", "onnxplug_verifier", "onnxplug_commands"}
LIST_HOOKS = (
    "onnxplug_rules",
    "onnxplug_domains",
    "onnxplug_operators",
    "onnxplug_rewrites",
    "onnxplug_decompositions",
    "onnxplug_observers",
    "onnxplug_patches",
    "onnxplug_runtime",
    "onnxplug_evaluators",
    "onnxplug_refusals",
    "onnxplug_samples",
    "onnxplug_sources",
)


@dataclass
class LoadedPlugin:
    """An imported plugin with the results of its hooks.

    Attributes:
        plugin: The module or object that the entry point names.
        hooks: Names of the hooks that it implements.
        info: The result of ``onnxplug_info``.
        values: The results of the other hooks, by the hook's name.
    """

    plugin: Any
    hooks: list[str] = field(default_factory=list)
    info: Any = field(default_factory=PluginInfo)
    values: dict[str, Any] = field(default_factory=dict)


def load_plugin(point: EntryPoint, seen: Mapping[int, str], later: Collection[str] = ()) -> LoadedPlugin:
    """Imports a plugin and calls its hooks once; loading runs no other code of the plugin."""
    loaded = LoadedPlugin(point.load())
    if id(loaded.plugin) in seen:
        return loaded
    loaded.hooks = check_hooks(loaded.plugin)
    if "onnxplug_info" in loaded.hooks:
        loaded.info = loaded.plugin.onnxplug_info()
    if getattr(loaded.info, "api", API_VERSION) != API_VERSION:
        return loaded
    for hook in LIST_HOOKS:
        if hook not in loaded.hooks or hook in later:
            continue
        value = getattr(loaded.plugin, hook)()
        # An iterator is run here, where a plugin that hangs is noticed.
        iterable = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
        loaded.values[hook] = list(value) if iterable else value
    return loaded


def check_hooks(plugin: Any) -> list[str]:
    """The hooks that a plugin implements.

    Raises:
        PluginError: A name that looks like a hook's is unknown, or isn't marked with ``hookimpl``.
    """
    known = [name for name in vars(hookspecs) if name.startswith("onnxplug_")]
    hooks = []
    for name in dir(plugin):
        if not name.startswith("onnxplug_"):
            continue
        function = getattr(plugin, name)
        if inspect.ismodule(function) or not callable(function):
            continue
        if name not in known:
            raise PluginError(f"it has a function {name}, which is not a hook; the hooks are {', '.join(known)}")
        if not hasattr(function, f"{PROJECT_NAME}_impl"):
            raise PluginError(f"its function {name} is not marked with @onnxplug.hookimpl")
        hooks.append(name)
    return hooks


def unmet(requires: Sequence[str]) -> Iterator[str]:
    """The requirements of a plugin that are not met, each with the reason."""
    for text in requires:
        try:
            requirement = Requirement(text)
            installed = version(requirement.name)
        except InvalidRequirement as error:
            yield f"{text!r}, which is not a valid requirement: {error}"
        except PackageNotFoundError:
            yield f"{text}, which is not installed"
        else:
            if not requirement.specifier.contains(installed, prereleases=True):
                yield f"{text}, but version {installed} is installed"


def check_rules(rules: Sequence[Any], record: PluginRecord) -> None:
    for rule in rules:
        if not isinstance(rule, Rule):
            raise PluginError(f"onnxplug_rules returned {rule!r}, which is not a Rule")
        rule.source = record.distribution
    record.rules = len(rules)


_SCHEME = re.compile(r"[a-z][a-z0-9-]+")


def check_sources(items: Sequence[Any]) -> None:
    for item in items:
        if not isinstance(item, ModelSource):
            raise PluginError(f"onnxplug_sources returned {item!r}, which is not a ModelSource")
        suffixes = () if isinstance(item.suffixes, str) else tuple(item.suffixes)
        if item.suffixes and not all(isinstance(text, str) and text.startswith(".") for text in suffixes or [None]):
            raise PluginError(
                f"onnxplug_sources returned a ModelSource whose suffixes are {item.suffixes!r}; they are a list of words with a dot"
            )
        unnamed = item.scheme == "" and (suffixes or item.accepts is not None)
        if not unnamed and (not isinstance(item.scheme, str) or not _SCHEME.fullmatch(item.scheme)):
            raise PluginError(
                f"onnxplug_sources returned a ModelSource whose scheme is {item.scheme!r}; it is a word in small letters"
            )
        needed = {"load"} if item.scheme or suffixes else set()
        needed |= {"accepts", "module"} if (item.accepts, item.module) != (None, None) else set()
        for name in ("load", "export", "accepts", "module"):
            value = getattr(item, name)
            named = isinstance(value, str) and value.count(":") == 1
            if not named and not callable(value) and (value is not None or name in needed):
                raise PluginError(
                    f"onnxplug_sources returned a ModelSource with {name}={value!r}, which is neither a function nor "
                    "'package.module:function'"
                )


def _check_kind(hook: str, kind: type, words: str, items: Sequence[Any]) -> None:
    for item in items:
        if not isinstance(item, kind):
            raise PluginError(f"{hook} returned {item!r}, which is not {words}")


def check_rewrites(items: Sequence[Any]) -> None:
    from onnxplug.rewrite.rewrite import Rewrite  # a plugin that has one has imported it

    _check_kind("onnxplug_rewrites", Rewrite, "a Rewrite", items)


def check_patches(items: Sequence[Any]) -> None:
    for item in items:
        if not isinstance(item, AbstractContextManager | LibraryPatch) and not callable(item):
            raise PluginError(f"onnxplug_patches returned {item!r}, neither a context manager nor a function of one")


#: A name as rules have it, of an operator, of a Python function, or of a higher-order operator.
_OPERATOR = re.compile(r"(\w+:)?[\w.]+::\w+(\.\w+)?|\w+")


def check_decompositions(table: Mapping[Any, Any]) -> None:
    for name, function in table.items():
        if not isinstance(name, str) or not _OPERATOR.fullmatch(name):
            raise PluginError(f"onnxplug_decompositions has {name!r}, which is no name such as 'aten::add.Tensor'")
        if function is not None and not callable(function):
            raise PluginError(f"onnxplug_decompositions has {function!r} for {name}, neither a function nor None")


def check_refusals(items: Sequence[Any]) -> None:
    for item in items:
        if not callable(item) and not (isinstance(item, str) and item.count(":") == 1):
            raise PluginError(f"onnxplug_refusals returned {item!r}, neither a function nor 'package.module:function'")


def check_runtime(items: Sequence[Any]) -> None:
    from onnxplug.plugins.runtime import is_kernel

    for item in items:
        if not isinstance(item, OrtLibrary | ReferenceOp):
            raise PluginError(f"onnxplug_runtime returned {item!r}, which is neither an OrtLibrary nor a ReferenceOp")
        if isinstance(item, ReferenceOp):
            named = isinstance(item.kernel, str) and item.kernel.count(":") == 1
            if not named and not is_kernel(item.kernel):
                raise PluginError(
                    f"onnxplug_runtime returned a ReferenceOp of {item.kernel!r}, which is not an OpRun class with an op_domain"
                )
        elif isinstance(item.providers, str) or isinstance(item.domains, str):
            raise PluginError(f"onnxplug_runtime returned {item!r}; its providers and domains are lists of names")


def check_observers(items: Sequence[Any]) -> None:
    """Checks the result of ``onnxplug_observers``.

    Raises:
        PluginError: An item is neither an observer nor a function.
    """
    for item in items:
        if not isinstance(item, Observer) and (isinstance(item, type) or not callable(item)):
            raise PluginError(f"onnxplug_observers returned {item!r}, which is neither an Observer nor a function")


def made_observer(item: Any, options: Any, label: str) -> Observer | None:
    """An observer of ``onnxplug_observers``, or the observer that a function of the options returns.

    Raises:
        PluginError: The function raised, or returned something else.
    """
    if isinstance(item, Observer):
        return item
    try:
        observer = item(options)
    except OnnxplugError:
        raise
    except Exception as error:
        raise PluginError(f"an observer of {label} raised {type(error).__name__}: {error}") from error
    if observer is not None and not isinstance(observer, Observer):
        raise PluginError(f"onnxplug_observers of {label} made {observer!r}, which is no Observer")
    return observer


#: Hook to the check of its result.
CHECKS: dict[str, Callable[[Any], None]] = {
    "onnxplug_domains": partial(_check_kind, "onnxplug_domains", Domain, "a Domain"),
    "onnxplug_rewrites": check_rewrites,
    "onnxplug_decompositions": check_decompositions,
    "onnxplug_patches": check_patches,
    "onnxplug_runtime": check_runtime,
    "onnxplug_observers": check_observers,
    "onnxplug_operators": partial(_check_kind, "onnxplug_operators", OnnxOperator, "an OnnxOperator"),
    "onnxplug_refusals": check_refusals,
    "onnxplug_evaluators": partial(_check_kind, "onnxplug_evaluators", Evaluator, "an Evaluator"),
    "onnxplug_samples": partial(_check_kind, "onnxplug_samples", OpSample, "an OpSample"),
    "onnxplug_sources": check_sources,
}

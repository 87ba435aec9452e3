"""Metadata about the origin of nodes as seen from a module: without the path from the model to the module."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from onnxplug.build.provenance import CLASSES, NAMES, NAMESPACE, REPLACED, without_fx_node
from onnxplug_tools.outline.calls import ModuleCall

_NUMBERED = re.compile(r"(_\d+)+$")


def within(path: str, around: str) -> str:
    """A path as seen from a module."""
    return "" if path == around else path.removeprefix(f"{around}.") if around else path


def unnumbered(name: str) -> str:
    """A name without the numbers that distinguish it from other names of the model."""
    return _NUMBERED.sub("", name) or name


def in_terms_of(path: str, metadata: Mapping[str, str]) -> dict[str, str]:
    """A node's metadata as seen from a module, without the numbers of FX nodes."""
    terms = dict(metadata)
    if NAMESPACE in terms:
        terms[NAMESPACE] = _namespace(terms[NAMESPACE], path)
    if NAMES in terms and CLASSES in terms:
        names, classes = ast.literal_eval(terms[NAMES]), ast.literal_eval(terms[CLASSES])
        start = names.index(path) + 1 if path in names[:-1] else 0
        inner = [within(name, path) for name in names[start:-1]] if start else names[:-1]
        terms[NAMES] = repr([*inner, unnumbered(names[-1])])
        terms[CLASSES] = repr(classes[start:])
    if REPLACED in terms:
        terms[REPLACED] = repr(list(dict.fromkeys(_title(title, path) for title in ast.literal_eval(terms[REPLACED]))))
    return terms


def _namespace(text: str, path: str) -> str:
    """``": Model/blocks.0: Block/blocks.0.linear: Linear/linear_3: aten.linear.default"`` from the inside of ``blocks.0``."""
    scopes, slash, last = text.rpartition("/")
    name, colon, kind = last.partition(": ")
    last = f"{unnumbered(name)}{colon}{kind}"
    entry = f"/{path}: "
    start = f"/{scopes}".find(entry)
    if not slash or start < 0:
        return f"{scopes}{slash}{last}"
    _, _, inner = f"/{scopes}/"[start + 1 :].partition("/")
    if path:
        inner = f"/{inner}".replace(f"/{path}.", "/")[1:]
    return f"{inner}{last}"


def _title(title: str, path: str) -> str:
    """``"blocks.0.linear/linear_3: aten.linear.default: Gemm"`` from the inside of ``blocks.0``."""
    scope, slash, rest = title.partition("/")
    if not slash:
        scope, rest = "", title
    name, colon, kind = rest.partition(": ")
    inner = within(scope, path)
    return f"{inner}{'/' if inner else ''}{unnumbered(name)}{colon}{kind}"


def of_call(call: ModuleCall, path: str, full: bool | None) -> dict[str, str]:
    """The metadata of a call that stands for a module.

    Args:
        path: The path of the module that the call is part of; empty for the model's graph.
        full: Whether the metadata are full or short; ``None`` for none.
    """
    if full is None:
        return {}
    chain: list[ModuleCall] = []
    around: ModuleCall | None = call
    while around is not None and not (path and around.path == path):
        chain.append(around)
        around = around.around
    names = [within(c.path, path) for c in reversed(chain)]
    classes = [c.class_name for c in reversed(chain)]
    metadata = {NAMESPACE: "/".join(f"{name}: {kind}" for name, kind in zip(names, classes, strict=True))}
    return {**metadata, **without_fx_node(classes, names)} if full else metadata

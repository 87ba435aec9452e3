"""Words of errors: why no plugin serves a domain, a namespace or a library."""

from __future__ import annotations

from collections.abc import Sequence

from onnxplug.plugins.libraries import LIBRARIES
from onnxplug.plugins.records import PluginRecord


def explain_domain(
    domain: str,
    records: Sequence[PluginRecord],
    declaring: Sequence[PluginRecord],
    with_kernels: Sequence[PluginRecord],
) -> str:
    """The plugin that could run the operators of a domain, and why none does.

    Args:
        domain: The domain.
        records: All plugins.
        declaring: The plugins that declare the domain.
        with_kernels: The plugins that supply kernels.
    """
    reasons = []
    for record in declaring:
        supplies = any(record is other for other in with_kernels)
        problem = "none of its kernels is for this operator" if supplies else "it supplies no kernels"
        reasons.append(f"The plugin {record.label} declares the domain {domain}, but {problem}.")
    if not reasons:
        broken = [record for record in records if record.status == "failed"]
        reasons += [f"The plugin {r.label} is broken: {(r.error or '').splitlines()[-1]}" for r in broken]
        blocked = [record.label for record in records if record.status == "blocked" and record.error is None]
        if blocked:
            reasons.append(f"Plugins that are left out: {', '.join(blocked)}.")
    return "\n".join(reasons) or f"No installed plugin declares the domain {domain}."


def explain_missing(namespace: str, records: Sequence[PluginRecord]) -> str | None:
    """Why a namespace has no rules, or nothing serves a library: the plugin for it is broken, left out or not installed."""
    for record in records:
        words = (record.name, record.distribution, record.value)
        claims = namespace in (*record.namespaces, *record.libraries) or any(
            namespace.replace("_", "-") in w.replace("_", "-") for w in words
        )
        if record.is_builtin or not claims:
            continue
        text = f"The plugin {record.name} of {record.distribution} may translate {namespace}, but it"
        if record.status == "failed":
            return f"{text} failed:\n{record.error}"
        if record.status == "blocked":
            return f"{text} is left out."
    package = LIBRARIES.get(namespace)
    if package in (None, *(record.distribution for record in records)):
        return None
    return f"pip install {package}: this package is for models that use {namespace}."

"""Imported once by the process that jobs are forked from, so that jobs begin with torch, rules and plugins loaded.

A tiny export imports the modules that are imported late. It makes no session of ONNX Runtime, whose threads a fork
would not have.
"""

from __future__ import annotations

import contextlib


def warm_up() -> None:
    """Loads the modules that exports load."""
    import torch
    from onnxplug_tools.report.observer import ReportObserver

    from onnxplug import to_onnx
    from onnxplug.cli import app, report, targets  # noqa: F401 - imported for the jobs
    from onnxplug.cli.options import registry
    from onnxplug_fleet import identity, job, verification  # noqa: F401 - imported for the jobs

    identity.distributions()
    rules = registry()
    identity.plugins_text(rules[1])
    reporter = ReportObserver()
    model = torch.nn.Linear(2, 2).eval()
    to_onnx(model, (torch.zeros(3, 2),), dynamic_shapes=({0: "batch"},), registry=rules, observers=[reporter])
    for write in (reporter.report.html, reporter.report.sarif, reporter.report.markdown, reporter.report.json):
        write()
    with contextlib.suppress(ImportError):
        import onnxruntime  # noqa: F401


with contextlib.suppress(Exception):  # the jobs report any error
    warm_up()

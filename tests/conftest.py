"""Settings and fixtures for every test."""

from __future__ import annotations

import gc
import os

# Before torch is imported, here or in a worker of pytest-xdist: one thread a worker, no look-ups on a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests see the plugins they ask for, not those of the developer's shell.
os.environ.pop("ONNXPLUG_PLUGINS", None)
os.environ.pop("ONNXPLUG_METADATA", None)

from collections import Counter
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings
from onnxplug_tools.testing import plugin as onnxplug_fixtures

from tests.support.check import evaluated
from tests.support.parts import mark_long
from tests.support.seeds import pytest_collectstart, seeded, vision

__all__ = ["pytest_collectstart", "seeded", "vision"]  # pytest finds them here

#: The property of a test's report for each set of inputs that an evaluator ran.
EVALUATED = "evaluated"

# `make test` draws the same examples in every run, a quarter as many; `make test-all` draws others.
settings.register_profile("same", derandomize=True, max_examples=25)
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    """The fixtures of `onnxplug.testing`, also where this checkout was installed before it had its entry point."""
    if not config.pluginmanager.has_plugin("onnxplug"):
        config.pluginmanager.register(onnxplug_fixtures, "onnxplug")


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves out the long ones
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tests with many costly cases a part runs by default."""
    mark_long(items)


def _freeze() -> None:
    """Exempts present objects from later garbage collections, which would take seconds in a late test."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Exempts imports and tests from garbage collections, and makes these rarer, as graphs have many objects."""
    gc.set_threshold(10_000, 10, 10)
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Exempts the imports of a file's tests from garbage collections."""
    yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()


@pytest.fixture(autouse=True, scope="session")
def _shape_warnings() -> Iterator[None]:
    """ONNX Runtime's warnings go to stderr."""
    from onnxplug_tools.testing.warnings import shape_warnings

    with shape_warnings():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Every test fails where ONNX Runtime warns that a shape in the model is wrong."""
    from onnxplug_tools.testing.warnings import fail_on_shape_warnings

    report = yield
    fail_on_shape_warnings(report)
    if report.when == "call":
        report.user_properties += [(EVALUATED, name) for name in evaluated]
        evaluated.clear()
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how much was not run by ONNX Runtime; reports bring the numbers of workers."""
    reports = [r for rs in terminalreporter.stats.values() for r in rs if isinstance(r, pytest.TestReport)]
    names = Counter(str(value) for r in reports for key, value in r.user_properties if key == EVALUATED)
    for name, count in sorted(names.items()):
        terminalreporter.write_line(f"{count} results were compared with {name}, as ONNX Runtime has no kernel")

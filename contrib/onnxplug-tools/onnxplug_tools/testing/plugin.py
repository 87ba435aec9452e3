"""onnxplug's pytest plugin, found by its entry point ``pytest11``.

Fixtures: ``onnx_check``, ``expect_graph``, ``isolated_registry``, and ``onnx_sample``: a test that takes it runs once for
every sample (``onnxplug_samples``) of the plugin named by ``@pytest.mark.onnxplug("NAME")`` and every opset promised.
``as_torch_onnx`` is for tests of libraries that call ``torch.onnx.export``, and the option ``--as-torch-onnx`` for all of them.

Importing this loads neither torch nor onnx: pytest imports it at every start.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from onnxplug_tools.testing.registry import IsolatedRegistry


#: The exports of the run so far, with the option.
_EXPORTS = pytest.StashKey[list[Any]]()
#: The property of a report: the error of each export of the test; "" for an export that succeeded.
_OUTCOMES = "as_torch_onnx"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option ``--as-torch-onnx``."""
    parser.getgroup("onnxplug").addoption(
        "--as-torch-onnx",
        action="store_true",
        help="onnxplug exports wherever a test calls torch.onnx.export; a summary says how often",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker; with the option, puts onnxplug's export in the place of torch's, before it is imported."""
    config.addinivalue_line("markers", "onnxplug(name): the plugin whose samples the fixture onnx_sample goes through")
    if config.getoption("--as-torch-onnx", False):
        import contextlib

        import onnxplug

        stack = contextlib.ExitStack()
        config.stash[_EXPORTS] = stack.enter_context(onnxplug.as_torch_onnx())
        config.add_cleanup(stack.close)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Counts the exports of a test."""
    exports = item.config.stash.get(_EXPORTS, [])
    before = len(exports)
    try:
        return (yield)
    finally:
        item.user_properties += [(_OUTCOMES, export.error or "") for export in exports[before:]]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the number of exports by onnxplug; reports bring the exports of other processes too."""
    if not config.getoption("--as-torch-onnx", False):
        return
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    outcomes = [
        (report.nodeid, value)
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == _OUTCOMES
    ]
    failed = [(test, error) for test, error in outcomes if error]
    terminalreporter.write_line(f"onnxplug: {len(outcomes)} exports, {len(failed)} failed")
    for test, error in failed:
        terminalreporter.write_line(f"  {test}: {error}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test by ``onnx_check`` or ``onnx_sample`` fails where ONNX Runtime warns of a wrong shape."""
    report = yield
    if {"onnx_check", "onnx_sample"} & set(getattr(item, "fixturenames", ())):
        from onnxplug_tools.testing.warnings import fail_on_shape_warnings

        fail_on_shape_warnings(report)
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each sample and opset."""
    if "onnx_sample" not in metafunc.fixturenames:
        return
    from onnxplug.errors import OnnxplugError
    from onnxplug_tools.testing.registry import sample_cases

    marker = metafunc.definition.get_closest_marker("onnxplug")
    name = marker.args[0] if marker is not None and marker.args else None
    try:
        cases = sample_cases(name)
    except OnnxplugError as error:
        pytest.fail(f"onnx_sample: {error}", pytrace=False)
    if name is not None and not cases:
        pytest.fail(f"onnx_sample: the plugin {name} has no onnxplug_samples", pytrace=False)
    metafunc.parametrize("onnx_sample", cases, ids=str)


@pytest.fixture
def onnx_check() -> Iterator[Callable[..., Any]]:
    """``onnx_check(model, args, …)``: exports, runs and compares with PyTorch; see ``onnxplug.testing.check_model``.

    The test fails where ONNX Runtime warns that a shape in the model is wrong.
    """
    from onnxplug_tools.testing.check import check_model
    from onnxplug_tools.testing.warnings import shape_warnings

    with shape_warnings():
        yield check_model


@pytest.fixture
def as_torch_onnx() -> Iterator[list[Any]]:
    """The exports so far: while the test runs, ``torch.onnx.export`` is onnxplug's. See ``onnxplug.as_torch_onnx``."""
    import onnxplug

    with onnxplug.as_torch_onnx() as exports:
        yield exports


@pytest.fixture
def expect_graph() -> Callable[..., None]:
    """``expect_graph(program, "Gemm ... Relu")``; see ``onnxplug.testing.expect_graph``."""
    from onnxplug_tools.testing.graph import expect_graph

    return expect_graph


@pytest.fixture
def isolated_registry() -> Iterator[IsolatedRegistry]:
    """The builtin rules and those that the test adds, in the place of the installed plugins until the test ends."""
    from onnxplug_tools.testing.registry import IsolatedRegistry

    with IsolatedRegistry().active() as registry:
        yield registry

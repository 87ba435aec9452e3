"""Tests of the packages in this folder run from the checkout, each as if pip had installed it alone.

`pytest contrib/NAME/tests` by itself takes NAME/pyproject.toml for its settings and never reads this file: it tests the
installed package.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from onnxplug_tools.testing import plugin as onnxplug_fixtures

from tests.support.contrib import CONTRIB, installed, is_installed, modules_alone
from tests.support.seeds import pytest_collectstart, seeded, vision

__all__ = ["pytest_collectstart", "seeded", "vision"]  # pytest finds them here

#: Built by a compiler: tests/test_contrib.py installs it, and runs its tests there.
collect_ignore = ["onnxplug-example-cpp"]


def installed_for(path: Path) -> AbstractContextManager[None]:
    """Installs the package that a test file belongs to, and no other plugin."""
    return installed(path.relative_to(CONTRIB).parts[0])


def pytest_configure(config: pytest.Config) -> None:
    """Registers the fixtures of `onnxplug.testing`, and puts the packages' modules on the path."""
    if not config.pluginmanager.has_plugin("onnxplug"):
        config.pluginmanager.register(onnxplug_fixtures, "onnxplug")
    for project in CONTRIB.glob("*/pyproject.toml"):
        name = project.parent.name
        if name not in collect_ignore and not is_installed(name):
            sys.path.append(str(modules_alone(project.parent)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, None, None]:
    """`onnx_sample` asks for the package's samples while tests are collected."""
    if "onnx_sample" not in metafunc.fixturenames:
        return (yield)
    with installed_for(metafunc.definition.path):
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves out the long ones
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks three in four opsets of each sample as long; neighbouring samples run at different opsets by default."""
    samples: dict[tuple[Path, int], list[pytest.Item]] = {}
    for item in items:
        case = item.callspec.params.get("onnx_sample") if hasattr(item, "callspec") else None
        if case is not None and item.path.is_relative_to(CONTRIB):
            samples.setdefault((item.path, id(case.sample)), []).append(item)
    for number, opsets in enumerate(samples.values()):
        for place, item in enumerate(opsets):
            if place % 4 != number % min(4, len(opsets)):
                item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True, scope="module")
def _installed(request: pytest.FixtureRequest) -> Iterator[None]:
    with installed_for(request.path):
        yield

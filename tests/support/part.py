"""``pytest -p tests.support.part --one-in 8``: the same eighth of the tests in every run, chosen by their names."""

from __future__ import annotations

import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--one-in``."""
    parser.addoption(
        "--one-in", type=int, default=1, metavar="N", help="run one test in N, chosen by a hash of its name"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests outside of the part."""
    parts = config.getoption("one_in")
    left_out = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not zlib.crc32(item.nodeid.encode()) % parts]

"""Random programs of views, writes, aliases, constants, buffers and branches on sizes, and random trees of modules, are right, or an
error or a warning says what is not."""

from __future__ import annotations

import pytest

from tests.capture.adversary import Constants, Program, outcome
from tests.capture.buffers import Buffers
from tests.capture.trees import Tree

#: The accepted outcomes of a program.
FINE = ("right", "said", "refused", "eager")


@pytest.mark.parametrize("seed", range(4))
def test_random_programs(seed: int) -> None:
    status, reason = outcome(seed, dynamic=seed % 3 != 0)
    assert status in FINE, f"{reason}\n{Program(seed).text}"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4, 300))
def test_many_random_programs(seed: int) -> None:
    test_random_programs(seed)


@pytest.mark.parametrize("seed", range(4))
def test_random_constants(seed: int) -> None:
    """Constants of the model's code are views of each other, are written, detached in place, and decide branches."""
    status, reason = outcome(seed, make=Constants)
    assert status in FINE, f"{reason}\n{Constants(seed).layers}"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4, 300))
def test_many_random_constants(seed: int) -> None:
    test_random_constants(seed)


@pytest.mark.parametrize("seed", range(4))
def test_random_buffers(seed: int) -> None:
    """Numbers of buffers decide branches, and buffers are written."""
    status, reason = outcome(seed, dynamic=seed % 3 != 0, make=Buffers)
    assert status in FINE, f"{reason}\n{Buffers(seed).steps}"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4, 300))
def test_many_random_buffers(seed: int) -> None:
    test_random_buffers(seed)


@pytest.mark.parametrize("seed", [3, 20, 41])
def test_random_trees(seed: int) -> None:
    """In these trees modules are found at two places, and methods by a text."""
    status, reason = outcome(seed, dynamic=seed % 3 != 0, make=Tree)
    assert status in ("right", "said"), f"{reason}\n{Tree(seed)}"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60, 300))
def test_many_random_trees(seed: int) -> None:
    status, reason = outcome(seed, dynamic=seed % 3 != 0, make=Tree)
    assert status in FINE, f"{reason}\n{Tree(seed)}"


def test_most_random_programs_are_right() -> None:
    """A change that makes the capture refuse all programs is no success."""
    assert sum(outcome(seed, dynamic=False)[0] == "right" for seed in range(100, 106)) > 2
    assert sum(outcome(seed, make=Constants)[0] == "right" for seed in range(100, 106)) > 4
    assert sum(outcome(seed, make=Buffers)[0] == "right" for seed in range(100, 110)) > 2

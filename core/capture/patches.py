"""Capture's replacements in torch that record a model's questions: about sizes, and torch's refusals.

Other replacements come from plugins by the hook ``onnxplug_patches``; onnxplug's own are in ``onnxplug.patches``.

The patches hold for the process. A lock is held while they are in place, so that one model is captured at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from onnxplug.capture.assumptions import any_size_is_accepted, zero_is_a_size
from onnxplug.capture.branches import Branches
from onnxplug.capture.questions import recorded
from onnxplug.capture.refusals import Answers


@dataclass(frozen=True)
class Trace:
    """The facts that decide which patches an attempt of a capture needs.

    Attributes:
        general: Whether operators that ask whether a size is 1 get the answer for other sizes.
        has_empty: Whether an example has a dynamic size of 0, which stays symbolic.
        answers: Answers for code that reads values of tensors.
        branches: The branches on values that may become selections.
        decides: Whether the model's comparisons of sizes are answered at once.
    """

    strict: bool = False
    general: bool = False
    has_empty: bool = False
    answers: Answers | None = None
    branches: Branches | None = None
    decides: bool = False


@dataclass(frozen=True)
class TorchPatch:
    """A patch of torch with its purpose.

    Attributes:
        target: The name in torch that is replaced.
        why: torch's behaviour without it.
        test: A test that fails without it.
        enter: Makes the context manager that puts it in place: of a :class:`Trace` here, of an
            :class:`onnxplug.CaptureRequest` in ``onnxplug.patches``.
        scope: Whether it holds for a whole capture, or for one attempt of it.
        needed: Whether a capture needs it. A patch for features that only some models use tests ``mentions`` by itself.
        versions: The versions of torch that were seen to need it.
    """

    name: str
    target: str
    why: str
    test: str
    enter: Callable[[Any], AbstractContextManager[Any]]
    scope: Literal["capture", "attempt"] = "capture"
    needed: Callable[[Any], bool] = lambda request: True
    versions: str = "2.13"


PATCHES: tuple[TorchPatch, ...] = (
    TorchPatch(
        name="sizes of 0",
        scope="attempt",
        target="torch.fx.experimental.symbolic_shapes.make_symbol",
        why="Symbols of sizes are positive, which an example's size of 0 is not.",
        test="tests/capture/test_small_sizes.py::test_an_automatic_dimension_that_a_branch_depends_on_is_static",
        enter=lambda trace: zero_is_a_size(),
        needed=lambda trace: trace.has_empty,
    ),
    TorchPatch(
        name="constraints",
        scope="attempt",
        target="torch.fx.experimental.symbolic_shapes.ShapeEnv.produce_guards_verbose",
        why="torch refuses a named dimension for what the model asks of it; size_guards decides that afterwards.",
        test="tests/capture/test_guards.py::test_a_branch_narrows_the_range_of_a_named_dimension[None]",
        enter=lambda trace: any_size_is_accepted(),
    ),
    TorchPatch(
        name="questions",
        scope="attempt",
        target="ShapeEnv.evaluate_expr, symbolic_shapes._guard_or, sym_node.to_node, comparisons and __repr__ of symbolic numbers",
        why="What code asks of sizes is answered and forgotten where torch needs no guard; the export has to say it.",
        test="tests/capture/test_size_guards.py::test_a_branch_that_samples_miss_is_said",
        enter=lambda trace: recorded(
            general=trace.general, answers=trace.answers, branches=trace.branches, decides=trace.decides
        ),
    ),
)


@contextlib.contextmanager
def torch_patched(trace: Trace) -> Iterator[dict[str, Any]]:
    """While it holds, torch has the patches that an attempt needs.

    Yields:
        The records of the patches, by their names.
    """
    with contextlib.ExitStack() as stack:
        yield {p.name: stack.enter_context(p.enter(trace)) for p in PATCHES if p.needed(trace)}

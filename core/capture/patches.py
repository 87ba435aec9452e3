"""What capture replaces in torch while it traces a model: each patch once, with what it is for and the test that needs it.

What is replaced for single operators and functions of torch stands beside their converters, ``onnxplug.converters.patches``.

The patches are those of the process. One lock is held while they are in place, so that one model is captured at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from onnxplug.capture.conversions import conversions_that_change_nothing
from onnxplug.capture.handled import handled_errors
from onnxplug.capture.lengths import lengths_stay_dynamic
from onnxplug.capture.members import members_are_compared
from onnxplug.capture.mentions import Mentions
from onnxplug.capture.onnx_flag import onnx_export_flag, onnx_export_flag_in_dynamo
from onnxplug.capture.operator_calls import operator_calls_repeated
from onnxplug.capture.patching import ONE_AT_A_TIME
from onnxplug.capture.questions import any_size_is_accepted, recorded, zero_is_a_size
from onnxplug.capture.refusals import Answers
from onnxplug.capture.timing import modules_timed
from onnxplug.capture.tracing import lean_tracing


@dataclass(frozen=True)
class Trace:
    """What decides which patches a capture, or an attempt of it, needs.

    Attributes:
        mentions: What the model's code names.
        strict: torch.export's mode.
        general: Whether operators that ask whether a size is 1 are answered as for the other sizes.
        repeats: Whether equal operator calls are repeated.
        has_empty: Whether an example has a dynamic size of 0, which stays symbolic.
        answers: Answers for code that asks for values of tensors.
    """

    mentions: Mentions
    strict: bool = False
    general: bool = False
    repeats: bool = False
    has_empty: bool = False
    answers: Answers | None = None


@dataclass(frozen=True)
class TorchPatch:
    """A patch of torch.

    Attributes:
        name: What it is called.
        target: What is replaced.
        why: What torch does without it.
        test: A test that fails without it.
        enter: Makes the context manager that puts it in place, of a :class:`Trace`; for a single operator of what patches of
            plugins get, a :class:`onnxplug.CaptureRequest`.
        scope: Whether it holds for a whole capture, or for one attempt of it.
        needed: Whether a trace needs it. A patch for what only some models use looks at ``mentions`` by itself.
        versions: The versions of torch that were seen to need it.
    """

    name: str
    target: str
    why: str
    test: str
    enter: Callable[[Any], AbstractContextManager[Any]]
    scope: Literal["capture", "attempt"] = "capture"
    needed: Callable[[Trace], bool] = lambda trace: True
    versions: str = "2.13"


PATCHES: tuple[TorchPatch, ...] = (
    TorchPatch(
        name="onnx flag",
        target="torch.onnx._flags._is_onnx_exporting",
        why="Models branch on torch.onnx.is_in_onnx_export(), which is true in torch.onnx.export alone.",
        test="tests/capture/test_attempts.py::test_a_model_sees_that_it_is_being_exported[None]",
        enter=lambda trace: onnx_export_flag(),
    ),
    TorchPatch(
        name="conversions",
        target="torch.nn.Module._apply",
        why="module.to(...) swaps fake parameters for themselves: an error, or a write to the parameter.",
        test="tests/capture/test_conversions.py::test_a_conversion_that_changes_nothing_is_no_write",
        enter=lambda trace: conversions_that_change_nothing(),
    ),
    TorchPatch(
        name="len",
        target="len, in the Python modules of the model's code",
        why="len(tensor) is a plain number, which makes a dynamic size a constant.",
        test="tests/capture/test_lengths.py::test_length_of_a_tensor",
        enter=lambda trace: lengths_stay_dynamic(trace.mentions),
    ),
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
        name="onnx flag in Dynamo",
        scope="attempt",
        target="torch._dynamo.variables.torch.tracing_state_functions",
        why="The strict mode takes torch.onnx.is_in_onnx_export() for the constant False.",
        test="tests/capture/test_attempts.py::test_a_model_sees_that_it_is_being_exported[True]",
        enter=lambda trace: onnx_export_flag_in_dynamo(),
        needed=lambda trace: trace.strict,
    ),
    TorchPatch(
        name="members in Dynamo",
        scope="attempt",
        target="torch._dynamo.variables.lists.iter_contains",
        why="The strict mode takes no size to be equal to a number that it is searched among, and asks nothing.",
        test="tests/capture/test_questions.py::test_a_form_of_asking_is_right_or_said",
        enter=lambda trace: members_are_compared(),
        needed=lambda trace: trace.strict,
    ),
    TorchPatch(
        name="lean tracing",
        scope="attempt",
        target="functions of torch.fx.experimental.proxy_tensor, torch.export._trace and torch.export's passes",
        why="Half of the time of a trace goes into what nobody reads: stack traces, code of graphs between passes, …",
        test="tests/capture/test_export_passes.py::test_no_code_is_made_of_a_graph_that_nobody_runs",
        enter=lambda trace: lean_tracing(),
        needed=lambda trace: not trace.strict,
    ),
    TorchPatch(
        name="equal operator calls",
        scope="attempt",
        target="torch.fx.experimental.proxy_tensor.proxy_call",
        why="Every call is traced, though nearly all are equal to an earlier one.",
        test="tests/capture/test_operator_calls.py::test_training",
        enter=lambda trace: operator_calls_repeated(),
        needed=lambda trace: trace.repeats,
    ),
    TorchPatch(
        name="questions",
        scope="attempt",
        target="ShapeEnv.evaluate_expr, symbolic_shapes._guard_or, comparisons of torch.SymInt and SymFloat, SymInt.__repr__",
        why="What code asks of sizes is answered and forgotten where torch needs no guard; the export has to say it.",
        test="tests/capture/test_size_guards.py::test_a_branch_that_samples_miss_is_said",
        enter=lambda trace: recorded(general=trace.general, answers=trace.answers),
    ),
    TorchPatch(
        name="handled errors",
        scope="attempt",
        target="torch._export.non_strict_utils._NonStrictTorchFunctionHandler, proxy_tensor.proxy_call, FakeTensorMode.dispatch",
        why="The model's code may handle errors that only tensors without numbers raise, or never raise, and go another way.",
        test="tests/capture/test_handled.py",
        enter=lambda trace: handled_errors(strict=trace.strict),
    ),
    TorchPatch(
        name="seconds of modules",
        scope="attempt",
        target="torch.fx.experimental.proxy_tensor._ModuleStackTracer.call_module",
        why="torch doesn't say how long each module takes; only an export with a profile needs it.",
        test="contrib/onnxplug-tools/tests/profiling/test_chrome.py::test_of_an_export",
        enter=lambda trace: modules_timed(),
    ),
)


@contextlib.contextmanager
def torch_patched(scope: Literal["capture", "attempt"], trace: Trace) -> Iterator[dict[str, Any]]:
    """While it holds, torch has the patches of a scope that a trace needs, and no other thread captures a model.

    Yields:
        What the patches record, by their names.
    """
    with ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        yield {p.name: stack.enter_context(p.enter(trace)) for p in PATCHES if p.scope == scope and p.needed(trace)}

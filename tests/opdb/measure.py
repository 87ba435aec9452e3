"""One sample of torch's operator database: captured, exported, run, compared."""

from __future__ import annotations

import copy
import functools
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

import onnxplug
from onnxplug.errors import CaptureError, MissingRuleError, OnnxplugError, OpsetError, Unsupported, VerificationError
from onnxplug.registry.names import without_prefix
from onnxplug.registry.target import DEFAULT_RUNTIME
from onnxplug.verification.compare import Scale, compare
from onnxplug.verification.inputs import Sizes, generated_inputs
from tests.opdb.tolerances import comparable, tolerance, valid_inputs

#: Statuses that count as passed; samples with a status in UNMEASURABLE are not counted.
GOOD = frozenset({"pass", "pass-reference", "pass-wide", "pass-exact"})
#: Integers beyond it are special values, as NaN and infinities are.
ORDINARY = 2**53
HALVES = (torch.float16, torch.bfloat16)
UNMEASURABLE = frozenset({"eager", "capture"})


@dataclass
class Outcome:
    """The outcome of one sample.

    Attributes:
        status: ``pass``; ``pass-reference`` (ONNX Runtime has no kernel, ``onnxplug.reference`` agrees); ``pass-wide`` (of
            half dtypes: agrees not with torch's half result but with its float one, rounded once); ``pass-exact`` (of
            samples with NaN, infinities or integers beyond 2**53: agrees with ``exact=True``, and without it on
            ordinary numbers); ``eager``: torch refuses; ``capture``: torch.export can't; ``missing``, ``unsupported``,
            ``convert``, ``run``, ``dtype``, ``shape``, ``value``, ``count``: the failures; ``crash``, ``timeout``.
        detail: The error's first line.
        conversion_seconds: Time after capture.
        rules: Whether rules did it ("rule") or a decomposition was needed ("decomposition").
    """

    status: str
    detail: str = ""
    conversion_seconds: float = 0.0
    how: str = "rule"
    seconds: float = field(default=0.0)


def entries() -> dict[str, Any]:
    """Every entry of torch's database by name, variants as ``name.variant``."""
    from torch.testing._internal.common_methods_invocations import op_db

    results: dict[str, Any] = {}
    for op in op_db:
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        assert name not in results, name
        results[name] = op
    return results


def seed(number: int = 0) -> None:
    """Starts every generator of random numbers anew."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def samples(op: Any, dtype: torch.dtype, count: int) -> list[Any]:
    """The first two samples of an entry, and ``count - 2`` spread over the others, the last one among them."""
    seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    if len(every) <= count:
        return every
    if count <= 2:
        return every[:count]
    rest = count - 2
    step = (len(every) - 3) / max(rest - 1, 1)
    places = sorted({len(every) - 1 if rest == 1 else 2 + round(i * step) for i in range(rest)})
    return every[:2] + [every[i] for i in places]


class Sample(torch.nn.Module):
    """An operator with one sample's arguments; its tensors are the inputs, everything else is fixed."""

    def __init__(self, op: Callable[..., Any], arguments: Any) -> None:
        super().__init__()
        self.op = op
        self.leaves, self.spec = _pytree.tree_flatten(arguments)
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.leaves[i].detach().clone() for i in self.places)

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = _pytree.tree_unflatten(leaves, self.spec)
        return self.op(*args, **kwargs)


#: Operators that return indices of equal elements in an order that torch leaves open: name to the position of ``dim`` after
#: the input, and the output that holds the indices. Indices count as equal when they name equal elements.
TIES = {"sort": (0, 1), "argsort": (0, 0), "msort": (0, 1), "topk": (1, 1), "kthvalue": (1, 1), "mode": (0, 1)}


def _tied(name: str, index: int, module: Sample, inputs: Any, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two index tensors name equal elements of the input."""
    if name not in TIES or TIES[name][1] != index or ours.shape != theirs.shape or ours.dtype != torch.int64:
        return False
    (x, *rest), named = _pytree.tree_unflatten(module.leaves, module.spec)
    x = inputs[0]
    place = TIES[name][0]
    dim = named.get("dim", rest[place] if len(rest) > place and isinstance(rest[place], int) else -1)
    if not x.dim():
        return bool((ours == 0).all())
    picks = [i if i.dim() == x.dim() else i.unsqueeze(dim) for i in (ours, theirs)]
    a, b = (x.gather(dim, i) for i in picks)
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def module_of(op: Any, sample: Any) -> Sample:
    """The module for one sample."""
    return Sample(op.op, ((sample.input, *sample.args), sample.kwargs))


def measure(
    op: Any,
    dtype: torch.dtype,
    module: Sample,
    *,
    opset: int | None = None,
    dynamic: bool = False,
    name: str = "",
    target: str | None = DEFAULT_RUNTIME,
) -> Outcome:
    """Exports one sample's module, runs it and compares; never raises. Portable models run by the reference."""
    started = time.perf_counter()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            outcome = _measure(op, dtype, module, opset, dynamic, name, target)
        except Exception as error:  # a defect of the suite: the entry fails, the others go on
            outcome = Outcome("error", f"{type(error).__name__}: {_line(error)}")
    outcome.seconds = time.perf_counter() - started
    return outcome


def _measure(
    op: Any, dtype: torch.dtype, module: Sample, opset: int | None, dynamic: bool, name: str, target: str | None
) -> Outcome:
    inputs = module.inputs()
    try:
        seed()
        expected = module(*copy.deepcopy(inputs))
    except Exception as error:
        return Outcome("eager", _line(error))
    shapes = None
    if dynamic and inputs:
        # forward(*tensors): the shapes of the one variadic parameter.
        shapes = (tuple(dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) for x in inputs),)
    outcome = _exported(module, inputs, expected, dtype, shapes, opset, name, target)
    if outcome.status == "value" and _is_special((*inputs, *_pytree.tree_leaves(expected))):
        ordinary = tuple(_ordinary(x) for x in inputs)
        seed()
        wanted = module(*copy.deepcopy(ordinary))
        plain = _exported(module, ordinary, wanted, dtype, shapes, opset, name, target)
        if plain.status not in GOOD and not _is_special(_pytree.tree_leaves(wanted)):
            return plain
        exact = _exported(module, inputs, expected, dtype, shapes, opset, name, target, exact=True)
        if exact.status not in GOOD:
            return exact
        outcome.status, outcome.detail = "pass-exact", ""
    return outcome


def _is_special(values: Sequence[Any]) -> bool:
    """Whether some value is NaN, infinite, or an integer beyond 2**53."""
    for x in values:
        if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) and not bool(x.isfinite().all()):
            return True
        if isinstance(x, torch.Tensor) and x.dtype == torch.int64 and bool(((x > ORDINARY) | (x < -ORDINARY)).any()):
            return True
    return False


def _ordinary(x: torch.Tensor) -> torch.Tensor:
    """A tensor with ordinary numbers in the place of special ones."""
    if x.is_floating_point():
        return x.nan_to_num(0.5, 3.0, -3.0)
    return x.clamp(-9, 9) if x.dtype == torch.int64 and _is_special([x]) else x


def _exported(
    module: Sample,
    inputs: tuple[torch.Tensor, ...],
    expected: Any,
    dtype: torch.dtype,
    shapes: Any,
    opset: int | None,
    name: str,
    target: str | None,
    exact: bool = False,
) -> Outcome:
    """The outcome of one export and its runs."""
    dynamic = shapes is not None
    try:
        program = onnxplug.to_onnx(
            module,
            inputs,
            dynamic_shapes=shapes,
            opset_version=opset,
            plugins=["reference"],
            target=target,
            exact=exact,
        )
    except CaptureError as error:
        # A failure is ours only where torch.export itself captures the sample.
        try:
            torch.export.export(module, module.inputs(), dynamic_shapes=shapes, strict=False)
        except Exception as torchs:
            return Outcome("capture", _line(torchs))
        return Outcome("convert", _line(error))
    except (MissingRuleError, Unsupported, OpsetError) as error:
        kind = "missing" if isinstance(error, MissingRuleError) else "unsupported"
        return Outcome(kind, _line(error))
    except Exception as error:
        return Outcome("convert", f"{type(error).__name__}: {_line(error)}")
    seconds = program.statistics.conversion_seconds
    kinds = {_kind(node.target) for node in program.exported_program.graph.nodes}
    random_op = "random" if "random" in kinds else "unwritten" if "unwritten" in kinds else ""
    outcome = _compare(program, module, inputs, expected, dtype, name, random_op)
    if dynamic and outcome.status in GOOD:
        second = _other_sizes(program, module, dtype, name, random_op)
        if second is not None:
            outcome = second
    outcome.conversion_seconds = seconds
    outcome.how = _how(program)
    return outcome


@functools.cache
def _builtin() -> Any:
    from onnxplug.plugins.manager import registry_for

    return registry_for(plugins=["reference"])[0]


def _how(program: Any) -> str:
    """``rule`` when every operator of the captured graph has one, else ``decomposition``."""
    targets = {node.target for node in program.exported_program.graph.nodes if node.op == "call_function"}
    names = [str(t._schema.name) for t in targets if isinstance(t, torch._ops.OpOverload)]
    known = _builtin().operators()
    packets = {without_prefix(op).partition(".")[0] for op in known}
    return "rule" if all(name in packets for name in names) else "decomposition"


def _other_sizes(program: Any, module: Sample, dtype: torch.dtype, name: str, random_op: str) -> Outcome | None:
    """The outcome of the exported program at other sizes than the export's; ``None`` when torch accepts no others."""
    exported = program.exported_program
    leaves = list(module.inputs())
    values = [slot.node.meta.get("val") for slot in program.inputs if slot.position is not None]
    if len(values) != len(leaves):
        return None
    sizes = Sizes.of(leaves, values, exported.range_constraints, {})
    for number in (1, 2, 0):
        fresh = generated_inputs(leaves, values, sizes.draw(number), number)
        if all(x.shape == y.shape for x, y in zip(fresh, leaves, strict=True)):
            continue
        try:
            inputs = tuple(valid_inputs(name, fresh))
            seed()
            expected = module(*copy.deepcopy(inputs))
            captured = exported.module()(*copy.deepcopy(inputs))
        except Exception:
            continue  # torch, or the program that it captured, refuses the sizes
        shapes = [
            [x.shape for x in _pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
            for result in (expected, captured)
        ]
        if shapes[0] != shapes[1]:
            return Outcome("capture", "torch.export's own program has another shape at other sizes")
        return _compare(program, module, inputs, expected, dtype, name, random_op)
    return None


def _kind(target: Any) -> str:
    """``random`` for an operator that draws random numbers, ``unwritten`` for one that returns memory nobody wrote."""
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return "random"
    name = getattr(target, "_opname", "").removeprefix("new_")
    return "unwritten" if name.startswith(("empty", "resize")) else ""


def _compare(
    program: Any,
    module: Sample,
    inputs: tuple[torch.Tensor, ...],
    expected: Any,
    dtype: torch.dtype,
    name: str,
    random_op: str,
) -> Outcome:
    wanted = [x for x in _pytree.tree_leaves(expected) if x is not None]
    if not wanted:
        return Outcome("eager", "no tensor comes out")
    try:
        portable = program.model.graph.metadata_props["onnxplug.target"].startswith("portable")
        got = (program.call_reference if portable else program)(*copy.deepcopy(inputs))
    except VerificationError as error:
        return Outcome("run", _line(error))
    except OnnxplugError as error:
        return Outcome("convert", _line(error))
    passed = "pass-reference" if program.runtime == "onnxplug.reference" else "pass"
    results = len(wanted)
    written = _written(program, module, inputs, results)
    if len(got) != results + len(written):
        return Outcome("count", f"{len(got)} outputs, torch has {results} and writes {len(written)} inputs")
    wanted = [*comparable(name, dtype, wanted), *written]
    got = [*comparable(name, dtype, got[:results]), *got[results:]]
    for index, (actual, reference) in enumerate(zip(got, wanted, strict=True)):
        problem = _difference(actual, reference, dtype, name, random_op)
        if problem is not None and problem[0] == "value" and _tied(name, index, module, inputs, actual, reference):
            problem = None
        if problem is not None and problem[0] == "value" and dtype in HALVES:
            # Closer to the truth than torch, which rounds between the steps of a composite operator.
            wide = _in_float(module, inputs)
            if wide is not None and index < len(wide):
                problem = _difference(actual, wide[index], dtype, name, random_op)
                passed = "pass-wide" if problem is None else passed
        if problem is not None:
            return Outcome(problem[0], f"output {index}: {problem[1]}")
    return Outcome(passed)


def _written(program: Any, module: Sample, inputs: tuple[torch.Tensor, ...], results: int) -> list[torch.Tensor]:
    """The new values of the inputs that the operator writes, for each output of the program beyond the results."""
    slots = program.outputs[results:]
    if not slots:
        return []
    positions = {slot.node.name: slot.position for slot in program.inputs} | {
        s.name: s.position for s in program.inputs
    }
    fresh = copy.deepcopy(inputs)
    seed()
    module(*fresh)
    return [fresh[positions[slot.target]] for slot in slots if positions.get(slot.target) is not None]


def _difference(
    actual: torch.Tensor, reference: Any, dtype: torch.dtype, name: str, random_op: str
) -> tuple[str, str] | None:
    if isinstance(reference, torch.Tensor) and random_op:
        real = torch.view_as_real(reference.resolve_conj()) if reference.dtype.is_complex else reference
        if actual.dtype != real.dtype:
            return "dtype", f"{actual.dtype}, torch has {real.dtype}"
        if actual.shape != real.shape:
            return "shape", f"{tuple(actual.shape)}, torch has {tuple(real.shape)}"
        return _distribution(actual, real, name) if random_op == "random" else None
    rtol, atol = tolerance(name, reference.dtype) if isinstance(reference, torch.Tensor) else (None, None)
    comparison = compare(actual, reference, scale=Scale.OPERATOR, rtol=rtol, atol=atol)
    if comparison.equal:
        return None
    return "dtype" if comparison.problem.startswith("is ") else "shape" if comparison.problem else "value", str(
        comparison
    )


def _in_float(module: Sample, inputs: tuple[torch.Tensor, ...]) -> list[Any] | None:
    """torch's results in float from the same half inputs, rounded once; ``None`` where it has none."""
    try:
        dtypes = {x.dtype for x in inputs if x.is_floating_point()}
        result = module(*[x.float() if x.dtype in HALVES else x for x in inputs])
    except Exception:
        return None
    half = next(iter(dtypes & set(HALVES)), None)
    return [
        x.to(half) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 and half is not None else x
        for x in _pytree.tree_leaves(result)
        if x is not None
    ]


def _distribution(actual: torch.Tensor, reference: torch.Tensor, name: str) -> tuple[str, str] | None:
    """The problem of two samples of one distribution whose means are more than five standard errors apart."""
    if any(part in name for part in ("feature", "dropout2d", "dropout3d")):
        # A channel is dropped as a whole: as many draws as channels.
        actual, reference = (x.flatten(2).mean(2) if x.dim() > 2 else x for x in (actual, reference))
    if actual.numel() < 30 or actual.dtype == torch.bool:
        return None
    a, b = actual.double(), reference.double()
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return None
    bound = 5 * max(a.std().item(), b.std().item()) * math.sqrt(2 / a.numel()) + 1e-6
    if abs((a.mean() - b.mean()).item()) > bound:
        return "value", f"mean {a.mean().item():.4g}, torch has {b.mean().item():.4g} (random)"
    return None


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text or type(error).__name__)[:400]


def numbered(op: Any, dtype: torch.dtype, count: int) -> Iterator[tuple[int, Sample]]:
    """The modules of an entry's samples, with their numbers."""
    for index, sample in enumerate(samples(op, dtype, count)):
        yield index, module_of(op, sample)

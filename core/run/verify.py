"""Verification: the exported model against eager PyTorch, at several sizes and values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from onnxplug.capture.signature import InputKind, OutputKind
from onnxplug.errors import OnnxplugError, VerificationError
from onnxplug.run.inputs import clone_leaves, generated_inputs, resized_inputs
from onnxplug.run.session import Runner

if TYPE_CHECKING:
    from onnxplug.program import OnnxProgram

#: Tolerance relative to the largest value of the output, by dtype. Looser than torch.testing's for one operator: a deep
#: network sums in another order at each of its layers, and rounding adds up.
SCALED_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.complex64: 1e-4,
    torch.complex128: 1e-9,
}


@dataclass(frozen=True)
class VerificationCase:
    """One set of inputs that both models ran on.

    Attributes:
        sizes: Size of each dynamic dimension.
        seed: Seed of the generated inputs; ``None`` for the export's own.
        max_abs_difference: Largest difference over all outputs.
        runtime: What ran the model.
    """

    sizes: Mapping[str, int]
    seed: int | None
    max_abs_difference: float
    runtime: str


@dataclass
class VerificationReport:
    """What verification compared.

    Attributes:
        cases: The sets of inputs on which both agree.
        skipped: Sizes that eager PyTorch itself rejects, with its reason.
    """

    cases: list[VerificationCase] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def max_abs_difference(self) -> float:
        """Largest difference over all cases."""
        return max((case.max_abs_difference for case in self.cases), default=0.0)


def verify_program(
    program: OnnxProgram,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seeds: Sequence[int] = (0, 1, 2),
) -> VerificationReport:
    """See :meth:`OnnxProgram.verify`."""
    captured = program.captured
    if captured is None or program.exported_program is None:
        raise VerificationError("the program has no PyTorch model to compare with")
    exported = program.exported_program
    if args is None and kwargs is None:
        args, kwargs = captured.args, captured.kwargs
    if not args and not kwargs and any(s.kind is InputKind.USER for s in program.inputs):
        raise VerificationError(
            "verification needs example inputs, and the ExportedProgram carries none", hint="program.verify(args=…)"
        )
    leaves = program._flatten(args or (), kwargs or {})
    values = [slot.node.meta.get("val") for slot in program.inputs if slot.position is not None]
    reference = captured.reference if captured.reference is not None else exported.module()
    runner = Runner(program.model, program.host)
    names = captured.dim_names
    report = VerificationReport()
    sets: list[tuple[int | None, list[Any], dict[str, int]]] = [(None, leaves, _sizes(leaves, values))]
    for number in seeds:
        fresh, chosen = generated_inputs(leaves, values, exported.range_constraints, number)
        sets.append((number, fresh, chosen))
    spec = exported.call_spec.in_spec
    for seed, inputs, sizes in sets:
        named = {names.get(symbol, symbol): size for symbol, size in sizes.items()}
        case = _compare_case(program, runner, reference, inputs, spec, seed, named, (rtol, atol), report)
        if case is not None:
            report.cases.append(case)
    return report


def _sizes(leaves: Sequence[Any], values: Sequence[Any]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for leaf, value in zip(leaves, values, strict=True):
        if isinstance(leaf, torch.Tensor) and isinstance(value, torch.Tensor):
            for size, wanted in zip(leaf.shape, value.shape, strict=True):
                if isinstance(wanted, torch.SymInt) and wanted.node.expr.is_Symbol:
                    sizes[str(wanted.node.expr)] = int(size)
    return sizes


def _compare_case(
    program: OnnxProgram,
    runner: Runner,
    reference: Callable[..., Any],
    inputs: Sequence[Any],
    spec: Any,
    seed: int | None,
    sizes: Mapping[str, int],
    tolerances: tuple[float | None, float | None],
    report: VerificationReport,
) -> VerificationCase | None:
    eager_leaves = clone_leaves(inputs)
    try:
        expected = _run_eager(program, reference, eager_leaves, spec)
    except Exception as error:
        if seed is None:
            raise VerificationError(f"the PyTorch model does not run on its own inputs: {error}") from error
        report.skipped.append(
            f"{dict(sizes)}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
        return None
    args, kwargs = _pytree.tree_unflatten(clone_leaves(inputs), spec)
    got = runner(program.feed(args, kwargs))
    where = f"at sizes {dict(sizes)}" if sizes else "at the exported sizes"
    where += f", seed {seed}" if seed is not None else ", on the export's inputs"
    worst = 0.0
    for slot, name, actual in zip(program.outputs, runner.output_names, got, strict=True):
        wanted = expected.get(id(slot))
        if wanted is None:
            continue
        worst = max(worst, compare(name, actual, wanted, where, *tolerances))
    return VerificationCase(sizes, seed, worst, runner.runtime)


def _run_eager(
    program: OnnxProgram, reference: Callable[..., Any], leaves: list[Any], spec: Any
) -> dict[int, torch.Tensor]:
    """What PyTorch computes for each output slot, mutated inputs and buffers included."""
    args, kwargs = _pytree.tree_unflatten(leaves, spec)
    model: Any = reference
    if isinstance(reference, torch.nn.Module) and any(s.kind is OutputKind.BUFFER_MUTATION for s in program.outputs):
        model = copy.deepcopy(reference)
    with torch.no_grad():
        result = model(*args, **kwargs)
    returned = _pytree.tree_leaves(result)
    expected: dict[int, torch.Tensor] = {}
    users = [slot for slot in program._slots if slot.kind is OutputKind.USER]
    if len(returned) != len(users):
        raise OnnxplugError(f"PyTorch returns {len(returned)} results where the exported program has {len(users)}")
    for slot, value in zip(users, returned, strict=True):
        if value is not None and slot.value is not None:
            expected[id(slot)] = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    by_name = {slot.name: slot for slot in program.inputs}
    state = dict(model.named_buffers()) if isinstance(model, torch.nn.Module) else {}
    for slot in program.outputs:
        if slot.kind is OutputKind.INPUT_MUTATION and slot.target in by_name:
            position = by_name[slot.target].position
            if position is not None:
                expected[id(slot)] = leaves[position]
        elif slot.kind is OutputKind.BUFFER_MUTATION and slot.target in state:
            expected[id(slot)] = state[slot.target]
    return expected


def verify_file(
    path: str,
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    host: Any = None,
) -> VerificationReport:
    """Compares an ONNX file with a PyTorch model that is run eagerly; nothing is captured.

    Args:
        path: The file.
        model: A module, function or ExportedProgram.
        args, kwargs: Example inputs; an ExportedProgram's own when there are none.
        dynamic: Input name to axis to the name of its dimension; other sizes are tried along these.
        seeds: One set of generated inputs a seed.
        host: The plugins whose libraries and kernels run custom operators; all that are installed when ``None``.

    Raises:
        PluginError: A plugin's library is missing or does not load.
        VerificationError: An output differs, the number of inputs or outputs does, or the file does not run.
    """
    if isinstance(model, torch.export.ExportedProgram):
        if not args and not kwargs and model.example_inputs is not None:
            args, kwargs = model.example_inputs
        model = model.module()
    elif isinstance(model, torch.nn.Module):
        model.eval()
    runner = Runner(path, host)
    leaves, spec = _pytree.tree_flatten((tuple(args), dict(kwargs)))
    fed = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len(fed) != len(runner.input_names):
        raise VerificationError(
            f"the model takes {len(runner.input_names)} inputs ({', '.join(runner.input_names)}), the target gives "
            f"{len(fed)} tensors",
            hint="Give its inputs with --input.",
        )
    order = _input_order(runner.input_names, fed, args, kwargs)
    axes = {order[name]: dict(named) for name, named in (dynamic or {}).items() if name in order}
    unknown = [name for name in dynamic or {} if name not in order]
    if unknown:
        raise VerificationError(f"the model has no input {unknown[0]!r}; it has {', '.join(runner.input_names)}")
    report = VerificationReport()
    for seed in (None, *seeds):
        inputs, sizes = (list(leaves), {}) if seed is None else resized_inputs(leaves, axes, seed)
        where = f"sizes {sizes}, seed {seed}" if seed is not None else "the given inputs"
        try:
            with torch.no_grad():
                a, k = _pytree.tree_unflatten(clone_leaves(inputs), spec)
                expected = [x for x in _pytree.tree_leaves(model(*a, **k)) if isinstance(x, torch.Tensor)]
        except Exception as error:
            if seed is None:
                raise VerificationError(f"the PyTorch model does not run: {error}") from error
            report.skipped.append(f"{sizes}: {type(error).__name__}: {error}")
            continue
        got = runner({name: inputs[position] for name, position in order.items()})
        if len(got) < len(expected):
            raise VerificationError(f"the model has {len(got)} outputs, PyTorch {len(expected)}")
        worst = [compare(n, x, y, where) for n, x, y in zip(runner.output_names, got, expected, strict=False)]
        report.cases.append(VerificationCase(sizes, seed, max(worst, default=0.0), runner.runtime))
    return report


def _input_order(
    names: Sequence[str], fed: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, int]:
    """ONNX input name to the leaf that goes there: keywords by name where every name is an input's, else by position."""
    if not args and set(kwargs) == set(names):
        position = {name: index for index, name in enumerate(kwargs)}
        return {name: position[name] for name in names}
    return dict(zip(names, fed, strict=True))


def compare(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    where: str = "",
    rtol: float | None = None,
    atol: float | None = None,
) -> float:
    """Holds one output against PyTorch's.

    Returns:
        The largest absolute difference.

    Raises:
        VerificationError: Dtype, shape or a value differs; the message names the output, the index and both values.
    """
    expected = expected.detach().cpu()
    if expected.is_complex() and not actual.is_complex():
        expected = torch.view_as_real(expected.resolve_conj())
    is_number = expected.dim() == 0 and expected.dtype in (torch.int64, torch.float32, torch.bool)
    if actual.dtype != expected.dtype and not is_number:
        raise VerificationError(f"output {name!r} is {actual.dtype}, PyTorch has {expected.dtype} ({where})")
    if actual.shape != expected.shape:
        raise VerificationError(
            f"output {name!r} has the shape {list(actual.shape)}, PyTorch {list(expected.shape)} ({where})"
        )
    if not actual.numel():
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    ours, theirs = actual.to(wide), expected.to(wide)
    exact = not (expected.is_floating_point() or expected.is_complex())
    same = (actual == expected.to(actual.dtype)) if exact else (ours == theirs) | (ours.isnan() & theirs.isnan())
    difference = torch.where(same, torch.zeros((), dtype=wide), ours - theirs).abs()
    finite = theirs[theirs.isfinite()]
    scaled = SCALED_TOLERANCE.get(expected.dtype, 0.0)
    relative = rtol if rtol is not None else scaled
    absolute = atol if atol is not None else scaled * (float(finite.abs().max()) if finite.numel() else 1.0)
    if rtol is None and atol is None:
        absolute, relative = max(absolute, scaled * 1e-3), 0.0
    allowed = absolute + relative * theirs.abs()
    # Integers beyond 2**53 differ by less than a double can tell: they are equal or they aren't.
    # An infinity allows nothing but itself, however large a share of it the tolerance is.
    bad = ~same if exact and atol is None else ~(same | (theirs.isfinite() & (difference <= allowed)))
    if bool(bad.any()):
        score = torch.where(bad, torch.nan_to_num(difference, nan=float("inf")), torch.full((), -1.0).to(difference))
        index = [int(i) for i in torch.unravel_index(score.argmax(), score.shape)] if score.dim() else []
        raise VerificationError(
            f"output {name!r} differs at index {index}: ONNX has {actual[tuple(index)].item()!r}, PyTorch "
            f"{expected[tuple(index)].item()!r}; {int(bad.sum())} of {bad.numel()} elements differ by more than the "
            f"tolerance ({where})",
            hint="optimize=False tells whether a rewrite or a rule is wrong; please report it.",
        )
    finite_difference = difference[difference.isfinite()]
    return float(finite_difference.max()) if finite_difference.numel() else 0.0

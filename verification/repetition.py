"""A second run of a model with the choices of the first: the results then differ only by rounding.

An operator chooses where it makes indices, masks, integers or Python numbers of floating-point operands, and where its result
jumps: ``sign``, ``floor``, ``hardshrink``. No table lists the operators that jump. Instead they are also run on operands between
those of both runs, in float64; a result that changes all at once on the way jumps, and a result that changes gradually does not:

    hardshrink, from 0.49999997 to 0.50000003:   0, 0, …, 0, 0.50000002, …    one of 16 steps has nearly the whole change
    x - y, from 1e-7 to 3e-7:                    1e-7, 1.1e-7, 1.2e-7, …      each has a sixteenth

A result that is a polynomial of its operands, of the second degree at most, can't jump: two of 16 steps have less than a third of
its change. Nor can a result that moves at most twice as far as its operands, without a limit on both sides: a steep ``tanh`` is a
step. Neither is examined (:data:`STEADY`), nor are the operands kept: such operators take most of a network's time and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from onnxplug.torch_private import HigherOrderOperator, TorchDispatchMode, pytree
from onnxplug.verification import spectra
from onnxplug.verification.kernels import are_apart

#: Changes of at most this number of units of a result's own rounding are not examined.
_UNITS = 4
#: The places on the way between both operands, 0 and 1, where results are computed. The distances differ a little, so that no place
#: hits a step in the exact middle.
_PLACES = [(part / 16) ** 1.1 for part in range(17)]
#: How far the middle may be from a straight line, as a share of the whole change, without examining the other places.
_BEND = 0.1
#: The share of the whole change that two of the parts have where a result jumps. Two: both sides of a pole are far apart.
_SHARE = 0.55

#: Operators whose results can't jump, with the indices and masks of the first run, where all operands are finite: polynomials of
#: degree 2 at most in the floating-point operands, and real functions that move at most twice as far and have no two limits.
STEADY = frozenset(
    f"aten::{name}"
    for name in (
        "convolution _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
        "mm bmm mv dot matmul linear addmm addmv addbmm baddbmm addr outer ger "
        "add sub rsub mul neg add_ sub_ mul_ neg_ addcmul sum mean cat stack clone constant_pad_nd "
        "avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_nearest2d upsample_bilinear2d "
        "index gather index_select embedding masked_fill where repeat roll flip "
        "relu relu_ clamp_min clamp_min_ abs maximum minimum amax amin max_pool2d_with_indices max_pool3d_with_indices "
        "silu silu_ gelu mish hardswish _log_softmax"
    ).split()
)

WIDE = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    torch.complex64: torch.complex128,
}


def _as_it_is(func: Any, operands: Any, result: Any) -> Any:
    return result


class Repetition(TorchDispatchMode):
    """Records the operands and choices of a run's operators, and makes other runs choose the same.

    Of a steady operator the sums and norms of its operands are kept instead of them. If moved operands happen to have the same, the
    operator counts as an operator on constants, and its result is moved by one more unit of rounding.

    Attributes:
        jumped: Whether a result of another run has jumped; whoever reads it sets it back.
        kernels: Whether the first run had operators whose kernels are apart.

    Raises:
        ValueError: Another run does not call the same operators, or has infinities where the first has none.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.jumped = self.kernels = False
        self._kept: list[tuple[Any, Any, list[Any], bool]] = []
        self._left: Iterator[tuple[Any, Any, list[Any], bool]] | None = None
        self._move: Callable[..., torch.Tensor] | None = None
        self._each = False
        self._apart: Callable[[Any, Any, Any], Any] = _as_it_is

    def again(
        self,
        move: Callable[..., torch.Tensor] | None = None,
        each: bool = False,
        apart: Callable[[Any, Any, Any], Any] | None = None,
    ) -> Repetition:
        """For ``with``: the choices of the first run hold.

        Args:
            move: Moves what the model makes of constants alone, as if it were a weight, and the results of conversions, by a unit
                of rounding of the type that is its argument ``precision``.
            each: Move the result of each operator.
            apart: Moves an operator's result, given the operator and its operands, by what its kernels may differ.
        """
        self._left, self._move, self._each, self._apart = iter(self._kept), move, each, apart or _as_it_is
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # its kernel takes no mode, the operators that it calls are examined
            return func(*map(self._inside, args), **{name: self._inside(x) for name, x in named.items()})
        if func.is_view or not any(map(is_real, pytree.tree_leaves((args, named)))):
            made = func(*args, **named)
            return made if func.is_view or self._left is None else pytree.tree_map(self._moved, made)
        # What a model writes later would be written in a record too; operands of the other runs are read here alone.
        operands = _cloned((args, named)) if self._left is None or func._schema.is_mutable else (args, named)
        leaves, spec = pytree.tree_flatten(func(*args, **named))
        if self._left is None:
            self.kernels |= are_apart(func)
            measures = _measures(operands) if func._schema.name in STEADY else None
            kept = operands if measures is None else measures
            self._kept.append((func, kept, [None if is_real(x) else _cloned(x) for x in leaves], measures is not None))
            return pytree.tree_unflatten(leaves, spec)
        known: Any
        known, before, chosen, steady = next(self._left, (None, None, [], False))
        if known is not func or [_kind(x) for x in chosen] != [None if is_real(x) else _kind(x) for x in leaves]:
            raise ValueError(f"another run of the model calls {func} where the first did not")
        first: list[Any] = [None] * len(leaves)
        masks: list[Any] = [None] * len(leaves)
        if str(func) in spectra.OPERATORS:
            leaves = _arranged(func, leaves, _call(func, before))
        compared = _measures(operands) if steady else operands
        if compared is None:
            raise ValueError(f"an operand of {func} overflows in another run of the model")
        if not steady:
            first, masks = jumps(func, before, operands, leaves)
        rounding = _rounding(operands, leaves) if self._move is not None else None
        is_moved = rounding is not None or (self._move is not None and (self._each or _is_same(before, compared)))
        for i, mask in enumerate(masks):
            if not is_real(leaves[i]):
                x = _cloned(chosen[i])
            elif mask is None:  # nothing jumps
                x = leaves[i]
            else:
                self.jumped |= bool(mask.any())
                x = torch.where(mask, first[i], leaves[i])
            x = self._apart(func, operands, self._moved(x, rounding) if is_moved else x)
            if func._schema.is_mutable and isinstance(x, torch.Tensor):
                leaves[i].copy_(x)
            else:
                leaves[i] = _laid_out(x, leaves[i])
        return pytree.tree_unflatten(leaves, spec)

    def _moved(self, made: Any, rounding: torch.dtype | None = None) -> Any:
        """A result, moved where it is no integer: integers are exact, and a mask is made of them."""
        if self._move is None or not is_real(made):
            return made
        moved = self._move(made) if rounding is None else self._move(made, precision=rounding)
        return _laid_out(
            torch.where((made.real if made.is_complex() else made).double().frac() == 0, made, moved), made
        )

    def _inside(self, called: Any) -> Any:
        """A function of an operator, called with this mode."""
        if not callable(called) or isinstance(called, torch.Tensor):
            return called

        def repeated(*args: Any, **kwargs: Any) -> Any:
            with self:
                return called(*args, **kwargs)

        return repeated


def _laid_out(x: Any, made: Any) -> Any:
    """With the strides of an operator's own result: on them it depends which operators PyTorch calls next."""
    if not isinstance(x, torch.Tensor) or x.shape != made.shape or x.stride() == made.stride():
        return x
    return torch.empty_strided(made.shape, made.stride(), dtype=x.dtype, device=x.device).copy_(x)


def jumps(func: Any, before: Any, after: Any, results: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor | None]]:
    """Where an operator's results jump on the way from some operands to others.

    Args:
        func: An operator.
        before, after: Its positional and keyword operands, two times.
        results: Its results for the latter.

    Returns:
        The results for the former, and masks of the elements that jump; ``None`` for a result that is not real.
    """
    first = _call(func, before)
    suspects = [
        beyond_rounding(x, y) if is_real(y) and x.shape == y.shape else None
        for x, y in zip(first, results, strict=True)
    ]
    for places, jump in (((0.0, _PLACES[8], 1.0), _is_bent), (_PLACES, _is_sudden)):
        if not any(s is not None and bool(s.any()) for s in suspects):
            break
        try:
            start = _call(func, _between(before, after, places[0]))
            points = [_suspected(start, suspects)]
            for place in places[1:]:
                point = _arranged(func, _call(func, _between(before, after, place)), start)
                points.append(_suspected(point, suspects))
            suspects = [
                None if s is None else torch.zeros_like(s).masked_scatter(s, jump([x[i] for x in points]))
                for i, s in enumerate(suspects)
            ]
        except Exception:  # no kernel for float64: nothing is known of it, and a jump excuses nothing
            break
    return first, suspects


def _suspected(results: Sequence[Any], suspects: Sequence[torch.Tensor | None]) -> list[Any]:
    """The elements of results that may have jumped: 17 times all of them are too much memory."""
    return [None if mask is None else x[mask] for x, mask in zip(results, suspects, strict=True)]


def _measures(operands: Any) -> list[torch.Tensor] | None:
    """Each floating-point operand's sum and sum of squares; ``None`` where an operand is complex or of 8 bits, or not finite."""
    numbers = [x for x in pytree.tree_leaves(operands) if is_real(x)]
    if any(x.is_complex() or x.element_size() == 1 for x in numbers):
        return None
    wide = (x.to(torch.float64).flatten() for x in numbers)  # reductions that widen as they go take three times as long
    measures = [measure for x in wide for measure in (x.sum(), x.dot(x))]
    return measures if all(bool(x.isfinite()) for x in measures) else None


def _arranged(func: Any, results: list[Any], first: Sequence[Any]) -> list[Any]:
    """The results of an operator in the order and with the phases that they have in ``first``: the first run's choice."""
    name = str(func)
    if name not in spectra.OPERATORS:
        return results
    arranged = spectra.taken(name, tuple(results) if len(results) > 1 else results[0], first)
    if arranged is None:
        return results
    return list(arranged) if isinstance(arranged, tuple) else [arranged]


def _is_same(before: Any, after: Any) -> bool:
    pairs = zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=True)
    return all(torch.equal(x, y) for x, y in pairs if is_real(x))


def _rounding(operands: Any, results: Sequence[Any]) -> torch.dtype | None:
    """The type with fewer digits, where an operator converts floating-point numbers from a type to another.

    What comes from such a type, or goes into it, is rounded, as under ``torch.autocast``, and a model's inputs and weights in
    float32 don't tell. Types of 8 bits have steps too large for uncertainty: they are quanta.
    """
    before, after = (
        {torch.finfo(x.dtype).eps: x.dtype for x in pytree.tree_leaves(values) if is_real(x)}
        for values in (operands, results)
    )
    if len(before) != 1 or len(after) != 1 or before.keys() == after.keys():
        return None
    coarse = max((before | after).items())[1]
    return coarse if torch.finfo(coarse).bits > 8 else None


def beyond_rounding(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Which elements differ by more than some units of rounding; numbers that are none do."""
    near = (x - y).abs() <= _UNITS * torch.finfo(x.dtype).eps * x.abs().minimum(y.abs())
    return ~(near | (x == y))


def _is_bent(points: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether the middle of three results is far from the straight line between the others, element by element."""
    start, middle, end = points
    straight = start + (end - start) * _PLACES[8]
    return ~(end.isfinite() & ((middle - straight).abs() <= _BEND * (end - start).abs()))


def _is_sudden(points: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether most of each element's change lies in two of the steps along a row of results, or it ends where it is no number."""
    differences = torch.stack([(x - y).abs() for x, y in pairwise(points)])
    changes = torch.nan_to_num(differences, posinf=torch.finfo(differences.dtype).max / len(points))
    ends = points[0].isnan() != points[-1].isnan()
    return ends | (changes.topk(2, dim=0)[0].sum(0) > _SHARE * changes.sum(0))


def _between(before: Any, after: Any, place: float) -> Any:
    """Operands on the way from one run's to another run's, in float64."""

    def between(x: Any, y: Any) -> Any:
        if isinstance(x, torch.dtype):
            return WIDE.get(x, x)
        if not is_real(x):
            return _cloned(x)
        wide = torch.complex128 if x.is_complex() else torch.float64
        start, end = x.to(wide), y.to(wide)
        if place == 1:
            return end
        return torch.where(start == end, start, start + (end - start) * place)  # infinities have no way between them

    return pytree.tree_map(between, before, after)


def _call(func: Any, operands: Any) -> list[Any]:
    args, kwargs = _cloned(operands)
    return list(pytree.tree_leaves(func(*args, **kwargs)))


def _cloned(operands: Any) -> Any:
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, operands)


def is_real(value: Any) -> bool:
    """Whether a value is a tensor of floating-point or complex numbers."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _kind(value: Any) -> Any:
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value) if value is not None else None

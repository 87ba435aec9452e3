"""``associative_scan`` as few operators that fit all sizes, while a model is captured.

torch's own algorithm makes a dynamic number of elements a constant, and any other dynamic size too where a scan is over
several tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from onnxplug.capture.patching import patched
from onnxplug.plugin_api import Mentions
from onnxplug.torch_private import associative_scans, pytree, scan

Tensors = list[torch.Tensor]
Combine = Callable[[Tensors, Tensors], Tensors]


@contextlib.contextmanager
def associative_scans_of_any_size(mentions: Mentions) -> Iterator[None]:
    """While it holds, ``associative_scan`` of a model that has one is traced by the functions here."""
    if not hasattr(associative_scans, "generic_associative_scan") or not mentions(
        lambda name: name == "associative_scan"
    ):
        yield
        return
    with patched(associative_scans, "generic_associative_scan", _scan):
        yield


def _scan(
    operator: Callable[..., Any], leaves: Sequence[torch.Tensor], dim: int = 0, additional_inputs: Sequence[Any] = ()
) -> Tensors:
    """The inclusive scan of tensors along an axis, of one or more elements.

    Args:
        operator: Combines two lists of tensors, one after the other, with any number of elements each.
        leaves: The tensors.
        dim: The axis.
        additional_inputs: Additional arguments of ``operator``.
    """

    def combine(first: Tensors, second: Tensors) -> Tensors:
        moved = [t.movedim(0, dim) for t in (*first, *second)]
        return [t.movedim(dim, 0) for t in pytree.tree_leaves(operator(*moved, *additional_inputs))]

    elements = [leaf.movedim(dim, 0) for leaf in leaves]
    if isinstance(elements[0].shape[0], int):
        results = _unrolled(elements, combine)
    else:
        results = _in_turn(elements, _of_single_elements(operator) or _with_axis(combine))
    return [result.movedim(0, dim) for result in results]


def _unrolled(elements: Tensors, combine: Combine) -> Tensors:
    """For a static number of elements: combines neighbours, scans the pairs, and computes the elements between from the results.

    The work is linear in the number of elements and the depth logarithmic (R. E. Ladner and M. J. Fischer, Parallel prefix
    computation, 1980).
    """
    count = elements[0].shape[0]
    if count < 2:
        return list(elements)
    pairs, between = count // 2, (count - 1) // 2
    firsts = [e[: 2 * pairs : 2] for e in elements]
    seconds = [e[1::2] for e in elements]
    odd = _unrolled(combine(firsts, seconds), combine)
    even = [e[:1] for e in elements]
    if between:
        combined = combine([o[:between] for o in odd], [e[2::2] for e in elements])
        even = [torch.cat(parts) for parts in zip(even, combined, strict=True)]
    results = [torch.stack([e[:pairs], o], 1).flatten(0, 1) for e, o in zip(even, odd, strict=True)]
    if count > 2 * pairs:
        results = [torch.cat([result, e[pairs:]]) for result, e in zip(results, even, strict=True)]
    return results


def _of_single_elements(operator: Any) -> Combine | None:
    """The user's function of single elements, which torch.vmap has batched; ``None`` where it can't be recovered.

    The graph of a scan's step can't be traced through torch.vmap.
    """
    keywords = getattr(operator, "keywords", {})
    mapped: Any = keywords.get("combine_fn")
    spec, code = keywords.get("spec"), getattr(mapped, "__code__", None)
    if spec is None or code is None or "func" not in code.co_freevars:
        return None
    function = mapped.__closure__[code.co_freevars.index("func")].cell_contents

    def combine(first: Tensors, second: Tensors) -> Tensors:
        result = function(pytree.tree_unflatten(list(first), spec), pytree.tree_unflatten(list(second), spec))
        return list(pytree.tree_leaves(result))

    return combine


def _with_axis(combine: Combine) -> Combine:
    def of_single(first: Tensors, second: Tensors) -> Tensors:
        return [t.squeeze(0) for t in combine([t.unsqueeze(0) for t in first], [t.unsqueeze(0) for t in second])]

    return of_single


def _in_turn(elements: Tensors, combine: Combine) -> Tensors:
    """For a dynamic number of elements, one element at a time: ONNX's Scan."""

    def step(carry: Tensors, new: Tensors) -> tuple[Tensors, Tensors]:
        is_first, *sofar = carry
        combined = combine(list(sofar), list(new))
        # There is no element before the first: its result of the operator is replaced by the element itself.
        results = [torch.where(is_first, t, c) for t, c in zip(new, combined, strict=True)]
        return [torch.zeros_like(is_first), *results], [result.clone() for result in results]

    start = [torch.ones((), dtype=torch.bool), *(e.select(0, 0).clone() for e in elements)]
    _, results = scan(step, start, elements, dim=0)
    return list(results)

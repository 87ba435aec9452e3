"""Parameters, buffers and constants in the same memory, one of which the model writes.

torch.export makes a placeholder of each: a buffer, a slice of it that the model keeps in an attribute, the same tensor in a list. A
write to the buffer would not reach the others. All are views of the tensor that has the whole memory::

    b = placeholder, v = placeholder                b = placeholder
    add_(b, 1)                                      v = as_strided(b, (2,), (1,), 0)
    return mul(x, v)                                add_(b, 1)
                                                    return mul(x, v)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from onnxplug.errors import CaptureError
from onnxplug.torch_private import is_alias_of


def shared_with(
    written: Iterable[torch.fx.Node], tensors: Mapping[torch.fx.Node, torch.Tensor]
) -> list[list[torch.fx.Node]]:
    """The placeholders that share memory with a written placeholder.

    Args:
        written: The placeholders that are written.
        tensors: Placeholders that are read or written, with their tensors.

    Returns:
        Lists of placeholders in the same memory, each of two at least.
    """
    groups: list[list[torch.fx.Node]] = []
    grouped: set[torch.fx.Node] = set()
    for node in written:
        if node in tensors and node not in grouped:
            group = [other for other, tensor in tensors.items() if is_alias_of(tensors[node], tensor)]
            grouped.update(group)
            groups += [group] if len(group) > 1 else []
    return groups


def with_views(
    graph: torch.fx.Graph, groups: Iterable[list[torch.fx.Node]], tensors: Mapping[torch.fx.Node, torch.Tensor]
) -> tuple[torch.fx.Graph, dict[torch.fx.Node, torch.fx.Node]]:
    """A copy of a graph in which the placeholders of a group are views of one of them.

    Returns:
        The copy, and its nodes by the nodes of ``graph``.

    Raises:
        CaptureError: No placeholder of a group has all the memory of the others.
    """
    copy, nodes = torch.fx.Graph(owning_module=graph.owning_module), dict[torch.fx.Node, torch.fx.Node]()
    copy.output(copy.graph_copy(graph, nodes))
    copy._codegen = graph._codegen
    first = next(node for node in copy.nodes if node.op != "placeholder")
    for group in groups:
        base = next((node for node in group if all(_covers(tensors[node], tensors[other]) for other in group)), None)
        if base is None:
            raise refusal(group)
        start = tensors[base].storage_offset() - base.meta["val"].storage_offset()
        for node in group:
            if node is not base:
                tensor, place = tensors[node], (list(tensors[node].shape), list(tensors[node].stride()))
                with copy.inserting_before(first):
                    view = copy.call_function(
                        torch.ops.aten.as_strided.default, (nodes[base], *place, tensor.storage_offset() - start)
                    )
                view.meta = dict(node.meta)
                nodes[node].replace_all_uses_with(view)
    return copy, nodes


def _covers(base: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a tensor fills a range of the memory, all of ``view`` is in it, and its elements have the same meaning."""
    if base.dtype != view.dtype or base.is_conj() != view.is_conj() or base.is_neg() != view.is_neg():
        return False
    (start, end), (first, last) = _range(base), _range(view)
    return end - start == base.numel() and start <= first and last <= end


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The index of a tensor's first element in its memory, and the index behind its last."""
    first = int(tensor.storage_offset())
    return first, first + sum(step * (n - 1) for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def refusal(group: Iterable[torch.fx.Node]) -> CaptureError:
    """The error for placeholders whose memory is shared in a way that a graph can't express."""
    names = ", ".join(repr(node.name.partition("_")[2]) for node in group)
    return CaptureError(
        f"the model writes a tensor that shares its memory with others: {names}",
        hint="Take views in forward (self.buffer[:2]) instead of keeping them, or keep copies (.clone()).",
    )

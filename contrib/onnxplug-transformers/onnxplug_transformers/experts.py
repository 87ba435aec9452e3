"""Mixtures of experts: tokens sorted by expert, then one product a group. Experts that are modules: each on its own tokens."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe

from onnxplug.capture.patching import patched

#: Ways of computing experts that torch.export doesn't capture, besides the eager one.
_KERNELS_OF_GPUS = frozenset({"deepgemm", "sonicmoe"})


@contextlib.contextmanager
def exportable_experts() -> Iterator[None]:
    """Holds while a model is captured: experts are computed by ``grouped_mm`` where the model's own way can't be captured.

    The eager way is a loop over the experts that were chosen, whose number depends on the data. Five models have such a loop
    beside transformers' interface.
    """
    interface = moe.ALL_EXPERTS_FUNCTIONS
    choose = interface.get_interface

    def exportable(implementation: Any, default: Any) -> Any:
        chosen = choose(implementation, default)
        plain = chosen is not default and implementation not in _KERNELS_OF_GPUS
        return chosen if plain else moe.grouped_mm_experts_forward

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(interface, "get_interface", exportable))
        for place, forward in _FORWARDS.items():
            module, _, name = place.partition(":")
            owner = vars(sys.modules.get(f"transformers.models.{module}", sys)).get(name)
            if owner is not None:
                stack.enter_context(patched(owner, "forward", forward))
        yield


def _grouped(
    hidden: Tensor, index: Tensor, weights: Tensor, count: int, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The weighted sum of the experts' results for the tokens.

    Args:
        hidden: [tokens, H]
        index: [tokens, K], the experts of each token; an expert of ``count`` or more leaves the token as it is.
        weights: [tokens, K]
        compute: Computes [tokens * K, H] from rows of this shape, sorted by expert, and the ends of each expert's rows,
            int32 [count].
    """
    expert, order = index.reshape(-1).sort(stable=True)
    ends = (expert.unsqueeze(-1) <= torch.arange(count, device=expert.device)).sum(0, dtype=torch.int32)
    rows = hidden[order // index.shape[-1]]
    results = torch.where((expert < count).unsqueeze(-1), compute(rows, ends), rows)
    results = (results * weights.reshape(-1)[order].unsqueeze(-1))[order.argsort()]
    return results.unflatten(0, index.shape).sum(1).to(hidden.dtype)


def _product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows by its matrix, [experts, H, F], as an operator of transformers that is captured in every dtype."""
    product: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, matrices, offs=ends)
    return product


def _dbrx(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """DBRX, whose experts' weights are rows of three matrices: [experts * F, H]."""
    gate, up, down = (w.unflatten(0, (self.num_experts, -1)) for w in (self.mlp.w1, self.mlp.v1, self.mlp.w2))

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        gates, ups = (_product(rows, w.mT, ends) for w in (gate, up))
        return _product(self.mlp.activation_fn(gates) * ups, down, ends)

    tokens = hidden_states.reshape(-1, self.hidden_size)
    return _grouped(tokens, top_k_index, top_k_weights, self.num_experts, compute).view_as(hidden_states)


def _longcat(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """LongCat-Flash, whose last experts do nothing."""
    count = self.num_routed_experts

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        if not count:
            return rows
        gates, ups = _product(rows, self.gate_up_proj[:count].mT, ends).chunk(2, dim=-1)
        return _product(self.act_fn(gates) * ups, self.down_proj.mT, ends)

    return _grouped(hidden_states, top_k_index, top_k_weights, count, compute)


def _step(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Step 3.7, which leaves out a token's expert that is beyond the last."""

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        gates_and_ups = _product(rows, self.gate_up_proj.mT, ends)
        return _product(self._apply_gate(gates_and_ups), self.down_proj.mT, ends)

    weights = top_k_weights.where(top_k_index < self.num_experts, 0)
    return _grouped(hidden_states, top_k_index, weights, self.num_experts, compute)


def _switch(self: Any, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
    """Switch Transformers: ``selected_experts``, [tokens, 1, experts], is 1 for a token's expert, if it has any."""
    return _in_turn(self, hidden_states, lambda number: selected_experts[..., number] == 1, routing_weights)


def _nllb(self: Any, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
    """NLLB: ``router_mask`` is compared with numbers of experts, [tokens, K], as in transformers."""
    kept = 1.0 if self.training else 1.0 - self.moe_token_dropout
    return _in_turn(self, hidden_states, lambda number: router_mask == number, router_probs * kept)


def _in_turn(experts: Any, hidden: Tensor, chosen: Callable[[int], Tensor], weights: Tensor) -> Tensor:
    """Each expert's module on the tokens that chose it, however few: groups would need copies of all weights."""
    result = torch.zeros_like(hidden)
    for number in range(experts.num_experts):
        tokens, choice = chosen(number).nonzero().unbind(1)
        rows = experts[f"expert_{number}"](hidden[tokens]) * weights[tokens, choice].unsqueeze(-1)
        result = result.index_add(0, tokens, rows.to(hidden.dtype))
    return result


#: Experts with a loop of their own: their module behind ``transformers.models``, their class, and its ``forward`` here.
_FORWARDS: dict[str, Callable[..., Tensor]] = {
    "dbrx.modeling_dbrx:DbrxExperts": _dbrx,
    "longcat_flash.modeling_longcat_flash:LongcatFlashExperts": _longcat,
    "step3p7.modeling_step3p7:Step3p7Experts": _step,
    "switch_transformers.modeling_switch_transformers:SwitchTransformersExperts": _switch,
    "nllb_moe.modeling_nllb_moe:NllbMoeExperts": _nllb,
}

"""SLANet's and SLANeXt's structure of a table while a model is captured: tokens until each row of the batch has ended.

transformers appends each step's result to a list and leaves the loop by the tokens' values. Here the loop is a ``while_loop`` of
torch, a Loop in ONNX, which keeps the result of every step: as many as there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from onnxplug.capture.patching import patched
from onnxplug.torch_private import while_loop_stack_output
from onnxplug_transformers.exchanged import in_use, modeling_of


@contextlib.contextmanager
def tables_of_any_length() -> Iterator[None]:
    """Holds while a model is captured."""
    with contextlib.ExitStack() as stack:
        for name in ("SLANetSLAHead.forward", "SLANeXtSLAHead.forward"):
            for owner, attribute, before in in_use(name):
                stack.enter_context(patched(owner, attribute, _forward(before)))
        yield


def _forward(before: Any) -> Any:
    def forward(self: Any, hidden_states: Tensor, targets: Tensor | None = None, **kwargs: Any) -> Any:
        """The probabilities of the tokens, [batch, steps, tokens]."""
        asked = ("output_hidden_states", "output_attentions")
        if any(kwargs.get(name) or getattr(self.config, name, False) for name in asked):
            return before(self, hidden_states, targets, **kwargs)  # a list with an element for each step
        scores = _steps(_Step(self), self.config, hidden_states.float())
        probabilities = functional.softmax(scores.transpose(0, 1), dim=-1, dtype=torch.float32)
        return modeling_of(self).BaseModelOutput(last_hidden_state=probabilities.to(hidden_states.dtype))

    return forward


class _Step(nn.Module):
    """One step of the head of SLANet."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.cell, self.generator, self.count = (
            head.structure_attention_cell,
            head.structure_generator,
            head.config.out_channels,
        )

    def forward(self, number: Tensor, ended: Tensor, features: Tensor, tokens: Tensor, hidden: Tensor) -> Any:
        """The arguments of the next step but ``hidden``, and the scores, [batch, tokens].

        Args:
            number: The number of steps before this one, a scalar.
            ended: bool [batch], the rows that have had the last token.
            features: [batch, width].
            tokens: int64 [batch], of the step before.
            hidden: The image, [batch, places, channels].
        """
        known = functional.one_hot(tokens, self.count).float()
        features, _ = self.cell(features, hidden, known)
        scores = self.generator(features)
        tokens = scores.argmax(dim=1)
        return number + 1, ended | (tokens == self.count - 1), features, tokens, scores


def _steps(step: _Step, config: Any, hidden: Tensor) -> Tensor:
    """The scores of all steps, [steps, batch, tokens]."""
    weights = {**dict(step.named_parameters()), **dict(step.named_buffers())}
    batch = hidden.shape[0]

    def goes_on(number: Tensor, going: Tensor, *_: Tensor) -> Tensor:
        return going.clone()

    def once(number: Tensor, going: Tensor, ended: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        features, tokens, _, hidden, *values = operands
        arguments = (number, ended, features, tokens, hidden)
        number, ended, *rest = functional_call(step, dict(zip(weights, values, strict=True)), arguments)
        going = (number <= config.max_text_length) & ~ended.all()
        return number, going, ended, *rest

    first = (
        torch.zeros((), dtype=torch.int64, device=hidden.device),
        torch.ones((), dtype=torch.bool, device=hidden.device),
        torch.zeros(batch, dtype=torch.bool, device=hidden.device),
        torch.zeros(batch, config.hidden_size, device=hidden.device),
        torch.zeros(batch, dtype=torch.int64, device=hidden.device),
        torch.zeros(batch, config.out_channels, device=hidden.device),
    )
    results = while_loop_stack_output(goes_on, once, first, (hidden, *weights.values()))
    scores: Tensor = results[-1]
    return scores

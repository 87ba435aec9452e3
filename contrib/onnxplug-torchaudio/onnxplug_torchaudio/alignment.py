"""Forced alignment by ATen operators: a scan over the frames, and one back along the best path."""

from __future__ import annotations

import torch
from torch import Tensor

from onnxplug.torch_private import scan


def forced_align(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    blank: int = 0,
) -> tuple[Tensor, Tensor]:
    """``torchaudio.functional.forced_align`` without checks of the values: the label of each frame, and its score.

    Args:
        log_probs: [1, T, classes]
        targets: [1, L], without ``blank``; more labels than frames have no alignment.
        input_lengths, target_lengths: T and L, as the library demands.
        blank: The class between labels.

    Returns:
        The labels [1, T], and their ``log_probs`` [1, T].
    """
    paths = aligned(log_probs[0], targets[0], blank).unsqueeze(0)
    return paths, log_probs.gather(2, paths.long().unsqueeze(2)).squeeze(2)


def aligned(log_probs: Tensor, targets: Tensor, blank: int) -> Tensor:
    """The label of each frame [T] on the best path through blank, label, blank, label, …, blank."""
    between = torch.full_like(targets, blank)
    labels = torch.cat([torch.stack([between, targets], 1).flatten(), targets.new_full((1,), blank)]).long()
    places = torch.arange(labels.shape[0], device=labels.device)
    emitted = log_probs[:, labels]
    lowest = emitted.new_full((2,), float("-inf"))
    # A blank is skipped between labels that differ: the label two places before is neither the same nor a blank.
    before = torch.cat([labels.new_full((2,), blank), labels[:-2]])
    skipped = (places % 2 == 1) & (places != 1) & (labels != before)
    # The scores before the first frame, which may be a blank or the first label.
    first = torch.where(places == 0, torch.zeros((), dtype=emitted.dtype), float("-inf"))

    def step(scores: Tensor, frame: Tensor) -> tuple[Tensor, Tensor]:
        padded = torch.cat([lowest, scores])
        one = padded.narrow(0, 1, scores.shape[0])
        two = torch.where(skipped, padded.narrow(0, 0, scores.shape[0]), float("-inf"))
        by_two, by_one = (two > one) & (two > scores), (one > scores) & (one > two)
        best = torch.where(by_two, two, torch.where(by_one, one, scores))
        return best + frame, torch.where(by_two, 2, torch.where(by_one, 1, 0))

    scores, moves = scan(step, first, emitted)
    place = torch.where(scores[-1:] > scores[-2:-1], places[-1:], places[-2:-1])

    def back(place: Tensor, moves: Tensor) -> tuple[Tensor, Tensor]:
        return place - moves[place], place.clone()

    _, path = scan(back, place, moves.flip(0))
    return labels[path.flip(0).squeeze(1)].to(targets.dtype)

"""Rejection sampling, which torch does in Python, as loops of the graph.

torch draws until all samples are accepted, in a Python loop whose end depends on the samples.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Wishart, constraints, von_mises

from onnxplug.capture.patching import patched


@contextlib.contextmanager
def samples_drawn_in_the_graph() -> Iterator[None]:
    """While it holds, distributions don't check values, and their rejection sampling runs in loops of the graph."""
    with (
        patched(Distribution, "_validate_args", False),
        patched(von_mises, "_rejection_sample", rejection_sample),
        patched(Wishart, "rsample", wishart_sample),
        patched(type(constraints.positive_definite), "check", is_positive_definite),
    ):
        yield


def is_positive_definite(self: Any, value: Tensor) -> Tensor:
    """As torch's own: where any matrix of a batch is not symmetric, only symmetry is tested."""
    if value.shape[-2] != value.shape[-1]:
        return torch.zeros(value.shape[:-2], dtype=torch.bool)
    symmetric = torch.isclose(value, value.mT, atol=1e-6).all(-2).all(-1)
    return torch.where(symmetric.all(), torch.linalg.cholesky_ex(value).info.eq(0), symmetric)


def rejection_sample(loc: Tensor, concentration: Tensor, proposal_r: Tensor, x: Tensor) -> Tensor:
    """As torch's own, of Best and Fisher (1979): angles are proposed until all are accepted."""

    def goes_on(accepted: Tensor, angle: Tensor) -> Tensor:
        return ~accepted.all()

    def propose(accepted: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        direction, height, side = torch.rand_like(angle), torch.rand_like(angle), torch.rand_like(angle)
        z = torch.cos(math.pi * direction)
        f = (1 + proposal_r * z) / (proposal_r + z)
        c = concentration * (proposal_r - f)
        accept = ((c * (2 - c) - height) > 0) | ((c / height).log() + 1 - c >= 0)
        return accepted | accept, torch.where(accept, (side - 0.5).sign() * f.acos(), angle)

    start = torch.zeros_like(x)
    _, angle = torch.while_loop(goes_on, propose, (torch.zeros_like(start, dtype=torch.bool), start))
    return (angle + math.pi + loc) % (2 * math.pi) - math.pi


def wishart_sample(
    self: Any, sample_shape: tuple[int, ...] | torch.Size = (), max_try_correction: int | None = None
) -> Tensor:
    """As torch's own: samples that ``support.check`` picks are drawn again, at most ten times.

    The first time torch picks the positive definite samples (and names them ``is_singular``), then the others.
    """
    tries = 10 if max_try_correction is None else max_try_correction
    shape, axes = torch.Size(sample_shape), len(self._batch_shape) + len(self._event_shape)

    def picked(sample: Tensor) -> Tensor:
        right = self.support.check(sample)
        return right.amax(self._batch_dims) if self._batch_shape else right

    def goes_on(number: Tensor, again: Tensor, sample: Tensor) -> Tensor:
        return (number < tries) & again.any()

    def draw(number: Tensor, again: Tensor, sample: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        drawn = self._bartlett_sampling(shape)
        singular = ~self.support.check(drawn)
        singular = singular.amax(self._batch_dims) if self._batch_shape else singular
        mask = again.reshape(again.shape + (1,) * axes)
        return number + 1, again & singular, torch.where(mask, drawn, sample)

    sample = self._bartlett_sampling(shape)
    _, _, sample = torch.while_loop(goes_on, draw, (torch.tensor(0), picked(sample), sample))
    return sample

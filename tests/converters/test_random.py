"""Random operators, by the distribution of ONNX Runtime's numbers: moments, and a test after Kolmogorov and Smirnov.

The seed is fixed and the limits are wide: five standard deviations for means, a probability of 1e-6 for distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnxruntime
import pytest
import torch

import onnxplug
from tests.support.check import Call

aten = torch.ops.aten
COUNT = 20000
OPSETS = [18, 21, 22, 24]

pytestmark = pytest.mark.filterwarnings("error:ONNX Runtime can't run", "ignore:.*training mode")


def draw(function: Callable[..., Any], *args: torch.Tensor, opset: int | None = None, **options: Any) -> torch.Tensor:
    """The first result of a run; a second one differs."""
    onnxruntime.set_seed(7)
    program = onnxplug.to_onnx(Call(function), args, opset_version=opset, **options)
    first, second = program(*args)[0], program(*args)[0]
    assert first.dtype == function(*args).dtype
    assert first.shape == function(*args).shape
    assert not torch.equal(first, second)
    return first


def is_distributed(sample: torch.Tensor, cdf: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether the largest distance of the empirical distribution from a continuous one is likely.

    The limit is Kolmogorov's: 2 exp(-2 n d²) = 1e-6.
    """
    x = sample.double().flatten().sort().values
    n = x.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    at = cdf(x)
    distance = max((steps[1:] - at).abs().max().item(), (at - steps[:-1]).abs().max().item())
    return distance < math.sqrt(math.log(2e6) / (2 * n))


def are_frequencies(sample: torch.Tensor, probabilities: torch.Tensor) -> bool:
    """Whether 0, 1, … are as frequent as their probabilities say, within 5 standard deviations each."""
    n = sample.numel()
    counts = torch.bincount(sample.flatten().long(), minlength=len(probabilities)).double()
    deviation = (n * probabilities * (1 - probabilities)).sqrt()
    return len(counts) == len(probabilities) and bool(((counts - n * probabilities).abs() <= 5 * deviation).all())


def uniform(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(0, 1)


def normal(x: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtr(x)


EMPTY = torch.zeros(COUNT)
CONTINUOUS: dict[str, tuple[Callable[..., Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "rand": (lambda x: torch.rand(COUNT), uniform),
    "rand_double": (lambda x: torch.rand(COUNT, dtype=torch.float64), uniform),
    "rand_of_generator": (lambda x: aten.rand.generator([COUNT], generator=None), uniform),
    "rand_like": (lambda x: torch.rand_like(x), uniform),
    "rand_like_of_generator": (lambda x: aten.rand_like.generator(x, generator=None), uniform),
    "uniform_": (lambda x: x.clone().uniform_(-1, 3), lambda x: (x + 1) / 4),
    "randn": (lambda x: torch.randn(COUNT), normal),
    "randn_double": (lambda x: torch.randn(COUNT, dtype=torch.float64), normal),
    "randn_of_generator": (lambda x: aten.randn.generator([COUNT], generator=None), normal),
    "randn_like_of_generator": (lambda x: aten.randn_like.generator(x, generator=None), normal),
    "normal_": (lambda x: x.clone().normal_(2, 3), lambda x: normal((x - 2) / 3)),
    "complex": (
        lambda x: torch.view_as_real(torch.randn(COUNT // 2, dtype=torch.complex64)),
        lambda x: normal(x * math.sqrt(2)),
    ),
    "exponential_": (lambda x: x.clone().exponential_(2.0), lambda x: 1 - (-2 * x).exp()),
}


def skip_without_overload(name: str) -> None:
    if name.endswith("_like_of_generator") and not hasattr(aten.rand_like, "generator"):
        pytest.skip("torch 2.9 has no such overload")


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous(name: str, opset: int) -> None:
    skip_without_overload(name)
    function, cdf = CONTINUOUS[name]
    assert is_distributed(draw(function, EMPTY, opset=opset), cdf)


DISCRETE: dict[str, tuple[Callable[..., Any], list[float]]] = {
    "bernoulli_p": (lambda x: x.clone().bernoulli_(0.2), [0.8, 0.2]),
    "bernoulli_of_half": (lambda x: x.clone().bernoulli_(), [0.5, 0.5]),
    "bernoulli_tensor": (lambda x: x.clone().bernoulli_(torch.full((1,), 0.3)), [0.7, 0.3]),
    "bernoulli_tensor_double": (lambda x: x.int().bernoulli_(torch.full((), 0.3).double()), [0.7, 0.3]),
    "randint": (lambda x: torch.randint(5, (COUNT,)), [0.2] * 5),
    "randint_of_generator": (lambda x: aten.randint.generator(5, [COUNT], generator=None), [0.2] * 5),
    "randint_low": (lambda x: torch.randint(-3, 1, (COUNT,)) + 3, [0.25] * 4),
    "randint_low_of_generator": (lambda x: aten.randint.low_generator(-3, 1, [COUNT], generator=None) + 3, [0.25] * 4),
    "randint_far": (lambda x: torch.randint(2**62 - 3, 2**62 + 1, (COUNT,)) - (2**62 - 3), [0.25] * 4),
    "randint_low_bits": (lambda x: torch.randint(2**62, (COUNT,)) % 4, [0.25] * 4),
    "randint_high_bits": (lambda x: torch.randint(3 * 2**59, (COUNT,)) // 2**59, [1 / 3] * 3),
    "randint_of_all": (lambda x: torch.randint(-(2**63), 2**63 - 1, (COUNT,)) // 2**61 + 4, [0.125] * 8),
    "randint_of_most": (lambda x: torch.randint(-(2**62), 2**63 - 1, (COUNT,)) // 2**61 + 2, [1 / 6] * 6),
    "randint_like_of_tensor": (lambda x: aten.randint_like.Tensor(x, torch.tensor(4)), [0.25] * 4),
    "randint_like_of_generator": (lambda x: aten.randint_like.low_generator_dtype(x, 0, 4, generator=None), [0.25] * 4),
    "random_": (lambda x: x.clone().random_() // 2**22, [0.25] * 4),
    "random_of_bool": (lambda x: x.bool().random_(), [0.5] * 2),
    "random_of_bytes": (lambda x: x.to(torch.uint8).random_() // 64, [0.25] * 4),
    "random_of_int8": (lambda x: x.to(torch.int8).random_() // 32, [0.25] * 4),
    "random_of_int64": (lambda x: x.long().random_() // 2**61, [0.25] * 4),
    "random_to": (lambda x: x.clone().random_(3), [1 / 3] * 3),
    "random_from": (lambda x: x.int().random_(-1, 3) + 1, [0.25] * 4),
    "random_from_without_end": (lambda x: x.to(torch.int8).random_(120, None) - 120, [0.125] * 8),
    "multinomial": (lambda x: torch.multinomial(torch.tensor([0.0, 1, 0, 2, 1]), COUNT, True), [0, 0.25, 0, 0.5, 0.25]),
    "multinomial_rows": (
        lambda x: torch.multinomial(torch.tensor([[1.0, 3], [0, 2], [2, 6]]).half(), COUNT, True)[::2],
        [0.25, 0.75],
    ),
}  # fmt: skip


@pytest.mark.parametrize("opset", [18, 22])
@pytest.mark.parametrize("name", DISCRETE)
def test_discrete(name: str, opset: int) -> None:
    skip_without_overload(name)
    function, probabilities = DISCRETE[name]
    assert are_frequencies(draw(function, EMPTY, opset=opset), torch.tensor(probabilities).double())


@pytest.mark.parametrize("opset", [18, 22])
def test_permutation(opset: int) -> None:
    sample = draw(
        lambda x: torch.stack([aten.randperm.generator(50, generator=None), torch.randperm(50)]), EMPTY, opset=opset
    )
    assert torch.equal(sample.sort(-1).values, torch.arange(50).expand(2, -1))
    assert not torch.equal(sample[0], sample[1])


def test_an_upper_bound_of_run_time() -> None:
    program = onnxplug.to_onnx(
        Call(lambda x: torch.randint(x.shape[0], (COUNT,))),
        (torch.zeros(3),),
        dynamic_shapes=(({0: torch.export.Dim.AUTO},),),
    )
    for size in (3, 7):
        assert are_frequencies(program(torch.zeros(size))[0], torch.full((size,), 1 / size).double())


class Seeded(torch.nn.Module):
    """Draws by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.randn(x.shape, generator=self.generator), x.clone().bernoulli_(generator=self.generator)


def test_generator_of_the_model() -> None:
    noise, coins = onnxplug.to_onnx(Seeded(), (EMPTY,))(EMPTY)
    assert is_distributed(noise, normal)
    assert are_frequencies(coins, torch.tensor([0.5, 0.5]).double())


def test_many_samples_of_many_categories() -> None:
    """A table of samples and categories would take 20 GB."""
    weights = torch.rand(2, 50000, generator=torch.Generator().manual_seed(0))
    weights[:, ::2] = 0
    sample = draw(lambda x: torch.multinomial(x, 50000, True), weights)
    assert bool((sample % 2 == 1).all())
    tenths = (weights.double().unflatten(1, (10, -1)).sum(-1) / weights.double().sum(-1, keepdim=True)).unbind()
    for row, shares in zip(sample // 5000, tenths, strict=True):
        assert are_frequencies(row, shares)


def test_without_replacement() -> None:
    program = onnxplug.to_onnx(Call(lambda x: torch.multinomial(x, 3)), (torch.tensor([1.0, 0, 2, 3]),))
    assert sorted(program(torch.tensor([1.0, 0, 2, 3]))[0].tolist()) == [0, 2, 3]


@pytest.mark.parametrize("opset", [18, 22])
def test_draws_are_independent(opset: int) -> None:
    """Draws of one element from run to run, draws of neighbours, and two draws in one model."""
    program = onnxplug.to_onnx(Call(lambda x: (torch.rand(4), torch.rand(4))), (EMPTY,), opset_version=opset)
    runs = torch.stack([torch.cat(program(EMPTY)) for _ in range(2000)])
    pairs = torch.cat([runs[:-1], runs[1:]], 1)
    off = torch.corrcoef(pairs.T) - torch.eye(16)
    assert off.abs().max() < 5 / math.sqrt(2000)
    for column in runs.unbind(1):
        assert is_distributed(column, uniform)


def test_portable_models_have_the_random_operators() -> None:
    program = onnxplug.to_onnx(Call(lambda x: torch.rand_like(x)), (EMPTY,), opset_version=22, target=None)
    assert [n.op_type for n in program.model.graph] == ["RandomUniformLike"]

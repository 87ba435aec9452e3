"""Samples of torch.distributions, by their distribution: a test after Kolmogorov and Smirnov, frequencies, moments."""

from __future__ import annotations

import math

import onnxruntime
import pytest
import torch
from torch import distributions

import onnxplug
from tests.converters.test_random import COUNT, are_frequencies, draw, is_distributed
from tests.support.check import Call, check
from tests.support.tolerances import LOOSER, looser

pytestmark = pytest.mark.filterwarnings("error:ONNX Runtime can't run", "ignore:.*training mode")
#: The Cos of opset 22 has no kernel for float64 in ONNX Runtime 1.28.
OPSETS = [18, 22 if tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 31) else 21]


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [0.05, 0.5, 1.0, 2.5, 400.0])
def test_gamma(shape: float, dtype: torch.dtype, opset: int) -> None:
    sample = draw(torch._standard_gamma, torch.full((COUNT,), shape, dtype=dtype), opset=opset)
    assert bool((sample > 0).all())
    assert is_distributed(sample, lambda x: torch.special.gammainc(torch.full_like(x, shape), x))


def test_gamma_of_torch_distributions() -> None:
    """Shapes and rates of each element, of other sizes than at the export."""
    module = Call(lambda a, b: distributions.Gamma(a, b).rsample((4000,)))
    args = (torch.tensor([0.5, 3.0]), torch.tensor([2.0, 5.0]))
    auto = {0: torch.export.Dim.AUTO}
    program = onnxplug.to_onnx(module, args, dynamic_shapes=((auto, auto),))
    a, b = torch.tensor([0.2, 1.0, 7.0]), torch.tensor([1.0, 0.1, 3.0])
    for column, shape, rate in zip(program(a, b)[0].unbind(1), a.double(), b.double(), strict=True):
        assert is_distributed(
            column, lambda x, shape=shape, rate=rate: torch.special.gammainc(shape.expand_as(x), x * rate)
        )


@pytest.mark.parametrize("opset", OPSETS)
def test_dirichlet(opset: int) -> None:
    weights = torch.tensor([0.3, 1.0, 4.0])
    sample = draw(lambda x: torch._sample_dirichlet(x.expand(COUNT, 3)), weights, opset=opset).double()
    torch.testing.assert_close(sample.sum(-1), torch.ones(COUNT).double())
    mean = weights.double() / weights.sum()
    deviation = (mean * (1 - mean) / (weights.sum() + 1)).sqrt()
    assert bool(((sample.mean(0) - mean).abs() < 5 * deviation / math.sqrt(COUNT)).all())
    torch.testing.assert_close(sample.std(0), deviation, rtol=LOOSER["deviations"].rtol, atol=0)
    assert is_distributed(sample[:, 1], lambda x: 1 - (1 - x) ** 4.3)  # a beta distribution of 1 and the others


def test_beta() -> None:
    sample = draw(lambda x: distributions.Beta(x, x * 2).rsample(), torch.ones(COUNT))
    assert is_distributed(sample, lambda x: 1 - (1 - x) ** 2)


@pytest.mark.parametrize("name", ["dirichlet", "beta", "binomial"])
def test_drawn_for_any_number(name: str) -> None:
    """The parameters' checks of torch.distributions, which look at values, are left out."""
    make = {
        "dirichlet": lambda x: distributions.Dirichlet(x).rsample(),
        "beta": lambda x: distributions.Beta(x, x + 1).sample(),
        "binomial": lambda x: distributions.Binomial(7, probs=x / 9).sample(),
    }
    auto = {0: torch.export.Dim.AUTO}
    program = onnxplug.to_onnx(Call(make[name]), (torch.rand(2, 4) + 0.5,), dynamic_shapes=((auto,),))
    drawn = program(torch.rand(5, 4) + 0.5)[0]
    assert drawn.shape == (5, 4)
    assert bool(((drawn >= 0) & (drawn <= (7 if name == "binomial" else 1))).all())


DENSITIES = {
    "normal": lambda x: distributions.Normal(x, x.abs() + 1).log_prob(x * 2),
    "categorical": lambda x: distributions.Categorical(logits=x).log_prob(x.argmin(-1)),
    "entropy": lambda x: distributions.Categorical(probs=x.softmax(-1)).entropy(),
    "beta": lambda x: distributions.Beta(x.exp(), x.abs() + 1).log_prob(x.sigmoid()),
    "dirichlet": lambda x: distributions.Dirichlet(x.exp()).log_prob(x.softmax(-1)),
    "many normals": lambda x: distributions.MultivariateNormal(x, torch.eye(4).double() * 2).log_prob(x.exp()),
    "mixture": lambda x: distributions.MixtureSameFamily(
        distributions.Categorical(logits=x), distributions.Normal(x, x.exp())
    ).log_prob(x[:, 0]),
    "transformed": lambda x: distributions.TransformedDistribution(
        distributions.Normal(x, 1.0), [distributions.transforms.ExpTransform()]
    ).log_prob(x.exp()),
    "divergence": lambda x: distributions.kl_divergence(distributions.Gamma(x.exp(), 2.0), distributions.Gamma(1.0, x.exp())),
    "student": lambda x: distributions.StudentT(x.exp()).log_prob(x),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSITIES)
def test_densities_are_computed_unchecked(name: str) -> None:
    x, other = (torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (2, 5))
    check(DENSITIES[name], x, others=[(other,)], dynamic=[{0: torch.export.Dim.AUTO}])
    with pytest.raises(ValueError, match="constraint"):
        distributions.Normal(x, -x.abs())


def test_requested_checks_are_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"the model raises at .*distribution\.py:\d+ for some values of its inputs"):
        onnxplug.to_onnx(Call(lambda x: distributions.Normal(x, 1.0, validate_args=True).log_prob(x)), (torch.ones(2),))


def of_counts(log_probability: torch.Tensor) -> torch.Tensor:
    """The probabilities of 0, 1, …, normalised to the sum 1."""
    probability = log_probability.double().exp()
    return probability / probability.sum()


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("rate", [0.0, 0.4, 3.0, 9.9, 10.0, 47.3, 3000.0])
def test_poisson(rate: float, opset: int) -> None:
    if not rate:
        program = onnxplug.to_onnx(Call(torch.poisson), (torch.zeros(5),), opset_version=opset)
        assert not program(torch.zeros(5))[0].any()
        return
    sample = draw(torch.poisson, torch.full((COUNT,), rate), opset=opset)
    top = int(rate + 8 * math.sqrt(rate) + 8)
    bins = torch.arange(top + 1).double()
    probability = of_counts(distributions.Poisson(torch.tensor(rate).double()).log_prob(bins))
    assert are_counts(sample, probability)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize(
    ("n", "p"), [(1, 0.3), (7, 0.9), (30, 0.2), (40, 0.25), (100, 0.5), (2000, 0.97), (100000, 1e-5)]
)
def test_binomial(n: int, p: float, opset: int) -> None:
    sample = draw(torch.binomial, torch.full((COUNT,), float(n)), torch.full((COUNT,), p), opset=opset)
    assert bool(((sample >= 0) & (sample <= n)).all())
    result = distributions.Binomial(n, torch.tensor(p).double()).log_prob(torch.arange(n + 1).double())
    assert are_counts(sample, of_counts(result))


def are_counts(sample: torch.Tensor, probability: torch.Tensor) -> bool:
    """Whether counts have these probabilities: in bins of at least a hundredth, which rare counts at both ends join."""
    bins, total = torch.zeros(len(probability), dtype=torch.int64), 0.0
    for place, share in enumerate(probability.tolist()):
        bins[place] = bins[place - 1] + (total >= 0.01) if place else 0
        total = share if place and bins[place] != bins[place - 1] else total + share
    shares = torch.zeros(int(bins[-1]) + 1, dtype=torch.float64).index_add(0, bins, probability)
    return sample.max() < len(bins) and are_frequencies(bins[sample.long()], shares)


def test_ends_of_the_probabilities() -> None:
    n = torch.tensor([0.0, 5, 5, 3000, 3000])
    p = torch.tensor([0.3, 0, 1, 0, 1])
    program = onnxplug.to_onnx(Call(torch.binomial), (n, p))
    assert program(n, p)[0].tolist() == [0, 0, 5, 0, 3000]


def test_elements_of_both_methods_and_no_elements() -> None:
    auto = {0: torch.export.Dim.AUTO}
    program = onnxplug.to_onnx(Call(torch.poisson), (torch.ones(4),), dynamic_shapes=((auto,),))
    sample = program(torch.tensor([2.0, 50.0]).repeat(4000))[0].reshape(-1, 2)
    assert bool(((sample.mean(0) - torch.tensor([2.0, 50.0])).abs() < torch.tensor([0.12, 0.6])).all())
    assert program(torch.zeros(0))[0].shape == (0,)


SCALE = torch.rand(3, 4) + 0.1
MATRIX = torch.eye(3) + 0.1


def wishart(matrix: torch.Tensor) -> distributions.Wishart:
    return distributions.Wishart(torch.tensor(4.0), covariance_matrix=matrix)


def test_moments_and_densities() -> None:
    angle, concentration = torch.randn(3, 4), SCALE * 3

    def von_mises(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        d = distributions.VonMises(x, y)
        return d.mean, d.variance, d.log_prob(x * 0.3)

    check(von_mises, angle, concentration, others=[(angle * 0.5, concentration + 1)])
    others = [(MATRIX * 2 + torch.eye(3),)]
    check(lambda m: (wishart(m).mean, wishart(m).entropy(), wishart(m).log_prob(m + 1)), MATRIX, others=others)


@pytest.mark.filterwarnings("error:the exported model is right only where")
@pytest.mark.long
def test_angles_that_are_drawn_until_accepted() -> None:
    model = Call(lambda x, y: distributions.VonMises(x, y).sample((20_000,)))
    dynamic = {0: "elements"}
    program = onnxplug.to_onnx(model, (SCALE[0], SCALE[1]), dynamic_shapes=((dynamic, dynamic),))
    for mean, concentration in (
        (SCALE[0], SCALE[1]),
        (torch.tensor([0.5, -2.0, 3.0]), torch.tensor([1e-6, 2.0, 500.0])),
    ):
        sample = program(mean, concentration)[0]
        expected = model(mean, concentration)
        assert sample.shape == expected.shape
        assert bool((sample.abs() <= math.pi).all())
        for function in (torch.cos, torch.sin):  # 5 standard errors of a difference of means of numbers from -1 to 1
            moved = function(sample).mean(0) - function(expected).mean(0)
            assert bool((moved.abs() < 5 / math.sqrt(10_000)).all())


@pytest.mark.filterwarnings("ignore:Singular sample detected")
@pytest.mark.long
def test_matrices_that_are_drawn_until_accepted() -> None:
    model = Call(lambda m: wishart(m).rsample((20_000,)))
    program = onnxplug.to_onnx(model, (MATRIX,))
    for matrix in (MATRIX, 3 * MATRIX + torch.eye(3)):
        sample = program(matrix)[0]
        torch.testing.assert_close(sample, sample.mT)
        error = (sample.mean(0) - 4 * matrix).abs() / (matrix.diagonal().max() * 4)
        assert float(error.max()) < 0.05
        torch.testing.assert_close(sample.var(0), wishart(matrix).variance, **looser("variances"))


@pytest.mark.filterwarnings("ignore:the model raises")
def test_gaussian_likelihood() -> None:
    check(torch.nn.functional.gaussian_nll_loss, SCALE, SCALE * 2, SCALE + 1)

"""Verification where PyTorch leaves the choice among equal elements open, and where rounding decides a choice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import Rule, VerificationError
from onnxplug.verification.compare import compare
from onnxplug.verification.outputs import Outputs
from tests.support.check import Call

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(2, 30, 8, generator=GENERATOR)


class Detector(nn.Module):
    """Scores of few values, so that many are equal, and boxes of the best."""

    def __init__(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score, self.box, self.choose = nn.Linear(8, 1), nn.Linear(8, 4), choose

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        best = self.choose(self.scores(x))
        boxes = self.box(x).gather(1, best.unsqueeze(-1).expand(-1, -1, 4))
        return best, boxes, boxes.sigmoid().sum(-1)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return (self.score(x).squeeze(-1) > 0).float()


OPEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "topk": lambda s: s.topk(4, dim=1)[1],
    "smallest": lambda s: s.topk(4, dim=1, largest=False)[1],
    "unsorted": lambda s: s.topk(4, dim=1, sorted=False)[1],
    "sort": lambda s: s.sort(1, descending=True)[1][:, :4],
    "argsort": lambda s: s.argsort(1)[:, 2:5],
    "integers": lambda s: s.long().topk(4, dim=1)[1],
    "median": lambda s: s.median(1, keepdim=True)[1],
    "kthvalue": lambda s: s.kthvalue(3, 1, keepdim=True)[1],
    "mode": lambda s: s.mode(1, keepdim=True)[1],
    "twice": lambda s: s.topk(9, dim=1)[1].flip(1).float().div(9).round().topk(3, dim=1)[1],
}


@pytest.mark.parametrize("dynamic", [None, ({0: "batch"},)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", OPEN)
def test_equal_elements_in_another_order(name: str, dynamic: Any) -> None:
    program = onnxplug.to_onnx(Detector(OPEN[name]).eval(), (X,), dynamic_shapes=dynamic)
    report = program.verify()
    assert len(report.cases) == 4
    assert program.verify(intermediates=True).intermediates.culprit.value in ("nobody", "unknown")


def test_the_report_says_so() -> None:
    report = onnxplug.to_onnx(Detector(OPEN["topk"]).eval(), (X,)).verify()
    assert any(case.ties for case in report.cases)
    plain = onnxplug.to_onnx(lambda x: x.topk(3)[1], (X,)).verify()
    assert not any(case.ties for case in plain.cases)


def second(g: Any, node: Any) -> Any:
    """A wrong rule for topk: the elements after the best."""
    values, places = g.op.TopK(node.args[0], [node.args[1] + 1], _outputs=2)
    return [g.op.Slice(v, [1], [9], [1]) for v in (values, places)]


def twice(g: Any, node: Any) -> Any:
    """A wrong rule for topk: the best element again and again."""
    values, places = g.op.TopK(node.args[0], [1], _outputs=2)
    return [g.op.Expand(v, [1, node.args[1]]) for v in (values, places)]


def first(g: Any, node: Any) -> Any:
    """A wrong rule for topk: the first elements, whatever their values."""
    x, count = node.args[:2]
    places = g.op.Expand(g.op.Range(0, count, 1), [2, count])
    return [g.op.GatherElements(x, places, axis=1), places]


class Scored(Detector):
    """Few of the scores are equal."""

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return (self.score(x).squeeze(-1) * 4).round()


@pytest.mark.parametrize("wrong", [second, twice, first])
@pytest.mark.parametrize("kind", [Detector, Scored])
def test_a_wrong_choice_is_an_error(kind: type[Detector], wrong: Any) -> None:
    if (kind, wrong) == (Detector, second):  # the fifth best is as good as the first
        return
    model = kind(OPEN["topk"]).eval()
    program = onnxplug.to_onnx(model, (X,), rules=[Rule("aten::topk", wrong)])
    with pytest.raises(VerificationError):
        program.verify()


def moved(g: Any, node: Any) -> Any:
    """A wrong rule for gather: one element of each row is off."""
    result = g.call_next(node)
    return g.op.Add(result, g.const(0.01 * torch.eye(4).repeat(2, 1, 1)))


def test_results_computed_from_the_chosen_elements_are_still_compared() -> None:
    program = onnxplug.to_onnx(Detector(OPEN["topk"]).eval(), (X,), rules=[Rule("aten::gather", moved)])
    with pytest.raises(VerificationError, match="output"):
        program.verify()


def last(op_type: str) -> Any:
    return lambda g, node: getattr(g.op, op_type)(node.args[0], axis=1, keepdims=0, select_last_index=1)


STATED: dict[str, tuple[Callable[[torch.Tensor], Any], Rule]] = {
    "argmax": (lambda x: x.argmax(1), Rule("aten::argmax", last("ArgMax"))),
    "argmin": (lambda x: x.argmin(1), Rule("aten::argmin", last("ArgMin"))),
    "stable sort": (
        lambda x: x.sort(dim=1, stable=True)[1],
        Rule("aten::sort.stable", lambda g, node: [g.op.Neg(v) if v.dtype == 1 else v for v in _backwards(g, node)]),
    ),
}


def _backwards(g: Any, node: Any) -> Any:
    """A sort with equal elements from the last to the first: the negated values, and their places."""
    x = node.args[0]
    size = x.shape[1]
    turned = g.op.Slice(x, [-1], [-size - 1], [1], [-1])
    values, places = g.op.TopK(g.op.Neg(turned), [size], axis=1, _outputs=2)
    return [values, g.op.Sub(g.const(size - 1), places)]


@pytest.mark.parametrize("name", STATED)
def test_where_pytorch_states_which_element_it_is_no_other_is_right(name: str) -> None:
    model, rule = STATED[name]
    x = torch.randint(0, 3, (2, 9), generator=GENERATOR).float()
    assert onnxplug.to_onnx(Call(model), (x,), verify=True)
    with pytest.raises(VerificationError):
        onnxplug.to_onnx(Call(model), (x,), rules=[rule]).verify(seeds=())


def rounded_otherwise(g: Any, node: Any) -> Any:
    """Moves the elements down and up in turn by one unit of rounding, as another order of a sum does."""
    result = g.call_next(node)
    signs = torch.ones(30).index_fill(0, torch.arange(0, 30, 2), -1.0)
    return g.op.Mul(result, g.const(1 + signs * 1.5e-7))


@pytest.mark.long
def test_rounding_decides_between_two_that_are_nearly_equal() -> None:
    class Near(Detector):
        def scores(self, x: torch.Tensor) -> torch.Tensor:
            return (self.score(x).squeeze(-1) * 3).round().cos()

    for choose in (OPEN["topk"], lambda s: s.argmax(1, keepdim=True), lambda s: s.sort(dim=1, stable=True)[1]):
        model = Near(choose).eval()
        report = onnxplug.to_onnx(model, (X,), rules=[Rule("aten::cos", rounded_otherwise)]).verify()
        assert any(case.ties for case in report.cases)

    def off(g: Any, node: Any) -> Any:
        return g.op.Mul(rounded_otherwise(g, node), g.const(torch.linspace(0.5, 1.5, 30)))

    with pytest.raises(VerificationError):
        onnxplug.to_onnx(Near(OPEN["topk"]).eval(), (X,), rules=[Rule("aten::cos", off)]).verify()


def test_distinct_elements_in_any_order() -> None:
    def model(x: torch.Tensor) -> Any:
        values, places, counts = torch.unique(x, sorted=False, return_inverse=True, return_counts=True)
        return values, places, counts, values[places] * 2

    x = torch.randint(0, 6, (4, 5), generator=GENERATOR)
    assert len(onnxplug.to_onnx(Call(model), (x,)).verify().cases) >= 1

    def turned(g: Any, node: Any) -> Any:
        values, places, counts = g.call_next(node)
        ends = ([-1], [-100], [0], [-1])
        return [g.op.Slice(values, *ends), g.op.Sub(g.op.Sub(g.op.Size(values), 1), places), g.op.Slice(counts, *ends)]

    program = onnxplug.to_onnx(Call(model), (x,), rules=[Rule("aten::_unique2", turned)])
    assert any(case.ties for case in program.verify().cases)

    def wrong(g: Any, node: Any) -> Any:
        values, places, counts = turned(g, node)
        return [values, g.op.Sub(g.op.Sub(g.op.Size(values), 1), places), counts]

    with pytest.raises(VerificationError):
        onnxplug.to_onnx(Call(model), (x,), rules=[Rule("aten::_unique2", wrong)]).verify()


def test_a_capture_that_is_not_the_model_is_an_error() -> None:
    class Captured(Detector):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            best, boxes, total = super().forward(x)
            return best, boxes, total if torch.compiler.is_exporting() else total + 1

    with pytest.raises(VerificationError):
        onnxplug.to_onnx(Captured(OPEN["topk"]).eval(), (X,)).verify()


# -- rounding ---------------------------------------------------------------------------------------------------------


def cancelling(n: torch.Tensor) -> torch.Tensor:
    """Integers, which rounding does not move, become a sum that nearly cancels."""
    return ((n.float() * 0.1).sin() + 40).sum(1) - 40_000


def refuse(*_: Any) -> None:
    raise AssertionError


def refuse_to_run(*_: Any) -> Iterator[None]:
    yield refuse()


def as_near_as_pytorch() -> Iterator[tuple[onnxplug.OnnxProgram, torch.Tensor]]:
    """Exports of ``cancelling`` with inputs at which the results differ, and are as near to float64 as PyTorch's are:
    the kernels of both round to either side of the float64 result."""
    for seed in range(8):
        n = torch.randint(0, 100_000, (16, 1000), generator=torch.Generator().manual_seed(seed))
        program = onnxplug.to_onnx(cancelling, (n,))
        exact = ((n.double() * 0.1).sin() + 40).sum(1) - 40_000
        plain, near = compare(program(n)[0], cancelling(n)), compare(program(n)[0], cancelling(n), exact=exact)
        if plain.count and near.equal:
            yield program, n


def test_as_near_the_float64_result_as_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run in float64 comes first, and is enough."""
    monkeypatch.setattr("onnxplug.verification.outputs.slack_by_runs", refuse_to_run)
    assert sum(program.verify(seeds=()).cases[0].unstable for program, _ in as_near_as_pytorch())


def test_other_threads_keep_their_default_dtype() -> None:
    """The default dtype holds in all threads."""
    dtypes = set()

    def model(n: torch.Tensor) -> torch.Tensor:
        dtypes.add(torch.get_default_dtype())
        return cancelling(n) + torch.tensor([0.0])

    _, n = next(as_near_as_pytorch())
    assert onnxplug.to_onnx(model, (n,)).verify(seeds=()).cases[0].unstable
    assert dtypes == {torch.float32}


def test_farther_than_pytorch_is_a_difference() -> None:
    exact = torch.linspace(1, 2, 400, dtype=torch.float64)
    noise = torch.randn(400, generator=GENERATOR, dtype=torch.float64).clamp(-2, 2) * 3e-4
    pytorch, onnx = (exact + noise).float(), (exact - noise).float()
    assert compare(onnx, pytorch).count
    assert compare(onnx, pytorch, exact=exact).equal
    wrong = onnx.clone()
    wrong[7] += 3e-3
    assert compare(wrong, pytorch, exact=exact).count == 1
    # PyTorch's error at a few elements excuses no other element, and where it is large the float64 result says nothing.
    pytorch = exact.float()
    pytorch[:2] += 0.5
    assert compare(onnx, pytorch, exact=exact).count > 100
    assert compare(wrong, torch.full_like(pytorch, 1.5), exact=exact).count > 300
    assert compare(onnx, pytorch, exact=torch.full_like(exact, torch.nan)).count > 100


def test_nothing_runs_again_where_all_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxplug.verification.outputs.slack_by_runs", refuse_to_run)
    monkeypatch.setattr("onnxplug.verification.outputs.in_double", refuse)
    monkeypatch.setattr("onnxplug.verification.verify.outputs_of_choices", refuse)
    assert len(onnxplug.to_onnx(nn.Linear(3, 2), (torch.randn(2, 3),)).verify().cases) == 4
    assert Outputs.__dataclass_fields__["ties"]


# -- what a model changes ---------------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.count += 1
        return x * self.inner.count


def test_a_counter_is_named() -> None:
    with pytest.raises(VerificationError, match="differs") as caught:
        onnxplug.to_onnx(Counting(), (torch.ones(3),)).verify()
    assert "inner.count" in (caught.value.hint or "")
    assert "random" not in (caught.value.hint or "")


def test_random_numbers_are_still_reported() -> None:
    with pytest.raises(VerificationError) as caught:
        onnxplug.to_onnx(Call(lambda x: x * torch.rand(3)), (torch.ones(3),)).verify()
    assert "random numbers" in (caught.value.hint or "")


def test_verify_file_in_float64(tmp_path: Path) -> None:
    n = torch.randint(0, 100_000, (16, 1000), generator=torch.Generator().manual_seed(1))
    onnxplug.to_onnx(cancelling, (n,), tmp_path / "model.onnx")
    from onnxplug_tools.verification import verify_file

    assert verify_file(str(tmp_path / "model.onnx"), cancelling, (n,), {}, seeds=()).cases[0].unstable


class Spectral(nn.Module):
    """A short-time Fourier transform, the size of each number, and a GRU: what the sum of many products rounds, the GRU carries on."""

    def __init__(self, size: int, width: int, logarithm: bool) -> None:
        super().__init__()
        self.size, self.logarithm = size, logarithm
        self.register_buffer("window", torch.hann_window(size))
        self.rnn = nn.GRU(size // 2 + 1, width, batch_first=True, bidirectional=logarithm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(x, self.size, self.size // 4, window=self.window, return_complex=True).abs()
        features = (spectrum**2 + 1e-6).log() if self.logarithm else spectrum
        result: torch.Tensor = self.rnn(features.transpose(1, 2))[0]
        return result


@pytest.mark.parametrize(("logarithm", "seed"), [(False, 0), (True, 1)], ids=["sizes", "logarithms"])
@pytest.mark.parametrize(("size", "width"), [(100, 8), (256, 8), (512, 64)])
def test_rounding_that_a_recurrent_layer_carries_on_is_no_difference(
    size: int, width: int, logarithm: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    model = Spectral(size, width, logarithm).eval()
    program = onnxplug.to_onnx(model, (torch.randn(2, size * 12),))
    assert len(program.verify().cases) == 4


@pytest.mark.parametrize(("size", "width", "logarithm"), [(256, 8, False), (512, 64, False), (400, 64, True)])
def test_a_small_wrong_offset_is_no_rounding(size: int, width: int, logarithm: bool) -> None:
    """The offset is twice PyTorch's own rounding: 3e-7 to 2e-5 of results up to 1, depending on the processor."""
    torch.manual_seed(0)
    model, x = Spectral(size, width, logarithm).eval(), torch.randn(2, size * 12)
    with torch.no_grad():
        offset = 2 * float((model(x) - copy.deepcopy(model).double()(x.double())).abs().max())

    def moved(g: Any, node: Any) -> Any:
        results, *rest = g.call_next(node)
        return [g.op.Add(results, g.const(offset)), *rest]

    program = onnxplug.to_onnx(model, (x,), rules=[Rule("aten::gru", moved)])
    with pytest.raises(VerificationError, match="differ"):
        program.verify()


A = torch.randn(6, 12, 12, generator=GENERATOR)
SPECTRA: dict[str, Callable[[torch.Tensor], Any]] = {
    "eig": torch.linalg.eig,
    "eigenvalues": lambda x: torch.linalg.eigvals(x).real,
    "eigenvectors": lambda x: torch.linalg.eig(x)[1],
    "the best": lambda x: torch.linalg.eig(x)[1].gather(-1, torch.linalg.eigvals(x).abs().sort()[1].unsqueeze(-2)),
    "of complex ones": lambda x: torch.linalg.eig(torch.complex(x, x.flip(1))),
    "eigh": lambda x: torch.linalg.eigh(x + x.mT),
    "svd": lambda x: torch.linalg.svd(x[:, :4]),
    "reduced": lambda x: torch.linalg.svd(x[..., :4], full_matrices=False),
    "right vectors": lambda x: torch.svd(x)[2] * 2,
}


@pytest.mark.parametrize("name", [n if n == "svd" else pytest.param(n, marks=pytest.mark.long) for n in SPECTRA])
@pytest.mark.long
def test_orders_and_phases_that_pytorch_leaves_open(name: str) -> None:
    program = onnxplug.to_onnx(Call(SPECTRA[name]), (A,), dynamic_shapes=(({0: "batch"},),))
    report = program.verify(seeds=range(6))
    assert any(case.ties for case in report.cases)
    assert program.verify(intermediates=True).intermediates.culprit.value in ("nobody", "unknown")


def changed(place: int, change: Callable[[Any, Any], Any]) -> Any:
    """A rule that changes the result at ``place``, both parts of a complex result."""

    def convert(g: Any, node: Any) -> list[Any]:
        results = list(g.call_next(node))
        x = results[place]
        parts = [change(g, part) for part in ((x.real, x.imag) if hasattr(x, "real") else (x,))]
        results[place] = type(x)(*parts) if len(parts) == 2 else parts[0]
        return results

    return convert


def turned_about(g: Any, x: Any) -> Any:
    """The columns from the last to the first."""
    return g.op.Slice(x, [-1], [-13], [2], [-1])


def repeated(g: Any, x: Any) -> Any:
    """The first element or column twice, then the others but for the last."""
    return g.op.Gather(x, [0, *range(11)], axis=-1)


WRONG: dict[str, tuple[str, str, Any]] = {
    "vectors of other values": ("eig", "complex:aten::linalg_eig", changed(1, turned_about)),
    "a value twice": ("eig", "complex:aten::linalg_eig", changed(0, repeated)),
    "a vector twice": ("eigenvectors", "complex:aten::linalg_eig", changed(1, repeated)),
    "longer vectors": ("eigenvectors", "complex:aten::linalg_eig", changed(1, lambda g, x: g.op.Mul(x, 1.01))),
    "in another order": ("eigh", "aten::linalg_eigh", changed(1, turned_about)),
    "signs of one side": ("reduced", "aten::linalg_svd", changed(0, lambda g, x: g.op.Neg(x))),
    "one of the values": ("svd", "aten::linalg_svd", changed(1, lambda g, x: g.op.Add(x, [0.0, 0.0, 0.0, 1e-2]))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_spectrum_is_an_error(name: str) -> None:
    model, operator, convert = WRONG[name]
    program = onnxplug.to_onnx(Call(SPECTRA[model]), (A,), rules=[Rule(operator, convert)])
    with pytest.raises(VerificationError):
        program.verify(seeds=())


# -- choices that rounding flips, and wrong numbers beside them --------------------------------------------------------


class Flipping(nn.Module):
    """A choice that rounding decides: what it compares is 0 but for rounding."""

    def __init__(self, choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.choose = choose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = (x / 3).cumsum(0)[-1] * 3 - x.flip(0).cumsum(0)[-1]
        return self.choose(near, x).relu()


FLIPPING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "where": lambda near, x: torch.where(near > 0, x, x + 4),
    "step": lambda near, x: near.sign() * 4 + x,
    "integers": lambda near, x: (near * 9999).long() * 4 + x,
    "argmax": lambda near, x: x * 0 + x[torch.stack([near, -near]).argmax()] * 9,
    "sorted": lambda near, x: x * 0 + x[torch.stack([near, -near]).sort()[1][0]] * 9,
    "remainder": lambda near, x: near.remainder(1) * 4 + x,
    "fmod": lambda near, x: (near + 1).fmod(1) * 4 + x,
    "frac": lambda near, x: (near + 1).frac() * 4 + x,
    "hardshrink": lambda near, x: nn.functional.hardshrink(near + 0.5, 0.5) * 8 + x,
    "threshold": lambda near, x: nn.functional.threshold(near, 0, -4.0) + x,
    "rounded": lambda near, x: (near + 0.5).round() * 4 + x,
    "rounded in place": lambda near, x: (near + 0.5).round_() * 4 + x,
    "signed zero": lambda near, x: torch.copysign(torch.ones(()), near) * 4 + x,
    "heaviside": lambda near, x: torch.heaviside(near, torch.tensor(0.5)) * 4 + x,
    "reciprocal": lambda near, x: near.reciprocal().atan() * 4 + x,
    "angle": lambda near, x: torch.complex(-torch.ones(()), near).angle() * 2 + x,
    "vector": lambda near, x: x * 0 + torch.linalg.eigh(torch.stack([near, -near]).diag())[1][0].abs().sum() * 9,
    "rounding mode": lambda near, x: torch.div(near, 3, rounding_mode="floor") * 4 + x,
    "branch": lambda near, x: torch.cond(near > 0, lambda x: x + 4, lambda x: x.clone(), (x,)),
    "in a branch": lambda near, x: torch.cond(
        x.sum() > -99, lambda n, x: torch.where(n > 0, x + 4, x), lambda n, x: x + n, (near, x)
    ),
}


def off_by(amount: float) -> Any:
    return lambda g, node: g.op.Add(g.call_next(node), g.const(amount, node.args[0].dtype))


@pytest.mark.parametrize("seed", [0, 4, 5])
@pytest.mark.parametrize("name", FLIPPING)
def test_a_flipped_choice_excuses_no_wrong_number(name: str, seed: int) -> None:
    """A model that adds something after a choice is wrong, however far apart the candidates are."""
    x = torch.rand(64, generator=torch.Generator().manual_seed(seed)) + 99
    program = onnxplug.to_onnx(Flipping(FLIPPING[name]), (x,), rules=[Rule("aten::relu", off_by(0.5))])
    with pytest.raises(VerificationError):
        program.verify(seeds=())


class Chosen(nn.Module):
    """Elements chosen by scores that are nearly equal, or by a threshold that they are near."""

    def __init__(self, choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.choose = choose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.choose(x.round().cos(), x)


TIED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "where": lambda s, x: torch.where(s > s[:, :1], x, x + 4),
    "equal": lambda s, x: torch.where(s == s[:, :1], x, x + 4),
    "floor": lambda s, x: (s / s[:, :1]).ceil() * 4 + x,
    "integers": lambda s, x: (s / s[:, 1:2]).long() * 4 + x,
    "argmax": lambda s, x: x.gather(1, s.argmax(1, keepdim=True)),
    "topk": lambda s, x: x.gather(1, s.topk(3, dim=1)[1]),
}


def otherwise(g: Any, node: Any) -> Any:
    """Moves the elements down and up in turn by one unit of rounding."""
    signs = torch.ones(30).index_fill(0, torch.arange(0, 30, 2), -1.0)
    return g.op.Mul(g.call_next(node), g.const(1 + signs * 1.5e-7))


@pytest.mark.parametrize("name", TIED)
def test_a_choice_among_elements_tied_within_rounding_is_right(name: str) -> None:
    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    program = onnxplug.to_onnx(Chosen(TIED[name]), (x,), rules=[Rule("aten::cos", otherwise)])
    assert any(case.ties for case in program.verify(seeds=()).cases)
    uneven = torch.linspace(0.5, 1.5, 30) * (-1 if name in ("argmax", "topk") else 1)
    rule = Rule("aten::cos", lambda g, node: g.op.Mul(otherwise(g, node), g.const(uneven)))
    wrong = onnxplug.to_onnx(Chosen(TIED[name]), (x,), rules=[rule])
    with pytest.raises(VerificationError):
        wrong.verify(seeds=())


def off_by_one(g: Any, node: Any) -> Any:
    x, axis, places = node.args[:3]
    return g.op.GatherElements(x, g.op.Mod(g.op.Add(places, 1), g.dim(x, axis)), axis=axis)


def along_rows(g: Any, node: Any) -> Any:
    values, places = g.op.TopK(node.args[0], [3], axis=0, _outputs=2)
    return [g.op.Slice(g.op.Transpose(v, perm=[1, 0]), [0], [5], [0]) for v in (values, places)]


@pytest.mark.parametrize("rule", [Rule("aten::gather", off_by_one), Rule("aten::topk", along_rows)], ids=str)
def test_wrong_places_are_an_error(rule: Rule) -> None:
    x = torch.randn(5, 5, generator=torch.Generator().manual_seed(2)).round()
    program = onnxplug.to_onnx(Call(lambda x: x.gather(1, x.cos().topk(3, dim=1)[1]) * 4), (x,), rules=[rule])
    with pytest.raises(VerificationError):
        program.verify(seeds=())


@torch.library.custom_op("ties::quarters", mutates_args=())
def quarters(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight * 4).round() / 4


quarters.register_fake(lambda x, weight: x @ weight)


def test_operands_of_other_sizes_than_the_result() -> None:
    """The product lies midway between two steps of its rounding; the operator after it is wrong."""
    rules = [
        Rule("ties::quarters", lambda g, n: g.op.Div(g.op.Round(g.op.Mul(g.op.MatMul(*n.args), 4.0)), 4.0)),
        Rule("aten::tanh", lambda g, n: g.op.Add(g.call_next(n), 0.01)),
    ]
    args = (torch.full((3, 5), 0.125), torch.eye(5, 7))
    onnxplug.to_onnx(quarters, args, rules=rules[:1]).verify()
    with pytest.raises(VerificationError, match="differs"):
        onnxplug.to_onnx(lambda x, weight: quarters(x, weight).tanh(), args, rules=rules).verify()


class Unstable(nn.Module):
    """For some inputs its results follow from the signs of differences that are 0 but for rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = x.exp()
        near = (large / 0.7 * 0.7 - large).sum(1)
        return torch.where(x[0, 0] > -0.9, (near * 1e12).tanh().mean(), 0.0) * 4 + x.relu()


@pytest.mark.parametrize("amount", [0.0, 0.5])
def test_signs_that_rounding_decides_are_those_of_onnx(amount: float) -> None:
    x = torch.randn(64, 50, generator=torch.Generator().manual_seed(1))
    x[0, 0] = -1.0
    added = torch.full((64, 50), amount)
    rules = [
        Rule("aten::exp", lambda g, node: g.op.Mul(g.call_next(node), g.const(torch.linspace(1, 1 + 3e-7, 50)))),
        Rule("aten::relu", lambda g, node: g.op.Max(g.call_next(node), g.const(added))),
    ]
    program = onnxplug.to_onnx(Unstable(), (x,), rules=rules)
    if amount:
        with pytest.raises(VerificationError):
            program.verify(seeds=range(4))
    else:
        report = program.verify(seeds=range(4))
        assert any(case.ties for case in report.cases)
        assert len(report.cases) == 5

"""Eigenvectors and singular vectors of open order and phases: values computed from them, and culprits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import onnxplug
from onnxplug import Rule, VerificationError
from onnxplug.verification import spectra
from onnxplug.verification.conditioning import rounding_slack
from tests.support.check import Call
from tests.verification.test_ties import SPECTRA, WRONG, A, changed


@pytest.mark.parametrize("name", ["eigenvectors", "eigh", "reduced"])
def test_the_fault_of_a_spectrum_is_its_rule(name: str) -> None:
    _, operator, _ = next(row for row in WRONG.values() if row[0] == name)
    place = 0 if name == "reduced" else 1
    rule = Rule(operator, changed(place, lambda g, x: g.op.Mul(x, g.const(1 + 0.01 * torch.eye(12)[:, : x.shape[-1]]))))
    with pytest.raises(VerificationError) as caught:
        onnxplug.to_onnx(Call(SPECTRA[name]), (A,), rules=[rule]).verify(seeds=(), intermediates=True)
    assert caught.value.verdict.culprit.value == "rule"
    assert caught.value.verdict.first.operator.startswith(("aten::linalg_e", "aten::linalg_svd"))


def other_way(*places: int, change: Callable[[Any, Any], Any]) -> Any:
    """A rule as right as the next rule: it changes results only in a way that PyTorch leaves open."""

    def convert(g: Any, node: Any) -> Any:
        results = g.call_next(node)
        several = list(results) if isinstance(results, list | tuple) else [results]
        for place in places:
            x = several[place]
            if hasattr(x, "real"):  # both parts are made, also a part that has no reader
                several[place] = type(x)(change(g, x.real), change(g, x.imag))
            elif x is not None:
                several[place] = change(g, x)
        return several if isinstance(results, list | tuple) else several[0]

    return convert


def reversed_(g: Any, x: Any) -> Any:
    return g.op.Slice(x, [-1], [-1000], [-1], [-1])


def negated(g: Any, x: Any) -> Any:
    return g.op.Neg(x)


def negated_transposed(g: Any, x: Any) -> Any:
    """Negates, and ends with a Transpose, which cancels with a Transpose of the model."""
    return g.op.Transpose(g.op.Neg(g.op.Transpose(x, perm=[0, 2, 1])), perm=[0, 2, 1])


_EIGENVALUES = Rule("complex:aten::linalg_eigvals", other_way(0, change=reversed_))
_EIG = Rule("complex:aten::linalg_eig", other_way(0, 1, change=reversed_))
_PHASES = Rule("complex:aten::linalg_eig", other_way(1, change=negated))
_EIGH = Rule("aten::linalg_eigh", other_way(1, change=negated))
_SVD = Rule("aten::linalg_svd", other_way(0, 2, change=negated_transposed))
eig, svd = torch.linalg.eig, torch.linalg.svd

#: Models whose graph has only a part of an open result, or only values computed from it, and rules with another choice.
PARTS: dict[str, tuple[Callable[[torch.Tensor], Any], Rule]] = {
    "eigenvalues": (lambda x: torch.linalg.eigvals(x).real, _EIGENVALUES),
    "imaginary parts": (lambda x: torch.linalg.eigvals(x).imag, _EIGENVALUES),
    "computed from one part": (lambda x: torch.linalg.eigvals(x).real * 2 + 1, _EIGENVALUES),
    "one part of the values": (lambda x: (eig(x)[0].real, eig(x)[1]), _EIG),
    "real parts of vectors": (lambda x: eig(x)[1].real, _EIG),
    "imaginary parts of vectors": (lambda x: eig(x)[1].imag * 3, _EIG),
    "a part of each": (lambda x: (eig(x)[0].imag, eig(x)[1].real), _EIG),
    "phases": (lambda x: eig(x)[1].real, _PHASES),
    "transposed": (lambda x: svd(x[:, :4], full_matrices=False)[2].mT.exp(), _SVD),
    "transposed in a product": (lambda x: svd(x[:, :4], full_matrices=False)[2].mT @ x[:, :4], _SVD),
    "symmetric": (lambda x: torch.linalg.eigh(x + x.mT)[1].mT @ x, _EIGH),
}


INPUTS: dict[str, tuple[int, int, torch.dtype]] = {
    "small": (2, 4, torch.float32),
    "one": (1, 6, torch.float64),
    "more": (6, 7, torch.float32),
    "complex": (2, 5, torch.complex64),
}


@pytest.mark.parametrize("kind", [k if k == "small" else pytest.param(k, marks=pytest.mark.long) for k in INPUTS])
@pytest.mark.parametrize("name", PARTS)
def test_what_follows_from_an_open_choice_is_compared_in_it(name: str, kind: str) -> None:
    """The rules choose otherwise than LAPACK, so that the test does not depend on a processor's rounding."""
    model, rule = PARTS[name]
    batch, size, dtype = INPUTS[kind]
    if dtype.is_complex and rule not in (_EIGENVALUES, _EIG, _PHASES):
        return
    x = torch.randn(batch, size, size, generator=torch.Generator().manual_seed(size), dtype=dtype)
    report = onnxplug.to_onnx(Call(model), (x,), rules=[rule]).verify(seeds=(), intermediates=True)
    assert any(case.ties for case in report.cases)
    assert report.intermediates.culprit.value == "nobody", str(report.intermediates)


@pytest.mark.parametrize("name", [n if n == "transposed" else pytest.param(n, marks=pytest.mark.long) for n in PARTS])
def test_a_fault_behind_an_open_choice_is_named(name: str) -> None:
    model, rule = PARTS[name]
    off = Rule("aten::atan", lambda g, node: g.op.Add(g.call_next(node), 0.01))

    def behind(x: torch.Tensor) -> torch.Tensor:
        result = model(x)
        return (result[0] if isinstance(result, tuple) else result).atan()

    x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
    with pytest.raises(VerificationError) as caught:
        onnxplug.to_onnx(Call(behind), (x,), rules=[rule, off]).verify(seeds=(), intermediates=True)
    assert caught.value.verdict.culprit.value == "rule"
    assert caught.value.verdict.first.operator == "aten::atan.default"


@pytest.mark.parametrize("full", [False, True])
def test_vectors_of_near_values_in_other_phases(full: bool) -> None:
    """Rounding moves the vectors of singular values that are a thousandth apart by more than the tolerance."""
    x = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, _, right = svd(x, full_matrices=False)
    x = (left * torch.tensor([2.0, 1.001, 1.0, 0.999]).double() @ right).float()
    program = onnxplug.to_onnx(Call(lambda x: svd(x, full_matrices=full)), (x,), rules=[_SVD])
    verdict = program.verify(seeds=(), intermediates=True).intermediates
    assert verdict.culprit.value == "nobody", str(verdict)


FLIPPED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "values": lambda x: torch.linalg.eigvals(x).real,
    "vectors": lambda x: eig(x)[1].real,
    "of complex ones": lambda x: eig(torch.complex(x, x.flip(1)))[1].imag,
    "symmetric": lambda x: torch.linalg.eigh(x + x.mT)[1],
    "singular": lambda x: svd(x)[0],
}


@pytest.mark.parametrize("name", FLIPPED)
def test_another_order_or_phase_of_pytorch_is_no_rounding(name: str) -> None:
    """LAPACK gives another order or phase for some of 200 matrices when they differ in the last place."""
    for size in (6, 20):
        x = torch.randn(200, size, size, generator=torch.Generator().manual_seed(0))
        slack = rounding_slack(lambda _, leaves: [("", FLIPPED[name](leaves[0]))], None, [x])[0]
        assert slack is not None
        assert 0 < float(slack.max()) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize(("batch", "size"), [(1, 5), (6, 12), (40, 6), (3, 30)])
def test_order_and_phases_are_read_off_any_part(batch: int, size: int, dtype: torch.dtype) -> None:
    """To the last digits: an angle with half of its digits right leaves differences above the tolerances of float64."""
    generator = torch.Generator().manual_seed(size)
    values, vectors = eig(torch.randn(batch, size, size, generator=generator, dtype=dtype))
    order = torch.stack([torch.randperm(size, generator=generator) for _ in range(batch)])
    angles = torch.rand(batch, 1, size, generator=generator, dtype=vectors.real.dtype) * 7
    real = (vectors.imag == 0).all(-2, keepdim=True)
    turned = vectors * torch.where(real, angles.cos().sign() + 0j, torch.polar(torch.ones_like(angles), angles))
    ours = (values.gather(-1, order), turned.gather(-1, order.unsqueeze(-2).expand_as(turned)))
    missing = [torch.full_like(x.real, torch.nan) for x in ours]
    halves = [torch.complex(ours[i].real, missing[i]) for i in range(2)]
    others = [torch.complex(missing[i], ours[i].imag) for i in range(2)]
    for known in (ours, (None, ours[1]), (None, halves[1]), (None, others[1]), halves, others, (halves[0], others[1])):
        taken = spectra.taken("aten.linalg_eig.default", (values, vectors), known)
        for x, y in zip(known, taken, strict=True):
            for ours_, theirs in ((x.real, y.real), (x.imag, y.imag)) if x is not None else ():
                if not ours_.isnan().all():
                    eps = torch.finfo(ours_.dtype).eps
                    torch.testing.assert_close(
                        theirs, ours_, rtol=0, atol=float(8 * eps * values.abs().max().clamp_min(1))
                    )

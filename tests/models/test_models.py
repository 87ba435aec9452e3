"""The run over all architectures: three of them, and that it goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from tests.models import report
from tests.models.measure import Architecture, Outcome, architectures, measure, small_model
from tests.models.report import render, run


@pytest.mark.parametrize("kind", ["causal", "masked", "seq2seq", "image"])
def test_tables(kind: str) -> None:
    found = [a for a in architectures() if a.kind == kind]
    assert len(found) > 30
    assert len({a.name for a in found}) == len(found)


@pytest.mark.parametrize(
    "architecture",
    [
        Architecture("causal", "olmo2", "Olmo2ForCausalLM"),
        Architecture("masked", "electra", "ElectraForMaskedLM"),
        Architecture("image", "dinov2", "Dinov2ForImageClassification"),
    ],
    ids=lambda a: a.name,
)
def test_architecture(architecture: Architecture) -> None:
    outcome = measure(architecture)
    assert (outcome.status, outcome.dynamic) == ("pass", True), outcome.detail


def test_models_are_small() -> None:
    model, _, _ = small_model(Architecture("causal", "llama", "LlamaForCausalLM"))
    assert isinstance(model, nn.Module)
    assert sum(parameter.numel() for parameter in model.parameters()) < 100_000


def test_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Fake:
        def __init__(self, peer: bool) -> None:
            assert not peer

        def ask(self, architecture: Architecture) -> Outcome:
            asked.append(architecture.name)
            return Outcome("crash" if architecture.name == "b" else "pass")

        def stop(self) -> None:
            pass

    monkeypatch.setattr(report, "_Worker", Fake)
    chosen = [Architecture("causal", name, name.upper()) for name in ("a", "b", "c")]
    (tmp_path / "causal-a.json").write_text(json.dumps(vars(Outcome("wrong", "by | much", 1.0))))
    results = run(chosen, tmp_path, 1)
    assert asked == ["b", "c"]
    assert [outcome.status for outcome in results.values()] == ["wrong", "crash", "pass"]
    assert run(chosen, tmp_path, 1) == results
    assert asked == ["b", "c"]
    table = render(results, {chosen[2]: Outcome("pass", dynamic=False)})
    assert "| causal | c | C | pass | pass, static |" in table
    assert "| causal a | wrong | by \\| much |" in table

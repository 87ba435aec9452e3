"""The run over all architectures: a few of them, and that it goes on where it was."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from torch import nn

from tests.models import report
from tests.models.faults import fault
from tests.models.measure import Architecture, Outcome, architectures, measure, small_model
from tests.models.report import render, run
from tests.models.vision import TIMM, TORCHVISION


def test_every_family_is_there(vision: None) -> None:
    import timm
    import torchvision

    assert set(TIMM) == set(timm.list_modules())
    builder = torchvision.models.get_model_builder
    prefix = "torchvision.models."
    assert set(TORCHVISION) == {builder(m).__module__.removeprefix(prefix) for m in torchvision.models.list_models()}
    for family, small in TIMM.items():
        assert timm.models.is_model_in_modules(small.model, [family]), family


@pytest.mark.parametrize(
    "architecture",
    [
        Architecture("causal", "olmo2", "Olmo2ForCausalLM"),
        Architecture("masked", "electra", "ElectraForMaskedLM"),
        Architecture("image", "dinov2", "Dinov2ForImageClassification"),
        Architecture("timm", "starnet", "starnet_s050"),
        Architecture("torchvision", "squeezenet", "squeezenet1_1"),
        *(
            pytest.param(Architecture(*row.split()), marks=pytest.mark.long)
            for row in (
                "classification bert BertForTokenClassification",
                "classification bart BartForSequenceClassification",
                "choices electra ElectraForMultipleChoice",
                "backbones dinov2 Dinov2Backbone",
                "pretraining bert BertForPreTraining",
                "base dac DacModel",
            )
        ),
    ],
    ids=lambda a: f"{a.kind} {a.name}",
)
def test_architecture(architecture: Architecture) -> None:
    outcome = measure(architecture)
    assert (outcome.status, outcome.way) == ("pass", ""), outcome.detail


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "way"),
    [
        (Architecture("seq2seq", "mt5", "MT5ForConditionalGeneration"), "plugins"),
        (Architecture("masked", "funnel", "FunnelForMaskedLM"), "static sizes"),
    ],
    ids=lambda a: a.name if isinstance(a, Architecture) else "",
)
def test_way_round(architecture: Architecture, way: str) -> None:
    outcome = measure(architecture)
    assert (outcome.status, outcome.way) == ("pass", way), outcome.detail
    assert outcome.detail, "what is refused without it isn't said"


def test_models_are_small() -> None:
    model = small_model(Architecture("causal", "llama", "LlamaForCausalLM")).module
    assert isinstance(model, nn.Module)
    assert sum(parameter.numel() for parameter in model.parameters()) < 100_000


def test_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []

    class Fake:
        def __init__(self, exporter: str) -> None:
            assert exporter == "onnxplug"

        def ask(self, architecture: Architecture) -> Outcome:
            requests.append(architecture.name)
            return Outcome("crash" if architecture.name == "b" else "pass")

        def stop(self) -> None:
            pass

    monkeypatch.setattr(report, "_Worker", Fake)
    chosen = [Architecture("causal", name, name.upper()) for name in ("a", "b", "c")]
    (tmp_path / "causal-a-A.json").write_text(json.dumps(vars(Outcome("wrong", "by | much", 1.0))))
    results = run(chosen, tmp_path, 1)
    assert requests == ["b", "c"]
    assert [outcome.status for outcome in results.values()] == ["wrong", "crash", "pass"]
    assert run(chosen, tmp_path, 1) == results
    assert requests == ["b", "c"]
    peers = {
        "torch.onnx": {
            chosen[0]: Outcome("pass"),
            chosen[2]: Outcome("pass", way="static sizes", seconds=2.0, nodes=7),
        },
        "OnnxExporter": {chosen[1]: Outcome("convert", "ConversionError: step 1/3")},
    }
    table = render(results, peers)
    assert "| causal | c | C | pass |  |  | pass, static sizes | 2.0 | 7 |  |  |  |" in table
    assert "| causal | b | B | crash (onnxplug) |  |  |  |  |  | convert (torch.export) |  |  |" in table
    assert "| causal a | wrong |  | onnxplug | by \\| much |" in table
    assert "| causal | 3 | 1 | 0 | 2 | 2 | 1 | 1 | 0 | 1 | 0 | 0 | 1 |" in table
    assert "Both export 1 of the 2 that were measured; 0 with seconds of both" in table
    assert "| torch.onnx alone exports | 1 | causal a |" in table
    assert "Beside OnnxExporter" not in table


@pytest.mark.parametrize("exporter", ["torch.onnx", pytest.param("OnnxExporter", marks=pytest.mark.long)])
def test_the_others(exporter: str, vision: None) -> None:
    architecture = Architecture("masked", "electra", "ElectraForMaskedLM")
    outcome = measure(architecture, exporter)
    assert (outcome.status, outcome.way) == ("pass", ""), outcome.detail
    assert outcome.seconds > 0
    assert outcome.nodes > 20


@pytest.mark.parametrize(
    ("status", "detail", "words"),
    [
        (
            "convert",
            "TorchExportError: Failed to export the model with torch.export. This is step 1/3 of",
            "torch.export",
        ),
        (
            "convert",
            "ConversionError: Failed to convert the exported program to an ONNX model. This is step 3/3",
            "acme",
        ),
        ("capture", "CaptureError: torch.export can't capture the model: GuardOnDataDependentSymNode", "torch.export"),
        (
            "wrong",
            "VerificationError: the model does not run: [ONNXRuntimeError] : 9 : NOT_IMPLEMENTED",
            "ONNX Runtime",
        ),
        ("wrong", "VerificationError: the model does not run: [ONNXRuntimeError] : 2 : INVALID_ARGUMENT", "acme"),
        ("wrong", "VerificationError: output 'y' differs at index [1]", "acme"),
        ("timeout", "no answer", "acme"),
        ("convert", "", ""),
    ],
)
def test_faults(status: str, detail: str, words: str) -> None:
    assert fault(Outcome(status, detail), "acme") == words


def test_a_limit_of_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SECONDS", 0.5)
    worker = report._Worker("onnxplug")
    try:
        outcome = worker.ask(Architecture("timm", "nasnet", "nasnetalarge"))
    finally:
        worker.stop()
    assert (outcome.status, outcome.detail) == ("timeout", "no answer after 0 s of processor time")


def test_a_table_of_known_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [Architecture("detection", name, name.upper()) for name in ("a", "b")]
    monkeypatch.setattr(report, "architectures", lambda: chosen)
    (tmp_path / "detection-b-B.json").write_text(json.dumps(vars(Outcome("pass", seconds=1.0))))
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["report", "--known", "--out", str(tmp_path), "--write", str(page)])
    report.main()
    text = page.read_text()
    assert "| detection | a | A | unmeasured |  |  |" in text
    assert "| detection | b | B | pass | 1.0 |  |" in text
    assert "| detection | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |" in text


def test_the_table_holds_every_architecture() -> None:
    """docs/models.md is of the libraries that constraints.txt names."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.partition("\n|" + "---|" * 12 + "\n")[2].splitlines()]
    assert [tuple(row[:3]) for row in rows] == [tuple(a) for a in architectures()]


def test_the_figures_of_other_pages_are_those_of_the_table() -> None:
    root = Path(__file__).parents[2]
    table = (root / "docs/models.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rows = [list(map(int, row)) for row in re.findall(r"^\| \w+ \|" + r" (\d+) \|" * 12, table, re.MULTILINE)]
    total, plain, by_a_way, _, measured, passed, *_ = (sum(column) for column in zip(*rows, strict=True))
    for page in ("README.md", "docs/index.md"):
        text = " ".join((root / page).read_text(encoding="utf-8").split())
        assert (
            f"f {total} models of transformers, timm, torchvision and six more libraries {plain + by_a_way} are" in text
        ), page
        assert f"{plain} by the plain call" in text, page
        assert f"exports {passed} of the {measured} on which it was measured" in text, page

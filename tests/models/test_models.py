"""The run over all architectures: a few architectures, and a run that resumes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.models import measure as measuring, report
from tests.models.examples import Example, widened
from tests.models.faults import fault
from tests.models.lists import LISTS
from tests.models.measure import Architecture, Outcome, architectures, measure, small_model
from tests.models.report import read, render, run, write
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
                "multimodal blip BlipForConditionalGeneration",
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
        (Architecture("masked", "funnel", "FunnelForMaskedLM"), "plugins"),
        (Architecture("base", "vilt", "ViltModel"), "plugins"),
    ],
    ids=lambda a: a.name if isinstance(a, Architecture) else "",
)
def test_way_round(architecture: Architecture, way: str) -> None:
    outcome = measure(architecture)
    assert (outcome.status, outcome.way) == ("pass", way), outcome.detail
    assert outcome.detail, "what is refused without it isn't said"


def test_shuffled_results_are_sorted() -> None:
    """ViLT's sorted results are the same in each run, and each patch counts."""
    example = small_model(Architecture("base", "vilt", "ViltModel"))
    with torch.no_grad():
        first, again = (example.module(**example.kwargs) for _ in range(2))
        shuffled = [example.module.module(**example.kwargs).last_hidden_state for _ in range(2)]
        images = example.kwargs["pixel_values"].clone()
        images[0, :, -1, -1] += 9
        other = example.module(**{**example.kwargs, "pixel_values": images})
    torch.testing.assert_close(again, first)
    assert not torch.allclose(*shuffled)
    assert all(not torch.allclose(x, y) for x, y in zip(first, other, strict=True))
    assert first[0].numel() + first[1].numel() == shuffled[0].numel()


@pytest.mark.parametrize("name", LISTS)
def test_nothing_but_lists_of_images_is_left_out(name: str) -> None:
    """The result that is left out has a tensor for each image of the batch; the other results are the model's."""
    example = small_model(next(a for a in architectures() if a.model == name))
    for _, kwargs in (((), example.kwargs), *example.more[:2]):
        with torch.no_grad():
            kept, whole = example.module(**kwargs), example.module.module(**kwargs)
        *outer, last = LISTS[name].split(".")
        for result in outer:
            assert kept.keys() == whole.keys()
            kept, whole = kept[result], whole[result]
        if last not in whole:
            pytest.skip("this version of transformers returns no list")
        assert set(whole) - set(kept) == {last}
        assert all(isinstance(result, torch.Tensor) for result in kept.values())
        torch.testing.assert_close(kept, {result: whole[result] for result in kept})
        lists = [whole[last]] if isinstance(whole[last][0], torch.Tensor) else [of_layer for _, of_layer in whole[last]]
        for found in lists:
            assert isinstance(found, list | tuple)
            assert len(found) == kwargs["input_ids"].shape[0]


@pytest.mark.parametrize(
    "row",
    [
        "gemma3 Gemma3ForConditionalGeneration",
        pytest.param("qwen2_vl Qwen2VLForConditionalGeneration", marks=pytest.mark.long),
        pytest.param("idefics3 Idefics3ForConditionalGeneration", marks=pytest.mark.long),
    ],
)
def test_images_fit_their_tokens(row: str) -> None:
    """The model takes the example and the other sizes, and refuses a text with a token less."""
    example = small_model(Architecture("multimodal", *row.split()))
    results = [example.module(**kwargs).logits for _, kwargs in (((), example.kwargs), *example.more)]
    assert [len(logits) for logits in results] == [2, 3, 1, 2, 2, 2]
    ids = example.kwargs["input_ids"].clone()
    ids[0, :4] = 4
    with pytest.raises((ValueError, RuntimeError), match="tokens"):
        example.module(**{**example.kwargs, "input_ids": ids})


class _Rows(nn.Module):
    """Takes any size, and Python code of it runs for each row of pixels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:, :, row].mean(-1) * row for row in range(x.shape[2])])


class _Square(nn.Module):
    """Takes one size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[2:] != (64, 64):
            raise ValueError("another size")
        return x.flatten(1).sum(-1)


@pytest.mark.parametrize(
    ("module", "dynamic", "way"),
    [
        (nn.Conv2d(3, 4, 3, stride=2), "batch, height, width", ""),
        (_Rows(), "batch", "static height and width"),
        (_Square(), "batch", ""),
    ],
    ids=["conv", "rows", "square"],
)
def test_heights_and_widths(module: nn.Module, dynamic: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = widened(Example(module.eval(), (torch.randn(2, 3, 64, 64),), {}, ({0: "batch"},)))
    monkeypatch.setattr(measuring, "small_model", lambda architecture: example)
    outcome = measure(Architecture("timm", "made", "made"))
    assert (outcome.status, outcome.dynamic, outcome.way) == ("pass", dynamic, way), outcome.detail


@pytest.mark.parametrize(
    ("branches", "status", "words"),
    [(lambda width: width != 150, "wrong", "width=150"), (lambda width: width > 200, "convert", "width is 201")],
    ids=["condition", "bound"],
)
@pytest.mark.long
def test_what_an_export_warned_of(
    branches: Callable[[int], bool], status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result that is right on the example and wrong at another size is found; images of one size are left."""

    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (2 if branches(x.shape[3]) else 1)

    example = widened(Example(Branches(), (torch.randn(2, 3, 150, 150),), {}, ({0: "batch"},)))
    outcome = measuring._by_onnxplug(example, False)
    assert (outcome.status, words in outcome.detail) == (status, True), outcome.detail
    monkeypatch.setattr(measuring, "small_model", lambda architecture: example)
    outcome = measure(Architecture("timm", "made", "made"))
    assert (outcome.status, outcome.dynamic, outcome.way) == ("pass", "batch", "static height and width")


class _Sign(nn.Module):
    """The sign of a sum: rounding decides it where the sum is 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.sum(1) > 0, 1.0, -1.0)


@pytest.mark.parametrize(("balanced", "status"), [(0, "pass"), (2, "pass"), (3, "wrong")])
def test_calls_that_rounding_decides(balanced: int, status: str) -> None:
    """They don't count where three others are right."""
    torch.manual_seed(0)
    calls = [torch.rand(32 + n, 2500) for n in range(5)]
    calls = [torch.cat((x, -x[:, torch.randperm(2500)] if n > 4 - balanced else x), 1) for n, x in enumerate(calls)]
    example = Example(_Sign(), (calls[0],), {}, ({0: "batch"},), more=tuple(((x,), {}) for x in calls[1:]))
    outcome = measuring._by_onnxplug(example, False)
    assert outcome.status == status, outcome.detail


def test_models_are_small() -> None:
    model = small_model(Architecture("causal", "llama", "LlamaForCausalLM")).module
    assert isinstance(model, nn.Module)
    assert sum(parameter.numel() for parameter in model.parameters()) < 100_000


def test_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []

    class Fake:
        def __init__(self, exporter: str, limit: float) -> None:
            assert (exporter, limit) == ("onnxplug", report.SECONDS)

        def ask(self, architecture: Architecture) -> Outcome:
            requests.append(architecture.name)
            return Outcome("crash" if architecture.name == "b" else "pass")

        def stop(self) -> None:
            pass

    monkeypatch.setattr(report, "_Worker", Fake)
    chosen = [Architecture("causal", name, name.upper()) for name in ("a", "b", "c")]
    write(tmp_path, "onnxplug", {chosen[0]: Outcome("wrong", "by | much", 1.0, commit="before")})
    results = run(chosen, tmp_path, 1)
    assert requests == ["b", "c"]
    assert [outcome.status for outcome in results.values()] == ["wrong", "crash", "pass"]
    assert run(chosen, tmp_path, 1) == results
    assert requests == ["b", "c"]
    slow, quick = Architecture("base", "a", "Base"), Architecture("base", "c", "Base")
    with (tmp_path / "onnxplug.jsonl").open("a") as lines:
        lines.write(json.dumps({"architecture": chosen[2], "status": "pass", "seconds": 0.5}) + "\n")
    assert run([*chosen, slow, quick], tmp_path, 1, until=0) == run(chosen, tmp_path, 1)
    run([*chosen, slow, quick], tmp_path, 1)
    assert requests == ["b", "c", "c", "a"]  # the least expected time first
    known = read(tmp_path, "onnxplug")
    assert list(known) == [*chosen, quick, slow]
    assert known[quick].commit
    run([chosen[0], quick], tmp_path, 1, again=True)
    assert requests == ["b", "c", "c", "a", "a"]  # the outcome of another commit
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


def test_seconds_are_divided_by_the_pace_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pace is that of models that took from 2 to 5 seconds before; the limit of time follows it."""
    limits: set[float] = set()

    class Fake:
        def __init__(self, exporter: str, limit: float) -> None:
            limits.add(limit)

        def ask(self, architecture: Architecture) -> Outcome:
            return Outcome("pass", seconds=6.0)

        def stop(self) -> None:
            pass

    monkeypatch.setattr(report, "_Worker", Fake)
    chosen = [Architecture("causal", name, name.upper()) for name in "abcdef"]
    seconds = (3.0, 4.0, 4.0, 2.5, 60.0, 0.1)
    known = {a: Outcome("pass", seconds=s) for a, s in zip(chosen, seconds, strict=True)}
    known[chosen[3]].way = "static sizes"
    assert report.measure_pace(known, 1) == 1.5
    assert report.measure_pace({}, 1) == 1.0
    results = run(chosen[:2], tmp_path, 1, pace=1.5)
    assert [outcome.seconds for outcome in results.values()] == [4.0, 4.0]
    assert limits == {report.SECONDS, 1.5 * report.SECONDS}


def test_a_limit_of_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SECONDS", 0.5)
    worker = report._Worker("onnxplug", limit=0.5)
    try:
        outcome = worker.ask(Architecture("timm", "nasnet", "nasnetalarge"))
    finally:
        worker.stop()
    assert (outcome.status, outcome.detail) == ("timeout", "no answer after 0 s of processor time")


def test_a_table_of_known_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [Architecture("detection", name, name.upper()) for name in ("a", "b")]
    monkeypatch.setattr(report, "architectures", lambda: chosen)
    write(tmp_path, "onnxplug", {chosen[1]: Outcome("pass", seconds=1.0, commit="1234abcd")})
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["report", "--known", "--out", str(tmp_path), "--write", str(page)])
    report.main()
    text = page.read_text()
    assert "outcomes: 1234abcd (1)." in text
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
        assert measured == total
        assert f"exports {passed}{' ([table]' if page == 'README.md' else '. [The table]'}" in text, page

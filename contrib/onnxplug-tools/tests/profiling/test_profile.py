"""The profile of an export: its stages, rules, rewrites and nodes, the agreement of its sums, and its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_tools.profiling.observer import recording
from onnxplug_tools.profiling.profile import Profile
from onnxplug_tools.profiling.sums import StageTime

import onnxplug
from onnxplug import CaptureError, ConversionError, Rule, SaveError, UsageError
from onnxplug.observers import span

X = torch.randn(3, 8)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.nn.functional.gelu(self.linear(x)) + x)


class Branching(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else x.flip(0)


def net() -> torch.nn.Module:
    return torch.nn.Sequential(*(Block() for _ in range(3))).eval()


def named(stages: list[StageTime], *path: str) -> StageTime:
    (result,) = (stage for stage in stages if stage.name == path[0])
    return named(result.parts, *path[1:]) if path[1:] else result


def profile_of(program: Any) -> Profile:
    assert isinstance(program.profile, Profile)
    return program.profile


def test_off_by_default() -> None:
    program = onnxplug.to_onnx(net(), (X,))
    assert program.profile is None
    assert onnxplug.OnnxProgram(program.model, None).profile is None


def test_stages_and_their_parts(tmp_path: Path) -> None:
    program = onnxplug.to_onnx(
        net(), (X,), tmp_path / "m.onnx", dynamic_shapes=({0: "batch"},), profile=True, verify=True
    )
    stages = profile_of(program).stages()
    assert [stage.name for stage in stages] == ["export"]
    assert [part.name for part in stages[0].parts] == ["plugins", "capture", "conversion", "verification", "saving"]
    assert named(stages, "export", "capture", "attempt").about == {"mode": "non-strict"}
    assert named(stages, "export", "capture", "attempt", "torch.export.export").calls == 1
    parts = [part.name for part in named(stages, "export", "conversion").parts]
    assert parts == ["functionalization", "interpretation", "assembly", "rewrites", "finish"]
    assert named(stages, "export", "saving").about == {"file": str(tmp_path / "m.onnx")}

    def check(stage: StageTime) -> None:
        assert stage.seconds >= sum(part.seconds for part in stage.parts) > -1e-9
        assert stage.own_seconds == pytest.approx(stage.seconds - sum(part.seconds for part in stage.parts))
        for part in stage.parts:
            check(part)

    check(stages[0])
    assert profile_of(program).seconds == pytest.approx(stages[0].seconds)


def test_rules_nodes_and_modules() -> None:
    profile = profile_of(onnxplug.to_onnx(net(), (X,), profile=True))
    rules = {rule.op: rule for rule in profile.rules()}
    assert {op: rule.calls for op, rule in rules.items()} == {
        "aten::linear.default": 3,
        "aten::gelu.default": 3,
        "aten::add.Tensor": 3,
        "aten::layer_norm.default": 3,
    }
    assert rules["aten::gelu.default"].package == "onnxplug"
    assert rules["aten::gelu.default"].rule == "onnxplug.converters.activation:gelu"
    assert all(rule.seconds >= rule.own_seconds > 0 for rule in rules.values())
    (package,) = profile.packages()
    assert (package.package, package.calls) == ("onnxplug", 12)
    nodes = profile.nodes()
    assert len(nodes) == 12
    assert [node.seconds for node in nodes] == sorted((node.seconds for node in nodes), reverse=True)
    assert {node.location.rpartition(":")[0] for node in nodes if node.op == "aten::gelu.default"} == {__file__}
    assert sum(node.own_seconds for node in nodes) <= named(profile.stages(), "export", "conversion").seconds
    modules = {module.name: module for module in profile.modules()}
    assert modules["Block"].calls == 3
    assert modules["Linear"].longest == "0.linear"
    assert modules["Sequential"].seconds >= modules["Block"].seconds >= modules["Block"].own_seconds
    parts = {part.name: part.calls for part in profile.parts()}
    assert parts["shape inference"] > 0
    assert parts["simplification and folding"] > 0


def test_rules_that_decline_and_rules_that_call_others() -> None:
    def declines(g: Any, node: Any) -> Any:
        raise onnxplug.Decline("not today")

    def delegates(g: Any, node: Any) -> Any:
        return g.call_next(node)

    rules = [
        Rule("aten::gelu", declines, priority=2),
        Rule("aten::gelu", delegates, priority=1),
    ]
    profile = profile_of(onnxplug.to_onnx(torch.nn.GELU(), (X,), rules=rules, profile=True))
    rows = {row.rule.rpartition(".")[2].rpartition(":")[2]: row for row in profile.rules()}
    assert rows["declines"].declined == rows["declines"].calls == 1
    assert rows["delegates"].declined == 0
    assert rows["delegates"].package == "rules of the call"
    assert rows["delegates"].seconds >= rows["gelu"].seconds
    assert rows["delegates"].own_seconds == pytest.approx(rows["delegates"].seconds - rows["gelu"].seconds)
    assert {package.package for package in profile.packages()} == {"onnxplug", "rules of the call"}


def test_decompositions() -> None:
    """An operator of torch's table that no rule translates."""
    profile = profile_of(onnxplug.to_onnx(lambda x, y: torch.nn.functional.mse_loss(x, y), (X, X + 1), profile=True))
    (traced,) = (row for row in profile.rules() if row.package == "torch's decomposition")
    assert traced.op == "aten::mse_loss.default"
    assert traced.calls == 1
    outer = profile.nodes()[0]
    assert outer.op == traced.op
    inner = sum(node.seconds for node in profile.nodes()[1:] if node.op != "aten::broadcast_tensors.default")
    assert outer.own_seconds == pytest.approx(outer.seconds - inner)


def test_rewrites_count_matches() -> None:
    program = onnxplug.to_onnx(lambda x: torch.where(~(x > 0), x, torch.where(~(x > 1), -x, x)), (X,), profile=True)
    profile = profile_of(program)
    rewrites = {rewrite.name: rewrite for rewrite in profile.rewrites()}
    assert rewrites["where_of_not"].fired == 2
    fired = sum(rewrite.fired for rewrite in rewrites.values())
    assert fired == named(profile.stages(), "export", "conversion", "rewrites").about["replacements"]
    assert all(rewrite.tries >= rewrite.fired and rewrite.seconds > 0 for rewrite in rewrites.values())


def test_later_stages_are_added(tmp_path: Path) -> None:
    program = onnxplug.to_onnx(net(), (X,), profile=True)
    assert [stage.name for stage in profile_of(program).stages()] == ["export"]
    before = profile_of(program).seconds
    program.verify()
    program.save(tmp_path / "m.onnx")
    program.save(tmp_path / "n.onnx")
    stages = profile_of(program).stages()
    assert [(stage.name, stage.calls) for stage in stages] == [("export", 1), ("verification", 1), ("saving", 2)]
    assert profile_of(program).seconds > before


def test_pieces_are_profiled_together() -> None:
    pieces = onnxplug.to_onnx(net(), (X,), pieces=["0", "1", "2"], profile=True, verify=True)
    assert isinstance(pieces.profile, Profile)
    (stage,) = pieces.profile.stages()
    names = [part.name for part in stage.parts]
    assert names == ["runs of the model", "the piece 0", "the piece 1", "the piece 2", "verification"]
    own = profile_of(pieces.programs["1"])
    assert [stage.name for stage in own.stages()] == ["export"]
    assert {rule.calls for rule in own.rules()} == {1}
    assert {rule.calls for rule in pieces.profile.rules()} == {3}
    assert own.seconds < pieces.profile.seconds


@pytest.mark.parametrize(
    ("model", "rules", "error", "stage"),
    [
        (Branching(), [], CaptureError, "capture"),
        (net(), [Rule("aten::gelu", lambda g, node: 1 / 0)], ConversionError, "conversion"),
    ],
)
def test_a_failed_export_has_its_profile(
    model: torch.nn.Module, rules: list[Rule], error: type[Exception], stage: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(error) as caught:
        onnxplug.to_onnx(model, (X,), rules=rules, profile=path)
    profile = caught.value.profile  # type: ignore[attr-defined]
    assert named(profile.stages(), "export", stage).about["error"] == error.__name__
    assert named(profile.stages(), "export").about["error"] == error.__name__
    assert json.loads(path.read_text())["otherData"]["stages"][0]["about"]["error"] == error.__name__
    assert str(path) in caught.value.__notes__[-1]
    with pytest.raises(error) as caught:
        onnxplug.to_onnx(model, (X,), rules=rules)
    assert caught.value.profile is None  # type: ignore[attr-defined]


def test_a_failed_export_whose_profile_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Profile, path: Any) -> None:
        raise SaveError("no room")

    monkeypatch.setattr(Profile, "save", fails)
    with pytest.warns(UserWarning, match="no room"), pytest.raises(CaptureError):
        onnxplug.to_onnx(Branching(), (X,), profile=tmp_path / "profile.json")
    with pytest.raises(SaveError, match="no room"):
        onnxplug.to_onnx(net(), (X,), profile=tmp_path / "profile.json")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "profile takes True, False or the name of a file, got None"),
        (1, "got 1"),
        ("", "got ''"),
        (".", "is a folder"),
        ("nowhere/profile.json", "lies in nowhere, which is no folder"),
    ],
)
def test_malformed(value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        onnxplug.to_onnx(net(), (X,), profile=value)


def test_to_dict_is_json_and_agrees_with_the_rest() -> None:
    profile = profile_of(onnxplug.to_onnx(net(), (X,), profile=True))
    document = json.loads(json.dumps(profile.to_dict(), allow_nan=False))
    assert document["format"] == 1
    assert document["onnxplug"] == onnxplug.__version__
    assert [stage["name"] for stage in document["stages"][0]["parts"]] == ["plugins", "capture", "conversion"]
    assert sum(rule["calls"] for rule in document["rules"]) == 12
    assert document["packages"]["onnxplug"]["calls"] == 12
    assert {"name", "op", "location", "seconds", "own_seconds"} == document["nodes"][0].keys()
    assert {"name", "tries", "fired", "seconds"} == document["rewrites"][0].keys()


def test_a_recording_around_exports_has_them_all() -> None:
    with recording() as recorder, span("both"):
        program = onnxplug.to_onnx(torch.nn.GELU(), (X,))
        other = onnxplug.to_onnx(torch.nn.ReLU(), (X,))
    assert [rule.op for rule in profile_of(program).rules()] == ["aten::gelu.default"]
    assert [rule.op for rule in profile_of(other).rules()] == ["aten::relu.default"]
    (stage,) = Profile(recorder).stages()
    assert [(part.name, part.calls) for part in stage.parts] == [("export", 2)]

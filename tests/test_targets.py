"""``to_onnx(target=, exact=)`` and ``--target``, ``--exact``: the runtime that an export is for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import onnxplug_tools
import pytest
import torch

import onnxplug
from onnxplug import PluginInfo, Rewrite, Rule, UsageError, hookimpl
from onnxplug.cli.app import run
from onnxplug.testing import IsolatedRegistry


def negated(g: Any, node: Any) -> Any:
    return g.op.Neg(g.op.Neg(g.op.Relu(node.args[0])))


def operators(program: Any) -> Counter[str]:
    return Counter(n.op_type for n in program.model.graph)


class Chip:
    """A plugin that knows a target by each of its three ways."""

    @hookimpl
    def onnxplug_rules(self) -> list[Rule]:
        options: dict[str, Any] = {"override": True, "reason": "the chip has no Relu"}
        return [
            Rule("aten::relu.default", negated, target="chip:v2", **options),
            Rule("aten::abs.default", negated, exact=True, **options),
        ]

    @hookimpl
    def onnxplug_rewrites(self) -> list[Rewrite]:
        def twice(g: Any, node: Any) -> Any:
            inner = node.inputs[0].producer()
            return inner.inputs[0] if inner is not None and inner.op_type == "Neg" else None

        return [Rewrite("neg_of_neg", "Neg", twice, target="chip-with-a-compiler")]

    @hookimpl
    def onnxplug_info(self) -> PluginInfo:
        return PluginInfo(targets=["declared:only"])


def test_targets_of_plugins(isolated_registry: IsolatedRegistry) -> None:
    isolated_registry.add_plugin(Chip(), name="chip")
    x = (torch.randn(2, 3),)
    model = torch.nn.ReLU()
    for target in (None, "onnxruntime", "onnxruntime:cpu", "chip", "declared", "declared:only", "chip-with-a-compiler"):
        program = onnxplug.to_onnx(model, x, target=target, verify=True)
        assert operators(program) == {"Relu": 1}, target
        assert program.model.graph.metadata_props["onnxplug.target"] == (target or "portable")
    program = onnxplug.to_onnx(model, x, target="chip:v2", verify=True, optimize=False)
    assert operators(program) == {"Relu": 1, "Neg": 2}
    with pytest.raises(UsageError, match="target='chip:v3' is unknown") as caught:
        onnxplug.to_onnx(model, x, target="chip:v3")
    assert "Did you mean 'chip:v2'?" in str(caught.value)


def test_rules_of_the_call_declare_targets(isolated_registry: IsolatedRegistry) -> None:
    rule = Rule("aten::relu.default", negated, target="mine")
    program = onnxplug.to_onnx(torch.nn.ReLU(), (torch.randn(2),), rules=[rule], target="mine", optimize=False)
    assert operators(program)["Neg"] == 2
    assert operators(onnxplug.to_onnx(torch.nn.ReLU(), (torch.randn(2),), rules=[rule])) == {"Relu": 1}


def test_rewrites_of_a_target(isolated_registry: IsolatedRegistry) -> None:
    isolated_registry.add_plugin(Chip(), name="chip")
    rule = Rule("aten::relu.default", negated)
    x = (torch.randn(2, 3),)

    def shape(program: Any) -> int:
        return operators(program)["Neg"]

    plain = onnxplug.to_onnx(torch.nn.ReLU(), x, rules=[rule], optimize=False)
    assert shape(plain) == 2
    assert shape(onnxplug.to_onnx(torch.nn.ReLU(), x, rules=[rule], target="chip-with-a-compiler")) == 0


def test_exact_on_request(isolated_registry: IsolatedRegistry) -> None:
    isolated_registry.add_plugin(Chip(), name="chip")
    x = (torch.rand(2, 3),)
    assert operators(onnxplug.to_onnx(torch.abs, x)) == {"Abs": 1}
    program = onnxplug.to_onnx(torch.abs, x, exact=True, optimize=False)
    assert "Relu" in operators(program)
    assert program.model.graph.metadata_props["onnxplug.target"] == "onnxruntime, exact"


def test_the_command_line(
    isolated_registry: IsolatedRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import onnx

    isolated_registry.add_plugin(Chip(), name="chip")
    isolated_registry.add_plugin(onnxplug_tools, name="tools", distribution="onnxplug-tools")
    (tmp_path / "target_model.py").write_text(
        "import torch\ndef make(): return torch.nn.ReLU(), (torch.randn(2, 3),)\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    export = ["export", "target_model.py:make", "-o", "model.onnx", "--no-optimize"]
    for options, count in (([], 0), (["--target", "none"], 0), (["--target", "chip:v2", "--exact"], 2)):
        assert run([*export, *options]) == 0
        assert sum(n.op_type == "Neg" for n in onnx.load("model.onnx").graph.node) == count
    assert run([*export, "--target", "chips"]) == 2
    assert "Did you mean 'chip'?" in capsys.readouterr().err
    assert run(["why", "aten::relu.default", "--target", "chip:v2"]) == 0
    assert "for chip:v2: the chip has no Relu" in " ".join(capsys.readouterr().out.split())
    assert run(["why", "aten::abs.default"]) == 0
    assert "applies only with exact=True: the chip has no Relu" in " ".join(
        capsys.readouterr().out.replace("│", " ").split()
    )
    assert run(["ops", "aten::relu.default"]) == 0
    assert "for chip:v2" in capsys.readouterr().out


def test_operators_of_a_target(
    isolated_registry: IsolatedRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``ops`` lists targets and reasons, and the missing operators of a model depend on the target."""

    class Ghost:
        @hookimpl
        def onnxplug_rules(self) -> list[Rule]:
            return [Rule("ghosts::walk.default", negated, target="castle:tower", reason="ghosts walk there alone")]

    def listed(*options: str) -> list[dict[str, Any]]:
        assert run(["ops", *options, "--json"]) == 0
        results: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return results

    isolated_registry.add_plugin(Ghost(), name="ghost")
    isolated_registry.add_plugin(onnxplug_tools, name="tools", distribution="onnxplug-tools")
    library = torch.library.Library("ghosts", "DEF")
    library.define("walk(Tensor x) -> Tensor")
    library.impl("walk", lambda x: x.clone(), "CPU")
    library.impl("walk", torch.empty_like, "Meta")
    (row,) = listed("ghosts::*")
    assert (row["target"], row["reason"]) == (["castle:tower"], "ghosts walk there alone")
    assert listed("ghosts::*", "--target", "castle:tower") == [row]
    assert run(["ops", "ghosts::*", "--target", "none"]) == 1
    assert "for the target none" in capsys.readouterr().err
    assert run(["ops", "--target", "castel"]) == 2
    assert "Did you mean 'castle'?" in capsys.readouterr().err
    assert run(["ops", "ghosts::*"]) == 0
    assert "ghosts walk" in " ".join(capsys.readouterr().out.split())
    plain = {row["rule"].partition(":")[2] for row in listed("aten::clamp_min.*", "--target", "none")}
    special = {row["rule"].partition(":")[2] for row in listed("aten::clamp_min.*", "--target", "onnxruntime:cpu")}
    assert plain == {"clamp_min"}
    assert special == {"clamp_min", "clamp_min_by_extremum"}
    (tmp_path / "haunted.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x): return torch.ops.ghosts.walk(x)\n"
        "def make(): return Model(), (torch.randn(2, 3),)\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    missing = ["ops", "--missing", "haunted.py:make"]
    assert run([*missing, "--target", "castle:tower"]) == 0
    assert "has no operator without a translation" in capsys.readouterr().out
    for options in ([], ["--target", "none"], ["--target", "castle"]):
        assert run([*missing, *options]) == 1
        assert "ghosts::walk" in capsys.readouterr().err

"""`onnxplug plugins list | show | check | new`, `why`, `ops` and the plugin flags, on installed distributions."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
from onnxplug_tools.scaffold.write import write_package

from onnxplug.cli.app import run
from onnxplug.cli.options import read_settings
from onnxplug.errors import UsageError
from tests.support.distributions import Dist, environment, pip_of, place, run_python

OPERATORS = """
import torch
for name in ("double", "half"):
    op = torch.library.custom_op(f"shop::{name}", lambda x, f={"double": 2.0, "half": 0.5}[name]: x * f, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(lambda x: torch.empty_like(x))
"""
GOOD = """
import shop_operators
from onnxplug import Domain, OpSample, PluginInfo, Rule, hookimpl
import onnx_ir as ir
def double(g, node): return g.op.Mul(node.args[0], 2.0)
def double_half(g, node): return g.op.Add(node.args[0], node.args[0])
def inputs():
    import torch
    return (torch.randn(2, 3),)
@hookimpl
def onnxplug_rules():
    return [
        Rule("shop::double", double_half, when=lambda n: n.dtype == ir.DataType.FLOAT16, priority=1),
        Rule("shop::double", double, opset=(18, 19)),
        Rule("shop::double", double, opset=(20, 20)),
    ]
@hookimpl
def onnxplug_samples():
    return [OpSample("shop::double", inputs, opsets=(18, 19), dynamic_shapes=({0: "n", 1: "m"},))]
@hookimpl
def onnxplug_decompositions(): return {"shop::fourfold.default": lambda x: x * 4, "shop::whole.default": None}
@hookimpl
def onnxplug_domains(): return [Domain("com.shop", 3)]
@hookimpl
def onnxplug_info(): return PluginInfo(namespaces=("shop",))
@hookimpl
def onnxplug_commands(app):
    @app.command("stock")
    def stock(count: int = 3) -> None:
        "What is in stock."
        print(f"{count} in stock")
"""
BAD = """
from onnxplug import OpSample, PluginInfo, Rule, hookimpl
def wrong(g, node): return g.op.Mul(node.args[0], 3.0)
def inputs():
    import torch
    return (torch.ones(2),)
@hookimpl
def onnxplug_rules():
    return [
        Rule("shop::double", wrong, opset=(20, 20)),
        Rule("aten::relu.default", wrong),
        Rule("shop::nosuch", wrong),
        Rule("shop::half", wrong),
        Rule("shop::half", "nowhere:f", opset=(99, None)),
    ]
@hookimpl
def onnxplug_samples():
    return [OpSample("shop::half", inputs, opsets=(18,)), OpSample("shop::ghost", inputs, opsets=(18,))]
@hookimpl
def onnxplug_info(): return PluginInfo(requires=["torch>=99", "surely-not-installed"])
"""
HANGING = "import time\ndef wait():\n    time.sleep(600)\nwait()"
SLOW = "import time; time.sleep(1.2)\nfrom onnxplug import hookimpl\n@hookimpl\ndef onnxplug_rules(): return []"
LEAVING = "import sys; print('noise on stdout', flush=True); sys.exit(7)"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plugin that keeps its promises, and a plugin that breaks all of them."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop_operators.py").write_text(OPERATORS, encoding="utf-8")
    place(folder, Dist("shop-good", GOOD, entry="good"), Dist("shop-bad", BAD, entry="bad"))
    return folder


def onnxplug(folder: Path, *arguments: str, status: int = 0, **environment: str) -> str:
    printed = run_python(folder, "-W", "ignore", "-m", "onnxplug", *arguments, status=status, **environment)
    assert "Traceback" not in printed
    return printed


def test_hanging_slow_and_leaving_plugins_are_listed(tmp_path: Path) -> None:
    place(
        tmp_path,
        Dist("shop-hangs", HANGING, entry="hangs"),
        Dist("shop-slow", SLOW, entry="slow"),
        Dist("shop-dies", LEAVING, entry="dies"),
    )
    printed = run_python(tmp_path, "-W", "ignore", "-m", "onnxplug", "plugins", "list", "--json", "--timeout", "3")
    assert "noise on stdout" in printed
    records, _ = json.JSONDecoder().raw_decode(printed[printed.index("[\n") :])
    result = {record["name"]: record for record in records}
    assert result["hangs"]["status"] == "failed"
    assert "did not end within 3 s" in result["hangs"]["error"]
    assert "shop_hangs.py:3, in wait" in result["hangs"]["error"]
    assert result["slow"]["status"] == "loaded"
    assert 1.2 <= result["slow"]["seconds"] < 3
    assert result["dies"]["status"] == "failed"
    assert "SystemExit: 7" in result["dies"]["error"]
    assert result["builtin"]["status"] == "loaded"
    text = onnxplug(tmp_path, "plugins", "list", "--timeout", "2", "--strict-plugins", "--no-plugin", "dies", status=1)
    assert "slow" in text
    assert "the plugin hangs of shop-hangs 1.0 is broken" in text


def test_show(shop: Path) -> None:
    printed = " ".join(onnxplug(shop, "plugins", "show", "shop-good").split())
    for text in ("good = shop_good", "shop-good 1.0", "shop::double: shop_good:double (opset 18 to 19)", "com.shop 3",
                 "shop_good:double_half (conditional, priority 1)", "shop::double at opsets 18, 19"):  # fmt: skip
        assert text in printed
    assert "no plugin 'ghost' is installed" in onnxplug(shop, "plugins", "show", "ghost", status=2)


def test_show_names_what_is_in_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins", "show", "builtin", "--json"]) == 0
    printed = capsys.readouterr().out
    (record,) = json.loads(printed)
    assert " at 0x" not in printed
    assert {"Abs", "Conv"} <= {*record["contents"]["onnxplug_operators"]}
    assert record["contents"]["onnxplug_evaluators"] == ["onnx.reference"]
    assert record["contents"]["onnxplug_refusals"] == ["onnxplug.plugins.refused:refusal"]
    (timm,) = record["contents"]["onnxplug_sources"]
    assert timm.startswith("ModelSource(timm, onnxplug.plugins.timm:load, ")


def test_check(shop: Path) -> None:
    printed = onnxplug(shop, "plugins", "check", "--json", "--only-plugin", "good")
    report = [f for f in json.loads(printed) if f["plugin"] == "good"]
    assert [f["message"] for f in report if f["severity"] != "ok"] == [
        "no sample of shop::fourfold, which it decomposes",
        "1 of the 2 operators of shop have no rule: shop::half",
    ]
    assert {f["severity"] for f in report} == {"ok", "note"}
    assert "shop::double agrees with PyTorch at opsets 18 to 19" in report[0]["message"]
    opsets = ("--opset", "21", "--opset", "22")
    elsewhere = json.loads(onnxplug(shop, "plugins", "check", "--json", "--only-plugin", "good", *opsets))
    assert "no sample holds at opset 21 or 22: none was run" in [f["message"] for f in elsewhere]
    printed = onnxplug(shop, "plugins", "check", status=1)
    lines = " ".join(printed.split())
    for text in (
        "requires: torch>=99, but version",
        "requires: surely-not-installed, which is not installed",
        "dead rule: Rule('shop::nosuch', 'shop_bad:wrong'): torch does not know shop::nosuch",
        "holds at no opset that is supported",
        "cannot import 'nowhere:f'",
        "shadowed rule: Rule('aten::relu.default'",
        "conflict: 'shop-bad' and 'shop-good' both translate shop::double, by shop_bad:wrong and shop_good:double (opset 20)",
        "sample: the sample of shop::half of shop-bad at opset 18: output",
        "torch does not know the sample's operator shop::ghost",
        "problems found",
    ):  # fmt: skip
        assert text in lines.replace("'shop-good' and 'shop-bad'", "'shop-bad' and 'shop-good'").replace(
            "by shop_good:double and shop_bad:wrong", "by shop_bad:wrong and shop_good:double"
        ), text


def test_why_for_a_dtype(shop: Path) -> None:
    def taken(*arguments: str) -> str:
        printed = onnxplug(shop, "why", "shop::double", "--opset", "18", *arguments)
        return next(line for line in printed.splitlines() if "│ taken" in line)

    assert "shop_good:double_half" in taken("--dtype", "float16")
    assert "double_half" not in taken("--dtype", "float32")
    assert "shop_good:double " in taken("--dtype", "float32")
    text = onnxplug(shop, "why", "shop::double", "--opset", "18")
    assert "applies to a node for which its condition holds" in text
    text = onnxplug(shop, "why", "shop::double", "--opset", "18", "--dtype", "float32")
    assert "its condition does not hold" in text
    assert "needs opset 20 or later" in text
    assert "the plugin's sample in float32" in text
    assert "torch has no such dtype" in onnxplug(shop, "why", "shop::double", "--dtype", "flot", status=2)
    text = onnxplug(shop, "why", "shop::half", "--no-plugin", "bad", status=1)
    assert "no rule translates shop::half" in text
    # Two distributions at opset 20: --prefer decides, before and after the subcommand.
    assert "conflict" in onnxplug(shop, "why", "shop::double", "--opset", "20")
    prefer = ["--prefer", "shop::double=shop-bad"]
    for arguments in (
        ["why", "shop::double", "--opset", "20", *prefer],
        [*prefer, "why", "shop::double", "--opset", "20"],
    ):
        text = onnxplug(shop, *arguments)
        assert "shop_bad:wrong" in next(line for line in text.splitlines() if "│ taken" in line)


def test_why_for_an_operator_that_a_plugin_decomposes(shop: Path) -> None:
    text = onnxplug(shop, "why", "shop::fourfold")
    assert text.split() == (
        "shop::fourfold.default: no rule; shop-good decomposes it into other operators (onnxplug_decompositions)".split()
    )
    assert "no rule translates shop::whole" in onnxplug(shop, "why", "shop::whole", status=1)


def test_ops(shop: Path, tmp_path: Path) -> None:
    rows = json.loads(onnxplug(shop, "ops", "shop::*", "--json"))
    assert ("shop::double", "shop-good", "opset 18 to 19") in {(r["op"], r["package"], r["conditions"]) for r in rows}
    assert {r["package"] for r in rows} == {"shop-good", "shop-bad"}
    text = onnxplug(shop, "ops", "--plugin", "good")
    assert "1 operator, 3 rules" in text
    assert "no rule of good translates" in onnxplug(shop, "ops", "aten::*", "--plugin", "good", status=1)
    model = "import torch, shop_operators\ndef make():\n    return torch.nn.Sequential(M()), (torch.randn(2),)\nclass M(torch.nn.Module):\n    def forward(self, x): return torch.ops.shop.half(torch.ops.shop.double(x)) + 1\n"
    (tmp_path / "model.py").write_text(model, encoding="utf-8")
    target = f"{tmp_path}/model.py:make"
    printed = onnxplug(shop, "ops", "--missing", target, "--json", "--no-plugin", "bad", "--opset", "18", status=1)
    assert list(json.JSONDecoder().raw_decode(printed)[0]) == ["shop::half.default"]
    assert "The plugin bad of shop-bad may translate shop, but it is left out." in printed  # on standard error
    assert "model.py:5" in printed
    printed = onnxplug(shop, "ops", "--missing", target, "--only-plugin", "ghost", status=2)
    assert "no plugin 'ghost'" in printed
    assert "no operator without a translation" in onnxplug(shop, "ops", "--missing", target, "--opset", "18")


def test_a_plugins_own_command(shop: Path) -> None:
    assert "5 in stock" in onnxplug(shop, "stock", "--count", "5")
    assert "No such command" in onnxplug(shop, "--no-plugin", "good", "stock", status=2)


def test_strict_plugins_and_requirements(shop: Path) -> None:
    text = onnxplug(shop, "--strict-plugins", "ops", "shop::*", status=1)
    assert "shadows a builtin rule without override=True" in text
    assert onnxplug(shop, "ops", "shop::*", "--strict-plugins", "--no-plugin", "bad")
    assert onnxplug(shop, "ops", "shop::*", "--require-plugin", "shop-good>=1.0")
    text = onnxplug(shop, "plugins", "list", "--require-plugin", "shop-good>=1.2", status=1)
    assert "plugin good is version 1.0, but shop-good>=1.2 is required" in text


def test_pyproject_settings(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    project = tmp_path / "project"
    (project / "deep").mkdir(parents=True)

    def settings(text: str) -> None:
        (project / "pyproject.toml").write_text(f"[tool.onnxplug]\n{text}\n", encoding="utf-8")

    monkeypatch.syspath_prepend(str(shop))
    monkeypatch.chdir(project / "deep")
    settings('no-plugin = ["bad"]\nrequire-plugin = "shop-good>=1.0"\nprefer = {"aten::add.Tensor" = "onnxplug"}')
    assert read_settings(project / "deep")["prefer"] == ["aten::add.Tensor=onnxplug"]

    def statuses(*arguments: str) -> dict[str, str]:
        assert run(["plugins", "list", "--json", *arguments]) == 0
        rows = json.loads(capsys.readouterr().out)
        return {r["name"]: r["status"] for r in rows if r["distribution"] in ("onnxplug", "shop-good", "shop-bad")}

    assert statuses() == {"builtin": "loaded", "good": "loaded", "bad": "blocked"}
    settings('only-plugin = ["bad"]')
    assert statuses() == {"builtin": "loaded", "good": "blocked", "bad": "loaded"}
    assert statuses("--only-plugin", "good") == {"builtin": "loaded", "good": "loaded", "bad": "blocked"}
    monkeypatch.setenv("ONNXPLUG_PLUGINS", "good")
    assert statuses() == {"builtin": "loaded", "good": "loaded", "bad": "blocked"}
    for text, message in (
        ('no-plugins = ["bad"]', "no-plugins is unknown"),
        ("no-plugin = 3", "must be a list of strings"),
        ("strict-plugins = 1", "must be true or false"),
        ("no-plugin = [", "can't be read"),
    ):
        settings(text)
        with pytest.raises(UsageError, match=message):
            read_settings(project / "deep")
        assert run(["plugins", "list"]) == 2
        assert "pyproject.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("not a name", {}, "not a valid name of a distribution"),
        ("onnxplug-acme", {"op": "soft_clip"}, "not the name of an operator"),
        ("onnxplug-acme", {"op": "aten::soft_clip"}, "torch's own"),
        ("onnxplug-acme", {"op": "acme::class"}, "not the name of an operator"),
        ("onnxplug", {}, "not a valid name of a module"),
        ("torch", {"op": "acme::f"}, "'torch' is the name of a module that there is already"),
        ("json", {}, "'json' is the name of a module that there is already"),
        ("Ml-Dtypes", {}, "a module that there is already, ml_dtypes"),
        ("onnxplug-2d", {}, "'2d::soft_clip', by the name onnxplug-2d, is not the name of an operator"),
    ],
)
def test_new_refuses(tmp_path: Path, name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        write_package(name, tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_new_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plugins", "new", "onnxplug-acme", "-o", str(tmp_path)]
    assert run(arguments) == 0
    before = sorted(tmp_path.rglob("*"))
    assert run(arguments) == 1
    assert "already there" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.long
def test_new_writes_a_package_that_installs_and_whose_tests_pass(tmp_path: Path) -> None:
    """As a user does: pip in a fresh environment, then the package's own tests, README and `plugins check`."""
    made = write_package("onnxplug-my-lib", tmp_path, "my_lib::squeeze_in")
    python = environment(tmp_path / "venv")

    def succeed(*arguments: str) -> str:
        done = subprocess.run([str(python), *arguments], capture_output=True, text=True, cwd=made.folder, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip_of(python, "install", str(made.folder))
    # Before this checkout was installed with its entry point pytest11, the fixtures have to be named.
    from importlib.metadata import entry_points

    known = any(p.value == "onnxplug_tools.testing.plugin" for p in entry_points(group="pytest11"))
    printed = succeed("-m", "pytest", "-q", *([] if known else ["-p", "onnxplug_tools.testing.plugin"]))
    assert " passed" in printed
    assert "failed" not in printed
    assert "skipped" not in printed
    readme = (made.folder / "README.md").read_text(encoding="utf-8")
    code = textwrap.dedent(readme.split("```python\n")[1].split("```")[0])
    check = "\nfrom onnxplug.cli.app import run\nassert run(['plugins', 'check', 'my_lib']) == 0"
    printed = succeed("-c", code + check)
    assert "['Div', 'Tanh', 'Mul']" in printed
    assert "agrees with PyTorch" in printed

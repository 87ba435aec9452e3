"""Faults of plugins that an export itself reports, with the plugin's name, and that leave everything else alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.distributions import Dist, place, run_python

PRELUDE = """
import warnings
import torch, onnxplug
from onnxplug.errors import OnnxplugError

@torch.library.custom_op("shop::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
double.register_fake(lambda x: torch.empty_like(x))
@torch.library.custom_op("shop::both", mutates_args=())
def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, x * 3
both.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
X = torch.randn(2, 3)
def attempt(model, **options):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            made = [n.op_type for n in onnxplug.to_onnx(model, (X,), verify=True, **options).model.graph]
        except OnnxplugError as error:
            made = f"{type(error).__name__}: {error}".replace("\\n", " ")
    said = sorted({str(w.message).replace("\\n", " ") for w in seen if type(w.message).__name__ in ("PluginWarning", "RuleWarning")})
    print(made, len(said), *said)
"""
HEAD = """
import contextlib
from onnxplug import PluginInfo, Rewrite, Rule, hookimpl
def convert(g, node): return g.op.Mul(node.args[0], 2.0)
"""
GOOD = HEAD + "@hookimpl\ndef onnxplug_rules(): return [Rule('shop::double', convert)]"
TWICE = HEAD + "@hookimpl\ndef onnxplug_rules(): return [Rule('shop::other', convert), Rule('shop::other', convert)]"


def run(folder: Path, code: str, **environment: str) -> list[str]:
    options = ("-W", "ignore::DeprecationWarning", "-c", PRELUDE + code)
    return run_python(folder, *options, **environment).splitlines()


def test_a_rule_that_is_stated_twice_is_its_plugins_fault_alone(tmp_path: Path) -> None:
    place(
        tmp_path,
        Dist("onnxplug-good", GOOD, "good"),
        Dist("onnxplug-twice", TWICE, "twice"),
    )
    first, second = run(tmp_path, "attempt(lambda x: x.relu())\nattempt(lambda x: double(x))")
    assert first.startswith("['Relu'] 1 the plugin twice of onnxplug-twice 1.0 is not used")
    assert "two rules for shop::other" in first
    assert second == "['Mul'] 0"
    strict = run(
        tmp_path,
        "from onnxplug.plugins.manager import PluginManager\nfrom onnxplug.plugins.records import Selection\n"
        "try: PluginManager(Selection(strict=True)).load()\nexcept OnnxplugError as e: print('two rules for' in str(e))",
    )
    assert "True" in strict


def test_a_requirement_that_is_not_met_is_reported(tmp_path: Path) -> None:
    wanted = "@hookimpl\ndef onnxplug_info(): return PluginInfo(requires=['torch>=99', 'surely-not-here', 'numpy'])\n"
    place(tmp_path, Dist("onnxplug-good", f"{GOOD}\n{wanted}", "good"))
    first, second = run(tmp_path, "attempt(lambda x: double(x))\nattempt(lambda x: double(x) + 1)")
    assert first.startswith(
        "['Mul'] 2 the plugin good of onnxplug-good 1.0 is used and may fail: it asks for surely-not-here"
    )
    assert "asks for torch>=99, but version" in first
    assert second.endswith("0")


@pytest.mark.parametrize("returned", ["value", "[value]"])
def test_a_rule_that_leaves_a_result_out_is_reported(tmp_path: Path, returned: str) -> None:
    source = f"{HEAD}def one(g, node):\n    value = convert(g, node)\n    return {returned}\n"
    place(
        tmp_path,
        Dist("onnxplug-good", source + "@hookimpl\ndef onnxplug_rules(): return [Rule('shop::both', one)]", "good"),
    )
    first, second = run(tmp_path, "attempt(lambda x: both(x)[0])\nattempt(lambda x: both(x)[0] + both(x)[1])")
    assert first.startswith(
        "['Mul'] 1 rule onnxplug_good:one of onnxplug-good for shop::both.default returned 1 result where"
    )
    assert second.startswith(
        "OutputMismatchError: rule onnxplug_good:one of onnxplug-good for shop::both.default returned 1 result"
    )


PATCHES = {
    "begins": "def bad():\n    raise KeyError('nothing')\n    yield\n",
    "ends": "def bad():\n    yield\n    raise KeyError('nothing')\n",
}


@pytest.mark.parametrize("when", PATCHES)
def test_a_patch_that_raises_names_its_plugin(tmp_path: Path, when: str) -> None:
    patch = f"@contextlib.contextmanager\n{PATCHES[when]}@hookimpl\ndef onnxplug_patches(): return [bad]\n"
    fine = "@contextlib.contextmanager\ndef fine():\n    yield\n@hookimpl\ndef onnxplug_patches(): return [fine, contextlib.nullcontext()]\n"
    place(tmp_path, Dist("onnxplug-good", GOOD + "\n" + fine, "good"), Dist("onnxplug-bad", f"{HEAD}{patch}", "bad"))
    first, second, third = run(
        tmp_path,
        "attempt(lambda x: x.relu())\nattempt(lambda x: double(x), plugins=['good'])\n"
        "def refuses(x): raise ValueError('by the model')\nattempt(refuses, plugins=['good'])",
    )
    assert first.startswith(
        "PluginError: the patch bad of the plugin bad (onnxplug-bad 1.0), which holds during capture, raised"
    )
    assert f"KeyError as it {when}: 'nothing'" in first
    assert second == "['Mul'] 0"
    assert third.startswith("CaptureError")
    assert "by the model" in third


REWRITES = {
    "raised ZeroDivisionError": "Rewrite('bad', 'Relu', lambda g, node: 1 / 0)",
    "(`when`) of the rewrite 'bad' raised": "Rewrite('bad', 'Relu', lambda g, node: None, when=lambda node: 1 / 0)",
    "changed": "Rewrite('bad', 'Relu', lambda g, node: g.op.Cast(node.inputs[0], to=11))",
    "does not terminate": "Rewrite('bad', 'Relu', lambda g, node: g.op.Relu(g.op.Relu(node.inputs[0])))",
}


@pytest.mark.parametrize("fault", REWRITES)
def test_a_rewrite_that_fails_names_its_plugin(tmp_path: Path, fault: str) -> None:
    source = f"{HEAD}@hookimpl\ndef onnxplug_rewrites(): return [{REWRITES[fault]}]\n"
    place(tmp_path, Dist("onnxplug-good", GOOD, "good"), Dist("onnxplug-bad", source, "bad"))
    first, second = run(tmp_path, "attempt(lambda x: x.relu())\nattempt(lambda x: double(x))")
    assert first.startswith("ConversionError: ")
    assert fault in first
    assert "(the rewrite is of onnxplug-bad)" in first
    assert second == "['Mul'] 0"


LATE = {
    "onnxplug_missing": "def onnxplug_missing(node): return 1 / 0",
    "onnxplug_verifier": "def onnxplug_verifier(program): return 1 / 0",
    "a function of onnxplug_refusals": "def onnxplug_refusals(): return [lambda fx, **about: 1 / 0]",
    "the function accepts of a source": "def onnxplug_sources(): return [ModelSource(accepts=lambda m: 1 / 0, module=print)]",
    "the function module of a source": "def onnxplug_sources(): return [ModelSource(accepts=callable, module=lambda m: 1 / 0)]",
}


@pytest.mark.parametrize("what", LATE)
def test_a_function_that_raises_in_an_export_names_its_plugin(tmp_path: Path, what: str) -> None:
    source = f"{HEAD}from onnxplug import ModelSource\n@hookimpl\n{LATE[what]}\n"
    fine = (
        "@hookimpl\ndef onnxplug_missing(node): return None\n@hookimpl\ndef onnxplug_verifier(program): return None\n"
    )
    place(tmp_path, Dist("onnxplug-fine", f"{HEAD}{fine}", "fine"), Dist("onnxplug-bad", source, "bad"))
    first, second = run(tmp_path, "attempt(lambda x: double(x))\nattempt(lambda x: x.relu(), plugins=['fine'])")
    if what == "onnxplug_verifier":
        first = run(tmp_path, "attempt(lambda x: x.relu())")[0]
    owner = "onnxplug-bad:bad" if what.startswith("onnxplug_") else "bad (onnxplug-bad 1.0)"
    assert first.startswith(
        f"PluginError: {what} of the plugin {owner} raised ZeroDivisionError: division by zero Hint: "
    )
    assert second == "['Relu'] 0"


def test_a_converter_of_the_missing_hook_that_is_none(tmp_path: Path) -> None:
    place(tmp_path, Dist("onnxplug-bad", f"{HEAD}@hookimpl\ndef onnxplug_missing(node): return 3\n", "bad"))
    (first,) = run(tmp_path, "attempt(lambda x: double(x))")
    assert first.startswith("PluginError: onnxplug_missing returned 3, which is not a function")

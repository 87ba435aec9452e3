"""`onnxplug plugins check`, on a plugin's library: missing rules, samples, fakes and versions, and failures to load."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.distributions import Dist, place, run_python

LIBRARY = """
import torch
library = torch.library.Library("yard", "DEF")
for name in ("done", "bare", "traced", "split", "left"):
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x * 2, "CPU")
    if name != "bare":
        library.impl(name, torch.empty_like, "Meta")
library.define("left_backward(Tensor grad) -> Tensor")
library.impl("left_backward", lambda x: x, "CPU")
library.define("on_another_device(Tensor x) -> Tensor")
library.define("composite(Tensor x) -> Tensor")
library.impl("composite", lambda x: x + 1, "CompositeImplicitAutograd")
"""
PLUGIN = """
from onnxplug import Domain, OpSample, OrtLibrary, PluginInfo, ReferenceOp, Rule, hookimpl
def convert(g, node): return g.op.Mul(node.args[0], 2.0)
def inputs():
    import torch, yardlib
    return (torch.ones(2, 3),)
@hookimpl
def onnxplug_rules(): return [Rule("yard::done", convert), Rule("yard::bare", convert)]
@hookimpl
def onnxplug_decompositions(): return {"yard::split.default": lambda x: x * 2}
@hookimpl
def onnxplug_samples(): return [OpSample("yard::done", inputs, opsets=(21,))]
@hookimpl
def onnxplug_domains(): return [Domain("com.yard", 1)]
@hookimpl
def onnxplug_runtime(): return [OrtLibrary("/nowhere/libyard.so"), OrtLibrary(lambda: __file__), OrtLibrary(lambda: None), ReferenceOp("nowhere:Kernel")]
@hookimpl
def onnxplug_info(): return PluginInfo(namespaces=("yard",), libraries=("yardlib",), replaced=("yard::traced",))
"""


def test_findings_about_a_plugins_library(tmp_path: Path) -> None:
    place(tmp_path, Dist("onnxplug-yard", PLUGIN, "yard"), Dist("yard-library", LIBRARY, "library", module="yardlib"))
    printed = run_python(tmp_path, "-W", "ignore", "-m", "onnxplug", "plugins", "check", "yard", "--json", status=1)
    findings, _ = json.JSONDecoder().raw_decode(printed[printed.index("[\n") :])
    messages = {
        kind: [f for f in findings if f["kind"] == kind]
        for kind in ("sample", "operators", "fake", "versions", "runtime")
    }
    assert [f["message"] for f in messages["operators"]] == ["1 of the 5 operators of yard have no rule: yard::left"]
    assert [f["message"] for f in messages["fake"]] == [
        "torch knows no shapes of the results of yard::bare: register fake kernels in onnxplug_patches()"
    ]
    assert "no sample of yard::split, which it decomposes" in [f["message"] for f in messages["sample"]]
    assert "no sample of yard::bare" in [f["message"] for f in messages["sample"]]
    (versions,) = messages["versions"]
    assert versions["message"].startswith("no version of yard-library is stated: PluginInfo(requires=['yard-library>=")
    runtime = [(f["severity"], f["message"]) for f in messages["runtime"]]
    assert ("error", "the library /nowhere/libyard.so is not there") in runtime
    assert ("note", "the library of ONNX Runtime is not for this machine") in runtime
    assert any(severity == "error" and "can't be loaded" in text for severity, text in runtime)
    assert any(severity == "error" and "nowhere:Kernel" in text for severity, text in runtime)


def test_nothing_to_say(tmp_path: Path) -> None:
    whole = PLUGIN.replace('"yard::bare"', '"yard::left"').replace('"yard::split.default"', '"yard::bare.default"')
    whole = whole.replace(
        'replaced=("yard::traced",)', 'replaced=("yard::traced", "yard::split"), requires=["yard-library>=1.0"]'
    )
    whole = whole.partition("@hookimpl\ndef onnxplug_runtime")
    info = whole[2][whole[2].index("@hookimpl") :]
    fake = (
        "@hookimpl\ndef onnxplug_patches(): return [fakes]\ndef fakes():\n    import contextlib, torch\n"
        "    torch.library.register_fake('yard::bare', torch.empty_like)\n    return contextlib.nullcontext()\n"
    )
    place(
        tmp_path,
        Dist("onnxplug-yard", whole[0] + info + fake, "yard"),
        Dist("yard-library", LIBRARY, "library", module="yardlib"),
    )
    printed = run_python(tmp_path, "-W", "ignore", "-m", "onnxplug", "plugins", "check", "yard", "--json")
    findings, _ = json.JSONDecoder().raw_decode(printed[printed.index("[\n") :])
    assert {"operators: 5 operators of yard: each has a rule"} <= {f"{f['kind']}: {f['message']}" for f in findings}
    assert {f["kind"] for f in findings if f["severity"] == "note"} == {"sample"}

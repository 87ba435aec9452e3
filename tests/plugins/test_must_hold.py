"""Guarantees that hold though plugins misbehave; each plugin is a distribution of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.distributions import Dist, place, run_python

OPS = """
import sys, warnings, threading
warnings.simplefilter("ignore")
import torch, onnxplug
from onnxplug.errors import OnnxplugError

def define(name, n=1):
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2
    op = torch.library.custom_op(f"shop::{name}", f, mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))
    return op
X = torch.randn(2, 3)
def ops(program):
    return [n.op_type for n in program.model.graph]
def attempt(*args, **kwargs):
    try:
        return ops(onnxplug.to_onnx(*args, **kwargs))
    except OnnxplugError as error:
        return f"{type(error).__name__}: {error}".replace("\\n", " ")
"""

WRONG = """
from onnxplug import Rule, hookimpl, Decline
def count(g, node): return [node.args[0], node.args[0]]
def dtype(g, node): return g.op.Cast(node.args[0], to=11)
def rank(g, node): return g.op.Unsqueeze(node.args[0], [0])
def size(g, node): return g.op.Concat(node.args[0], node.args[0], axis=0)
def nothing(g, node): return None
def raises(g, node): return 1 / 0
def declines(g, node):
    g.op.Sin(g.op.Exp(node.args[0]))
    raise Decline("not today")
def after(g, node): return g.op.Mul(node.args[0], 2.0)
@hookimpl
def onnxplug_rules():
    names = ("count", "dtype", "rank", "size", "nothing", "raises")
    return [
        *(Rule(f"shop::{n}", globals()[n]) for n in names),
        Rule("shop::twice", declines, priority=1), Rule("shop::twice", after),
    ]
"""


def test_a_converter_that_returns_something_else(tmp_path: Path) -> None:
    place(tmp_path, Dist("onnxplug-shop", WRONG))
    code = """
for name in ("count", "dtype", "rank", "size", "nothing", "raises"):
    op = define(name)
    print(name, attempt(lambda x: op(x), (X,)))
"""
    lines = dict(line.split(" ", 1) for line in run_python(tmp_path, "-c", OPS + code).splitlines())
    for name in ("count", "dtype", "rank", "size", "nothing"):
        assert lines[name].startswith("OutputMismatchError: "), lines[name]
        assert f"rule onnxplug_shop:{name} of onnxplug-shop for shop::{name}.default returned" in lines[name]
    assert "torch has a float[2, 3]" in lines["count"]
    assert "returned double" in lines["dtype"]
    assert "returned rank 3" in lines["rank"]
    assert "returned the shape [4, 3]" in lines["size"]
    assert "returned None" in lines["nothing"]
    assert "the converter raised ZeroDivisionError" in lines["raises"]
    assert "of onnxplug-shop" in lines["raises"]


@pytest.mark.parametrize("optimize", [True, False])
def test_decline_leaves_no_orphan(tmp_path: Path, optimize: bool) -> None:
    place(tmp_path, Dist("onnxplug-shop", WRONG))
    code = f"""
op = define("twice")
print(attempt(lambda x: op(x), (X,), optimize={optimize}, verify=True))
"""
    assert "['Mul']" in run_python(tmp_path, "-c", OPS + code)


REWRITES = """
from onnxplug import Rewrite, hookimpl
def there(g, node): return g.op.Ceil(node.inputs[0])
def back(g, node): return g.op.Floor(node.inputs[0])
def same(g, node): return g.op.Tan(node.inputs[0])
def wide(g, node): return g.op.Cast(g.op.Atan(node.inputs[0]), to=11)
def raises(g, node): return node.nothing
@hookimpl
def onnxplug_rewrites():
    return [
        Rewrite("there", "Floor", there), Rewrite("back", "Ceil", back), Rewrite("to_itself", "Tan", same),
        Rewrite("widens", "Acos", wide), Rewrite("clumsy", "Asin", raises),
    ]
"""


def test_a_rewrite_that_does_not_end_or_changes_a_dtype_is_stopped_and_named(tmp_path: Path) -> None:
    place(tmp_path, Dist("onnxplug-shop", REWRITES))
    code = """
for name in ("floor", "tan", "acos", "asin", "relu"):
    print(name, attempt(lambda x: getattr(x, name)(), (X,)))
print("plain", attempt(lambda x: x.tan(), (X,), optimize=False))
"""
    lines = dict(line.split(" ", 1) for line in run_python(tmp_path, "-c", OPS + code).splitlines())
    assert "does not terminate" in lines["floor"]
    assert "the rewrite 'there' does not terminate" in lines["floor"]
    assert "the rewrite 'to_itself' does not terminate" in lines["tan"]
    assert "the rewrite 'widens' changed" in lines["acos"]
    assert "the rewrite 'clumsy' raised AttributeError" in lines["asin"]
    assert lines["relu"] == "['Relu']"
    assert lines["plain"] == "['Tan']"


CHANGING = """
from onnxplug import Rule, hookimpl
RULES = []
def first(g, node):
    import os, sys, importlib.metadata
    RULES.clear()                                   # the plugin's own list
    del sys.modules[__name__]                       # its module
    os.rename(os.environ["LATE"], os.environ["LATE"] + ".away")      # its metadata: as uninstalled
    import onnxplug, torch
    inner = onnxplug.to_onnx(lambda x: x.relu(), (torch.randn(2),), plugins=[])   # another export, other plugins
    assert [n.op_type for n in inner.model.graph] == ["Relu"]
    return g.op.Mul(node.args[0], 2.0)
def second(g, node): return g.op.Add(node.args[0], node.args[0])
RULES += [Rule("shop::first", first), Rule("shop::second", second)]
@hookimpl
def onnxplug_rules():
    return RULES
"""


def test_a_registry_changed_during_an_export_and_a_plugin_uninstalled_between_processes(tmp_path: Path) -> None:
    place(tmp_path, Dist("onnxplug-shop", CHANGING))
    (info,) = tmp_path.glob("onnxplug_shop-*.dist-info")
    code = """
first, second = define("first"), define("second")
print(attempt(lambda x: second(first(x)), (X,), verify=True))
print(attempt(lambda x: second(x), (X,)))
"""
    printed = run_python(tmp_path, "-c", OPS + code, LATE=str(info)).splitlines()
    assert printed == ["['Mul', 'Add']", "['Add']"]
    gone = run_python(tmp_path, "-c", OPS + code, LATE=str(info)).splitlines()
    assert all(line.startswith("MissingRuleError: ") for line in gone)
    assert "shop::first.default" in gone[0]
    assert "shop::second.default" in gone[0]


MUL = "from onnxplug import Rule, hookimpl\ndef f(g, node): return g.op.Mul(node.args[0], 2.0)\n@hookimpl\ndef onnxplug_rules(): return [Rule('shop::double', f)]"
ADD = MUL.replace("g.op.Mul(node.args[0], 2.0)", "g.op.Add(node.args[0], node.args[0])")


def test_threads_with_different_plugins_never_see_each_other(tmp_path: Path) -> None:
    place(tmp_path, Dist("shop-a", MUL, entry="a"), Dist("shop-b", ADD, entry="b"))
    code = """
double = define("double")
class M(torch.nn.Module):
    def forward(self, x): return double(double(x) + 1)
# torch.export itself is not for threads: capture first.
captured = torch.export.export(M(), (X,))
seen = {"a": set(), "b": set(), "both": set()}
def work(name, plugins):
    for _ in range(20):
        seen[name].add(str(attempt(captured, plugins=plugins))[:17])
threads = [threading.Thread(target=work, args=w) for w in (("a", ["a"]), ("b", ["b"]), ("both", None))]
[t.start() for t in threads]; [t.join() for t in threads]
print(seen["a"], seen["b"], seen["both"])
"""
    printed = run_python(tmp_path, "-c", OPS + code)
    assert printed.strip() == """{"['Mul', 'Add', 'M"} {"['Add', 'Add', 'A"} {'RuleConflictError'}"""


def test_a_blocked_plugin_is_never_imported(tmp_path: Path) -> None:
    loud = "import pathlib; pathlib.Path(__file__).with_name('was-imported').touch(); raise RuntimeError('loud')"
    place(tmp_path, Dist("onnxplug-shop", loud), Dist("onnxplug-good", MUL, entry="good"))
    for arguments, environment in (
        (["--no-plugin", "shop", "plugins", "list"], {}),
        (["plugins", "list", "--no-plugin", "onnxplug-shop"], {}),
        (["why", "shop::double", "--only-plugin", "good"], {}),
        (["ops", "shop::*"], {"ONNXPLUG_PLUGINS": "-shop"}),
    ):
        run_python(tmp_path, "-m", "onnxplug", *arguments, **environment)
        assert not (tmp_path / "was-imported").exists()
    assert "loud" in run_python(tmp_path, "-m", "onnxplug", "plugins", "list")
    assert (tmp_path / "was-imported").exists()

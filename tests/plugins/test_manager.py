"""Plugins as real distributions: metadata and modules on the path, found by their entry points."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.distributions import Dist, pip_install, place, run_python

PRELUDE = """
import sys, warnings
import torch, onnxplug
from onnxplug.plugins.manager import PluginManager, registry_for
from onnxplug.plugins.records import Selection

@torch.library.custom_op("shop::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
double.register_fake(lambda x: torch.empty_like(x))
X = torch.randn(2, 3)
model = lambda x: double(x)
def ops(program):
    return [n.op_type for n in program.model.graph]
"""
RULE = """
from onnxplug import Rule, hookimpl
def convert(g, node):
    return {body}
@hookimpl
def onnxplug_rules():
    return [Rule({op!r}, convert{options})]
"""


def install(
    folder: Path, name: str, source: str, *, module: str = "", entry: str = "shop", version: str = "1.0"
) -> None:
    """A distribution installed in ``folder``."""
    place(folder, Dist(name, source, entry, module, version))


def rule(body: str, op: str = "shop::double", options: str = "") -> str:
    return RULE.format(body=body, op=op, options=options)


def run(folder: Path, code: str, **environment: str) -> str:
    return run_python(folder, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + code, **environment)


MUL = "g.op.Mul(node.args[0], 2.0)"
ADD = "g.op.Add(node.args[0], node.args[0])"
EXPORT = "print(ops(onnxplug.to_onnx(model, (X,), verify=True)))"


def test_an_installed_package_translates_its_operator(tmp_path: Path) -> None:
    """In a new process, built and installed by pip; the other tests start from files that ``place`` writes."""
    shop, again = (
        Dist("onnxplug-shop", rule(MUL), version="1.2"),
        Dist("onnxplug-again", None, "again", "onnxplug_shop"),
    )
    by_pip, written = tmp_path / "pip", tmp_path / "written"
    pip_install(by_pip, shop, again)
    options = ("-W", "ignore::DeprecationWarning", "-c", PRELUDE + EXPORT.replace("(X,)", "(X,), plugins=['shop']"))
    assert "['Mul']" in run_python(by_pip, *options, fresh=True)
    written.mkdir()
    place(written, shop, again)
    of_pip_alone = {"REQUESTED", "WHEEL", "direct_url.json", "RECORD"}  # its own build, and the hashes of that

    def files(folder: Path) -> dict[str, str]:
        results = (p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc" and p.name not in of_pip_alone)
        return {p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8") for p in results}

    assert files(written) == files(by_pip)


def test_choosing_plugins(tmp_path: Path) -> None:
    install(tmp_path, "onnxplug-shop", rule(MUL))
    missing = """
try: onnxplug.to_onnx(model, (X,){options})
except onnxplug.MissingRuleError as e: print("missing", "left out" in str(e), "onnxplug_shop" in sys.modules)
"""
    assert "missing True False" in run(tmp_path, missing.format(options=", plugins=[]"))
    assert "missing True False" in run(tmp_path, missing.format(options=""), ONNXPLUG_PLUGINS="-shop")
    assert "missing True False" in run(tmp_path, missing.format(options=""), ONNXPLUG_PLUGINS="")
    assert "['Mul']" in run(tmp_path, EXPORT.replace("(X,)", "(X,), plugins=['shop']"))
    assert "['Mul']" in run(tmp_path, EXPORT, ONNXPLUG_PLUGINS="onnxplug-shop")
    unknown = "try: onnxplug.to_onnx(model, (X,), plugins=['shopp'])\nexcept onnxplug.PluginError as e: print(e)"
    assert "no plugin 'shopp' is installed" in run(tmp_path, unknown)


def test_a_plugin_that_raises_at_import(tmp_path: Path) -> None:
    install(tmp_path, "onnxplug-shop", "import nowhere_to_be_found")
    code = """
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    print(ops(onnxplug.to_onnx(lambda x: x + 1, (X,))), ops(onnxplug.to_onnx(lambda x: x - 1, (X,))))
print(len([w for w in seen if "is not used: ModuleNotFoundError" in str(w.message)]), "warning")
try: onnxplug.to_onnx(model, (X,))
except onnxplug.MissingRuleError as e: print(e)
"""
    printed = run(tmp_path, code)
    assert "['Add'] ['Sub']" in printed
    assert "1 warning" in printed
    assert "Traceback" in printed
    assert "No module named 'nowhere_to_be_found'" in printed


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys; sys.exit(3)", "SystemExit"),
        ("from onnxplug import hookimpl\n@hookimpl\ndef onnxplug_rulez(): return []", "onnxplug_rulez, which is not a hook"),
        ("def onnxplug_rules(): return []", "not marked with @onnxplug.hookimpl"),
        ("from onnxplug import hookimpl\n@hookimpl\ndef onnxplug_rules(): return None", "returned None, not an iterable"),
        ("from onnxplug import hookimpl\n@hookimpl\ndef onnxplug_rules(): return [3]", "which is not a Rule"),
        ("from onnxplug import hookimpl\n@hookimpl\ndef onnxplug_rules(): return 1/0", "ZeroDivisionError"),
        ("from onnxplug import *\nfrom onnxplug import hookimpl, PluginInfo\n@hookimpl\ndef onnxplug_info(): return PluginInfo(api=2)", "plugin API 2"),
        ("from onnxplug import hookimpl\n@hookimpl\ndef onnxplug_rules(extra): return []", "extra"),
        ("from onnxplug import hookimpl\n@hookimpl\ndef onnxplug_domains(): return ['acme']", "'acme', which is not a Domain"),
        ("from onnxplug import hookimpl\n@hookimpl\ndef onnxplug_rewrites(): return [print]", "which is not a Rewrite"),
        ("from onnxplug import hookimpl\n@hookimpl\ndef onnxplug_patches(): return [3]", "neither a context manager nor"),
        ("from onnxplug import hookimpl\n@hookimpl\ndef onnxplug_samples(): return [3]", "which is not an OpSample"),
        ("from onnxplug import hookimpl\n@hookimpl\ndef onnxplug_decompositions(): return {'aten.sin': print}", "no name such as"),
        ("from onnxplug import hookimpl\n@hookimpl\ndef onnxplug_decompositions(): return {'aten::sin': 3}", "neither a function nor None"),
        ("from onnxplug import PluginInfo, hookimpl\n@hookimpl\ndef onnxplug_info(): return PluginInfo(namespaces='acme')", "takes a list, got 'acme'"),
    ],
)  # fmt: skip
def test_a_malformed_plugin_is_refused_whole(tmp_path: Path, source: str, message: str) -> None:
    install(tmp_path, "onnxplug-shop", source)
    install(tmp_path, "onnxplug-good", rule(MUL), entry="good")
    code = """
warnings.simplefilter("ignore")
print(ops(onnxplug.to_onnx(model, (X,))))
for r in registry_for()[1].records(): print(r.name, r.status, r.error)
"""
    printed = run(tmp_path, code)
    assert "['Mul']" in printed
    assert "shop failed" in printed
    assert "good loaded" in printed
    assert message in printed


def test_two_plugins_for_one_operator(tmp_path: Path) -> None:
    install(tmp_path, "shop-a", rule(MUL), entry="a")
    install(tmp_path, "shop-b", rule(ADD), entry="b")
    code = """
print(ops(onnxplug.to_onnx(lambda x: x + 1, (X,))))
try: onnxplug.to_onnx(model, (X,))
except onnxplug.RuleConflictError as e: print(e)
print(ops(onnxplug.to_onnx(model, (X,), prefer={"shop::double": "shop-b"})))
print(ops(onnxplug.to_onnx(model, (X,), prefer={"shop::double.default": "shop-a"})))
try: onnxplug.to_onnx(model, (X,), prefer={"shop::double": "shop-c"})
except onnxplug.UsageError as e: print(e)
"""
    printed = run(tmp_path, code)
    assert "'shop-a' and 'shop-b' both translate shop::double.default, by shop_a:convert and shop_b:convert" in printed
    assert "prefer=" in printed
    assert "['Add']\n" in printed
    assert "['Mul']\n" in printed
    assert "'shop-c' has no rule for shop::double; the distributions that have one: shop-a, shop-b" in printed


def test_overriding_a_builtin_rule(tmp_path: Path) -> None:
    body = "g.op.Max(node.args[0], 0.0)"
    install(tmp_path, "shop-a", rule(body, "aten::relu.default", ", override=True, opset=(20, 20)"), entry="a")
    code = (
        "for o in (18, 20, 21): print(o, ops(onnxplug.to_onnx(lambda x: x.relu(), (X,), opset_version=o, verify=True)))"
    )
    printed = run(tmp_path, code)
    assert printed.splitlines() == ["18 ['Relu']", "20 ['Max']", "21 ['Relu']"]


def test_a_rule_that_shadows_a_builtin_rule_silently_is_refused(tmp_path: Path) -> None:
    install(tmp_path, "shop-a", rule("g.op.Max(node.args[0], 0.0)", "aten::relu"), entry="a")
    code = """
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    print(ops(onnxplug.to_onnx(lambda x: x.relu(), (X,))))
print([str(w.message) for w in seen if "override=True" in str(w.message)])
"""
    printed = run(tmp_path, code)
    assert "['Relu']" in printed
    assert "of shop-a for aten::relu is ignored" in printed


def test_the_same_module_under_two_entry_points(tmp_path: Path) -> None:
    install(tmp_path, "onnxplug-shop", rule(MUL))
    place(tmp_path, Dist("onnxplug-again", None, entry="again", module="onnxplug_shop"))
    code = "print([(r.name, r.status) for r in registry_for()[1].records()]); " + EXPORT
    printed = run(tmp_path, code)
    assert "['Mul']" in printed
    assert "'blocked'" in printed


def test_required_plugins(tmp_path: Path) -> None:
    install(tmp_path, "onnxplug-shop", rule(MUL), version="1.1")
    code = """
for text in ("onnxplug-shop>=1.0", "shop>=1.2", "ghost", "not a requirement!"):
    try: PluginManager(Selection(require=(text,))).load(); print("fine")
    except onnxplug.PluginError as e: print(str(e).splitlines()[0])
"""
    printed = run(tmp_path, code).splitlines()
    assert printed[:3] == [
        "fine",
        "plugin shop is version 1.1, but shop>=1.2 is required",
        "the required plugin ghost is not installed",
    ]
    assert "--require-plugin 'not a requirement!' is not a valid requirement" in printed[3]


def test_the_missing_hook_and_decompositions(tmp_path: Path) -> None:
    install(
        tmp_path,
        "onnxplug-shop",
        """
from onnxplug import hookimpl
@hookimpl
def onnxplug_missing(node):
    if node.op_name == "shop::double.default":
        return lambda g, node: g.op.Mul(node.args[0], 2.0)
""",
    )
    assert "['Mul']" in run(tmp_path, EXPORT)


def test_a_plugins_decomposition(tmp_path: Path) -> None:
    source = "from onnxplug import hookimpl\n@hookimpl\ndef onnxplug_decompositions(): return {'shop::double.default': lambda x: x + x}"
    install(tmp_path, "onnxplug-shop", source)
    assert "['Add']" in run(tmp_path, EXPORT)


def test_a_decomposition_of_every_overload(tmp_path: Path) -> None:
    """A name without an overload, as in rules: a function for all of them, or ``None``, which forbids torch's own."""
    source = """
from onnxplug import hookimpl
@hookimpl
def onnxplug_decompositions(): return {'shop::double': lambda x: x + x, 'aten::special_zeta': None}
"""
    install(tmp_path, "onnxplug-shop", source)
    code = """
from onnxplug.plugins.manager import host_for
print(host_for().decomposers("shop::double.default"))
from onnxplug.interpret.decompose import find_decompositions
entr = torch.ops.aten.special_entr.default, "aten::special_entr.default"
print([len(find_decompositions(*entr, table)) for table in ({}, {"aten::special_entr": None}, {entr[1]: len, "aten::special_entr": None})])
"""
    printed = run(tmp_path, EXPORT + "\n" + code)
    assert printed.splitlines()[-3:] == ["['Add']", "{'shop::double': 'onnxplug-shop'}", "[1, 0, 1]"]


def test_two_plugins_that_decompose_one_operator(tmp_path: Path) -> None:
    """Neither is chosen by its name's place in the alphabet; models without the operator are exported."""
    source = (
        "from onnxplug import hookimpl\n@hookimpl\ndef onnxplug_decompositions(): return {'shop::double.default': %s}"
    )
    install(tmp_path, "shop-a", source % "lambda x: x + x", entry="a")
    install(tmp_path, "shop-b", source % "None", entry="b")
    code = """
print(ops(onnxplug.to_onnx(lambda x: x + 1, (X,))))
try: onnxplug.to_onnx(model, (X,))
except onnxplug.MissingRuleError as e: print(e)
print(ops(onnxplug.to_onnx(model, (X,), plugins=["a"])), ops(onnxplug.to_onnx(model, (X,), plugins=["a", "builtin"])))
"""
    printed = run(tmp_path, code)
    assert "the plugins a (shop-a 1.0) and b (shop-b 1.0) both decompose shop::double.default" in printed
    assert printed.startswith("['Add']\n")
    assert printed.endswith("['Add'] ['Add']\n")


def test_loading_that_is_interrupted_begins_again(tmp_path: Path) -> None:
    install(tmp_path, "onnxplug-first", rule(MUL) + "import sys\nsys.loads = getattr(sys, 'loads', 0) + 1\n", entry="a")
    interrupt = "import sys\nif not hasattr(sys, 'once'):\n    sys.once = True\n    raise KeyboardInterrupt\n"
    install(tmp_path, "onnxplug-slow", interrupt + rule("node.args[0]", "shop::other"), entry="b")
    install(tmp_path, "onnxplug-third", rule(ADD, "shop::third"), entry="c")
    code = """
try: onnxplug.to_onnx(model, (X,))
except KeyboardInterrupt: print("interrupted")
print(ops(onnxplug.to_onnx(model, (X,))))
print([r.name for r in registry_for()[1].records() if r.status == "loaded" and r.name in "abc"])
"""
    assert run(tmp_path, code).splitlines() == ["interrupted", "['Mul']", "['a', 'b', 'c']"]


def test_discovery_imports_no_converter_module(tmp_path: Path) -> None:
    code = """
from onnxplug.plugins.manager import host_for
host = host_for()
host.load()
print("discovered", {r.distribution for r in host.records() if r.status == "loaded"} >= {"onnxplug"}, [m for m in sys.modules if "onnxplug.converters" in m])
builtin, _ = host.rules()
print("asked", len(builtin) > 1000, host.records()[0].rules == len(builtin))
"""
    printed = run(tmp_path, code)
    assert "discovered True []" in printed
    assert "asked True True" in printed


def test_import_is_cheap(tmp_path: Path) -> None:
    code = """
import subprocess
print(subprocess.run([sys.executable, "-c", "import sys, onnxplug; from onnxplug import Rule, hookimpl, PluginInfo; print([m for m in ('torch', 'onnx', 'onnx_ir', 'onnxscript', 'numpy') if m in sys.modules])"], capture_output=True, text=True).stdout)
"""
    assert "[]" in run(tmp_path, code)


def test_a_required_or_strict_plugin_that_is_broken_fails_every_time(tmp_path: Path) -> None:
    install(tmp_path, "onnxplug-shop", "1 / 0")
    code = """
warnings.simplefilter("ignore")
for selection in (Selection(require=("onnxplug-shop",)), Selection(strict=True)):
    for _ in range(2):
        try: registry_for(selection=selection); print("fine")
        except onnxplug.PluginError as e: print("broken" in str(e), "ZeroDivisionError" in str(e))
"""
    assert run(tmp_path, code).split() == ["True"] * 8


HANGS = "import time\ndef wait():\n    time.sleep(600)\nwait()"
HANGS_IN_A_HOOK = """
import time
from onnxplug import hookimpl
@hookimpl
def onnxplug_rules():
    yield from ()
    time.sleep(600)
"""


@pytest.mark.parametrize("source", [HANGS, pytest.param(HANGS_IN_A_HOOK, marks=pytest.mark.long)])
def test_a_plugin_that_hangs_is_named_and_given_up(tmp_path: Path, source: str) -> None:
    install(tmp_path, "onnxplug-hangs", source, entry="a_first")
    install(tmp_path, "onnxplug-shop", rule(MUL))
    notice = "import onnxplug.plugins.timeout as t; t.TimedThread.__init__.__defaults__ = (0.5,)\n"
    printed = run(tmp_path, notice + EXPORT, ONNXPLUG_PLUGIN_TIMEOUT="2")
    assert "onnxplug: waiting for the plugin a_first (onnxplug-hangs 1.0), until 2 s have passed" in printed
    assert (
        "PluginWarning: the plugin a_first of onnxplug-hangs 1.0 is not used: PluginError: it did not end within 2 s"
        in printed
    )
    assert f"onnxplug_hangs.py:{source[: source.index('time.sleep')].count(chr(10)) + 1}, in " in printed
    assert "['Mul']" in printed, "the others are loaded"
    strict = "try: registry_for(selection=Selection(strict=True))\nexcept onnxplug.PluginError as e: print('strict', e)"
    assert "strict the plugin a_first" in run(tmp_path, strict, ONNXPLUG_PLUGIN_TIMEOUT="1")


def test_the_time_for_a_plugin_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxplug.errors import UsageError
    from onnxplug.plugins.timeout import DEFAULT, timeout

    assert timeout() == DEFAULT
    for text, seconds in (("", DEFAULT), ("2.5", 2.5), ("0", None), ("inf", None), ("1e300", None)):
        monkeypatch.setenv("ONNXPLUG_PLUGIN_TIMEOUT", text)
        assert timeout() == seconds
    for text in ("soon", "-1", "nan"):
        monkeypatch.setenv("ONNXPLUG_PLUGIN_TIMEOUT", text)
        with pytest.raises(UsageError, match="ONNXPLUG_PLUGIN_TIMEOUT"):
            timeout()


def test_waiting_passes_results_and_errors_on() -> None:
    import threading

    from onnxplug.errors import PluginError
    from onnxplug.plugins.timeout import TimedThread

    thread = TimedThread(5.0)
    assert thread.call(lambda: threading.current_thread() is threading.main_thread(), "a test") is False
    with pytest.raises(SystemExit):
        thread.call(lambda: sys.exit(3), "a test")
    short = TimedThread(0.05)
    never = threading.Event()
    with pytest.raises(PluginError, match=r"did not end within 0.05 s; it was at "):
        short.call(never.wait, "a test")
    assert short.call(lambda: 4, "a test") == 4
    never.set()
    thread.close()
    short.close()

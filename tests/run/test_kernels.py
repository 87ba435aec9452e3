"""Plugins' ONNX Runtime libraries and reference kernels: chosen, loaded, and every way in which that fails."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnxplug_tools.verification import verify_file
from onnxruntime import InferenceSession

import onnxplug
import onnxplug.plugins.manager
import onnxplug.runtime
from onnxplug import PluginError, UsageError, VerificationError
from onnxplug.cli.app import run
from onnxplug.plugins import runtime
from onnxplug.run import kernels
from onnxplug.run.session import Runner
from tests.support.child import run_child

SOURCE = Path(__file__).resolve().parents[2] / "contrib" / "onnxplug-example-cpp" / "src"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the libraries are built by g++")


@torch.library.custom_op("kernels::leaky", mutates_args=())
def leaky(x: torch.Tensor, leak: float) -> torch.Tensor:
    sums = [x[..., 0]]
    for t in range(1, x.shape[-1]):
        sums.append(x[..., t] + leak * sums[-1])
    return torch.stack(sums, -1)


leaky.register_fake(lambda x, leak: torch.empty_like(x))


@torch.library.custom_op("kernels::second", mutates_args=())
def second(x: torch.Tensor, leak: float) -> torch.Tensor:
    return torch.ops.kernels.leaky(x, leak)


second.register_fake(lambda x, leak: torch.empty_like(x))

RULES = """
from onnxplug import Domain, OrtLibrary, PluginInfo, ReferenceOp, Rule, hookimpl

@hookimpl
def onnxplug_rules():
    return [
        Rule("kernels::leaky", lambda g, n: g.domain("kernels.test").Leaky(n.args[0], leak=n.args[1])),
        Rule("kernels::second", lambda g, n: g.domain("kernels.second").Second(n.args[0], leak=n.args[1])),
    ]
"""
DOMAINS = """
@hookimpl
def onnxplug_domains(): return [Domain("kernels.test"), Domain("com.microsoft")]
"""
REFERENCE = """
from onnx.reference.op_run import OpRun
import numpy as np
class Leaky(OpRun):
    op_domain = "kernels.test"
    def _run(self, x, leak=None):
        y = x.copy()
        for t in range(1, x.shape[-1]):
            y[..., t] += np.asarray(leak, x.dtype) * y[..., t - 1]
        return (y,)
class Second(Leaky):
    op_domain = "kernels.second"
"""
X = torch.randn(2, 5)


def model(x: torch.Tensor) -> torch.Tensor:
    return leaky(x + 1, 0.5)


def both(x: torch.Tensor) -> torch.Tensor:
    return second(leaky(x, 0.5), 0.25)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds a library of one operator; each library is built once."""
    folder = tmp_path_factory.mktemp("libraries")

    def build(name: str = "leaky", domain: str = "kernels.test", op: str = "Leaky") -> Path:
        path = folder / f"lib{name}.so"
        if not path.exists():
            defines = [f'-DEXAMPLE_DOMAIN="{domain}"', f'-DEXAMPLE_OP="{op}"']
            flags = ["-std=c++17", "-fPIC", "-shared", "-Wall", "-Werror"]
            subprocess.run(["g++", *flags, *defines, str(SOURCE / "ort_op.cpp"), "-o", str(path)], check=True)
        return path

    return build


class Shop:
    """A folder on the path into which plugins are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, *sources: str, runtime: str | None = None) -> None:
        """Writes a distribution as pip leaves it; ``runtime`` is the result of its hook ``onnxplug_runtime``."""
        module = name.replace("-", "_")
        header = "from onnxplug import Domain, OrtLibrary, PluginInfo, ReferenceOp, Rule, hookimpl"
        hook = f"@hookimpl\ndef onnxplug_runtime(): return {runtime}" if runtime is not None else ""
        (self.folder / f"{module}.py").write_text("\n".join((header, *sources, hook)), encoding="utf-8")
        info = self.folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[onnxplug]\n{name[5:]} = {module}\n", encoding="utf-8")


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    import sys

    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(onnxplug.plugins.manager, "_managers", {})
    monkeypatch.setattr(onnxplug.plugins.manager, "_registries", {})
    for name in [n for n in sys.modules if n.startswith("shop_")]:
        monkeypatch.delitem(sys.modules, name)
    return Shop(folder)


def test_a_library_runs_calls_verification_and_sessions(shop: Shop, library: Any, tmp_path: Path) -> None:
    shop.install("shop-a", RULES, DOMAINS, runtime=f"[OrtLibrary({str(library())!r})]")
    file = tmp_path / "model.onnx"
    program = onnxplug.to_onnx(model, (X,), file, input_names=["x"], dynamic_shapes=({0: "a", 1: "b"},))
    assert [case.runtime for case in program.verify().cases] == ["onnxruntime"] * 4
    torch.testing.assert_close(program(X)[0], model(X))
    report = verify_file(str(file), model, (X,), {}, {"x": {0: "a"}})
    assert {case.runtime for case in report.cases} == {"onnxruntime"}
    for source in (file, str(file), file.read_bytes(), onnx.load(file), program.model, program):
        session = onnxplug.runtime.inference_session(source)
        torch.testing.assert_close(torch.from_numpy(session.run(None, {"x": X.numpy()})[0]), model(X))
        assert onnxplug.runtime.custom_op_libraries(source) == [str(library())]


def test_double_too(shop: Shop, library: Any) -> None:
    shop.install("shop-a", RULES, DOMAINS, runtime=f"[OrtLibrary({str(library())!r})]")
    assert onnxplug.to_onnx(model, (X.double(),)).verify().cases[0].runtime == "onnxruntime"


def test_a_path_with_spaces_by_a_function(shop: Shop, library: Any, tmp_path: Path) -> None:
    (tmp_path / "a folder ü").mkdir()
    there = Path(shutil.copy(library(), tmp_path / "a folder ü" / "the lib.so"))
    shop.install(
        "shop-a", "import pathlib", RULES, DOMAINS, runtime=f"[OrtLibrary(lambda: pathlib.Path({str(there)!r}))]"
    )
    program = onnxplug.to_onnx(model, (X,), verify=True)
    torch.testing.assert_close(program(X)[0], model(X))
    assert onnxplug.runtime.custom_op_libraries(program) == [str(there)]


def test_a_reference_kernel_where_there_is_no_library(shop: Shop) -> None:
    shop.install("shop-a", RULES, DOMAINS, REFERENCE, runtime="[OrtLibrary(lambda: None), ReferenceOp(Leaky)]")
    program = onnxplug.to_onnx(model, (X,))
    assert {case.runtime for case in program.verify().cases} == {"onnxplug.reference"}
    torch.testing.assert_close(program(X)[0], model(X))
    with pytest.raises(PluginError, match=r"nothing runs kernels\.test::Leaky: no library has it"):
        onnxplug.runtime.inference_session(program)


def test_a_reference_kernel_by_name(shop: Shop) -> None:
    import sys

    (shop.folder / "shop_kernels.py").write_text(REFERENCE, encoding="utf-8")
    shop.install("shop-a", RULES, DOMAINS, runtime="[ReferenceOp('shop_kernels:Leaky')]")
    onnxplug.to_onnx(lambda x: x + 1, (X,), verify=True)
    program = onnxplug.to_onnx(model, (X,))
    assert "shop_kernels" not in sys.modules
    assert program.verify().cases[0].runtime == "onnxplug.reference"
    assert "shop_kernels" in sys.modules


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            "shop_kernels:Leaky",
            r"cannot import 'shop_kernels:Leaky', a reference kernel \(from the plugin a .*shop_kernels",
        ),
        ("builtins:int", "'builtins:int' of the plugin a .* is not an OpRun class"),
    ],
)
def test_a_reference_kernel_by_a_wrong_name(shop: Shop, kernel: str, message: str) -> None:
    shop.install("shop-a", RULES, DOMAINS, runtime=f"[ReferenceOp({kernel!r})]")
    with pytest.raises(PluginError, match=message):
        onnxplug.to_onnx(model, (X,), verify=True)


def test_a_wrong_reference_kernel_is_an_error(shop: Shop) -> None:
    wrong = REFERENCE.replace("y[..., t - 1]", "y[..., t]")
    shop.install("shop-a", RULES, DOMAINS, wrong, runtime="[ReferenceOp(Leaky)]")
    with pytest.raises(VerificationError, match="differs"):
        onnxplug.to_onnx(model, (X,), verify=True)


def test_reference_kernels_reach_functions_and_subgraphs(shop: Shop) -> None:
    rule = """
@hookimpl
def onnxplug_rules():
    def body(g): return lambda x: g.domain("kernels.test").Leaky(x, leak=0.5)
    return [
        Rule("kernels::leaky", lambda g, n: g.domain("kernels.test").Leaky(n.args[0], leak=n.args[1])),
        Rule("kernels::second", lambda g, n: g.function("kernels.local", "Wrapped", body(g), [n.args[0]])),
    ]
"""
    shop.install("shop-a", rule, DOMAINS, REFERENCE, runtime="[ReferenceOp(Leaky)]")

    def nested(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: second(x, 0.5), lambda x: leaky(x, 0.5) - 1, (x,))

    program = onnxplug.to_onnx(nested, (X,))
    for x in (X.abs(), -X.abs()):
        torch.testing.assert_close(program.call_reference(x)[0], nested(x))
        torch.testing.assert_close(program(x)[0], nested(x))


def test_call_reference_uses_the_kernel_beside_a_library(shop: Shop, library: Any) -> None:
    both_kinds = f"[OrtLibrary({str(library())!r}), ReferenceOp(Leaky)]"
    shop.install("shop-a", RULES, DOMAINS, REFERENCE, runtime=both_kinds)
    program = onnxplug.to_onnx(model, (X,))
    assert program.verify().cases[0].runtime == "onnxruntime"
    torch.testing.assert_close(program.call_reference(X)[0], model(X))


def test_a_library_goes_before_a_function_body(shop: Shop, library: Any, tmp_path: Path) -> None:
    from onnx import helper

    node = helper.make_node("Leaky", ["x"], ["y"], domain="kernels.test", leak=0.5)
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 5]) for name in "xy"]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("kernels.test", 1)]
    negate = helper.make_node("Neg", ["x"], ["y"])
    body = helper.make_function("kernels.test", "Leaky", ["x"], ["y"], [negate], opsets[:1], ["leak"])
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    file = str(tmp_path / "model.onnx")
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=[body], ir_version=8), file)
    shop.install("shop-a", DOMAINS, runtime=f"[OrtLibrary({str(library())!r})]")
    shop.install("shop-b", DOMAINS, REFERENCE, runtime="[ReferenceOp(Leaky)]")
    expected = leaky(X, 0.5)
    torch.testing.assert_close(Runner(file)({"x": X})[0], expected)
    torch.testing.assert_close(Runner(file, reference=True)({"x": X})[0], expected)
    without = onnxplug.plugins.manager.host_for([])
    for reference in (False, True):
        torch.testing.assert_close(Runner(file, without, reference=reference)({"x": X})[0], -X)


# -- nothing runs it --------------------------------------------------------------------------------------------------


def test_neither_library_nor_kernel(shop: Shop) -> None:
    shop.install("shop-a", RULES, DOMAINS)
    with pytest.raises(VerificationError) as caught:
        onnxplug.to_onnx(model, (X,), verify=True)
    assert "nothing runs kernels.test::Leaky" in caught.value.message
    assert (
        "The plugin a (shop-a 1.0) declares the domain kernels.test, but it supplies no kernels."
        in caught.value.message
    )
    assert caught.value.hint is not None
    assert "onnxplug_runtime" in caught.value.hint


def test_a_domain_that_nobody_declares(shop: Shop) -> None:
    shop.install("shop-a", RULES)
    with pytest.raises(VerificationError, match=r"No installed plugin declares the domain kernels\.test"):
        onnxplug.to_onnx(model, (X,))(X)


def test_a_broken_plugin_is_named(shop: Shop) -> None:
    shop.install("shop-a", RULES)
    shop.install("shop-b", "1 / 0")
    with pytest.warns(UserWarning, match="division by zero"):
        program = onnxplug.to_onnx(model, (X,))
    with pytest.raises(VerificationError, match=r"The plugin b \(shop-b 1\.0\) is broken: ZeroDivisionError"):
        program.verify()


def test_the_selection_of_the_export_holds_when_it_runs(shop: Shop, library: Any, tmp_path: Path) -> None:
    shop.install("shop-a", RULES)
    shop.install("shop-b", DOMAINS, runtime=f"[OrtLibrary({str(library())!r})]")
    alone = onnxplug.to_onnx(model, (X,), plugins=["a"])
    for use in (alone.verify, lambda: alone(X)):
        with pytest.raises(VerificationError, match=r"Plugins that are left out: .*b \(shop-b 1\.0\)"):
            use()
    with pytest.raises(PluginError, match="left out"):
        onnxplug.runtime.inference_session(alone)
    assert isinstance(onnxplug.runtime.inference_session(alone, plugins=["b"]), InferenceSession)
    alone.save(tmp_path / "model.onnx")
    assert isinstance(onnxplug.runtime.inference_session(tmp_path / "model.onnx"), InferenceSession)
    with pytest.raises(PluginError, match="left out"):
        onnxplug.runtime.inference_session(tmp_path / "model.onnx", plugins=["a"])
    assert onnxplug.to_onnx(model, (X,)).verify().cases


def test_a_library_without_the_operator(shop: Shop, library: Any) -> None:
    other = library("other", op="Other")
    shop.install("shop-a", RULES, DOMAINS, runtime=f"[OrtLibrary({str(other)!r})]")
    with pytest.raises(VerificationError, match="none of its kernels is for this operator") as caught:
        onnxplug.to_onnx(model, (X,), verify=True)
    assert f"Libraries that were loaded: {other}" in str(caught.value)


def test_a_reference_kernel_for_an_operator_that_the_library_lacks(shop: Shop, library: Any) -> None:
    other = f"[OrtLibrary({str(library('other', op='Other'))!r}), ReferenceOp(Leaky)]"
    shop.install("shop-a", RULES, DOMAINS, REFERENCE, runtime=other)
    assert onnxplug.to_onnx(model, (X,)).verify().cases[0].runtime == "onnxplug.reference"


def test_an_operator_in_a_library_and_another_in_python(shop: Shop, library: Any) -> None:
    domains = DOMAINS.replace("[", "[Domain('kernels.second'), ")
    runtime = f"[OrtLibrary({str(library())!r}, domains=['kernels.test']), ReferenceOp(Second)]"
    shop.install("shop-a", RULES, domains, REFERENCE, runtime=runtime)
    with pytest.raises(
        VerificationError, match=r"onnxplug\.reference can't run the model: nothing computes kernels\.test::Leaky"
    ) as caught:
        onnxplug.to_onnx(both, (X,), verify=True)
    assert "kernels.second:Second" in str(caught.value)


# -- libraries that can't be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["verify", "call", "session", "list"])
def test_a_missing_file(shop: Shop, tmp_path: Path, use: str) -> None:
    where = str(tmp_path / "nowhere" / "lib.so")
    shop.install("shop-a", RULES, DOMAINS, REFERENCE, runtime=f"[OrtLibrary({where!r}), ReferenceOp(Leaky)]")
    program = onnxplug.to_onnx(model, (X,))
    uses: dict[str, Callable[[], Any]] = {
        "verify": program.verify,
        "call": lambda: program(X),
        "session": lambda: onnxplug.runtime.inference_session(program),
        "list": lambda: onnxplug.runtime.custom_op_libraries(program),
    }
    with pytest.raises(PluginError) as caught:
        uses[use]()
    assert caught.value.message == f"the library {where} of the plugin a (shop-a 1.0) is not there"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("'/tmp'", "the library /tmp of the plugin a .* is a folder"),
        ("lambda: 1 / 0", "can't say where its library is: ZeroDivisionError"),
        ("lambda: 3", "names 3 as its library"),
        ("__file__", "can't load the library .*shop_a.py of the plugin a"),
    ],
)
def test_no_library_at_the_path(shop: Shop, path: str, message: str) -> None:
    shop.install("shop-a", RULES, DOMAINS, runtime=f"[OrtLibrary({path})]")
    with pytest.raises(PluginError, match=message):
        onnxplug.to_onnx(model, (X,), verify=True)


def test_a_model_that_does_not_need_the_library_is_not_bothered(shop: Shop) -> None:
    shop.install("shop-a", RULES, DOMAINS, runtime="[OrtLibrary('/nowhere/lib.so')]")
    assert onnxplug.to_onnx(lambda x: x + 1, (X,)).verify().cases
    program = onnxplug.to_onnx(lambda x: x + 1, (X,))
    assert onnxplug.runtime.custom_op_libraries(program) == []
    assert isinstance(onnxplug.runtime.inference_session(program), InferenceSession)


def test_another_provider_than_there_is(shop: Shop, library: Any) -> None:
    text = f"OrtLibrary({str(library())!r}, providers=['NoSuchExecutionProvider'])"
    shop.install("shop-a", RULES, DOMAINS, runtime=f"[{text}]")
    program = onnxplug.to_onnx(model, (X,))
    message = "needs NoSuchExecutionProvider, and this ONNX Runtime has .*CPUExecutionProvider"
    with pytest.raises(VerificationError, match=message):
        program.verify()
    with pytest.raises(PluginError, match=message):
        onnxplug.runtime.inference_session(program)
    with pytest.raises(PluginError, match="needs NoSuchExecutionProvider, and the session has CPUExecutionProvider"):
        onnxplug.runtime.inference_session(program, providers=["CPUExecutionProvider"])


def test_another_provider_and_a_reference_kernel(shop: Shop, library: Any) -> None:
    text = f"OrtLibrary({str(library())!r}, providers=['NoSuchExecutionProvider'])"
    shop.install("shop-a", RULES, DOMAINS, REFERENCE, runtime=f"[{text}, ReferenceOp(Leaky)]")
    assert onnxplug.to_onnx(model, (X,)).verify().cases[0].runtime == "onnxplug.reference"


def test_the_library_of_a_provider_that_is_there(shop: Shop, library: Any) -> None:
    """Of two libraries for one domain, the library whose provider the session has is taken."""
    pair = f"""[
        OrtLibrary('/nowhere/gpu.so', providers=['NoSuchExecutionProvider']),
        OrtLibrary({str(library())!r}, providers=['CPUExecutionProvider']),
    ]"""
    shop.install("shop-a", RULES, DOMAINS, runtime=pair)
    program = onnxplug.to_onnx(model, (X,), verify=True)
    assert isinstance(
        onnxplug.runtime.inference_session(program, providers=[("CPUExecutionProvider", {})]), InferenceSession
    )


def test_a_library_brings_its_provider_along(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "available_providers", lambda: ["AProvider", "BProvider", "CPUExecutionProvider"])
    custom = kernels.CustomOperators(("kernels.test",), (("kernels.test", "Leaky"),))
    item = onnxplug.OrtLibrary(library(), providers=["NoProvider", "BProvider"])
    supplied = runtime.PluginRuntime("p", ("kernels.test",), (item,))
    host: Any = type("Host", (), {"runtimes": lambda self: [supplied]})()
    assert runtime.kernels_for(custom, host).providers == ["BProvider", "CPUExecutionProvider"]
    chosen = runtime.kernels_for(custom, host, ["AProvider", "CPUExecutionProvider"])
    assert chosen.libraries == []
    assert "needs NoProvider or BProvider, and the session has AProvider" in chosen.passed_over[0]
    assert runtime.kernels_for(custom, host, ["BProvider"]).libraries[0].path == str(library())


def test_two_libraries_for_one_domain(shop: Shop, library: Any) -> None:
    shop.install("shop-a", RULES, DOMAINS, runtime=f"[OrtLibrary({str(library())!r})]")
    shop.install("shop-b", DOMAINS, runtime=f"[OrtLibrary({str(library('other', op='Other'))!r})]")
    program = onnxplug.to_onnx(model, (X,))
    for use in (program.verify, lambda: program(X), lambda: onnxplug.runtime.inference_session(program)):
        with pytest.raises(PluginError, match=r"2 libraries implement the domain kernels\.test") as caught:
            use()
        assert "plugin a (shop-a 1.0)" in caught.value.message
        assert "plugin b (shop-b 1.0)" in caught.value.message
        assert "--no-plugin" in (caught.value.hint or "")
    assert onnxplug.to_onnx(model, (X,), plugins=["a"]).verify().cases
    assert isinstance(onnxplug.runtime.inference_session(program, plugins=["a"]), InferenceSession)


def test_a_library_named_twice_and_a_library_for_another_domain(shop: Shop, library: Any, tmp_path: Path) -> None:
    link = tmp_path / "link.so"
    link.symlink_to(library())
    shop.install("shop-a", RULES, DOMAINS, runtime=f"[OrtLibrary({str(library())!r}), OrtLibrary({str(link)!r})]")
    elsewhere = f"[OrtLibrary({str(library('second', 'kernels.second', 'Second'))!r}, domains=['kernels.second'])]"
    shop.install("shop-b", DOMAINS, runtime=elsewhere)
    program = onnxplug.to_onnx(both, (X,), verify=True)
    assert len(onnxplug.runtime.custom_op_libraries(program)) == 2
    torch.testing.assert_close(program(X)[0], both(X))


def test_two_libraries_for_one_domain_that_nobody_declared(shop: Shop, library: Any) -> None:
    shop.install("shop-a", RULES, DOMAINS, runtime=f"[OrtLibrary({str(library())!r})]")
    liar = f"[OrtLibrary({str(library('other', op='Other'))!r}, domains=['kernels.second'])]"
    shop.install("shop-b", runtime=liar)
    with pytest.raises(PluginError, match="two libraries implement one domain") as caught:
        onnxplug.to_onnx(both, (X,), verify=True)
    assert "shop-a" in caught.value.message
    assert "shop-b" in caught.value.message


def test_two_reference_kernels_for_one_operator(shop: Shop) -> None:
    shop.install("shop-a", RULES, DOMAINS, REFERENCE, runtime="[ReferenceOp(Leaky)]")
    shop.install("shop-b", REFERENCE, runtime="[ReferenceOp(Leaky)]")
    with pytest.raises(
        PluginError, match=r"the operator kernels\.test::Leaky has two reference kernels, of .*shop-a.*shop-b"
    ):
        onnxplug.to_onnx(model, (X,), verify=True)


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ("['lib.so']", "neither an OrtLibrary nor a ReferenceOp"),
        ("[ReferenceOp(int)]", "not an OpRun class"),
        ("[OrtLibrary('lib.so', providers='CPUExecutionProvider')]", "lists of names"),
    ],
)
def test_results_of_the_hook_are_checked(shop: Shop, runtime: str, message: str) -> None:
    shop.install("shop-a", RULES, runtime=runtime)
    with pytest.warns(UserWarning, match=message), pytest.raises(onnxplug.MissingRuleError):
        onnxplug.to_onnx(model, (X,))


# -- given in the call -------------------------------------------------------------------------------------------------


def own_rules() -> list[onnxplug.Rule]:
    return [onnxplug.Rule("kernels::leaky", lambda g, n: g.domain("kernels.test").Leaky(n.args[0], leak=n.args[1]))]


def test_libraries_and_kernels_of_a_call(shop: Shop, library: Any, tmp_path: Path) -> None:
    item = onnxplug.OrtLibrary(library())
    program = onnxplug.to_onnx(model, (X,), tmp_path / "m.onnx", rules=own_rules(), runtime=[item], verify=True)
    torch.testing.assert_close(program(X)[0], model(X))
    assert onnxplug.runtime.custom_op_libraries(program) == [str(library())]
    with pytest.raises(PluginError, match=r"No installed plugin declares the domain kernels\.test"):
        onnxplug.runtime.inference_session(tmp_path / "m.onnx")
    assert isinstance(onnxplug.runtime.inference_session(tmp_path / "m.onnx", runtime=[item]), InferenceSession)
    namespace: dict[str, Any] = {}
    exec(REFERENCE, namespace)
    kernel = onnxplug.ReferenceOp(namespace["Leaky"])
    program = onnxplug.to_onnx(model, (X,), rules=own_rules(), runtime=[kernel])
    assert program.verify().cases[0].runtime == "onnxplug.reference"
    with pytest.raises(UsageError, match=r"runtime= takes OrtLibrary and ReferenceOp objects, got 'lib\.so'"):
        onnxplug.to_onnx(model, (X,), rules=own_rules(), runtime=["lib.so"])  # type: ignore[list-item]
    with pytest.raises(PluginError, match=r"the library /nowhere/lib\.so of this call .* is not there"):
        onnxplug.to_onnx(model, (X,), rules=own_rules(), runtime=[onnxplug.OrtLibrary("/nowhere/lib.so")], verify=True)


def test_libraries_of_the_call_go_before_a_plugins(shop: Shop, library: Any) -> None:
    wrong = REFERENCE.replace("y[..., t - 1]", "y[..., t]")
    shop.install("shop-a", RULES, DOMAINS, wrong, runtime="[OrtLibrary('/nowhere/lib.so'), ReferenceOp(Leaky)]")
    item = onnxplug.OrtLibrary(library(), domains=["kernels.test"])
    program = onnxplug.to_onnx(model, (X,), runtime=[item], verify=True)
    assert onnxplug.runtime.custom_op_libraries(program) == [str(library())]
    namespace: dict[str, Any] = {}
    exec(REFERENCE, namespace)
    program = onnxplug.to_onnx(model, (X,), runtime=[item, onnxplug.ReferenceOp(namespace["Leaky"])])
    torch.testing.assert_close(program.call_reference(X)[0], model(X))


# -- sessions and the command line -------------------------------------------------------------------------------------


def test_session_options_and_settings(shop: Shop, library: Any) -> None:
    import onnxruntime

    shop.install("shop-a", RULES, DOMAINS, runtime=f"[OrtLibrary({str(library())!r})]")
    program = onnxplug.to_onnx(model, (X,))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 3
    session = onnxplug.runtime.inference_session(program, session_options=options, enable_fallback=False)
    assert session.get_session_options().intra_op_num_threads == 3
    by_hand = onnxruntime.SessionOptions()
    by_hand.register_custom_ops_library(str(library()))
    assert isinstance(
        onnxplug.runtime.inference_session(program, session_options=by_hand, plugins=[]), InferenceSession
    )
    with pytest.raises(PluginError, match="two libraries implement one domain"):
        onnxplug.runtime.inference_session(program, session_options=by_hand)


def test_files_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model", encoding="utf-8")
    with pytest.raises(onnxplug.OnnxplugError, match=r"text\.onnx is not an ONNX model"):
        onnxplug.runtime.inference_session(tmp_path / "text.onnx")
    with pytest.raises(UsageError, match="there is no file"):
        onnxplug.runtime.inference_session(tmp_path / "nothing.onnx")
    with pytest.raises(UsageError, match="an int is not an ONNX model"):
        onnxplug.runtime.inference_session(3)
    bad = onnx.helper.make_node("Add", ["x", "x"], ["y"])
    value = onnx.helper.make_tensor_value_info("x", 1, [2]), onnx.helper.make_tensor_value_info("y", 7, [2])
    graph = onnx.helper.make_graph([bad], "g", value[:1], value[1:])
    with pytest.raises(onnxplug.OnnxplugError, match="can't load the model"):
        onnxplug.runtime.inference_session(onnx.helper.make_model(graph, ir_version=10))


def test_a_file_in_onnxruntimes_own_format(tmp_path: Path) -> None:
    import onnxruntime

    program = onnxplug.to_onnx(lambda x: x + 1, (X,), input_names=["x"])
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "model.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxplug.runtime.inference_session(program, session_options=options)
    session = onnxplug.runtime.inference_session(tmp_path / "model.ort")
    torch.testing.assert_close(torch.from_numpy(session.run(None, {"x": X.numpy()})[0]), X + 1)


def test_a_plugins_kernels_load_nothing_heavy() -> None:
    code = "import sys, onnxplug.run.kernels; print([m for m in ('onnx', 'onnx_ir', 'torch', 'numpy') if m in sys.modules])"
    done = run_child("-c", code, check=True)
    assert done.stdout.strip() == "[]"


def test_plugins_are_not_loaded_for_a_model_without_custom_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    program = onnxplug.to_onnx(lambda x: x + 1, (X,))
    monkeypatch.setattr("onnxplug.run.session.plugin_host", lambda: pytest.fail("plugins were loaded"))
    torch.testing.assert_close(Runner(program.model)({program.model.graph.inputs[0].name: X})[0], X + 1)


MODEL = """
import torch
def make():
    return (lambda x: torch.ops.kernels.leaky(x, 0.5)), (torch.randn(2, 4),)
"""


def test_the_command_line(
    shop: Shop, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODEL, encoding="utf-8")
    shop.install("shop-a", RULES, DOMAINS)
    shop.install("shop-b", DOMAINS, runtime=f"[OrtLibrary({str(library())!r})]")
    assert run(["export", "m.py:make", "-o", "model.onnx", "--verify"]) == 0
    assert run(["verify", "model.onnx", "m.py:make"]) == 0
    assert "onnxruntime" in capsys.readouterr().out
    assert run(["verify", "model.onnx", "m.py:make", "--no-plugin", "b"]) == 1
    assert run(["export", "m.py:make", "-o", "model.onnx", "--verify", "--no-plugin", "b"]) == 1
    printed = capsys.readouterr().err
    assert printed.count("nothing runs kernels.test::Leaky") == 2
    assert "Traceback" not in printed

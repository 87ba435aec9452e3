"""Third-party packages under contrib/: built and installed by pip into a clean environment, used, and uninstalled."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.distributions import environment, pip_of

ROOT = Path(__file__).resolve().parent.parent
USE = """
import warnings; warnings.filterwarnings("ignore")
import torch, onnxplug
from onnxplug_softcap import softcap
program = onnxplug.to_onnx(
    lambda x: softcap(softcap(x, 30.0) + 1, 5.0), (torch.randn(2, 4) * 50,), dynamic_shapes=({0: "batch"},), verify=True
)
print([n.op_type for n in program.model.graph], program.model.opset_imports, [f.name for f in program.model.functions.values()])
import onnx; onnx.checker.check_model(program.model_proto, full_check=True)
from onnxplug.cli.app import run
for line in ("plugins list --json", "why softcap::softcap", "plugins check softcap --opset 18 --opset 21"):
    assert run(line.split()) == 0, line
"""
MISSING = """
import warnings; warnings.filterwarnings("ignore")
import torch, onnxplug
@torch.library.custom_op("softcap::softcap", mutates_args=())
def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap)
softcap.register_fake(lambda x, cap: torch.empty_like(x))
try:
    onnxplug.to_onnx(lambda x: softcap(x, 30.0), (torch.randn(2, 4),))
except onnxplug.MissingRuleError as error:
    print("missing", list(error.missing))
"""


def run(python: Path, *arguments: str) -> str:
    done = subprocess.run([str(python), *arguments], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment shared by the tests here: each installs a package and uninstalls it."""
    return environment(tmp_path_factory.mktemp("environment"))


@pytest.mark.long  # its tests run in the default suite, and tests/cli/test_plugin_commands.py installs a package
def test_softcap_installs_translates_and_uninstalls(python: Path) -> None:
    package = str(ROOT / "contrib" / "onnxplug-softcap")
    pip_of(python, "install", package)
    printed = run(python, "-c", USE)
    assert "['Softcap', 'Add', 'Softcap']" in printed
    assert "'onnxplug.softcap': 1" in printed
    assert '"onnxplug-softcap"' in printed
    assert '"loaded"' in printed
    assert "onnxplug_softcap.plugin:softcap" in printed
    assert "softcap::softcap agrees with PyTorch at opsets 18, 21" in printed
    own = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{package}/tests")
    assert " passed" in own
    pip_of(python, "uninstall", "onnxplug-softcap")
    assert "missing ['softcap::softcap.default']" in run(python, "-c", MISSING)


CPP = """
import warnings; warnings.filterwarnings("ignore")
import pathlib, sys, torch, onnxplug, onnxplug.runtime
from onnxplug_example_cpp import leaky_sum
x = torch.randn(3, 5)
program = onnxplug.to_onnx(lambda x: leaky_sum(x, 0.5) + 1, (x,), sys.argv[1], dynamic_shapes=({0: "batch"},), input_names=["x"])
print([n.op_type for n in program.model.graph], {case.runtime for case in program.verify().cases})
got = onnxplug.runtime.inference_session(sys.argv[1]).run(None, {"x": x.numpy()})[0]
torch.testing.assert_close(torch.from_numpy(got), leaky_sum(x, 0.5) + 1)
print(*onnxplug.runtime.custom_op_libraries(sys.argv[1]))
"""
LOST = """
import sys, onnxplug, onnxplug.runtime
try: onnxplug.runtime.inference_session(sys.argv[1])
except onnxplug.PluginError as error: print(error)
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="the package is built by g++")
def test_example_cpp_builds_exports_runs_and_uninstalls(python: Path, tmp_path: Path) -> None:
    """Builds from a copy, as pip leaves a build folder in the sources."""
    package = Path(shutil.copytree(ROOT / "contrib" / "onnxplug-example-cpp", tmp_path / "source"))
    shutil.rmtree(package / "build", ignore_errors=True)
    model = str(tmp_path / "model.onnx")
    pip_of(python, "install", str(package))
    printed = run(python, "-c", CPP, model)
    assert "['LeakySum', 'Add'] {'onnxruntime'}" in printed
    library = Path(printed.splitlines()[-1])
    assert library.name == "libexample_ort.so"
    assert library.is_relative_to(python.parents[1].resolve())
    own = run(python, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", str(package / "tests"))
    assert " passed" in own
    library.unlink()
    assert f"the library {library} of the plugin example_cpp (onnxplug-example-cpp 0.1.0) is not there" in run(
        python, "-c", LOST, model
    )
    pip_of(python, "uninstall", "onnxplug-example-cpp")
    printed = run(python, "-c", LOST, model)
    assert "nothing runs onnxplug.example::LeakySum: no library has it" in printed
    assert "No installed plugin declares the domain onnxplug.example." in printed

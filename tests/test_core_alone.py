"""Core without onnxplug's other packages: it exports and verifies, and a missing feature names its package."""

from __future__ import annotations

import pytest

from tests.support.distributions import run_python

#: Every package beside the engine is hidden from imports, and its entry point from plugins' discovery.
ALONE = """
import importlib.abc, importlib.metadata, sys, warnings
warnings.simplefilter("ignore")
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("onnxplug_"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
import importlib.util
spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.startswith("onnxplug_") else spec(name, *rest)
points = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **by: [p for p in points(**by) if not p.value.startswith("onnxplug_")]
"""
MODEL = "import torch\ndef make(): return torch.nn.Linear(3, 2), (torch.randn(4, 3),)\n"
#: It exports and verifies, loads nothing of another package, then asks for missing features.
CODE = """
from onnxplug.cli.app import run
assert run(["export", "alone_model.py:make", "-o", "m.onnx", "--verify", "--dynamic", "input=batch,_"]) == 0
assert run(["--help"]) == 0
import onnxplug, torch
from onnxplug import *
program = onnxplug.to_onnx(torch.nn.ReLU(), (torch.randn(3),), verify=True)
assert not [name for name in sys.modules if name.startswith("onnxplug_")]
for command in ("verify", "inspect", "bench", "compare", "bisect", "diagnose", "why", "ops", "plugins", "convert", "fleet", "shardings", "run"):
    assert run([command, "m.onnx"]) == 1
x = torch.randn(3)
program = onnxplug.to_onnx(torch.nn.PReLU(), (x,))
program.apply_weights({"weight": torch.tensor([3.0])})
for x in (x, -x):
    torch.testing.assert_close(program(x)[0], torch.where(x > 0, x, 3 * x))
def bisect():
    from onnxplug import bisect
def check_model():
    from onnxplug.testing import check_model
for name, ask in {
    "profile=": lambda: onnxplug.to_onnx(torch.nn.ReLU(), (x,), profile=True),
    "progress=": lambda: onnxplug.to_onnx(torch.nn.ReLU(), (x,), progress=True),
    "report=": lambda: onnxplug.to_onnx(torch.nn.ReLU(), (x,), report=True),
    "functions=": lambda: onnxplug.to_onnx(torch.nn.ReLU(), (x,), functions=True),
    "dtype=": lambda: onnxplug.to_onnx(torch.nn.ReLU(), (x,), dtype="float16"),
    "quantize=": lambda: onnxplug.to_onnx(torch.nn.ReLU(), (x,), quantize="int4"),
    "target=": lambda: onnxplug.to_onnx(torch.nn.ReLU(), (x,), target="onnxruntime:openvino"),
    "checks=": lambda: onnxplug.to_onnx(torch.nn.ReLU(), (x,), checks=True),
    "onnxplug.runtime": lambda: onnxplug.runtime.inference_session("m.onnx"),
    "metadata=full": lambda: onnxplug.to_onnx(torch.nn.ReLU(), (x,), metadata="full"),
    "onnxplug.fake_weights": lambda: onnxplug.fake_weights(),
    "weights=": lambda: program.apply_weights("model.safetensors"),
    "examples=": lambda: onnxplug.to_onnx(torch.nn.ReLU(), examples=[(x,), (torch.randn(4),)]),
    "pieces=": lambda: onnxplug.to_onnx(torch.nn.ReLU(), (x,), pieces=["a"]),
    "intermediates=True": lambda: program.verify(intermediates=True),
    "onnxplug.bisect": bisect,
    "onnxplug.testing": check_model,
    "onnxplug.diagnose": lambda: onnxplug.diagnose,
    "onnxplug.export": lambda: onnxplug.export,
    "onnxplug.as_torch_onnx": lambda: onnxplug.as_torch_onnx,
    "onnxplug.compat": lambda: onnxplug.compat.symbolic,
    "custom_translation_table=": lambda: onnxplug.to_onnx(torch.nn.ReLU(), (x,), custom_translation_table={"aten::relu": abs}),
}.items():
    try:
        ask()
    except onnxplug.MissingPackageError as error:
        print(error.message)
        assert isinstance(error, ImportError)
assert "bisect" not in onnxplug.__all__ and "diagnose" not in dir(onnxplug)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of one new process, as the tests are about the imports of an interpreter without the packages."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "alone_model.py").write_text(MODEL, encoding="utf-8")
    return run_python(folder, "-c", ALONE + CODE, fresh=True)


def test_it_exports_and_verifies(printed: str) -> None:
    assert "Same as PyTorch" in printed
    assert "inspect" not in printed.partition("onnxplug inspect needs")[0]


def test_a_missing_feature_names_its_package(printed: str) -> None:
    for package, names in {
        "onnxplug-tools": "profile= progress= report= pieces= functions= checks= examples= onnxplug.runtime intermediates= onnxplug.bisect onnxplug.diagnose onnxplug.fake_weights onnxplug.testing verify inspect bench why plugins",
        "onnxplug-precision": "dtype= quantize= convert",
        "onnxplug-fleet": "fleet",
        "onnxplug-targets": "target='onnxruntime:openvino'",
        "onnxplug-torch-onnx": "onnxplug.export onnxplug.as_torch_onnx onnxplug.compat custom_translation_table= metadata=full run",
    }.items():
        for name in names.split():
            assert f"{name} needs the package {package}, which is not installed" in printed
    assert "weights= needs the package onnxplug-tools, which is not installed" in printed
    assert printed.count("hint: pip install onnxplug-tools") == 9
    assert printed.count("hint: pip install onnxplug-torch-onnx") == 1

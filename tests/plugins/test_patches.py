"""Patches of the hook onnxplug_patches that are functions of the captured module."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.capture.patching import patched
from onnxplug.testing import IsolatedRegistry


class Packed(nn.Parameter):
    """A weight in bytes with its factor as an attribute, as libraries of quantisation have: torch.export loses the attribute."""

    factor: torch.Tensor


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Packed(torch.randint(-9, 9, (4,), dtype=torch.int8), requires_grad=False)
        self.weight.factor = torch.tensor(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.weight.factor


class Plugin:
    @staticmethod
    @onnxplug.hookimpl
    def onnxplug_patches() -> list[Any]:
        return [plain_weights, contextlib.nullcontext, contextlib.nullcontext()]


@contextlib.contextmanager
def plain_weights(module: nn.Module) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for layer in module.modules():
            if isinstance(layer, Layer):
                layer.register_buffer("factor", layer.weight.factor, persistent=False)
                stack.callback(delattr, layer, "factor")
                stack.enter_context(patched(layer, "forward", lambda x, layer=layer: x * layer.weight * layer.factor))
        yield


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_function_with_a_parameter_gets_the_module(strict: bool | None) -> None:
    model = nn.Sequential(Layer(), nn.ReLU(), Layer()).eval()
    registry = IsolatedRegistry()
    registry.add_plugin(Plugin, name="packed", distribution="onnxplug-packed", version="1")
    with registry.active():
        program = onnxplug.to_onnx(model, (torch.randn(2, 4),), dynamic_shapes=({0: "rows"},), strict=strict)
    for rows in (2, 5):
        x = torch.randn(rows, 4) * rows
        torch.testing.assert_close(program(x)[0], model(x))
    stored = program.model.graph.initializers
    assert {name: str(value.dtype) for name, value in stored.items() if name.startswith("0.")} == {
        "0.weight": "INT8",
        "0.factor": "FLOAT",
    }
    assert not [layer for layer in model if hasattr(layer, "factor") or "forward" in vars(layer)]


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if LEVEL == 0 or x.sum() > 0 else x.flip(0)


LEVEL = 1


def raised(module: nn.Module, request: onnxplug.CaptureRequest) -> list[onnxplug.CaptureMode]:
    """A mode that fails at a branch of the model, and a mode that avoids the branch."""
    assert isinstance(module, Branching)
    assert request.options.opset_version == 20
    assert request.registry.find is not None
    assert request.mentions("sum".__eq__)
    assert not request.mentions("mean".__eq__)
    level = lambda: patched(sys.modules[__name__], "LEVEL", 0)  # noqa: E731
    return [onnxplug.CaptureMode(strict=False), onnxplug.CaptureMode(level)]


def test_the_first_mode_that_captures_the_model_is_taken() -> None:
    plugin = SimpleNamespace(onnxplug_patches=onnxplug.hookimpl(lambda: [raised, raised]))
    registry = IsolatedRegistry()
    registry.add_plugin(plugin, name="ways", distribution="onnxplug-ways", version="1")
    x = torch.randn(2, 4)
    with registry.active():
        program = onnxplug.to_onnx(Branching(), (x,), opset_version=20)
    torch.testing.assert_close(program(-x.abs())[0], 1 - x.abs())
    assert LEVEL == 1


def test_no_mode_captures_the_model() -> None:
    modes = onnxplug.hookimpl(lambda: [lambda module, request: [onnxplug.CaptureMode(strict=False)] * 2])
    registry = IsolatedRegistry()
    registry.add_plugin(SimpleNamespace(onnxplug_patches=modes), name="ways", distribution="onnxplug-ways", version="1")
    with registry.active(), pytest.raises(onnxplug.CaptureError, match="data-dependent expression"):
        onnxplug.to_onnx(Branching(), (torch.randn(2, 4),))


@pytest.mark.parametrize("module", [__name__, "module_that_nobody_imports"])
def test_a_patch_of_a_library_is_made_where_the_library_is_imported(module: str) -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def patch(module: nn.Module) -> Iterator[None]:
        entered.append(type(module).__name__)
        yield

    items = [onnxplug.LibraryPatch((module,), patch)]
    if module not in sys.modules:
        items.append(onnxplug.LibraryPatch((module,), "package_that_is_not_there.patches:patch"))
    plugin = SimpleNamespace(onnxplug_patches=onnxplug.hookimpl(lambda: items))
    registry = IsolatedRegistry()
    registry.add_plugin(plugin, name="library", distribution="onnxplug-library", version="1")
    with registry.active():
        onnxplug.to_onnx(nn.ReLU(), (torch.ones(2),))
    assert entered == (["ReLU"] if module in sys.modules else [])


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library with a function, a static method and an operator; another module has the function too."""

    def doubled(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        raise RuntimeError("needs a GPU")

    class Kernel:
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("needs a GPU")

    module, other = ModuleType("annexed.ops"), ModuleType("annexed_models")
    vars(module).update(doubled=doubled, Kernel=Kernel, builtin=max, operator=torch.ops.aten.logaddexp)
    vars(other).update(doubled=doubled)
    top = ModuleType("annexed")
    top.__version__ = "2.5.1"  # type: ignore[attr-defined]
    for one in (top, module, other):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    return module


def ours(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x * by


FUNCTIONS = {"annexed.ops:doubled": f"{__name__}:ours", "annexed.ops:Kernel.forward": lambda ctx, x: x + 1}


@contextlib.contextmanager
def with_functions(functions: Any, requires: str = "annexed>=2,<3") -> Iterator[onnxplug.LibraryFunctions]:
    item = onnxplug.LibraryFunctions(functions, requires)
    registry = IsolatedRegistry()
    plugin = SimpleNamespace(onnxplug_patches=onnxplug.hookimpl(lambda: [item]))
    registry.add_plugin(plugin, name="annexed", distribution="onnxplug-annexed", version="1")
    with registry.active():
        yield item


def test_functions_of_a_library_are_exchanged_wherever_a_module_has_them(library: Any) -> None:
    models, before = sys.modules["annexed_models"], library.doubled
    x = torch.randn(3)
    with with_functions({**FUNCTIONS, "not_imported.ops:f": "not_there:f", "annexed.ops:absent": ours}) as item:
        program = onnxplug.to_onnx(lambda x: models.doubled(x, 3.0) + library.Kernel.forward(None, x), (x,))
        for inputs in (x, x + 1):
            torch.testing.assert_close(program(inputs)[0], inputs * 4 + 1)
        assert library.doubled is models.doubled is before
        item.put()
        item.put()
        assert library.doubled is models.doubled is ours
        assert library.Kernel.forward(None, x).equal(x + 1)


def test_methods_of_a_library_are_exchanged(library: Any) -> None:
    class Scale:
        factor = 3.0

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(x.sum())

    library.Scale, before = Scale, Scale.scaled
    with with_functions({"annexed.ops:Scale.scaled": lambda self, x: x * self.factor}):
        program = onnxplug.to_onnx(lambda x: Scale().scaled(x), (torch.ones(3),))
    torch.testing.assert_close(program(torch.arange(3.0))[0], torch.arange(3.0) * 3)
    assert Scale.scaled is before


@pytest.mark.parametrize("version", ["1.9", "3.0.0"])
def test_functions_of_another_version(library: Any, version: str) -> None:
    sys.modules["annexed"].__version__ = version  # type: ignore[attr-defined]
    message = rf"the functions of annexed>=2,<3 are translated; {version} is installed"
    with with_functions(FUNCTIONS) as item:
        onnxplug.to_onnx(nn.ReLU(), (torch.ones(2),))
        for call in (lambda x: library.doubled(x), lambda x: library.Kernel.forward(None, x)):
            with pytest.raises(onnxplug.OnnxplugError, match=message):
                onnxplug.to_onnx(call, (torch.ones(2),))
        for function in (item.put, item.check):
            with pytest.raises(onnxplug.PluginError, match=message) as raised:
                function()
            assert raised.value.hint == "pip install 'annexed>=2,<3'"


def test_functions_with_other_parameters(library: Any) -> None:
    """Operators and functions of extensions have other names of parameters, or no names."""
    with with_functions({"annexed.ops:doubled": lambda x, factor: x, "annexed.ops:builtin": lambda a, b: a}) as item:
        item.check()
        assert item.places()[-1][1] == "builtin"
        with pytest.raises(onnxplug.OnnxplugError, match=r"annexed.ops.doubled of 2.5.1 has other parameters"):
            onnxplug.to_onnx(lambda x: library.doubled(x), (torch.ones(2),))
    alike, differs = (
        onnxplug.LibraryFunctions({"annexed.ops:operator": f}, "annexed") for f in (lambda a, b: a, lambda a, b, c: a)
    )
    assert alike.places()[0][2](1, 2) == 1
    with pytest.raises(onnxplug.PluginError, match="other parameters"):
        differs.places()[0][2](1, 2)


def test_a_library_that_is_absent() -> None:
    item = onnxplug.LibraryFunctions({"package_that_is_not_there.ops:f": ours}, "package_that_is_not_there>=1")
    item.check()
    assert item.places() == []


def test_an_export_reads_no_version_of_a_library_that_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a version from the files of the installed packages takes milliseconds, for each patch and attempt."""
    read: list[str] = []
    monkeypatch.setattr("importlib.metadata.version", lambda name: read.append(name) or "1")
    onnxplug.LibraryFunctions({"package_that_is_not_there.ops:f": ours}, "package_that_is_not_there>=1").places()
    assert read == []
    onnxplug.LibraryFunctions({"contextlib:suppress": ours}, "package_that_is_not_there>=1").places()
    assert set(read) == {"package_that_is_not_there"}

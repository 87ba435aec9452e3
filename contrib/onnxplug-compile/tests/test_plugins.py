"""Custom operators of an installed plugin under torch.compile: its rules, its kernels, and models kept on disk as it changes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.distributions import Dist, pip_install, place, run_python

SOURCE = Path(__file__).resolve().parents[3] / "contrib" / "onnxplug-example-cpp" / "src" / "ort_op.cpp"

PLUGIN = """
from onnxplug import Domain, OrtLibrary, ReferenceOp, Rule, hookimpl

@hookimpl
def onnxplug_rules():
    return [Rule("shop::leaky", {rule}), Rule("shop::leaky_backward", decayed)]

def node(g, n):
    return g.domain("shop.test").Leaky(n.args[0], leak=n.args[1])

def decayed(g, n):  # a translation into plain operators: a product with the powers of the leak
    x, leak = n.args
    steps = g.op.Range(g.const(0, torch.int64), g.dim(x, 1), g.const(1, torch.int64))
    distance = g.op.Sub(g.op.Unsqueeze(steps, [1]), g.op.Unsqueeze(steps, [0]))
    powers = g.op.Pow(g.const(leak, x.dtype), g.op.Cast(distance, to=x.dtype))
    kept = g.op.Where(g.op.Less(distance, g.const(0, torch.int64)), g.const(0.0, x.dtype), powers)
    return g.op.MatMul(x, {transposed})

@hookimpl
def onnxplug_domains():
    return [Domain("shop.test")]

@hookimpl
def onnxplug_runtime():
    return [{runtime}]

import numpy as np
import torch
from onnx.reference.op_run import OpRun

class Leaky(OpRun):
    op_domain = "shop.test"
    def _run(self, x, leak=None):
        y = x.copy()
        for t in range(1, x.shape[-1]):
            y[..., t] += np.asarray(leak, x.dtype) * y[..., t - 1]
        return (y,)
"""

#: Every mode imports this: the operator, with its gradient, as its package would bring it.
OPERATOR = """
import sys, warnings
import torch

@torch.library.custom_op("shop::leaky", mutates_args=())
def leaky(x: torch.Tensor, leak: float) -> torch.Tensor:
    sums = [x[..., 0]]
    for t in range(1, x.shape[-1]):
        sums.append(x[..., t] + leak * sums[-1])
    return torch.stack(sums, -1)

@torch.library.custom_op("shop::leaky_backward", mutates_args=())
def leaky_backward(grad: torch.Tensor, leak: float) -> torch.Tensor:
    return leaky(grad.flip(-1), leak).flip(-1)

def setup(ctx, inputs, output): ctx.leak = inputs[1]
for op in (leaky, leaky_backward): op.register_fake(lambda x, leak: torch.empty_like(x))
leaky.register_autograd(lambda context, grad: (leaky_backward(grad, context.leak), None), setup_context=setup)

def model(x): return leaky((x + 1).tanh(), 0.5).exp()

store, options = {}, {"fallback": False}
def check(backend="onnxplug", train=True, **more):
    compiled = torch.compile(model, backend=backend, dynamic=True, options={**options, "store": store, **more})
    for rows in (2, 7):
        x = torch.randn(rows, 5, requires_grad=train)
        other = x.detach().clone().requires_grad_(train)
        got, expected = compiled(x), model(other)
        torch.testing.assert_close(got, expected)
        if train:
            got.sum().backward(), expected.sum().backward()
            torch.testing.assert_close(x.grad, other.grad)
    print([(g.kind, sorted({n.domain for n in g.model.graph if n.domain} if g.model else ()), g.error) for g in store["graphs"]])
"""
FULL = '[("forward", ["shop.test"], None), ("backward", [], None)]'.replace('"', "'")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("the library is built by g++")
    path = tmp_path_factory.mktemp("libraries") / "libleaky.so"
    defines = ['-DEXAMPLE_DOMAIN="shop.test"', '-DEXAMPLE_OP="Leaky"']
    subprocess.run(["g++", "-std=c++17", "-fPIC", "-shared", *defines, str(SOURCE), "-o", str(path)], check=True)
    return path


def plugin(version: str = "1.0", *, rule: str = "node", runtime: str = "", transposed: str = "kept") -> Dist:
    text = PLUGIN.replace("{rule}", rule).replace("{runtime}", runtime).replace("{transposed}", transposed)
    return Dist("onnxplug-shop", text, version=version)


def test_a_library_serves_forward_and_a_rule_the_backward_pass(tmp_path: Path, library: Path) -> None:
    place(tmp_path, plugin(runtime=f"OrtLibrary({str(library)!r})"))
    assert FULL in run_python(tmp_path, "-c", f"{OPERATOR}\ncheck()")


def test_a_reference_kernel_serves_the_debugging_backend(tmp_path: Path) -> None:
    place(tmp_path, plugin(runtime="ReferenceOp(Leaky)"))
    printed = run_python(tmp_path, "-c", f"{OPERATOR}\ncheck('onnxplug_debug', compare=True)")
    assert FULL in printed
    # ONNX Runtime has no kernel: an error that says so, or eager PyTorch with one warning.
    failed = run_python(tmp_path, "-c", f"{OPERATOR}\ncheck()", status=1)
    assert "nothing runs shop.test::Leaky" in failed
    printed = run_python(tmp_path, "-c", f"{OPERATOR}\ncheck(fallback=True)")
    assert printed.count("a forward graph of") == 1
    assert "run by eager PyTorch: nothing runs shop.test::Leaky: no library has it" in printed


def test_a_wrong_reference_kernel_is_named(tmp_path: Path) -> None:
    wrong = plugin(runtime="ReferenceOp(Leaky)")
    assert wrong.source is not None
    place(tmp_path, Dist(wrong.name, wrong.source.replace("y[..., t - 1]", "y[..., t]")))
    failed = run_python(tmp_path, "-c", f"{OPERATOR}\ncheck('onnxplug_debug', compare=True)", status=1)
    assert "shop::leaky" in failed
    assert "differs from PyTorch" in failed


def test_a_rule_that_decomposes_needs_no_kernel(tmp_path: Path) -> None:
    """The forward operator is the transposed product of the backward operator."""
    flipped = "g.op.Transpose(kept, perm=[1, 0])"
    both = plugin(rule="lambda g, n: forwards(g, n)")
    assert both.source is not None
    text = both.source.replace(
        "def decayed(g, n):", "def forwards(g, n): return decayed(g, n, True)\n\ndef decayed(g, n, turned=False):"
    )
    text = text.replace("g.op.MatMul(x, kept)", f"g.op.MatMul(x, {flipped} if turned else kept)")
    place(tmp_path, Dist(both.name, text))
    plain = FULL.replace("'shop.test'", "")
    assert plain in run_python(tmp_path, "-c", f"{OPERATOR}\ncheck()")


@pytest.mark.long
def test_models_kept_on_disk_follow_the_plugin(tmp_path: Path, library: Path) -> None:
    """Another version, other code of the same version, no plugin: each has models of its own, and none is wrong."""
    models = tmp_path / "models"
    runtime = f"OrtLibrary({str(library)!r})"
    cached = (
        f"{OPERATOR}\ndel options['fallback']\ntorch.manual_seed(0)\n"
        + f"""
compiled = torch.compile(model, backend="onnxplug", options={{"cache": {str(models)!r}, "fallback": False}})
x = torch.full((2, 5), 0.25)
print("ratio", round((compiled(x) / model(x)).mean().item(), 3))
"""
    )
    doubled = "lambda g, n: g.op.Add(node(g, n), g.const(0.6931472, n.args[0].dtype))"

    def kept() -> int:
        return len(list(models.glob("*.onnx")))

    def installed(name: str, dist: Dist) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        pip_install(folder, dist)
        return folder

    first = installed("first", plugin(runtime=runtime))
    for _ in range(2):
        assert "ratio 1.0" in run_python(first, "-c", cached)
        assert kept() == 1
    newer = tmp_path / "newer"
    newer.mkdir()
    place(newer, plugin("1.1", rule=doubled, runtime=runtime))
    assert "ratio 2.0" in run_python(newer, "-c", cached)
    assert kept() == 2
    same_version = installed(
        "same", plugin("1.1", rule="lambda g, n: g.op.Mul(node(g, n), g.const(1.0, n.args[0].dtype))", runtime=runtime)
    )
    assert "ratio 1.0" in run_python(same_version, "-c", cached)
    assert kept() == 3
    pip_install(first, plugin("1.1", rule=doubled, runtime=runtime))  # an upgrade in place
    assert "ratio 2.0" in run_python(first, "-c", cached)
    assert kept() == 4  # pip's record names the folder that it was built in
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    assert "shop::leaky" in run_python(nothing, "-c", cached, status=1)
    assert kept() == 4

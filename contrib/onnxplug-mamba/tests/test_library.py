"""mamba_ssm's own modules and functions, where the library is installed, compiled or not."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_mamba import library, stand_in
from torch import Tensor

import onnxplug

pytest.importorskip("mamba_ssm")
from causal_conv1d.causal_conv1d_interface import causal_conv1d_ref, causal_conv1d_update_ref
from causal_conv1d.cpp_functions import causal_conv1d_fwd_function, causal_conv1d_update_function
from mamba_ssm import Mamba, Mamba2, MambaLMHeadModel
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.modules.mamba2_simple import Mamba2Simple
from mamba_ssm.ops import selective_scan_interface
from mamba_ssm.ops.triton import layernorm_gated, selective_state_update, ssd_combined
from mamba_ssm.utils.generation import InferenceParams

#: Tolerances looser than torch.testing's own, with their reasons.
LOOSER = {
    "models": ({"rtol": 1e-5, "atol": 1e-5}, "layers of sums that ONNX Runtime adds up in another order"),
    "float16": ({"rtol": 1e-3, "atol": 1e-3}, "projections are computed in float16"),
    "bfloat16": ({"rtol": 1e-2, "atol": 1e-2}, "projections are computed in bfloat16"),
    "kernels": ({"rtol": 1e-4, "atol": 1e-4}, "the library's chunks are longer, and states are sums over them"),
}
BATCH, LENGTH = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=1)
ROWS = {0: BATCH, 1: LENGTH}
SMALL: dict[str, Any] = {"d_model": 16, "d_state": 8}
SMALL2: dict[str, Any] = {**SMALL, "headdim": 8, "chunk_size": 16}
BLOCKS: dict[str, Callable[[], torch.nn.Module]] = {
    "Mamba": lambda: Mamba(**SMALL),
    "Mamba, not fused": lambda: Mamba(**SMALL, use_fast_path=False, bias=True),
    "Mamba2": lambda: Mamba2(**SMALL2),
    "Mamba2, not fused": lambda: Mamba2(**SMALL2, use_mem_eff_path=False, ngroups=2, dt_limit=(0.01, 0.5)),
    "Mamba2, without a norm": lambda: Mamba2(**SMALL2, rmsnorm=False, D_has_hdim=True),
    "Mamba2, with a gated part": lambda: Mamba2(**SMALL2, d_ssm=16, norm_before_gate=True),
    "Mamba2Simple": lambda: Mamba2Simple(**SMALL2, learnable_init_states=True),
}
#: The shapes of the kernels' tests.
X, DT, B = (2, 21, 4, 16), (2, 21, 4), (2, 21, 2, 16)


def check(
    model: torch.nn.Module,
    inputs: Sequence[tuple[Any, ...]],
    shapes: Any,
    tolerance: dict[str, float] = LOOSER["models"][0],
    **options: Any,
) -> onnxplug.OnnxProgram:
    """Exports with the first inputs; the file gives the model's results and written values for all inputs."""
    model = model.eval().requires_grad_(False)
    program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=shapes, **options)
    for args in inputs:
        written = [x.clone() for x in args]
        wanted = model(*written)
        wanted = [wanted] if isinstance(wanted, Tensor) else list(wanted)
        wanted += [new for old, new in zip(args, written, strict=True) if not torch.equal(old, new)]
        results = program(*(x.clone() for x in args))
        for result, value in zip(results, wanted, strict=True):
            torch.testing.assert_close(result.float(), value.float(), **tolerance)
    return program


@pytest.mark.parametrize("opset", [16, 23])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str, opset: int) -> None:
    inputs = [(torch.randn(*size, 16),) for size in ((2, 5), (1, 1), (3, 70))]
    program = check(BLOCKS[name](), inputs, (ROWS,), opset_version=opset)
    assert program.statistics.operators["Scan"] == 1


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float16, LOOSER["float16"][0]), (torch.bfloat16, LOOSER["bfloat16"][0])],
    ids=["float16", "bfloat16"],
)
@pytest.mark.parametrize("name", ["Mamba", "Mamba2"])
def test_blocks_in_halves(name: str, dtype: torch.dtype, tolerance: dict[str, float]) -> None:
    inputs = [(torch.randn(*size, 16).to(dtype),) for size in ((2, 5), (1, 1), (3, 70))]
    block = Mamba(**SMALL, dtype=dtype) if name == "Mamba" else Mamba2(**SMALL2, dtype=dtype)
    check(block, inputs, (ROWS,), tolerance)


def test_packed_sequences() -> None:
    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Mamba2(**SMALL2)

        def forward(self, x: Tensor, ids: Tensor) -> Any:
            return self.block(x, seq_idx=ids)

    inputs = [
        (torch.randn(batch, length, 16), (torch.arange(length, dtype=torch.int32) // 3).repeat(batch, 1))
        for batch, length in ((2, 7), (1, 1), (3, 40))
    ]
    model = Packed()
    check(model, inputs, (ROWS, ROWS))
    alone = model.block(inputs[0][0][:, 3:6])
    torch.testing.assert_close(model(*inputs[0])[:, 3:6], alone)


@pytest.mark.parametrize("name", ["Mamba", "Mamba2"])
def test_prompt_and_steps(name: str) -> None:
    """A prompt that leaves its states, then tokens one by one; together they give the result of all tokens at once."""
    block = (
        (Mamba(**SMALL, layer_idx=0) if name == "Mamba" else Mamba2(**SMALL2, layer_idx=0)).eval().requires_grad_(False)
    )

    class Prompt(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor, conv_state: Tensor, state: Tensor) -> Any:
            kept = InferenceParams(64, 64, key_value_memory_dict={0: (conv_state, state)})
            return self.block(x, inference_params=kept)

    class Step(Prompt):
        def forward(self, x: Tensor, conv_state: Tensor, state: Tensor) -> Any:
            return self.block.step(x, conv_state, state)[0]

    def states(batch: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn_like(x) for x in block.allocate_inference_cache(batch, 64))

    prompts = [(torch.randn(*size, 16), *states(size[0])) for size in ((2, 5), (1, 1), (3, 40))]
    tokens = [(torch.randn(batch, 1, 16), *states(batch)) for batch in (2, 1, 3)]
    prompt = check(Prompt(), prompts, (ROWS, {0: BATCH}, {0: BATCH}))
    step = check(Step(), tokens, ({0: BATCH},) * 3)
    x = torch.randn(2, 9, 16)
    result, *kept = prompt(x[:, :6], *block.allocate_inference_cache(2, 64))
    results = [result]
    for i in range(6, 9):
        result, *kept = step(x[:, i : i + 1], *kept)
        results.append(result)
    torch.testing.assert_close(torch.cat(results, 1), block(x), **LOOSER["models"][0])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
def test_language_model(layer: str, fused: bool) -> None:
    options = {"d_state": 8} if layer == "Mamba1" else {"d_state": 8, "headdim": 8}
    config = MambaConfig(
        d_model=16,
        n_layer=2,
        d_intermediate=24,
        vocab_size=40,
        ssm_cfg={"layer": layer, **options},
        fused_add_norm=fused,
    )
    inputs = [(torch.randint(0, 40, size),) for size in ((2, 5), (1, 1), (3, 30))]
    program = check(MambaLMHeadModel(config), inputs, (ROWS,))
    assert program.statistics.operators["Scan"] == 2


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(block, namespace)
    assert namespace["result"].shape == (3, 1, 64)


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mamba_ssm.__version__", "1.2.0")
    with pytest.raises(onnxplug.PluginError, match=r"mamba_ssm>=2.2.6,<2.4 are translated; 1.2.0 is installed"):
        stand_in()
    monkeypatch.setattr("causal_conv1d.__version__", "1.0.0")
    x, weight = torch.randn(2, 8, 5), torch.randn(8, 3)
    with pytest.raises(onnxplug.OnnxplugError, match=r"causal_conv1d>=1.6,<1.8 are translated; 1.0.0 is installed"):
        onnxplug.to_onnx(lambda x: causal_conv1d_fwd_function(x, weight, None, None, None, None, True), (x,))


def test_schemas() -> None:
    for name, schema in library.SCHEMAS.items():
        theirs = getattr(torch.ops.DaoAILab, name).default._schema
        ours = torch._C.parse_schema(f"DaoAILab::{name}{schema}")
        assert [(a.name, str(a.type)) for a in theirs.arguments] == [(a.name, str(a.type)) for a in ours.arguments]
        written = [[a.alias_info is not None and a.alias_info.is_write for a in s.arguments] for s in (theirs, ours)]
        assert written[0] == written[1]


def test_functions_beside_those_of_the_library() -> None:
    """The functions against the library's own formulas, with which it tests its kernels."""
    u, delta, b, c = torch.randn(2, 8, 9), torch.rand(2, 8, 9), torch.randn(2, 2, 4, 9), torch.randn(2, 2, 4, 9)
    a, d, z, bias = -torch.rand(8, 4), torch.randn(8), torch.randn(2, 8, 9), torch.randn(8)
    every = (u, delta, a, b, c, d, z, bias, True, True)
    ours = selective_scan_interface.selective_scan_fn(*every)
    torch.testing.assert_close(ours, selective_scan_interface.selective_scan_ref(*every))
    x, weight, state = torch.randn(2, 8, 9), torch.randn(8, 4), torch.randn(2, 8, 3)
    ids = torch.tensor([[0, 0, 1, 1, 1, -1, 2, 2, 2]] * 2, dtype=torch.int32)
    for initial, sequences in ((None, None), (state, None), (None, ids), (state, ids)):
        ours = causal_conv1d_fwd_function(x, weight, bias, sequences, initial, None, True)
        wanted = causal_conv1d_ref(x, weight, bias, initial, activation="silu", seq_idx=sequences)
        torch.testing.assert_close(ours, wanted)
    for used in (None, torch.tensor([1, 6], dtype=torch.int32)):
        kept, theirs = (torch.arange(80.0).view(2, 8, 5) for _ in range(2))
        ours = causal_conv1d_update_function(x[:, :, :3], kept, weight, bias, True, used, None)
        torch.testing.assert_close(ours, causal_conv1d_update_ref(x[:, :, :3], theirs, weight, bias, "silu", used))
        torch.testing.assert_close(kept, theirs)
    states = torch.randn(2, 4, 8, 4), torch.randn(4, 8), torch.randn(2, 4, 8)
    inputs = (
        states[2],
        states[2].abs(),
        -torch.rand(4, 8, 4),
        b[..., 0],
        c[..., 0],
        states[1],
        states[2],
        states[1],
        True,
    )
    kept, theirs = states[0].clone(), states[0].clone()
    wanted = selective_state_update.selective_state_update_ref(theirs, *inputs)
    torch.testing.assert_close(selective_state_update.selective_state_update(kept, *inputs), wanted)
    torch.testing.assert_close(kept, theirs)
    norm = layernorm_gated.RMSNorm(8, group_size=4, norm_before_gate=False)
    wanted = layernorm_gated.rms_norm_ref(u.mT, norm.weight, None, z.mT, 1e-5, 4, False)
    torch.testing.assert_close(norm(u.mT, z.mT), wanted)
    x, dt, b, c = torch.randn(X), torch.rand(DT), torch.randn(B), torch.randn(B)
    ours = ssd_combined.mamba_chunk_scan_combined(x, dt, -torch.ones(4), b, c, 21, D=torch.ones(4))
    wanted = ssd_combined.ssd_chunk_scan_combined_ref(x, dt, -torch.ones(4), b, c, 21, D=torch.ones(4))
    torch.testing.assert_close(ours, wanted, **LOOSER["kernels"][0])


#: Models computed by the library's kernels in triton's interpreter, and exported.
INTERPRETED = """
import contextlib, sys, torch
from onnxplug_mamba import library, stand_in
library.put_extensions()
import mamba_ssm, onnxplug, onnxplug_mamba
from onnxplug.testing import IsolatedRegistry
torch.cuda.device = lambda index: contextlib.nullcontext()
registry = IsolatedRegistry()
registry.add_plugin(onnxplug_mamba, name="mamba", distribution="onnxplug-mamba", version="0")
torch.manual_seed(0)
small = {"d_model": 16, "d_state": 16, "headdim": 16, "chunk_size": 16}
class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = mamba_ssm.Mamba2(**small)
    def forward(self, x, *states):
        return self.block.step(x, *states)[0]
step = Step()
config = mamba_ssm.models.config_mamba.MambaConfig(
    d_model=16, n_layer=2, d_intermediate=24, vocab_size=40, ssm_cfg={"d_state": 16}, fused_add_norm=True)
with registry.active(), torch.no_grad():
    for model, *args in (
        (mamba_ssm.Mamba2(**small), torch.randn(2, 37, 16)),
        (mamba_ssm.Mamba2(**small, ngroups=2, rmsnorm=False, use_mem_eff_path=False), torch.randn(1, 20, 16)),
        (mamba_ssm.Mamba2(**small, d_ssm=16), torch.randn(1, 20, 16)),
        (step, torch.randn(2, 1, 16), *(torch.randn_like(x) for x in step.block.allocate_inference_cache(2, 8))),
        (mamba_ssm.MambaLMHeadModel(config), torch.randint(0, 40, (2, 7))),
    ):
        program = onnxplug.to_onnx(model.eval(), tuple(args))
        results = program(*(x.clone() for x in args))
        wanted = model(*args)
        wanted = [wanted if isinstance(wanted, torch.Tensor) else wanted[0], *args[1:]]
        for result, value in zip(results, wanted, strict=True):
            torch.testing.assert_close(result, value, **TOLERANCE)
print("alike")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton isn't installed")
def test_kernels_in_triton() -> None:
    set_up = {
        "TRITON_INTERPRET": "1",
        "MAMBA_DETERMINISTIC": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-W", "ignore", "-c", f"TOLERANCE = {LOOSER['kernels'][0]}\n{INTERPRETED}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **set_up}, check=False)
    assert done.stdout.strip().endswith("alike"), done.stderr

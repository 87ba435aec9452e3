"""Operators' schemas and functions of flash_attn's source distribution, where ONNXPLUG_SOURCES names its folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

#: The folder of the archive.
FOLDER = os.environ.get("ONNXPLUG_SOURCES", "")
#: flash_attn's Python code in a process of its own, with its compiled extension as an empty module: schemas, then exports.
CODE = """
import sys, types
extension = types.ModuleType("flash_attn_2_cuda")
extension.fwd_kvcache = max  # a function that names no parameters
sys.modules["flash_attn_2_cuda"] = extension
import importlib.util, torch, onnxplug
spec = importlib.util.spec_from_file_location("flash_attn_interface", sys.argv[1])
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
from onnxplug_flash_attn.functions import SCHEMAS, define, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
for name, schema in SCHEMAS.items():
    theirs = getattr(torch.ops.flash_attn, name).default._schema
    ours = torch._C.parse_schema(f"flash_attn::{name}{schema} -> (Tensor, Tensor, Tensor, Tensor)")
    assert str(theirs) == str(ours), (str(theirs), str(ours))
define()
import onnxplug_flash_attn
from onnxplug.testing import IsolatedRegistry
registry = IsolatedRegistry()
registry.add_plugin(onnxplug_flash_attn, name="flash-attn", distribution="onnxplug-flash-attn", version="0")
q, k, v = torch.randn(2, 5, 4, 12), torch.randn(2, 7, 2, 12), torch.randn(2, 7, 2, 12)
at = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 3, 7], dtype=torch.int32)
used = torch.tensor([3, 4], dtype=torch.int32)
def dense(f): return lambda q, k, v: f(q, k, v, causal=True, window_size=(3, -1))
def packed(f): return lambda q, k, v, a, b: f(q, k, v, a, b, 3, 4, causal=True)
def cached(f): return lambda q, k, v, used: f(q, k, v, cache_seqlens=used, causal=True)
with registry.active():
    for make, a, b, args in (
        (dense, real.flash_attn_func, flash_attn_func, (q, k, v)),
        (packed, real.flash_attn_varlen_func, flash_attn_varlen_func, (q[0], k[0], v[0], *at)),
        (cached, real.flash_attn_with_kvcache, flash_attn_with_kvcache, (q, k, v, used)),
    ):
        program = onnxplug.to_onnx(make(a), args)
        torch.testing.assert_close(program(*args)[0], make(b)(*args))
print("alike")
"""


def test_the_library(tmp_path: Path) -> None:
    archive = next(Path(FOLDER).glob("flash_attn-*.tar.gz"), None) if FOLDER else None
    if archive is None:
        pytest.skip("no source distribution of flash_attn in the folder that ONNXPLUG_SOURCES names")
    with tarfile.open(archive) as files:
        name = next(n for n in files.getnames() if n.endswith("/flash_attn/flash_attn_interface.py"))
        source = files.extractfile(name)
        assert source is not None
        (tmp_path / "flash_attn_interface.py").write_bytes(source.read())
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path / "flash_attn_interface.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=paths, check=False)
    assert done.stdout.strip().endswith("alike"), done.stderr

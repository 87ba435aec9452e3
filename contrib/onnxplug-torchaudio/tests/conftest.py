"""torchaudio with its own kernels for the CPU: its package on PyPI needs CUDA's libraries, here empty ones."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

_FOUND = importlib.util.find_spec("torchaudio")


def undefined(library: Path) -> list[str]:
    """The names of the symbols that a shared library takes from other libraries."""
    command = ["nm", "-D", "--undefined-only", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[-1] for line in lines]


def load_empty(folder: Path, name: str, functions: set[str], version: str = "") -> None:
    """Makes a library whose functions do nothing, and loads it: later loads by its name get it."""
    source, script, library = (folder / f"{name}{end}" for end in (".c", ".map", ""))
    source.write_text("".join(f"int {function}(void) {{ return 1; }}\n" for function in sorted(functions)))
    script.write_text(f"{version} {{ global: *; }};\n" if version else "{ global: *; };\n")
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", f"-Wl,--version-script={script}", "-o"]
    subprocess.run([*command, str(library), str(source)], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def load_without_cuda(libraries: Path) -> None:
    """Loads empty libraries with the functions of CUDA that torchaudio's extensions take; none runs on a CPU."""
    names = {name for file in ("_torchaudio", "libtorchaudio") for name in undefined(libraries / f"{file}.abi3.so")}
    runtime = {name.split("@")[0] for name in names if "@libcudart" in name}
    versions = {name.split("@")[1] for name in names if "@libcudart" in name}
    cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    absent = {name for name in names if name.startswith(("aoti_", "torch_")) and not hasattr(cpu, name)}
    with tempfile.TemporaryDirectory() as folder:
        for version in versions:
            load_empty(Path(folder), version, runtime, version)
        load_empty(Path(folder), "libc10_cuda.so", absent)
        load_empty(Path(folder), "libtorch_cuda.so", set())


if _FOUND is not None and _FOUND.origin is not None and not torch.cuda.is_available():
    load_without_cuda(Path(_FOUND.origin).parent / "lib")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)

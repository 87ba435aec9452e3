"""Builds the two libraries: one that PyTorch loads, one that ONNX Runtime loads. Neither is a Python module."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HEADERS = ["src/leaky_sum.h", "src/ort_abi.h"]
FLAGS = ["-std=c++20", "-O2", "-fvisibility=hidden"]


class BuildLibraries(build_ext):
    """Plain shared libraries, whose names say nothing of a Python version; torch's headers are found when building."""

    def build_extensions(self) -> None:
        from torch.utils import cpp_extension

        if not sys.platform.startswith("linux"):
            raise SystemExit("onnxplug-example-cpp builds on Linux with g++ alone")
        for extension in self.extensions:
            if extension.name.endswith("_torch"):
                extension.include_dirs += cpp_extension.include_paths()
                extension.library_dirs += cpp_extension.library_paths()
                extension.libraries += ["c10", "torch", "torch_cpu"]
        super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        *package, name = fullname.split(".")
        return str(Path(*package, f"lib{name}.so"))


setup(
    cmdclass={"build_ext": BuildLibraries},
    ext_modules=[
        Extension(
            f"onnxplug_example_cpp.example_{kind}",
            [f"src/{kind}_op.cpp"],
            depends=HEADERS,
            extra_compile_args=FLAGS,
            language="c++",
        )
        for kind in ("torch", "ort")
    ],
)

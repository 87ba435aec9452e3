"""Frees the memory that torch would keep of every captured program.

A process that exports thousands of models, such as a test suite, otherwise grows by 0.3 MB an export, and its garbage
collections become slower with every export.
"""

from __future__ import annotations

import sys

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxplug.capture.locations import is_torch_file


def clear_size_caches() -> None:
    """Empties the caches of ``ShapeEnv``'s methods.

    Unlimited caches are keyed by the environment of sizes and keep every environment, with all that it refers to. Entries that
    are still of use are computed again.
    """
    for method in vars(ShapeEnv).values():
        clear = getattr(method, "cache_clear", None)
        if clear is not None:
            clear()


def forget_compiled_wrappers() -> None:
    """Makes Dynamo compile torch's own wrappers of higher-order operators anew for each capture.

    Otherwise it first compares the dynamic sizes of this capture with the sizes of an earlier capture in the process, and the
    comparison alone makes them constants.
    """
    if "torch._dynamo.convert_frame" not in sys.modules:
        return
    from onnxplug.torch_private import compiled_codes, forget_compiled

    for reference in list(compiled_codes.seen):
        code = reference()
        if code is not None and is_torch_file(code.co_filename) and _of_wrapper(code.co_filename):
            forget_compiled(code)


def _of_wrapper(file: str) -> bool:
    parts = file.replace("\\", "/").split("/")
    return "_higher_order_ops" in parts or parts[-1] == "flex_attention.py"


def release_inputs(program: torch.export.ExportedProgram) -> None:
    """Breaks the cycles of a captured program that the garbage collector cannot see.

    A fake input holds its sizes in C++, and they lead back to the environment of sizes, which lists the fake inputs and
    the operators computed on them. torch needs the list while it captures, and Dynamo empties it afterwards too.
    """
    for node in program.graph.find_nodes(op="placeholder"):
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        env = getattr(mode, "shape_env", None)
        if env is not None:
            env.tracked_fakes = None
            getattr(env, "fake_tensor_cache", {}).clear()
            return

"""mmcv with its own kernels for the CPU, compiled from the sources in its package; without mmcv, the package's operators alone."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_mmcv import library

try:  # where torchvision's own kernels don't load
    from tests.support.vision_kernels import define_vision_kernels
except ModuleNotFoundError:
    pass
else:
    define_vision_kernels()

#: The compiled functions, with the files that have them.
KERNELS = {
    "nms": "nms",
    "softnms": "nms",
    "nms_rotated": "nms_rotated",
    "box_iou_rotated": "box_iou_rotated",
    "roi_align_forward": "roi_align",
    "roi_align_rotated_forward": "roi_align_rotated",
    "deform_conv_forward": "deform_conv",
    "modulated_deform_conv_forward": "modulated_deform_conv",
}


def compiled(ops: Path) -> Any:
    """Functions of mmcv's extension, bound as in its own file; compiled once for an environment, in a minute or two."""
    from torch.utils import cpp_extension

    sources, folder = ops / "csrc" / "pytorch", ops.parents[1] / "onnxplug-mmcv"
    folder.mkdir(exist_ok=True)
    text = (sources / "pybind.cpp").read_text(encoding="utf-8")
    bound = [re.search(rf'  m\.def\("{name}",.*?\);\n', text, re.DOTALL)[0] for name in KERNELS]  # type: ignore[index]
    included = [f'#include "pytorch/{file}.cpp"\n' for file in dict.fromkeys(KERNELS.values())]
    binding = [
        "#include <torch/extension.h>\n",
        *included,
        "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {\n",
        *bound,
        "}\n",
    ]
    (folder / "binding.cpp").write_text("".join(binding), encoding="utf-8")
    return cpp_extension.load(
        "mmcv_kernels",
        [
            str(folder / "binding.cpp"),
            *(str(sources / "cpu" / f"{file}.cpp") for file in dict.fromkeys(KERNELS.values())),
        ],
        extra_include_paths=[str(ops / "csrc"), str(ops / "csrc" / "common")],
        extra_cflags=["-O1", "-w"],
        build_directory=str(folder),
    )


library.define()
_FOUND = importlib.util.find_spec("mmcv")
if _FOUND is not None and importlib.util.find_spec(library.EXTENSION) is None:
    assert _FOUND.origin is not None
    sys.modules[library.EXTENSION] = library.Extension(library.EXTENSION)
    kernels = compiled(Path(_FOUND.origin).parent / "ops")
    vars(sys.modules[library.EXTENSION]).update({name: getattr(kernels, name) for name in KERNELS})


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)

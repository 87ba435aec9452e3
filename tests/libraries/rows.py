"""The libraries whose exports are measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: Calls of the entry points of libraries whose source distribution has no tests of exports.
CALLS = Path(__file__).parent / "calls"


@dataclass(frozen=True)
class Library:
    """A library, and the tests of its exports.

    Attributes:
        name: The project on PyPI.
        version: The release whose source distribution is unpacked.
        needs: Further projects, pinned, that are installed without their own dependencies.
        folder: Where the packages are within the source distribution.
        tests: Paths of tests within the source distribution; may be none where ``calls`` has a file for the library.
        chosen: The expression for pytest's ``-k`` that chooses among the tests of the source distribution.
    """

    name: str
    version: str
    needs: tuple[str, ...] = ()
    folder: str = "."
    tests: tuple[str, ...] = ()
    chosen: str = ""

    @property
    def module(self) -> str:
        """The name in file names."""
        return self.name.replace("-", "_")

    @property
    def calls(self) -> Path:
        """The file with calls of the library's entry points; it may be absent."""
        return CALLS / f"exports_of_{self.module}.py"


_SCIKIT = ("scikit-learn==1.9.1", "joblib==1.6.0", "threadpoolctl==3.8.0", "narwhals==2.29.0", "cloudpickle==3.1.2")

LIBRARIES = [
    Library("timm", "1.0.31"),
    Library("sentence-transformers", "6.2.0", _SCIKIT),
    Library("segmentation-models-pytorch", "0.6.0"),
    Library("monai", "1.6.1", ("einops==0.8.2",)),
    Library("kornia", "0.9.0", ("kornia_rs==0.2.0",)),
    Library(
        "ultralytics",
        "8.4.190",
        (
            "opencv-python-headless==5.0.0.93",
            "matplotlib==3.11.2",
            "contourpy==1.3.3",
            "cycler==0.12.1",
            "fonttools==4.68.0",
            "kiwisolver==1.5.1",
            "ultralytics-thop==2.2.3",
            "onnxslim==0.1.98",
            "polars==2.1.0",
            "polars-runtime-32==2.1.0",
        ),
    ),
    Library("norse", "1.0.0", ("nir==1.0.8", "nirtorch==2.6", "h5py==3.16.0")),
    Library("brevitas", "0.13.4", ("dependencies==2.0.1", "unfoldNd==0.2.3", "onnxoptimizer==0.4.2"), folder="src"),
    Library("skorch", "1.4.0", (*_SCIKIT, "tabulate==0.10.0")),
    Library(
        "lightly-train",
        "0.18.0",
        (
            "albucore==0.0.24",
            "albumentations==2.0.8",
            "antlr4-python3-runtime==4.9.3",
            "contourpy==1.3.3",
            "cycler==0.12.1",
            "eval-type-backport==0.4.0",
            "fonttools==4.68.0",
            "hydra-core==1.3.8",
            "kiwisolver==1.5.1",
            "lightly==1.6.0",
            "lightly-utils==0.0.2",
            "lightning-utilities==0.15.3",
            "matplotlib==3.11.2",
            "numkong==7.8.6",
            "omegaconf==2.4.0",
            "onnxslim==0.1.98",
            "opencv-python-headless==5.0.0.93",
            "pyarrow==26.0.1",
            "pycocotools==2.0.11",
            "pytest-mock==3.17.0",
            "pytorch-lightning==2.6.6",
            "simsimd==6.5.16",
            "stringzilla==5.3.2",
            "tensorboard==2.21.0",
            "torchmetrics==1.9.0",
        ),
        folder="src",
        tests=(
            "tests/_task_models/image_classification",
            "tests/_task_models/dinov2_eomt_semantic_segmentation",
            "tests/_task_models/dinov2_eomt_panoptic_segmentation",
        ),
        chosen="export_onnx",
    ),
]

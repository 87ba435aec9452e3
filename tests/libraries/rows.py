"""The libraries whose exports are measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: Calls of the entry points of libraries whose source distribution has no tests of exports.
CALLS = Path(__file__).parent / "calls"


@dataclass(frozen=True)
class Library:
    """A library, and what exercises its exports.

    Attributes:
        name: The project on PyPI.
        version: The release whose source distribution is unpacked.
        needs: Further projects, pinned, that are installed without their own dependencies.
        folder: Where the packages are within the source distribution.
        tests: Paths of tests within the source distribution; none: a file of ``calls`` named after the library.
        chosen: The expression for pytest's ``-k`` that chooses among those tests.
        deselected: Tests among the chosen ones that need what is not there: weights to download, a GPU.
    """

    name: str
    version: str
    needs: tuple[str, ...] = ()
    folder: str = "."
    tests: tuple[str, ...] = ()
    chosen: str = ""
    deselected: str = ""

    @property
    def module(self) -> str:
        """The name in file names."""
        return self.name.replace("-", "_")

    @property
    def calls(self) -> Path:
        """The file with calls of the library's entry points; it need not be there."""
        return CALLS / f"exports_of_{self.module}.py"


_SCIKIT = ("scikit-learn==1.9.0", "joblib", "threadpoolctl", "narwhals")

LIBRARIES = [
    Library("timm", "1.0.31"),
]

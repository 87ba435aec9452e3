"""What verification compares, for a report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from onnxplug.report.failure import first_line
from onnxplug.report.record import Facts, Verification
from onnxplug.run.report import VerificationReport, measuring


@contextlib.contextmanager
def measured(report: Facts) -> Iterator[Callable[[VerificationReport], None]]:
    """Has a report take what verification compares while the context lasts; the last verification counts.

    Yields:
        What is to be called with what verification found.
    """
    found = report.verification = Verification()

    def note(result: VerificationReport) -> None:
        found.skipped = list(result.skipped)

    with measuring() as found.cases:
        try:
            yield note
        except Exception as error:
            found.error = getattr(error, "message", "") or first_line(error)
            raise

"""A process that measures architectures one by one: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.models.measure import Architecture, measure


def main() -> None:
    """Reads kind, name and class of each; the argument is the exporter."""
    (exporter,) = sys.argv[1:]
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print doesn't belong among the answers
    for line in sys.stdin:
        print(json.dumps(asdict(measure(Architecture(*json.loads(line)), exporter))), file=answers)


if __name__ == "__main__":
    main()

"""Whole models in a provider: ``python -m onnxplug_targets.asking openvino MODEL.onnx …`` prints the outcomes as JSON, a line each.

As :mod:`onnxplug_targets.probing`, it is run where Python imports the provider's ``onnxruntime``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import numpy as np

from onnxplug_targets.providers import PROVIDERS, Provider


def outcome_of(provider: Provider, path: str) -> dict[str, Any]:
    """The nodes of a file that a provider leaves to others, its errors, and its results' difference from the CPU's.

    ``FILE.npz`` beside the file has values of its inputs.
    """
    outcome: dict[str, Any] = {
        "file": os.path.basename(path),
        "error": "",
        "optimised": "",
        "left": [],
        "difference": None,
    }
    try:
        session = provider.session(path)
        outcome["left"] = sorted(provider.left(session))
        feed = dict(np.load(f"{path}.npz"))
        results, expected = session.run(None, feed), provider.cpu(path).run(None, feed)
        outcome["difference"] = max(map(_difference, results, expected), default=0.0)
    except Exception as error:
        outcome["error"] = str(error)[-300:]
    try:
        provider.session(path, plain=False)
    except Exception as error:
        outcome["optimised"] = str(error)[-300:]
    return outcome


def _difference(one: Any, other: Any) -> float:
    """The largest difference of two results, relative to the largest element; without floats the share that differs."""
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return float("inf")
    if not one.size:
        return 0.0
    if one.dtype.kind not in "f":
        return float((one != other).mean())
    scale = float(np.abs(other[np.isfinite(other)]).max(initial=1e-6))
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    return float(np.where(same, 0.0, np.abs(one.astype(np.float64) - other)).max() / scale)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=sorted(PROVIDERS))
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    os.environ.setdefault("ALLOW_RELEASED_ONNX_OPSET_ONLY", "0")
    for path in arguments.files:
        sys.stdout.write(json.dumps(outcome_of(PROVIDERS[arguments.target], path)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""How much memory ONNX Runtime takes for a model, measured in a process of its own, which runs this module."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_RUNS = 3
#: Seconds until it is given up.
_TIMEOUT = 900


@dataclass(frozen=True, slots=True)
class Memory:
    """What a session adds to the memory of a process.

    Attributes:
        loaded: Bytes that are held after it was made; ``None`` where the system does not say.
        peak: The most bytes at any time until it had run.
    """

    loaded: int | None
    peak: int


def measure(
    model: Path,
    feed: Mapping[str, torch.Tensor],
    *,
    threads: int | None,
    providers: Sequence[Any],
    libraries: Sequence[str],
) -> Memory | str:
    """Makes a session and runs it in a new process; text says why it could not be measured.

    Args:
        model: The file.
        feed: The inputs.
        threads: Threads within an operator.
        providers: Execution providers.
        libraries: Paths of libraries of custom operators.
    """
    import numpy as np

    from onnxplug.run.session import to_ort_value

    with tempfile.TemporaryDirectory() as folder:
        types: dict[str, int] = {}
        arrays: dict[str, Any] = {}
        for name, tensor in feed.items():
            value = to_ort_value(tensor)
            types[name] = value.element_type()
            arrays[f"input {len(arrays)}"] = _bits(tensor)
        np.savez(Path(folder) / "feed.npz", **arrays)
        spec = {
            "model": str(model.resolve()),
            "feed": str(Path(folder) / "feed.npz"),
            "types": types,
            "threads": threads,
            "providers": list(providers),
            "libraries": list(libraries),
        }
        (Path(folder) / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-m", "onnxplug_tools.inspection.memory", str(Path(folder) / "spec.json")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False, cwd=folder)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2] or f"the process ended with status {done.returncode}"
    return Memory(**json.loads(done.stdout.rpartition("\n")[2] or done.stdout))


def _bits(tensor: torch.Tensor) -> Any:
    """A tensor as an array that a file can hold: element types that numpy lacks as integers of the same width."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


def _status(key: str) -> int | None:
    """A line of the system's own account of this process, in bytes."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = next((line.split()[1] for line in text.splitlines() if line.startswith(f"{key}:")), None)
    return int(found) * 1024 if found is not None else None


def _peak() -> int:
    # Linux counts the parent's memory in what getrusage says, until the new program was loaded.
    found = _status("VmHWM")
    if found is not None:
        return found
    import resource  # Windows has none

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _child(path: str) -> None:
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    import numpy as np
    import onnxruntime

    arrays = np.load(spec["feed"], allow_pickle=False)
    make = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
    feed = {
        name: make(np.ascontiguousarray(arrays[f"input {position}"]), kind)
        for position, (name, kind) in enumerate(spec["types"].items())
    }
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if spec["threads"] is not None:
        options.intra_op_num_threads = spec["threads"]
    for library in spec["libraries"]:
        options.register_custom_ops_library(library)
    before, peak_before = _status("VmRSS"), _peak()
    session = onnxruntime.InferenceSession(spec["model"], options, providers=spec["providers"])
    after = _status("VmRSS")
    for _ in range(_RUNS):
        session.run_with_ort_values(None, feed)
    loaded = after - before if after is not None and before is not None else None
    peak = _peak() - (before if before is not None else peak_before)
    sys.stdout.write(json.dumps({"loaded": loaded, "peak": peak}))


if __name__ == "__main__":
    _child(sys.argv[1])

"""Graphs kept as files, with the inputs that they were called with: ``options={"dump": DIR}``.

The layout is that of ONNX's own test data, which ``onnx.backend.test`` and ONNX Runtime's test runner read:
``graph_0_inference/model.onnx``, ``graph_0_inference/test_data_set_0/input_0.pb``, ``output_0.pb``, …
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.build.stored import WeightTensor
from onnxplug.capture.signature import FunctionalGraph
from onnxplug.errors import OnnxplugError
from onnxplug.run.save import save_model
from onnxplug.verification.eager import feed_of, placeholder_values, run_graph
from onnxplug_compile.binding import Executable, RunError
from onnxplug_compile.lowering import Lowered

#: The number of calls of one graph that are kept at most: the first call with each set of sizes.
MOST_CALLS = 10
_NUMBERED = re.compile(r"graph_(\d+)_")


class Dump:
    """The files of one graph; nothing is written before its first call.

    Args:
        folder: The folder of graphs; it may hold graphs of earlier runs.
        functional: The graph that computes the expected outputs.
        kind: ``"inference"``, ``"forward"`` or ``"backward"``.
    """

    def __init__(self, folder: str | os.PathLike[str], model: ir.Model, functional: FunctionalGraph, kind: str) -> None:
        self._folder = Path(folder)
        self._model = model
        self._functional = functional
        self._kind = kind
        self._place: Path | None = None
        self._seen: set[Any] = set()
        self._lock = threading.Lock()

    def add(self, values: Sequence[Any]) -> None:
        """Keeps a call: its inputs, and eager PyTorch's results from them.

        Raises:
            RunError: The files can't be written.
        """
        sizes = tuple(tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in values)
        with self._lock:
            if sizes in self._seen or len(self._seen) == MOST_CALLS:
                return
            try:
                if self._place is None:
                    self._place = self._started()
                self._write(self._place, f"test_data_set_{len(self._seen)}", values)
            except (OSError, OnnxplugError) as error:
                raise RunError(f"the graph can't be kept in {self._folder}: {error}") from error
            self._seen.add(sizes)

    def _started(self) -> Path:
        """Makes the graph's own folder, with its model: complete or not at all."""
        made = Path(tempfile.mkdtemp(prefix=".graph-", dir=self._folder))
        try:
            made.chmod(0o755)
            save_model(self._model, made / "model.onnx")
            number = max((int(m[1]) for p in self._folder.iterdir() if (m := _NUMBERED.match(p.name))), default=-1)
            while True:
                number += 1
                place = self._folder / f"graph_{number}_{self._kind}"
                # Another process or kind may have taken the number since.
                if any(self._folder.glob(f"graph_{number}_*")):
                    continue
                try:
                    made.rename(place)
                except OSError:
                    if not place.exists():
                        raise
                    continue
                return place
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise

    def _write(self, place: Path, name: str, values: Sequence[Any]) -> None:
        made = Path(tempfile.mkdtemp(prefix=".data-", dir=place))
        try:
            made.chmod(0o755)
            feed = feed_of(self._functional, values)
            for index, value in enumerate(self._model.graph.inputs):
                _write_tensor(made / f"input_{index}.pb", str(value.name), feed[str(value.name)])
            expected = self._expected(values)
            for index, value in enumerate(self._model.graph.outputs):
                if value.name in expected:
                    _write_tensor(made / f"output_{index}.pb", str(value.name), expected[str(value.name)])
            made.rename(place / name)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise

    def _expected(self, values: Sequence[Any]) -> dict[str, torch.Tensor]:
        """PyTorch's result for each output, by name."""
        names = {slot.value: slot.name for slot in self._functional.outputs}
        expected: dict[str, torch.Tensor] = {}

        def keep(node: torch.fx.Node, _: Any, result: Any) -> Any:
            if node in names and isinstance(result, torch.Tensor):
                expected[names[node]] = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
            return result

        with torch.random.fork_rng(devices=[]):
            run_graph(self._functional, placeholder_values(self._functional, values), keep)
        return expected


def _write_tensor(path: Path, name: str, value: torch.Tensor) -> None:
    tensor = value.detach().cpu().resolve_neg().contiguous()
    path.write_bytes(ir.serde.serialize_tensor(WeightTensor(tensor, name=name)).SerializeToString())


class DumpingExecutable(Executable):
    """A graph run by ONNX Runtime whose calls are kept."""

    def __init__(self, session: Any, lowered: Lowered, dump: Dump) -> None:
        super().__init__(session, lowered)
        self._dump = dump

    def _run(self, values: Sequence[Any], numbers: Sequence[int]) -> list[torch.Tensor]:
        self._dump.add(values)
        return super()._run(values, numbers)

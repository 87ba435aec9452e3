"""A builder that counts, for a profile, what it does for the rules."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.inference.dims import Result
from onnxplug.build.spec import OpSpec
from onnxplug.profiling.recorder import Recorder, active


class ObservedBuilder(GraphBuilder):
    """Tells the active recorder how long the inference of shapes and the simplification of nodes take, and what is folded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorder = active() or Recorder()
        super().__init__(*args, **kwargs)

    def _infer(
        self,
        spec: OpSpec,
        values: Sequence[ir.Value | None],
        attrs: Mapping[str, ir.Attr],
        raw: Mapping[str, Any],
        outputs: int,
    ) -> Result:
        started = time.perf_counter_ns()
        try:
            return super()._infer(spec, values, attrs, raw, outputs)
        finally:
            self._count("shape inference", started)

    def _infer_by_onnx(
        self, spec: OpSpec, values: Sequence[ir.Value | None], attrs: Mapping[str, ir.Attr], outputs: int
    ) -> Result:
        started = time.perf_counter_ns()
        try:
            return super()._infer_by_onnx(spec, values, attrs, outputs)
        finally:
            self._count("shape inference, by onnx", started)

    def _without_node(self, spec: OpSpec, values: Sequence[ir.Value | None], raw: Mapping[str, Any]) -> ir.Value | None:
        started = time.perf_counter_ns()
        try:
            return super()._without_node(spec, values, raw)
        finally:
            self._count("simplification and folding", started)

    def _folded(self, spec: OpSpec, values: Sequence[ir.Value | None], raw: Mapping[str, Any]) -> ir.Value | None:
        found = super()._folded(spec, values, raw)
        total = self._recorder.total("fold", spec.op_type)
        total.calls += 1
        total.hits += found is not None
        return found

    def _count(self, name: str, started: int) -> None:
        total = self._recorder.total("part", name)
        total.calls += 1
        total.nanoseconds += time.perf_counter_ns() - started

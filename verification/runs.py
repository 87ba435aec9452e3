"""Runs an ONNX model and returns its intermediate values too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.build.dtypes import as_array, to_torch
from onnxplug.build.scope import detach
from onnxplug.host import Kernels, RuntimeHost, plugin_host
from onnxplug.run.kernels import custom_operators, onnxruntime_module
from onnxplug.run.reference import make_evaluator
from onnxplug.run.session import make_session, model_source, run_session, to_ort_value
from onnxplug.strings import STRING

_FATAL = 4
#: Levels of ONNX Runtime's optimisation, the least first.
LEVELS = ("disable", "basic", "extended", "layout", "all")
_LEVEL_NAMES = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}


class Runs:
    """Runs one model on one set of inputs, in several ways.

    Args:
        model: The model; it stays as it is.
        host: The plugins whose libraries and kernels run custom operators; all installed plugins when ``None``.
        feed: The inputs by name; inputs that the model does not have are left out.

    Raises:
        PluginError: A library is missing.
    """

    def __init__(self, model: ir.Model, host: RuntimeHost | None, feed: Mapping[str, torch.Tensor]) -> None:
        self.model = model
        self._host = host
        taken = {value.name for value in model.graph.inputs}
        self._feed = {name: value for name, value in feed.items() if name in taken}
        custom = custom_operators(model)
        self._kernels = Kernels()
        if custom.domains:
            self._kernels = (host if host is not None else plugin_host()).kernels_for(custom)
        #: Every tensor of the graph: inputs, constants and results of nodes, by name.
        self._values = _tensors(model)

    def known(self, names: Collection[str]) -> list[str]:
        """The names among some that are values of the model."""
        return [name for name in names if name in self._values]

    def evaluated(self, names: Collection[str]) -> dict[str, Any]:
        """Values by the evaluator.

        Raises:
            OnnxplugError: It can't run the model.
        """
        source, folder = model_source(self.model)
        host = self._host if self._host is not None else plugin_host()
        _, evaluator = make_evaluator(source, self._kernels.reference.values(), host)
        known = self.known(names)
        results = evaluator.run(known, {name: as_array(value) for name, value in self._feed.items()})
        del folder
        return {name: to_torch(value) for name, value in zip(known, results, strict=True)}

    def computed(
        self, names: Collection[str] = (), level: str = "all", without: Sequence[str] = (), *, alone: bool = False
    ) -> dict[str, torch.Tensor]:
        """Values by ONNX Runtime; they become outputs of the graph, which changes its fusions.

        Args:
            names: The values, in addition to the graph's own outputs.
            level: How far it optimises.
            without: Optimisers to leave out.
            alone: The values are the only outputs, and nodes that they don't need are left out.

        Raises:
            Exception: ONNX Runtime can't load or run the model.
        """
        results_of_nodes = [name for name in self.known(names) if self._values[name].producer() is not None]
        model = with_outputs(self.model, results_of_nodes, alone=alone) if results_of_nodes else self.model
        source, folder = model_source(model)
        session, feed = self._session(source, level, without)
        results = run_session(session, feed)
        by_name = {o.name: v for o, v in zip(session.get_outputs(), results, strict=True)}
        del folder
        return {**self._inputs_and_constants(names), **{name: v for name, v in by_name.items() if v is not None}}

    def lists(self) -> dict[str, Any]:
        """The graph's own outputs that are no tensors, by name and as ONNX Runtime gives them to Python.

        A sequence is a list of arrays or of dictionaries, a map a dictionary, an optional its content or ``None``.

        Raises:
            Exception: ONNX Runtime can't load or run the model.
        """
        source, folder = model_source(self.model)
        session, feed = self._session(source, "all", ())
        names = [output.name for output in session.get_outputs() if not output.type.startswith("tensor(")]
        values = {
            name: as_array(value) if getattr(value, "dtype", None) == STRING else to_ort_value(value)
            for name, value in feed.items()
        }
        results = session.run(names, values) if names else []
        del folder
        return dict(zip(names, results, strict=True))

    def _session(self, source: Any, level: str, without: Sequence[str]) -> tuple[Any, dict[str, torch.Tensor]]:
        """A session, and the inputs that it takes."""
        runtime = onnxruntime_module()
        options = runtime.SessionOptions()
        options.log_severity_level = _FATAL  # errors are expected here: they need no log
        options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, _LEVEL_NAMES[level])
        session = make_session(
            source,
            libraries=self._kernels.libraries,
            providers=self._kernels.providers,
            options=options,
            disabled_optimizers=list(without),
        )
        wanted = {i.name for i in session.get_inputs()}
        return session, {name: value for name, value in self._feed.items() if name in wanted}

    def _inputs_and_constants(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """The values among some that are inputs or constants."""
        tensors = {}
        for name in self.known(names):
            tensor = self._values[name].const_value
            if name in self._feed:
                tensors[name] = self._feed[name]
            elif tensor is not None and self._values[name].producer() is None:
                tensors[name] = to_torch(tensor.numpy())
        return tensors


def _tensors(model: ir.Model) -> dict[str, ir.Value]:
    graph = model.graph
    values = [value for node in graph for value in node.outputs]
    return {
        str(value.name): value
        for value in (*graph.inputs, *values, *graph.initializers.values())
        if value.name and (value.type is None or isinstance(value.type, ir.TensorType))
    }


def with_outputs(model: ir.Model, names: Collection[str], *, alone: bool = False) -> ir.Model:
    """A copy of a model with additional outputs.

    Args:
        model: The model.
        names: Values of its graph.
        alone: They are its only outputs, and nodes that they don't need are removed.
    """
    copy = model.clone()
    graph = copy.graph
    if alone:
        graph.outputs.clear()
    present = {value.name for value in graph.outputs}
    values = {value.name: value for node in graph for value in node.outputs}
    graph.outputs.extend(values[name] for name in names if name not in present)
    if alone:
        for node in reversed(graph):
            if not any(value.uses() or value.is_graph_output() for value in node.outputs):
                detach(node)
                graph.remove(node)
    return copy

"""The providers of ONNX Runtime that can be asked, as they are installed."""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Provider:
    """A provider of ONNX Runtime.

    Attributes:
        target: The name for ``to_onnx(target=...)``.
        title: Its name in messages.
        name: Its name in ONNX Runtime.
        distribution: The distribution that installs it.
        options: Its options; ``{library}`` stands for the folder of its library.
        since, until: The versions of ai.onnx that it is asked about.
        library: The module with the path of the provider's library; empty where the provider is in ``onnxruntime``.
        tolerance: The relative and absolute tolerance of its float32 results against the CPU's.
        overlooks_subgraphs: Whether its groups of nodes ignore the values that subgraphs read
            (:mod:`onnxplug_targets.groups`).
        leaves_groups: Whether it leaves some groups of the nodes that it takes (ditto).
        mistakes_maxima: Whether it computes the largest element of a Concat otherwise (:mod:`onnxplug_targets.maxima`).
    """

    target: str
    title: str
    name: str
    distribution: str
    options: dict[str, str] = field(default_factory=dict)
    since: int = 13
    until: int = 23
    library: str = ""
    tolerance: float = 1e-2
    overlooks_subgraphs: bool = False
    leaves_groups: bool = False
    mistakes_maxima: bool = False

    def facts(self) -> dict[str, Any]:
        """The entries of its table about the provider itself."""
        return {
            "target": self.target,
            "title": self.title,
            "provider": self.name,
            "asked": f"{self.distribution} {importlib.metadata.version(self.distribution)}",
            "options": self.options,
            "command": f"python -m onnxplug_targets.probing {self.target}",
            "opsets": [self.since, self.until],
            **({"overlooks_subgraphs": True} if self.overlooks_subgraphs else {}),
            **({"leaves_groups": True} if self.leaves_groups else {}),
            **({"mistakes_maxima": True} if self.mistakes_maxima else {}),
        }

    def session(self, model: bytes | str, *, plain: bool = True) -> Any:
        """A session on the provider.

        Args:
            model: The model, or a file's path.
            plain: Whether ONNX Runtime leaves the graph as it is.
        """
        import onnxruntime

        settings = self._settings(plain)
        settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if not self.library:
            return onnxruntime.InferenceSession(
                model, settings, providers=[(self.name, self.options)], enable_fallback=False
            )
        module = importlib.import_module(self.library)
        devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == self.name]
        if not devices:
            onnxruntime.register_execution_provider_library(self.name, module.get_library_path())
            devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == self.name]
        options = {key: value.format(library=module.LIB_DIR_FULL_PATH) for key, value in self.options.items()}
        settings.add_provider_for_devices(devices[:1], options)
        return onnxruntime.InferenceSession(model, settings, enable_fallback=False)

    def cpu(self, model: bytes | str) -> Any:
        """A session on the CPU."""
        import onnxruntime

        return onnxruntime.InferenceSession(model, self._settings(True), providers=["CPUExecutionProvider"])

    def left(self, session: Any) -> set[str]:
        """Names of the nodes that the provider leaves to others, by ONNX Runtime's lists of each provider's nodes."""
        return {
            node.name
            for graph in session.get_provider_graph_assignment_info()
            if graph.ep_name != self.name
            for node in graph.get_nodes()
        }

    @staticmethod
    def _settings(plain: bool) -> Any:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 4
        settings.intra_op_num_threads = 1
        if plain:
            settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return settings


_OPENVINO = {"device_type": "CPU", "num_of_threads": "1"}
_QNN = {"backend_path": "{library}/libQnnHtp.so"}
PROVIDERS = {
    provider.target: provider
    for provider in (
        Provider(
            "openvino",
            "OpenVINO",
            "OpenVINOExecutionProvider",
            "onnxruntime-openvino",
            _OPENVINO,
            leaves_groups=True,
            mistakes_maxima=True,
        ),
        Provider("webgpu", "WebGPU", "WebGpuExecutionProvider", "onnxruntime-webgpu"),
        Provider(
            "qnn",
            "QNN",
            "QNNExecutionProvider",
            "onnxruntime-qnn",
            _QNN,
            since=21,  # it takes half a second per node
            until=21,
            library="onnxruntime_qnn",
            tolerance=2e-2,
            overlooks_subgraphs=True,
        ),
    )
}

"""``onnxplug.runtime``: runs models with custom operators by ONNX Runtime, by the package ``onnxplug-tools``."""

from onnxplug.packages import members_of

__getattr__, __dir__ = members_of("runtime")

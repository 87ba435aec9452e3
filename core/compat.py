"""``onnxplug.compat``: translations written for torch.onnx, used unchanged, by the package ``onnxplug-torch-onnx``."""

from onnxplug.packages import members_of

__getattr__, __dir__ = members_of("compat")

"""``onnxplug.reference``: the evaluators of the package ``onnxplug-reference``."""

from onnxplug.packages import members_of

__getattr__, __dir__ = members_of("reference")

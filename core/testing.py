"""``onnxplug.testing``: what tests of plugins use, of the package ``onnxplug-tools``."""

from onnxplug.packages import members_of

__getattr__, __dir__ = members_of("testing")

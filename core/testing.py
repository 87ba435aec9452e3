"""``onnxplug.testing``: helpers for tests of plugins, from the package ``onnxplug-tools``."""

from onnxplug.packages import members_of

__getattr__, __dir__ = members_of("testing")

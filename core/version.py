"""onnxplug's version, outside of :mod:`onnxplug` so that its modules need not import the package with all names."""

VERSION = "0.1.0"

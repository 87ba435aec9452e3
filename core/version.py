"""onnxplug's version, apart from :mod:`onnxplug` so that its own modules need not import the package that names them all."""

VERSION = "0.1.0"

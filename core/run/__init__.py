"""onnxplug's run stage."""

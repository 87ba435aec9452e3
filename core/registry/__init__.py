"""onnxplug's registry stage."""

"""onnxplug's build stage."""

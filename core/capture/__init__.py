"""onnxplug's capture stage."""

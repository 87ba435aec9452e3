"""onnxplug's cli stage."""

"""onnxplug's interpret stage."""

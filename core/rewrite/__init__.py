"""onnxplug's rewrite stage."""

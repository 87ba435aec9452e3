"""onnxplug's last stage before the program: a graph becomes a model."""

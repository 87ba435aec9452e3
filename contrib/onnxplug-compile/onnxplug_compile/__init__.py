"""``torch.compile`` backends: ``onnxplug`` runs a model's graphs by ONNX Runtime."""

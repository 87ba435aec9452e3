"""Exports of other libraries, by torch.onnx's two exporters and by onnxplug: ``make libraries``."""

"""Calls of modules become calls of ONNX functions."""

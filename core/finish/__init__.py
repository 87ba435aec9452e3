"""Finishing: a graph becomes a model with initializers, functions and opset imports."""

"""In place of ``torch.onnx.export``: its signature, its arguments, and programs of others that call it."""

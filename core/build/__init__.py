"""The graph builder: emits typed ONNX nodes and simplifies them."""

"""What is known of the operators of ai.onnx: dtype and shape of results, simplification, constant folding; a record an operator."""

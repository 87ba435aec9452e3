"""A model of torchvision whose weights get names too: positional arguments, names of weights, an argument of the script."""

import sys

import numpy as np
import onnx
import onnxruntime
import torch
import torchvision

torch.manual_seed(0)
model = torchvision.models.squeezenet1_1(weights=None, num_classes=7)
image = torch.randn(2, 3, 64, 64)
input_names = ["actual_input_1", *(f"learned_{i}" for i in range(52))]
if __name__ == "__main__":
    torch.onnx.export(
        model, image, sys.argv[1], input_names=input_names, output_names=["output1"], dynamo=False, verbose=False
    )
    graph = onnx.load(sys.argv[1]).graph
    assert {tensor.name for tensor in graph.initializer} >= set(input_names[1::2])  # torch merges biases, all zero here
    session = onnxruntime.InferenceSession(sys.argv[1])
    (result,) = session.run(None, {"actual_input_1": image.numpy()})
    np.testing.assert_allclose(result, model.eval()(image).detach().numpy(), rtol=1e-4, atol=1e-5)
    np.savez("results.npz", result)
    sys.exit(len(result) + 1)

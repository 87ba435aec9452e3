"""An image enlarged by a sub-pixel convolution: the exporter of old, a dynamic batch, an old opset."""

import numpy as np
import onnx
import onnxruntime
import torch
import torch.onnx
from torch import nn
from torch.nn import init


class SuperResolution(nn.Module):
    def __init__(self, upscale: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 8, 3, padding=1)
        self.conv3 = nn.Conv2d(8, upscale**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(upscale)
        init.orthogonal_(self.conv1.weight, init.calculate_gain("relu"))

    def forward(self, x):  # type: ignore[no-untyped-def]
        x = self.relu(self.conv2(self.relu(self.conv1(x))))
        return self.shuffle(self.conv3(x))


torch.manual_seed(0)
model = SuperResolution(3).eval()
x = torch.randn(4, 1, 20, 24, requires_grad=True)
expected = model(x)
torch.onnx.export(
    model,
    x,
    "super_resolution.onnx",
    export_params=True,
    opset_version=14,
    do_constant_folding=True,
    input_names=["input"],
    output_names=["output"],
    dynamic_axes={"input": {0: "batch_size"}, "output": {0: "batch_size"}},
    dynamo=False,
)
onnx.checker.check_model(onnx.load("super_resolution.onnx"))
session = onnxruntime.InferenceSession("super_resolution.onnx", providers=["CPUExecutionProvider"])
(result,) = session.run(None, {session.get_inputs()[0].name: x.detach().numpy()})
np.testing.assert_allclose(expected.detach().numpy(), result, rtol=1e-3, atol=1e-5)
other = torch.randn(1, 1, 20, 24)
(second,) = session.run(None, {"input": other.numpy()})
np.testing.assert_allclose(model(other).detach().numpy(), second, rtol=1e-3, atol=1e-5)
np.savez("results.npz", result, second)

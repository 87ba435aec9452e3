"""An LSTM over sentences of any length: a function taken from torch.onnx, a dict of inputs at the end, a buffer as file."""

import io

import numpy as np
import onnxruntime
import torch
from torch import nn
from torch.onnx import export as to_onnx_file


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.tag = nn.Linear(12, 5)

    def forward(self, words, state=None):  # type: ignore[no-untyped-def]
        output, (hidden, cell) = self.lstm(self.embed(words), state)
        return nn.functional.log_softmax(self.tag(output), -1), hidden, cell


torch.manual_seed(0)
model = Tagger().eval()
words, state = torch.randint(0, 50, (2, 7)), (torch.randn(4, 2, 6), torch.randn(4, 2, 6))
buffer = io.BytesIO()
to_onnx_file(
    model,
    (words, {"state": state}),
    buffer,
    input_names=["words", "h0", "c0"],
    output_names=["tags", "hn", "cn"],
    dynamic_axes={"words": {1: "length"}, "tags": {1: "length"}},
    dynamo=False,
)
session = onnxruntime.InferenceSession(buffer.getvalue())
assert [value.name for value in session.get_inputs()] == ["words", "h0", "c0"]
results = []
for length in (7, 3):
    words = torch.randint(0, 50, (2, length))
    found = session.run(["tags", "hn", "cn"], {"words": words.numpy(), "h0": state[0].numpy(), "c0": state[1].numpy()})
    for result, expected in zip(found, model(words, state), strict=True):
        np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    results += found
np.savez("results.npz", *results)

"""An encoder of transformers with a mask of padding: the new exporter, the program that it returns."""

import numpy as np
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 100)

    def forward(self, tokens, padding):  # type: ignore[no-untyped-def]
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=padding))


torch.manual_seed(0)
model = Encoder().eval()
tokens, padding = torch.randint(0, 100, (3, 9)), torch.arange(9).expand(3, 9) > torch.tensor([[8], [5], [7]])
batch, length = torch.export.Dim("batch", max=1024), torch.export.Dim("length", max=1024)
program = torch.onnx.export(
    model,
    (tokens,),
    kwargs={"padding": padding},
    dynamic_shapes={"tokens": {0: batch, 1: length}, "padding": {0: batch, 1: length}},
    output_names=["scores"],
    report=False,
    verify=True,
    dynamo=True,
)
program.optimize()
program.save("encoder.onnx")
results = []
for size in ((3, 9), (5, 4)):
    tokens, padding = torch.randint(0, 100, size), torch.zeros(size, dtype=torch.bool)
    padding[1:, -2:] = True
    (scores,) = program(tokens, padding=padding)
    torch.testing.assert_close(scores, model(tokens, padding), rtol=1e-4, atol=1e-5)
    results.append(scores.detach().numpy())
np.savez("results.npz", *results)

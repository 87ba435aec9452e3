"""Models of TorchScript, run by an interpreter of their graphs that torch.export captures like any other module."""

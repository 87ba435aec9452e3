"""Verification: whether a model computes what PyTorch computes, up to rounding and choices among equal elements.

Core calls it through the hook ``onnxplug_verifier``, so that a plugin may judge models of its kind in another way.
"""

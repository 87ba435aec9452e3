"""Eager-mode and FX graph-mode quantised models (``torch.ao.quantization.convert``, ``convert_fx``) during capture.

torch cannot trace quantised tensors: they have no fakes, and packed weights are objects of C++. While a model is captured, each
is replaced by a stand-in of Python that holds ordinary tensors: integers with their scale and zero point. The model's own
code runs on them as it is. torch hands every function that is called with a stand-in over to the tables here
(``__torch_function__``), which compute on numbers and quantise the result, as ONNX's QuantizeLinear and DequantizeLinear do.
A function that is not in the tables is an error.
"""

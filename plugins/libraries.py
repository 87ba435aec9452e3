"""Which of onnxplug's packages is for a library; errors name it where it isn't installed.

Written by ``docs/packages.py`` (`make index`) from what the packages say. Packages that others
publish are not known.
"""

from __future__ import annotations

#: A namespace of torch, or the import name of a library, to the package.
LIBRARIES: dict[str, str] = {
    "DaoAILab": "onnxplug-mamba",
    "_C": "onnxplug-vllm",
    "bitsandbytes": "onnxplug-bitsandbytes",
    "causal_conv1d": "onnxplug-mamba",
    "detectron2": "onnxplug-mmcv",
    "diffusers": "onnxplug-diffusers",
    "fbgemm": "onnxplug-fbgemm",
    "fbgemm_gpu": "onnxplug-fbgemm",
    "flash_attn": "onnxplug-flash-attn",
    "kornia": "onnxplug-kornia",
    "mamba_ssm": "onnxplug-mamba",
    "mmcv": "onnxplug-mmcv",
    "natten": "onnxplug-natten",
    "pyg": "onnxplug-torch-geometric",
    "pyg_lib": "onnxplug-torch-geometric",
    "sgl_kernel": "onnxplug-vllm",
    "torch_geometric": "onnxplug-torch-geometric",
    "torch_scatter": "onnxplug-torch-geometric",
    "torchaudio": "onnxplug-torchaudio",
    "torchrec": "onnxplug-fbgemm",
    "torchvision": "onnxplug-torchvision",
    "transformers": "onnxplug-transformers",
    "vllm": "onnxplug-vllm",
    "xformers": "onnxplug-xformers",
    "xformers_flash": "onnxplug-xformers",
}

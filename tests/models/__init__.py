"""Every architecture of transformers, timm and torchvision: small ones of each, exported and compared."""

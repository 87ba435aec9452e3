"""Every architecture of transformers, timm and torchvision: small models of each, exported and compared."""

"""onnxplug's replacements in torch while it captures a model; the builtin plugin supplies them by the hook ``onnxplug_patches``."""

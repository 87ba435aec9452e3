"""What onnxplug replaces in torch while it captures a model; the builtin plugin gives it by the hook ``onnxplug_patches``."""

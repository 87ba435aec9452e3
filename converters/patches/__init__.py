"""What capture replaces in torch for single operators and functions, which the converters beside it translate.

The table is as capture's own (``onnxplug.capture.patches``); the builtin plugin gives it by the hook ``onnxplug_patches``.
"""

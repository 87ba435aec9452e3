"""The builtin rules, one module an operator family; ``onnxplug.plugins.builtin`` hands their tables over."""

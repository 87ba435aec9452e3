"""onnxplug's tests; the folders below mirror core, converters and plugins."""

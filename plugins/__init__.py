"""Plugins: hook specifications, the plugin manager, and the plugin that carries onnxplug's own rules."""

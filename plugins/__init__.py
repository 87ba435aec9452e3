"""Plugins that ship with onnxplug, and the manager that loads everyone's."""

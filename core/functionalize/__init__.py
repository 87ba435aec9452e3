"""onnxplug's functionalize stage: graphs that write in place become graphs that don't."""

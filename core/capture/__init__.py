"""Capture: a model becomes an ``ExportedProgram``."""

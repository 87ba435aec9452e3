"""Dtypes and shapes of what is emitted, node by node."""

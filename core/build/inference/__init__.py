"""Dtypes and shapes of the results of emitted nodes, node by node."""

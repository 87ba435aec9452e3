"""Interpretation: each node of the FX graph is converted by its rule."""

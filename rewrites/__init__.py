"""Rewrites: patterns of several nodes that have a better form; each module has a table ``REWRITES``."""

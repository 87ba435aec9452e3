"""Helpers shared by the tests: models, drawn inputs, comparisons."""

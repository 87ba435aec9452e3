"""Inspection of finished models: their content, the differences between two, their run times and their results."""

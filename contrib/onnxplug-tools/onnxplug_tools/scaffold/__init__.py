"""The template of a plugin package, and the code that fills it in."""

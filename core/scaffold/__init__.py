"""The template of a plugin package, and what fills it in."""

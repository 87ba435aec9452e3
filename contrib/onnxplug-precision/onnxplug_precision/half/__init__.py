"""Models in float16 and bfloat16."""

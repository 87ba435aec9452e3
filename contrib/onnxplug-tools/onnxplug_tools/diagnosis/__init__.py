"""Who is wrong: a rule, a rewrite or ONNX Runtime; and the smallest graph that shows it."""

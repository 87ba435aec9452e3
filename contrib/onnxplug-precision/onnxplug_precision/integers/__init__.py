"""Models with weights and activations of 8 and 4 bits."""

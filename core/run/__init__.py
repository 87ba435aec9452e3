"""Running, verifying and saving an exported model."""

"""Rules, the registry that chooses among them, and targets."""

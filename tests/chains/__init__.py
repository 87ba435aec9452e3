"""Random chains of operators: neighbours for a runtime's graph optimisations that no single-operator test has."""

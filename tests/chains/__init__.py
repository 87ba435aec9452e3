"""Random chains of operators: what one runtime's graph optimisations make of neighbours that no single-operator test has."""

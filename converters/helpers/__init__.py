"""Helpers that several families of converters share: small modules, one topic each. None of them imports a family."""

"""Submodules exported as models of their own, and the program that chains them."""

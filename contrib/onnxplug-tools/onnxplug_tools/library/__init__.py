"""Libraries of custom operators: the operators that they register, and checks of the plugins that translate them."""

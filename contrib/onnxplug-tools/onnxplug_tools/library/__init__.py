"""Libraries of custom operators: what they register, what a plugin has of it, and the index of packages for them."""

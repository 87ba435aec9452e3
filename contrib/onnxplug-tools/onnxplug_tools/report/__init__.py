"""Reports of exports: what was done, why it failed, and how the results compare."""

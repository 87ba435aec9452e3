"""The report that is being made, if any."""

"""torch's operator database, every entry exported, run and compared."""

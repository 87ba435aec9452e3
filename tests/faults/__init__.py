"""Faults at every write: a full disk, a process that is killed; and many exports and saves at once."""

"""Hostile input: tables of bad arguments and bad files, and the judge of the answers to them (see ``worker.py``)."""

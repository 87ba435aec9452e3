"""Hostile input: tables of bad arguments and bad files, and what judges how each is answered (see ``worker.py``)."""

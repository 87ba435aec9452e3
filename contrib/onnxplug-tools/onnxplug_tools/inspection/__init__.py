"""Finished models looked at: what is in them, what differs between two, how long they take and what they compute."""

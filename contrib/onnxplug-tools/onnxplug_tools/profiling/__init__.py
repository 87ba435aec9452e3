"""Where the time of an export goes: what is recorded while it runs, and the tables and files made of it."""

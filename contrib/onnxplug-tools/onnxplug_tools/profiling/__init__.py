"""The time of an export: spans that are recorded while it runs, and the tables and files made of them."""

"""Readers and writers of foreign formats, one entry for a profile in any of them (`any.py`)."""

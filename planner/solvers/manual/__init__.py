"""The user's own stages."""

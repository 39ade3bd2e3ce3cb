"""Predicted and measured runs as Chrome traces, compared, and learned from."""

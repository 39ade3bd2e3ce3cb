"""Dynamic programming over the downsets of the operator graph."""

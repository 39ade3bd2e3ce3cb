"""Action lists and their costs -> `Timeline`, and its export as a trace."""

"""NetSplit's constraint model, its engines and bounds, and Pesto."""

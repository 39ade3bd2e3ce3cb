"""The placement with the smallest bottleneck: local search and integer program."""

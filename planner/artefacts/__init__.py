"""The nouns, and their files: graph, profile, topology, sharding, strategy, plan, calibration."""

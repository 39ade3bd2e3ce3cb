"""PipeDream's optimizer, number for number."""

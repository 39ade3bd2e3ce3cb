"""The sources of a profile's figures: measured, computed, estimated."""

"""The version, in a file of its own: `planner` itself imports what stands above this."""

__version__ = "0.1.0"

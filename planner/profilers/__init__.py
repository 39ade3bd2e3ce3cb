"""Where the figures of a `Profile` come from."""

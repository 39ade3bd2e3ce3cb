"""A strategy as one list of actions per device, and whether the lists run to their end."""

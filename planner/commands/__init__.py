"""The commands, a file each, and what they share. Only here are click and rich loaded."""

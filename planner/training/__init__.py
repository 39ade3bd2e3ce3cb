"""What people train with, above the launcher."""

"""Two small networks, their samples, and their training by PyTorch and by the planner."""

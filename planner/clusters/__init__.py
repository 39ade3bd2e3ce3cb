"""What follows from a topology, and where topologies come from."""

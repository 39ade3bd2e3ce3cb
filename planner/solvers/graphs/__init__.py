"""What follows from a graph alone, without costs: downsets, repeated layers, coarser graphs."""

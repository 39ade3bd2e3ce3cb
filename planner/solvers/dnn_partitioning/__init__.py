"""dnn-partitioning's cost model and its solvers."""

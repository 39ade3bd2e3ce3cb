"""The roofline: times of kernels, and how they grow with the samples of a microbatch."""

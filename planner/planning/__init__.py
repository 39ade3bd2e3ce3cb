"""A problem -> the best plan: who is asked, who judges, and which sizes of the microbatch."""

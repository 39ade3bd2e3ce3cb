"""Other people's descriptions of clusters -> a topology."""

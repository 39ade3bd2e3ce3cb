"""Other planners' problems under their own cost models, solved exactly."""

"""PipeDream's asynchronous schedule in a launch: flows, versions of parameters, and their steps."""

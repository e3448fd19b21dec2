"""The orchestrator: carries out what the log says is due, and serves the people who steer runs."""

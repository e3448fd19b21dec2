"""A2A agents that misbehave, one class for each way, to be launched like any other child."""

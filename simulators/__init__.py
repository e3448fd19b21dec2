"""Stand-ins for the world: services with a journal of their own, and children that misbehave on purpose.

Nothing here reads the run log. A simulator only knows what arrived at its own door.
"""

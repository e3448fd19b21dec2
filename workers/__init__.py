"""Agents that know which revision they work for, and whose only way out is the gateway."""

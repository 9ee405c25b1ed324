"""Agents: records of pure functions over one state, by the first word after `isqn train`."""

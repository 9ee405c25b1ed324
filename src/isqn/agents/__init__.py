"""Agents: records of pure functions over one state. Each file registers one agent of `isqn train`."""

"""Deep value-based reinforcement learning without the second network."""

__version__ = "0.1.0"

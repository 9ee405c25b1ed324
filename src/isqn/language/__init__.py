"""Implicit language Q-learning (ILQL) and Wordle: agent, networks, game, players, data and play."""

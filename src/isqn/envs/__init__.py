"""Environments: `adapter` for the host loop, `native` for the compiled loop.

Importing this package registers the toy problems and Wordle with Gymnasium.
"""

from isqn.envs import toy, wordle

toy.register()
wordle.register()

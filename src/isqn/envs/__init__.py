"""Environments: `adapter` for the host loop, `native` for the compiled loop."""

from isqn.envs import toy, wordle

toy.register()
wordle.register()

"""Environments: `adapter` for the host loop, `native` for the compiled loop."""

from isqn.envs.toy import register

register()

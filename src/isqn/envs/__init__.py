"""Environments: `adapter` for the host loop, `native` for the compiled loop; importing this registers our own ids."""

from isqn.envs import registry

registry.register_own()

"""Import of JAX and Optax when they are first used, so that `isqn --help` and `isqn list` are fast.

Use `from isqn.lazy import jax, jnp, optax` in modules that only describe an agent, an environment, a loss or a scheme.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any


class LazyModule(ModuleType):
    """Placeholder for a module, which is imported when one of its attributes is first read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # inspection must not import the module
            raise AttributeError(name)
        value = getattr(import_module(self.__name__), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import jax as jax
    import jax.numpy as jnp
    import optax as optax
else:
    jax, jnp, optax = LazyModule("jax"), LazyModule("jax.numpy"), LazyModule("optax")

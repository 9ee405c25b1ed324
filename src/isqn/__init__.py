"""Deep Q-learning without a target network.

Importing the package does not import JAX: each public name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "Model": "isqn.model",
    "evaluate": "isqn.model",
    "TargetScheme": "isqn.schemes",
    "target_based": "isqn.schemes",
    "target_free": "isqn.schemes",
    "iterated_shared": "isqn.schemes",
    "ensemble_shared": "isqn.schemes",
    "iterated_target_based": "isqn.schemes",
    "register_scheme": "isqn.schemes",
    "register_loss": "isqn.agents.registry",
    "register_agent": "isqn.agents.registry",
    "make_config": "isqn.agents.registry",
    "register_torso": "isqn.torsos",
    "register_environment": "isqn.envs.registry",
    "NativeEnvironment": "isqn.envs.native",
    "make_environment": "isqn.envs.adapter",
    "check_environment": "isqn.envs.check",
    "UserError": "isqn.types",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'isqn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

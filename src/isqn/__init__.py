"""Deep value-based reinforcement learning without the second network.

Importing it starts no device: everything below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Model": "isqn.model",
    "evaluate": "isqn.model",
    "Config": "isqn.experiments.config",
    "TargetScheme": "isqn.schemes",
    "target_based": "isqn.schemes",
    "target_free": "isqn.schemes",
    "iterated_shared": "isqn.schemes",
    "ensemble_shared": "isqn.schemes",
    "iterated_target_based": "isqn.schemes",
    "make_environment": "isqn.envs.adapter",
    "check_environment": "isqn.envs.check",
    "UserError": "isqn.types",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'isqn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

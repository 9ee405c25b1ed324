"""Registry of environments, of the package and of users.

Any other Gymnasium id works too. An environment with a JAX version can also be trained in the compiled loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym

from isqn.envs import classic, minatar, toy
from isqn.envs.native import NativeEnvironment, NativeGymnasium, complete_spec, native_environment, require_consistent
from isqn.types import UserError, require_new_name


class Entry(NamedTuple):
    """A registered environment: its group in `isqn list envs`, and its JAX version."""

    kind: str  # group in `isqn list envs`
    native: Callable[[], NativeEnvironment] | None  # function that makes the JAX version
    module: str  # module that registered it


_ENTRIES: dict[str, Entry] = {}


def register_environment(
    env_id: str,
    native: NativeEnvironment | Callable[[], NativeEnvironment] | None = None,
    *,
    entry_point: str | Callable[..., gym.Env[Any, Any]] | None = None,
    kind: str = "user",
    **gymnasium_settings: Any,
) -> None:
    """Register an environment for `--env-id`, `isqn list envs` and `gymnasium.make`.

    `native` is its JAX version, for the compiled loop; `entry_point` is its Gymnasium class. One of them is enough: an
    environment in JAX also works in the host loop and in evaluations.
    """
    if not isinstance(env_id, str) or not (
        entry_point is None or isinstance(entry_point, str) or callable(entry_point)
    ):
        raise UserError(
            f"register_environment: env_id is {env_id!r} and entry_point {entry_point!r}; give an id, and a class or "
            "'module:Class'."
        )
    if not (native is None or isinstance(native, NativeEnvironment) or callable(native)):
        raise UserError(f"register_environment: native is {native!r}; it must be an isqn.NativeEnvironment.")
    if native is None and entry_point is None and env_id not in gym.registry:
        raise UserError(f"register_environment: give {env_id!r} an entry_point, or a native version in JAX.")
    module = _module_of(entry_point or (native.step if isinstance(native, NativeEnvironment) else native))
    owner = _ENTRIES[env_id].module if env_id in _ENTRIES else None
    if owner is None and entry_point is not None and env_id in gym.registry:
        owner = "gymnasium"
    require_new_name("register_environment", "an environment", env_id, owner, module)
    make_native = (lambda: native) if isinstance(native, NativeEnvironment) else native
    own_wrapper = isinstance(getattr(gym.registry.get(env_id), "entry_point", None), partial)  # of an earlier version
    if entry_point is None and make_native is not None and (env_id not in gym.registry or own_wrapper):
        entry_point = partial(_make_gymnasium, env_id)
    if entry_point is not None:
        gym.registry.pop(env_id, None)
        gym.register(env_id, entry_point=entry_point, **gymnasium_settings)
    _ENTRIES[env_id] = Entry(kind, make_native, module)


def _module_of(maker: Any) -> str:
    """Return the module of a class or a function, or of the text "module:Class"."""
    maker = maker.func if isinstance(maker, partial) else maker
    return maker.partition(":")[0] if isinstance(maker, str) else getattr(maker, "__module__", "isqn.envs.registry")


def _make_gymnasium(env_id: str, **settings: Any) -> NativeGymnasium:
    return NativeGymnasium(make_native(env_id), **settings)


def entries() -> dict[str, Entry]:
    return dict(_ENTRIES)


def has_native(env_id: str) -> bool:
    """Return whether an environment has a JAX version, without importing JAX."""
    entry = _ENTRIES.get(canonical_id(env_id))
    return entry is not None and entry.native is not None


def make_native(env_id: str) -> NativeEnvironment:
    """Make the JAX version of an environment that has one."""
    entry = _ENTRIES.get(canonical_id(env_id))
    if entry is None or entry.native is None:
        raise ValueError(f"{env_id} has no JAX version; has_native says which have.")
    native = entry.native()
    native = native._replace(spec=complete_spec(native.spec))
    if not entry.module.startswith("isqn."):
        require_consistent(native, env_id)
    return native


def canonical_id(env_id: str) -> str:
    """Return the id with its version, which is optional for MinAtar."""
    return minatar.canonical_id(env_id) or env_id


def register_own() -> None:
    """Register the environments of the package, once."""
    if _ENTRIES:
        return
    for env_id in toy.PROBLEMS:
        register_environment(
            env_id,
            partial(_make_toy, env_id),
            entry_point="isqn.envs.toy:ToyEnvironment",
            kind="toy",
            kwargs={"name": env_id},
        )
    register_environment("isqn/Wordle-v0", entry_point="isqn.language.game:WordleEnvironment", kind="Wordle")
    for env_id in classic.IDS:
        register_environment(env_id, partial(_make_classic, env_id), kind="classic")
    for env_id in classic.HOST_IDS:
        register_environment(env_id, kind="classic")
    for env_id in minatar.IDS:
        _ENTRIES[env_id] = Entry("MinAtar", partial(_make_minatar, env_id), __name__)


def _make_toy(env_id: str) -> NativeEnvironment:
    return native_environment(env_id, "gymnasium", *toy.make_jax_functions(toy.PROBLEMS[env_id]()))


def _make_classic(env_id: str) -> NativeEnvironment:
    return native_environment(env_id, "gymnasium", *classic.make_jax_functions(env_id))


def _make_minatar(env_id: str) -> NativeEnvironment:
    return native_environment(env_id, minatar.PROTOCOL, *minatar.make_jax_functions(env_id))

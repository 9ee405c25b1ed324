"""Environments of recorded datasets, as the fields of Gymnasium's `EnvSpec`.

Nothing that a file names is imported: an environment is made by its id alone, from the registry, with keyword arguments
that are JSON and wrappers that `env_wrappers` allows.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.envs.registration import WrapperSpec

from isqn.config.fields import json_text
from isqn.envs import atari, dmc
from isqn.envs.adapter import Environment
from isqn.envs.wrappers import WRAPPERS
from isqn.types import UserError

FLAGS = "say what it is by --env-id ID, --env-kwargs JSON and --env-wrappers JSON"
# Wrappers that record or show, and change neither observations nor rewards nor ends.
OBSERVERS = ("HumanRendering", "OrderEnforcing", "PassiveEnvChecker", "RecordEpisodeStatistics", "RecordVideo")


def recover_settings(
    recorded: dict[str, Any] | None,
    where: str,
    *,
    env_id: str | None = None,
    env_kwargs: str | None = None,
    env_wrappers: str | None = None,
) -> dict[str, str]:
    """Return the settings of the recorded environment, as `make_environment` takes them.

    The last three arguments replace what is recorded; None takes it from the file. Another `env_id` than the recorded
    one replaces the keyword arguments and wrappers, too. `where` begins the sentence of an error.
    """
    given = {"env_kwargs": json_text("env_kwargs", env_kwargs or "", dict)}
    given["env_wrappers"] = json_text("env_wrappers", env_wrappers or "", list)
    if env_id is None and recorded is None:
        raise UserError(f"{where} does not record its environment; {FLAGS}.")
    name = env_id or (recorded or {})["id"]
    if recorded is None or name.rpartition(":")[2] != recorded["id"]:
        return {"env_id": name, **given}
    if name.startswith(("ALE/", "MinAtar/", dmc.PREFIX)):
        return {"env_id": name, "protocol": "auto" if env_id else _protocol(recorded, where), **given}
    registered = gym.registry.get(recorded["id"])
    if registered is None:
        raise UserError(
            f"{where} is of {name!r}, which is not registered, and the module that the file names is not imported. Add "
            "--import MODULE if it registers the environment, or name another by --env-id."
        )
    if env_id is None and recorded.get("entry_point") != registered.entry_point:
        raise UserError(
            f"{where} is of {name} as {recorded.get('entry_point')!r}, and the registered {name} is "
            f"{registered.entry_point!r}. If they are the same, add --env-id {name}."
        )
    if env_kwargs is None:
        given["env_kwargs"] = _kwargs(recorded, registered, where)
    if env_wrappers is None:
        given["env_wrappers"] = _wrappers(recorded, where)
    return {"env_id": name, **given}


def _kwargs(recorded: dict[str, Any], registered: GymnasiumSpec, where: str) -> str:
    """Return the recorded keyword arguments that differ from those of the registry."""
    kwargs = recorded.get("kwargs", {})
    if not isinstance(kwargs, dict) or (missing := set(registered.kwargs) - set(kwargs)):
        lacks = f" and lacks {', '.join(sorted(missing))}" if isinstance(kwargs, dict) else ""
        raise UserError(f"{where} records the keyword arguments {kwargs!r}{lacks}; {FLAGS}.")
    changed = {
        key: value
        for key, value in kwargs.items()
        if key != "render_mode" and not (key in registered.kwargs and _as_json(registered.kwargs[key]) == value)
    }
    limit = recorded.get("max_episode_steps")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise UserError(f"{where} records max_episode_steps {limit!r}; {FLAGS}.")
    if limit != registered.max_episode_steps:
        changed["max_episode_steps"] = -1 if limit is None else limit  # -1: gymnasium.make sets no limit
    try:
        json.dumps(changed, allow_nan=False)
    except ValueError:
        raise UserError(f"{where} records the keyword arguments {kwargs!r}, which are not JSON; {FLAGS}.") from None
    return json_text("env_kwargs", changed, dict)


def _as_json(value: Any) -> Any:
    """Return a value as a file has it: tuples as lists."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return value


def _wrappers(recorded: dict[str, Any], where: str) -> str:
    """Return the recorded wrappers, by their names."""
    wrappers = recorded.get("additional_wrappers") or []
    entries = []
    for wrapper in wrappers if isinstance(wrappers, list) else [wrappers]:
        fields = wrapper if isinstance(wrapper, dict) else {}
        module, _, name = str(fields.get("entry_point")).partition(":")
        is_known = module.startswith("gymnasium.wrappers.")
        if is_known and name in OBSERVERS:
            continue
        if not is_known or name not in WRAPPERS or not isinstance(fields.get("kwargs"), dict):
            problem = "which has no recorded arguments" if is_known and name in WRAPPERS else "which isqn does not add"
            raise UserError(f"{where} was recorded with the wrapper {fields.get('entry_point')!r}, {problem}; {FLAGS}.")
        entries.append([name, fields["kwargs"]] if fields["kwargs"] else name)
    return json_text("env_wrappers", entries, list)


def _protocol(recorded: dict[str, Any], where: str) -> str:
    """Return the protocol of a recorded Atari game."""
    if recorded["id"].startswith("ALE/"):
        for name, protocol in atari.PROTOCOLS.items():
            settings = atari.gymnasium_settings(protocol)
            wrappers = [w for w in recorded.get("additional_wrappers") or [] if isinstance(w, dict)]
            names = [str(w.get("entry_point")).partition(":")[2] for w in wrappers]
            if (
                settings
                and names == ["AtariPreprocessing"]
                and wrappers[0].get("kwargs") == settings[1]
                and recorded.get("max_episode_steps") is None
                and settings[0].items() <= dict(recorded.get("kwargs") or {}).items()
            ):
                return name
    raise UserError(
        f"{where} is of {recorded['id']} with the keyword arguments {recorded.get('kwargs')} and the wrappers "
        f"{recorded.get('additional_wrappers')}, which is no protocol of isqn. If it was recorded under the default "
        f"protocol, add --env-id {recorded['id']}."
    )


def gymnasium_spec(env: Environment) -> GymnasiumSpec | None:
    """Return the specification by which Gymnasium makes an environment elsewhere, or None if there is none."""
    if env.spec.id.startswith("ALE/"):
        return _atari_spec(env.spec.id, atari.PROTOCOLS[env.spec.protocol])
    spec = env.env.spec
    if spec is None or env.spec.id.startswith(dmc.PREFIX):
        return None
    spec = copy.deepcopy(spec)  # as `gymnasium.make` gives it without settings of isqn
    spec.disable_env_checker = env.spec.id in gym.registry and gym.registry[env.spec.id].disable_env_checker
    try:
        spec.to_json()
    except (TypeError, ValueError):  # its entry point is a function, or an argument is an object
        return None
    return None if any(wrapper.kwargs is None for wrapper in spec.additional_wrappers) else spec


def _atari_spec(env_id: str, protocol: atari.AtariProtocol) -> GymnasiumSpec | None:
    settings = atari.gymnasium_settings(protocol)
    if settings is None or env_id not in gym.registry:
        return None
    spec = copy.deepcopy(gym.registry[env_id])
    spec.kwargs = {**spec.kwargs, **settings[0]}
    entry_point = f"{gym.wrappers.AtariPreprocessing.__module__}:AtariPreprocessing"
    spec.additional_wrappers = (WrapperSpec("AtariPreprocessing", entry_point, settings[1]),)
    return spec

"""Detection of the format and the environment of a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import gymnasium as gym

from isqn.config.fields import flag
from isqn.data import arrays, minari, rlds, sources
from isqn.data.index import INDEX, read_index, spec_from_index
from isqn.data.spaces import needs_flattening
from isqn.envs import atari
from isqn.envs.adapter import make_environment
from isqn.envs.recorded import gymnasium_spec, recover_settings
from isqn.envs.registry import canonical_id
from isqn.types import EnvSpec, UserError

FLATTEN = "FlattenObservation"
FORMATS = (
    "a dataset of this package (index.json), DQN replay ($store$_observation_ckpt.N.gz), d4rl-atari "
    "(N/observation.gz), RL Unplugged (run_R-NNNNN-of-MMMMM, or features.json of TensorFlow Datasets) "
    "or Minari (data/metadata.json), or a file: HDF5 or .npz "
    "(observations, actions, rewards, terminals)"
)


def find_source(
    folder: Path,
    env_id: str | None,
    run: int,
    checkpoints: int,
    *,
    env_kwargs: str | None = None,
    env_wrappers: str | None = None,
) -> tuple[sources.Source, EnvSpec]:
    """Return the source in a folder or a file, and the specification of its environment."""
    given = {"env_kwargs": env_kwargs, "env_wrappers": env_wrappers}
    if folder.is_file():
        kind = arrays.arrays_format(folder)
        if kind is None:
            raise UserError(f"{folder} is not a dataset of a known format; the formats are {FORMATS}.")
        settings: Any = {name: value for name, value in given.items() if value}
        with make_environment(env_id or _refuse_unnamed(folder), **settings) as env:
            return arrays.arrays(folder, kind, env.spec, env.to_frame), env.spec
    for name, value in given.items():
        if value is not None and not minari.is_minari(folder):
            raise UserError(f"{flag(name)} is for Minari datasets and for files of arrays; {folder} is neither.")
    if (folder / INDEX).is_file():
        spec = spec_from_index(read_index(folder))
        if env_id and canonical_id(env_id) != spec.id:
            raise UserError(f"{folder} is of {spec.id}, not of --env-id {env_id}.")
        return sources.own_dataset(folder, checkpoints), spec
    if any(folder.glob("$store$_observation_ckpt.*.gz")):
        spec = _atari_spec(folder, env_id)
        return sources.dopamine(folder, spec), spec
    if any(folder.glob("*/observation.gz")):
        spec = _atari_spec(folder, env_id)
        return sources.d4rl_atari(folder, spec), spec
    if any(folder.glob("run_*-of-*")):
        spec = _atari_spec(folder, env_id)
        source = sources.rl_unplugged(folder, spec, run)
        if not source.parts:
            raise UserError(f"{folder} has no file of --run {run}.")
        return source, spec
    if (folder / rlds.FEATURES).is_file():
        spec = _atari_spec(folder, env_id or rlds.rlds_game(folder))
        return rlds.rlds(folder, spec), spec
    if minari.is_minari(folder):
        return _minari_source(folder, env_id, env_kwargs, env_wrappers)
    if (folder / "dataset" / INDEX).is_file():
        raise UserError(f"{folder} is a run, whose dataset is {folder / 'dataset'}.")
    if versions := sorted([*folder.glob(f"*/{rlds.FEATURES}"), *folder.glob(f"*/*/{rlds.FEATURES}")]):
        raise UserError(
            f"{folder} holds folders of TensorFlow Datasets; give one of them, such as {versions[-1].parent}."
        )
    raise UserError(f"{folder} is not a dataset of a known format; the formats are {FORMATS}.")


def _minari_source(
    folder: Path, env_id: str | None, env_kwargs: str | None, env_wrappers: str | None
) -> tuple[sources.Source, EnvSpec]:
    """Return the episodes of a Minari dataset and the environment that it records, or that replaces it."""
    recording = minari.open_recording(folder)
    own, keeps_settings = recording.spec, env_kwargs is None and env_wrappers is None
    if own and keeps_settings and (env_id is None or canonical_id(env_id) == own.id):
        return minari.source(recording, own, recording.observation_space), own
    if old_id := recording.old_env_id:
        with make_environment(env_id or old_id) as env:
            return minari.source(recording, env.spec, recording.observation_space), env.spec
    minari.require_supported(recording)
    settings: Any = recover_settings(
        recording.env_spec, str(folder), env_id=env_id, env_kwargs=env_kwargs, env_wrappers=env_wrappers
    )
    if flattens := needs_flattening(recording.observation_space):
        wrappers = json.loads(settings["env_wrappers"] or "[]")
        wrappers += [FLATTEN] if wrappers[-1:] != [FLATTEN] else []
        settings["env_wrappers"] = json.dumps(wrappers)
    with make_environment(**settings) as env:
        inner = env.env.env if flattens and isinstance(env.env, gym.Wrapper) else env.env
        spaces = {"observation_space": inner.observation_space, "action_space": env.env.action_space}
        owner = " ".join(filter(None, (env.spec.id, env.spec.env_kwargs, env.spec.env_wrappers)))
        for name, space in spaces.items():
            minari.require_same_space(recording, name, space, owner, strict=env_id is None)
        return minari.source(recording, env.spec, inner.observation_space), env.spec


def export_to_minari(folder: Path, out: Path) -> bool:
    """Export a dataset to Minari with its environment; return False if it was already exported.

    An environment that Gymnasium cannot make elsewhere, or that is not installed here, is left out.
    """
    spec = spec_from_index(read_index(folder))
    try:
        with make_environment(
            spec.id, protocol=spec.protocol, env_kwargs=spec.env_kwargs, env_wrappers=spec.env_wrappers
        ) as env:
            env_spec, space = gymnasium_spec(env), env.env.observation_space
            is_same = env.spec == spec
    except UserError:
        is_same = False
    return minari.export(folder, out, env_spec, space) if is_same else minari.export(folder, out)


def _atari_spec(folder: Path, env_id: str | None) -> EnvSpec:
    """Return the specification of the game `env_id`, or of the game in the path, such as Pong."""
    games = {name.removeprefix("ALE/").removesuffix("-v5"): name for name in atari.list_games()}
    in_path = [games[part] for part in reversed(folder.resolve().parts) if part in games]
    game = games.get(env_id or "", env_id) or (in_path[0] if in_path else _refuse_unnamed(folder))
    with make_environment(game) as env:
        return env.spec


def _refuse_unnamed(folder: Path) -> NoReturn:
    raise UserError(f"The environment of {folder} is not recorded; give it by --env-id.")

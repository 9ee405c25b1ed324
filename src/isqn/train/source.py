"""Detection of the format and the environment of a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from isqn.data import arrays, rlds, sources
from isqn.data.dataset import INDEX, MINARI, read_index, spec_from_index
from isqn.envs import atari
from isqn.envs.adapter import make_environment
from isqn.envs.registry import canonical_id
from isqn.types import EnvSpec, UserError

FORMATS = (
    "a dataset of this package (index.json), DQN replay ($store$_observation_ckpt.N.gz), d4rl-atari "
    "(N/observation.gz), RL Unplugged (run_R-NNNNN-of-MMMMM, or features.json of TensorFlow Datasets) "
    "or Minari (data/metadata.json), or a file: HDF5 or .npz "
    "(observations, actions, rewards, terminals)"
)


def find_source(folder: Path, env_id: str | None, run: int, checkpoints: int) -> tuple[sources.Source, EnvSpec]:
    """Return the source in a folder or a file, and the specification of its environment."""
    if folder.is_file():
        kind = arrays.arrays_format(folder)
        if kind is None:
            raise UserError(f"{folder} is not a dataset of a known format; the formats are {FORMATS}.")
        with make_environment(env_id or _refuse_unnamed(folder)) as env:
            return arrays.arrays(folder, kind, env.spec, env.to_frame), env.spec
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
    if any((folder / name).is_file() for name in MINARI):
        with make_environment(env_id or sources.minari_env_id(folder) or _refuse_unnamed(folder)) as env:
            return sources.minari(folder, env.spec, env.to_frame), env.spec
    if (folder / "dataset" / INDEX).is_file():
        raise UserError(f"{folder} is a run, whose dataset is {folder / 'dataset'}.")
    if versions := sorted([*folder.glob(f"*/{rlds.FEATURES}"), *folder.glob(f"*/*/{rlds.FEATURES}")]):
        raise UserError(
            f"{folder} holds folders of TensorFlow Datasets; give one of them, such as {versions[-1].parent}."
        )
    raise UserError(f"{folder} is not a dataset of a known format; the formats are {FORMATS}.")


def _atari_spec(folder: Path, env_id: str | None) -> EnvSpec:
    """Return the specification of the game `env_id`, or of the game in the path, such as Pong."""
    games = {name.removeprefix("ALE/").removesuffix("-v5"): name for name in atari.list_games()}
    in_path = [games[part] for part in reversed(folder.resolve().parts) if part in games]
    game = games.get(env_id or "", env_id) or (in_path[0] if in_path else _refuse_unnamed(folder))
    with make_environment(game) as env:
        return env.spec


def _refuse_unnamed(folder: Path) -> NoReturn:
    raise UserError(f"The environment of {folder} is not recorded; give it by --env-id.")

"""Minari datasets (Younis et al. 2024): their reader and their writer. Both need `pip install "isqn[offline]"`.

Nothing that a file names is imported or made here. Minari makes the environment of a file that lacks a space, so such a
file is refused before Minari reads it. The writer uses Minari's own storage, so that Minari loads what it wrote; the
reader uses it for HDF5, and `minari_arrow` for the other formats.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isqn.data.dataset import UNKNOWN_POLICY, Dataset, Piece, check_output_folder
from isqn.data.files import writing
from isqn.data.index import MINARI
from isqn.data.minari_arrow import ARROW_FORMATS, read_episode, require_pyarrow
from isqn.data.sample import CONTEXT, INSIDE, TERMINATED, TRUNCATED
from isqn.data.sources import Part, Source, digest_files
from isqn.data.spaces import action_space, fits, leaves, observation_space, to_frames, to_observations
from isqn.types import EnvSpec, UserError

if TYPE_CHECKING:
    from gymnasium import Space
    from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

Array = NDArray[Any]

PREFIX = "minari:"  # of a dataset that is named by its id
FORMATS = ("hdf5", *ARROW_FORMATS)
NAMES = "letters, digits, - and _ before -vN, such as cartpole/expert-v0; a namespace has two characters or more"
# Entries of `infos` that keep what Minari has no place for. Other software may ignore them.
CONTEXT_FRAMES, AGENT_ACTIONS = "isqn_context", "isqn_actions"


class Recording(NamedTuple):
    """What a Minari dataset says about itself."""

    folder: Path
    metadata: dict[str, Any]
    observation_space: Space[Any]
    action_space: Space[Any]

    @property
    def env_spec(self) -> dict[str, Any] | None:
        """Return the recorded environment, the fields of Gymnasium's `EnvSpec`, if there is one."""
        text = self.metadata.get("env_spec")
        if text is None:
            return None
        try:
            fields = json.loads(text)
            if not isinstance(fields["id"], str):
                raise TypeError
        except (TypeError, ValueError, KeyError):
            raise _unreadable(self.folder, "its env_spec is not that of an environment") from None
        return dict(fields)

    @property
    def spec(self) -> EnvSpec | None:
        """Return the specification that `export` wrote, if any; it must fit the spaces of the dataset."""
        fields = self.metadata.get("isqn_spec")
        if fields is None:
            return None
        try:
            spec = EnvSpec.from_json(fields)
            if self.action_space == action_space(spec) and fits(self.observation_space, spec):
                return spec
        except (TypeError, ValueError, AttributeError):
            pass
        raise _unreadable(self.folder, "its isqn_spec does not fit its spaces")

    @property
    def old_env_id(self) -> str | None:
        """Return the id of the environment of an old export, which held frames instead of observations."""
        is_old = not {"env_spec", "isqn_spec"} & set(self.metadata)
        return self.metadata.get("isqn_env_id") if is_old else None


# -- finding and opening


def is_minari(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MINARI)


def root() -> Path:
    """Return the folder of Minari's local datasets."""
    return Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets")


def local_folder(name: str) -> Path:
    """Return the folder of the local dataset `minari:ID`; nothing is downloaded."""
    dataset_id = name.removeprefix(PREFIX)
    paths = sorted(root().glob("**/data/metadata.json"))
    known = {path.parents[1].relative_to(root()).as_posix(): path.parents[1] for path in paths}
    if dataset_id not in known:
        listed = f"there are {', '.join(known)}" if known else "there is none"
        raise UserError(
            f"{name} is not a local dataset of Minari: in {root()}, {listed}. `minari download {dataset_id}` downloads "
            "a dataset, and MINARI_DATASETS_PATH is the folder where they are."
        )
    return known[dataset_id]


def open_recording(folder: Path) -> Recording:
    """Read and check the metadata of a Minari dataset."""
    import_storage()
    from minari.serialization import deserialize_space

    try:
        metadata = json.loads((_data(folder) / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(folder, f"its metadata.json is damaged ({error})") from None
    if not isinstance(metadata, dict):
        raise _unreadable(folder, "its metadata.json is not a JSON object")
    recorded = []
    for name in ("observation_space", "action_space"):
        if not isinstance(metadata.get(name), str):
            raise _unreadable(
                folder, f"its metadata.json has no {name}, and isqn does not make what a file names to find it out"
            )
        try:
            recorded.append(deserialize_space(metadata[name]))
        except Exception as error:  # Minari asserts, and looks up names
            raise _unreadable(folder, f"its {name} is not that of a Gymnasium space") from error
    for name in ("total_episodes", "total_steps"):
        if type(metadata.get(name)) is not int or metadata[name] < 0:
            raise _unreadable(folder, f"{name} of its metadata.json is {metadata.get(name)!r}, not a number")
    if metadata.get("data_format") not in FORMATS:
        raise _unreadable(folder, f"its data_format is {metadata.get('data_format')!r}, not {', '.join(FORMATS)}")
    return Recording(folder, metadata, *recorded)


def exported_digest(folder: Path) -> str | None:
    """Return the digest of the dataset of isqn that a Minari dataset was exported from, if any."""
    return open_recording(folder).metadata.get("isqn_digest") if is_minari(folder) else None


def import_storage() -> Any:
    """Import and return Minari's storage class."""
    try:
        from minari.dataset.minari_storage import MinariStorage
    except ImportError:
        raise UserError('Minari datasets need `pip install "isqn[offline]"`.') from None
    return MinariStorage


def _unreadable(folder: Path, reason: str) -> UserError:
    return UserError(f"{folder} cannot be read as a Minari dataset: {reason}.")


def _data(folder: Path) -> Path:
    return (folder / "data" if (folder / "data").is_dir() else folder).resolve()  # Minari needs a resolved path


# -- checks of spaces


def require_supported(recording: Recording) -> None:
    """Refuse observations that are not numbers, and actions that are neither Discrete nor Box."""
    from gymnasium import spaces

    for leaf in leaves(recording.observation_space):
        if not isinstance(leaf, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            raise UserError(
                f"The observations of {recording.folder} have the space {recording.observation_space}; "
                f"{type(leaf).__name__} cannot be turned into numbers. Box, Discrete, MultiDiscrete, MultiBinary, and "
                "Dict and Tuple of them are supported."
            )
    is_atari = str((recording.env_spec or {}).get("id")).startswith("ALE/")
    if is_atari and (recording.observation_space.shape or ())[:2] == (210, 160):
        raise UserError(
            f"The observations of {recording.folder} are whole screens, {recording.observation_space}. A frame of a "
            "protocol is the maximum of two grey screens, resized to 84x84, which recorded screens do not determine. "
            "Record it with Gymnasium's AtariPreprocessing, or take its game from DQN replay or RL Unplugged."
        )
    if not isinstance(recording.action_space, spaces.Box | spaces.Discrete):
        raise UserError(
            f"The actions of {recording.folder} have the space {recording.action_space}; Discrete and Box actions are "
            "supported."
        )


def require_same_space(recording: Recording, name: str, other: Space[Any], owner: str, *, strict: bool) -> None:
    """Refuse a dataset whose space `name` differs from that of an environment.

    If not `strict`, observations may differ in their bounds, which have no effect on them.
    """
    from gymnasium import spaces

    own = getattr(recording, name)
    is_same = own == other
    if not strict and name == "observation_space" and isinstance(own, spaces.Box) and isinstance(other, spaces.Box):
        is_same = own.shape == other.shape and own.dtype == other.dtype
    if is_same:
        return
    raise UserError(
        f"{recording.folder} was recorded with the {name.replace('_', ' ')} {own}, and {owner} has {other}. Give its "
        "environment by --env-id, --env-kwargs and --env-wrappers."
    )


# -- reader


def source(recording: Recording, spec: EnvSpec, space: Space[Any]) -> Source:
    """Return the episodes of a dataset, for an environment whose observations, as recorded, are of a space.

    The space is that of the environment: the parts of a Dict may be in another order in the file.
    """
    folder, total = recording.folder, recording.metadata["total_episodes"]
    read = _episode_reader(recording)

    def pieces() -> Iterator[Piece]:
        for number in range(total):
            try:
                episode = read(number)
            except Exception as error:  # a damaged file can raise anything
                reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
                raise UserError(f"{folder} is damaged: episode {number} cannot be read ({reason}).") from error
            try:
                yield from _read_episode(episode, spec, space, is_own="isqn_spec" in recording.metadata)
            except KeyError as error:
                raise UserError(f"{folder}: episode {number}: {error} is missing.") from error
            except (ValueError, TypeError, IndexError) as error:
                raise UserError(f"{folder}: episode {number}: {error}.") from error

    policy = str(recording.metadata.get("algorithm_name", UNKNOWN_POLICY))
    part = Part("episodes", 0, recording.metadata["total_steps"], pieces)
    return Source("minari", policy, [part], digest_files(_data(folder).rglob("*")))


def _episode_reader(recording: Recording) -> Callable[[int], dict[str, Any]]:
    """Return a function that reads an episode by its number."""
    data, data_format = _data(recording.folder), recording.metadata["data_format"]
    if data_format in ARROW_FORMATS:
        require_pyarrow(recording.folder, data_format)
        spaces = (recording.observation_space, recording.action_space)
        return lambda number: read_episode(data, number, data_format, spaces)
    from PIL import EpsImagePlugin

    EpsImagePlugin.gs_binary = False  # a file that claims to hold JPEG images must not start Ghostscript
    try:
        storage = import_storage().read(data)
    except ImportError as error:
        raise _unreadable(recording.folder, str(error).rstrip(".")) from None
    except Exception as error:  # a damaged file can raise anything
        raise _unreadable(recording.folder, "its data are damaged") from error
    return lambda number: next(iter(storage.get_episodes([number])))


def _read_episode(episode: dict[str, Any], spec: EnvSpec, space: Space[Any], *, is_own: bool) -> Iterator[Piece]:
    """Yield an episode of L steps, which has L + 1 observations; nothing if it has no step."""
    env_actions, rewards = np.asarray(episode["actions"]), np.asarray(episode["rewards"])
    frames = to_frames(episode["observations"], space, spec)
    steps = len(env_actions)
    ended = [np.asarray(episode[name], bool) for name in ("terminations", "truncations")]
    if {len(frames) - 1, len(rewards), *map(len, ended)} != {steps}:
        raise ValueError(
            f"it has {steps} actions, {len(rewards)} rewards, {len(ended[0])} terminations, {len(ended[1])} "
            f"truncations and {len(frames)} observations; L actions need L of each, and L + 1 observations"
        )
    if not steps:
        return
    if (early := np.flatnonzero((ended[0] | ended[1])[:-1])).size:
        raise ValueError(f"it ends at step {early[0]} and goes on after it")
    infos = (episode.get("infos") or {}) if is_own else {}
    actions = _agent_actions(env_actions, infos.get(AGENT_ACTIONS), spec)
    context = np.asarray(infos.get(CONTEXT_FRAMES, frames[:0]))
    if context.shape[1:] != spec.frame_shape or context.dtype != frames.dtype:
        raise ValueError(f"{CONTEXT_FRAMES} of its infos is {context.dtype} {context.shape}")
    ends = np.full(len(context) + len(frames), INSIDE, np.uint8)
    ends[: len(context)] = CONTEXT
    ends[-1] = TERMINATED if ended[0][-1] else TRUNCATED
    before, last = np.zeros((len(context), *spec.action_shape), actions.dtype), np.zeros_like(actions[:1])
    yield Piece(
        np.concatenate([context, frames]),
        np.concatenate([before, actions, last]),
        np.concatenate([np.zeros(len(context)), rewards, np.zeros(1)]),
        ends,
    )


def _agent_actions(env_actions: Array, recorded: Any, spec: EnvSpec) -> Array:
    """Return actions as the agent chose them: those that isqn recorded, if they are the same in the environment."""
    expected: Any = action_space(spec)
    if env_actions.shape[1:] != expected.shape or not np.can_cast(env_actions.dtype, expected.dtype, "same_kind"):
        raise ValueError(f"its actions are {env_actions.dtype} of shape {env_actions.shape[1:]}, not of {expected}")
    actions: Array = spec.from_env_action(env_actions)
    if spec.is_continuous:
        if recorded is not None and np.array_equal(spec.to_env_action(recorded), env_actions):
            return np.asarray(recorded, np.float32)
    elif len(actions) and not (actions.min() >= 0 and actions.max() < spec.num_actions):
        raise ValueError(f"its actions go from {env_actions.min()} to {env_actions.max()}, which is not in {expected}")
    return actions


# -- writer


def output_folder(out: str) -> Path:
    """Return the folder to write to; `minari:ID` is a dataset in Minari's own folder."""
    if not out.startswith(PREFIX):
        return Path(out)
    _require_id(out.removeprefix(PREFIX), out)
    return root() / out.removeprefix(PREFIX)


def dataset_id(out: Path) -> str:
    """Return the id of a dataset in a folder: its path in Minari's folder, or its name with a version."""
    path, home = out.resolve(), root().resolve()
    if path.is_relative_to(home):
        name = path.relative_to(home).as_posix()
        _require_id(name, str(out))
        return name
    name = re.sub(r"[^\w-]+", "-", path.name, flags=re.ASCII).strip("-") or "dataset"
    return name if _is_id(name) else f"{name}-v0"


def _require_id(name: str, out: str) -> None:
    if not _is_id(name) or "data" in name.split("/"):  # Minari takes the parent of a folder `data` for a dataset
        raise UserError(f"--out {out} would be the dataset {name!r} of Minari; an id is {NAMES}.")


def _is_id(name: str) -> bool:
    import_storage()
    from minari.dataset.minari_dataset import parse_dataset_id

    try:
        parse_dataset_id(name)
    except (ValueError, TypeError):  # TypeError: without a version
        return False
    return True


def export(folder: Path, out: Path, env_spec: GymnasiumSpec | None = None, space: Space[Any] | None = None) -> bool:
    """Export a dataset to Minari, without stacking frames; return False if it was already exported.

    `env_spec` and `space` are the environment in Gymnasium and its observation space, if it can be made there.
    """
    dataset, storage_class = Dataset.open(folder), import_storage()
    dataset.require_complete()
    from minari import __version__

    name = dataset_id(out)
    check_output_folder(out)
    for outer in out.resolve().parents:
        if (outer / "data" / "metadata.json").is_file():
            raise UserError(f"{out} lies in the dataset {outer}; give --out another folder.")
    if out.exists() and any(out.iterdir()):
        if exported_digest(out) == dataset.digest:
            return False
        raise UserError(f"{out} is not empty; give --out another folder.")
    space = observation_space(dataset.spec) if space is None else space
    temporary = out.with_name(f".{out.name}.writing")  # left by a crash, it is removed by the next call
    shutil.rmtree(temporary, ignore_errors=True)
    with writing(out):
        (temporary / "data").mkdir(parents=True)
        storage = storage_class.new(
            (temporary / "data").resolve(), space, action_space(dataset.spec), env_spec, jpeg_encoding=False
        )
        about = {"dataset_id": name, "minari_version": __version__, "algorithm_name": dataset.index["policy"]}
        storage.update_metadata({**about, "isqn_spec": dataset.spec.to_json(), "isqn_digest": dataset.digest})
        storage.update_episodes(_episodes(dataset, space))
        temporary.replace(out)
    if out.resolve().is_relative_to(root().resolve()):
        _create_namespace(name)
    return True


def _create_namespace(name: str) -> None:
    """Write the files by which Minari knows the namespace of a dataset in its folder."""
    from minari.namespace import create_namespace, list_local_namespaces

    namespace = name.rpartition("/")[0]
    if namespace and namespace not in list_local_namespaces():
        create_namespace(namespace)


def _episodes(dataset: Dataset, space: Space[Any]) -> Iterator[Any]:
    """Yield the episodes of a dataset as Minari's writer takes them."""
    from minari.data_collector import EpisodeBuffer

    spec = dataset.spec
    for number, piece in enumerate(piece for piece in dataset.pieces() if piece.num_transitions):
        first = int((piece.ends != CONTEXT).argmax())  # rows of context precede the first step
        frames, actions = piece.frames[first:], piece.actions[first:-1].astype(spec.action_dtype)
        observations, env_actions = to_observations(frames, space, spec), spec.to_env_action(actions)
        if not np.array_equal(to_frames(observations, space, spec), frames):
            raise UserError(f"{dataset.folder}: frames of episode {number} are not observations of {space}.")
        infos = {CONTEXT_FRAMES: piece.frames[:first]} if first else {}
        if spec.is_continuous and spec.from_env_action(env_actions).tobytes() != actions.tobytes():
            infos[AGENT_ACTIONS] = actions  # the environment's numbers do not determine those of the agent
        ended = np.zeros((2, len(actions)), bool)
        ended[0 if piece.ends[-1] == TERMINATED else 1, -1] = True
        yield EpisodeBuffer(
            id=number,
            observations=observations,
            actions=env_actions if spec.is_continuous else env_actions.astype(np.int64),
            rewards=piece.rewards[first:-1].tolist(),
            terminations=ended[0].tolist(),
            truncations=ended[1].tolist(),
            infos=infos,
        )

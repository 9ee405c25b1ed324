"""Minari, read and written, with the real library: nothing is lost, and nothing that a file names is executed."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import warnings
from collections import OrderedDict
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import minari
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from minari.cli import app
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_dataset import parse_dataset_id
from minari.serialization import serialize_space
from typer.testing import CliRunner

from isqn.cli import main
from isqn.data import minari as module
from isqn.data.convert import convert
from isqn.data.dataset import Dataset, DatasetWriter, Piece, Provenance
from isqn.data.index import read_index
from isqn.data.sample import CONTEXT, INSIDE, TERMINATED, TRUNCATED
from isqn.envs.adapter import make_environment
from isqn.train.record import read_config
from isqn.train.source import export_to_minari, find_source
from isqn.types import EnvSpec, UserError

# Imported at most once in the life of a process, so a test that must not import it can tell.
HOSTILE = "import pathlib\npathlib.Path({witness!r}).write_text('code named by a file was executed')\n"

OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(5, start=3),
    "vector": spaces.Box(-9, 9, (3,), np.float64),
    "bytes": spaces.Box(0, 255, (4,), np.uint8),
    "image": spaces.Box(0, 255, (6, 5), np.uint8),
    "colours": spaces.Box(0, 255, (6, 5, 3), np.uint8),
    "channels first": spaces.Box(0, 255, (3, 40, 36), np.uint8),
    "booleans": spaces.Box(0, 1, (4, 4, 2), np.bool_),
    "photo": spaces.Box(0, 255, (40, 36, 3), np.uint8),  # large enough for JPEG
    "tuple": spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 3]))),
    # in another order than by name, which is the one that Minari's file gives back
    "dict": spaces.Dict(OrderedDict(zebra=spaces.Discrete(3), ape=spaces.Box(0, 255, (2, 2), np.uint8))),
    "text": spaces.Dict(word=spaces.Text(5), number=spaces.Discrete(3)),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3, start=2),
    "box": spaces.Box(np.array([[-0.3, 1.0]]), np.array([[0.7, 9.0]]), dtype=np.float64),
    "multi": spaces.MultiDiscrete([2, 3]),
    "dict": spaces.Dict(a=spaces.Discrete(2)),
}


class Toy(gym.Env):
    """An environment of any spaces, whose observations are drawn by the seed of the episode."""

    def __init__(self, observations: str = "vector", actions: str = "discrete", size: int = 4):
        self.observation_space, self.action_space, self.size = OBSERVATIONS[observations], ACTIONS[actions], size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.time = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.time += 1
        return self.observation_space.sample(), self.time / 4, self.time == self.size, False, {}


class Foreign(gym.Wrapper, gym.utils.RecordConstructorArgs):
    """A wrapper of the user, outside Gymnasium."""

    def __init__(self, env: gym.Env):
        gym.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The folder of Minari's local datasets, and the toy environment."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "home"))
    gym.register("Toy-v0", entry_point=f"{__name__}:Toy", max_episode_steps=9)
    yield tmp_path / "home"
    del gym.registry["Toy-v0"]


def column(space: spaces.Space[Any], values: list[Any]) -> Any:
    """Return observations or actions of an episode as Minari holds them."""
    if isinstance(space, spaces.Dict):
        return {key: column(part, [value[key] for value in values]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(column(part, [value[i] for value in values]) for i, part in enumerate(space.spaces))
    return values if isinstance(space, spaces.Text) else np.stack(values)


def record(env: gym.Env, name: str, episodes: int = 2, **options: Any) -> Path:
    """Record random actions, and write them by Minari's own writer."""
    buffers = []
    env.action_space.seed(0)
    for seed in range(episodes):
        observations, actions, rewards, ends = [env.reset(seed=seed)[0]], [], [], [(False, False)]
        while not any(ends[-1]):
            actions.append(env.action_space.sample())
            obs, reward, *end, _ = env.step(actions[-1])
            observations.append(obs)
            rewards.append(reward)
            ends.append(tuple(end))
        terminations, truncations = map(list, zip(*ends[1:], strict=True))
        buffers.append(
            EpisodeBuffer(
                observations=column(env.observation_space, observations),
                actions=column(env.action_space, actions),
                rewards=rewards,
                terminations=terminations,
                truncations=truncations,
            )
        )
    return create(name, buffers, env, **options)


def create(name: str, buffers: list[EpisodeBuffer], env: gym.Env, **options: Any) -> Path:
    """Write episodes by Minari's own writer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        created = minari.create_dataset_from_buffers(
            name, buffers, env=env, algorithm_name="random", **{"jpeg_encoding": False, **options}
        )
    return Path(created.spec.data_path).parent


def change_metadata(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change fields of metadata.json (None removes one) and return the recorded environment."""
    path = folder / "data" / "metadata.json"
    metadata = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None}
    path.write_text(json.dumps(metadata))
    return json.loads(metadata.get("env_spec", "{}"))


def change_env_spec(folder: Path, **changes: Any) -> None:
    change_metadata(folder, env_spec=json.dumps(change_metadata(folder) | changes))


def read_pieces(folder: Path, **options: Any) -> tuple[list[Piece], EnvSpec]:
    source, spec = find_source(folder, options.pop("env_id", None), 1, 1, **options)
    return [piece for part in source.parts for piece in part.pieces()], spec


def transitions(folder: Path) -> list[np.ndarray]:
    rows = Dataset.open(folder).rows
    return [np.asarray(column) for column in rows.gather(rows.valid_starts())[:5]]


def assert_identical(ones: list[np.ndarray], others: list[np.ndarray]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


# -- the recorded environment


def lake(**kwargs: Any) -> gym.Env:
    return gym.make("FrozenLake-v1", **kwargs)


@pytest.mark.parametrize(
    ("make", "env_kwargs", "env_wrappers"),
    [
        (lambda: lake(), "", ""),
        (lambda: lake(is_slippery=False), '{"is_slippery": false}', ""),
        (lambda: lake(map_name="8x8", render_mode="rgb_array"), '{"map_name": "8x8"}', ""),
        (lambda: lake(max_episode_steps=5), '{"max_episode_steps": 5}', ""),
        (lambda: gym.make("Toy-v0", max_episode_steps=-1, size=12), '{"max_episode_steps": -1, "size": 12}', ""),
        (lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1")), "", ""),
        (lambda: gym.wrappers.TimeAwareObservation(gym.make("CartPole-v1")), "", None),
        (
            lambda: gym.wrappers.ClipReward(gym.wrappers.FlattenObservation(lake()), 0, 0.5),
            "",
            '["FlattenObservation", ["ClipReward", {"max_reward": 0.5, "min_reward": 0}]]',
        ),
        (lambda: gym.make("Blackjack-v1"), "", '["FlattenObservation"]'),
        *(
            (lambda kind=kind: gym.make("Toy-v0", observations=kind), json.dumps({"observations": kind}), wrappers)
            for kind, wrappers in {
                **dict.fromkeys(("discrete", "bytes", "image", "colours", "channels first", "booleans"), ""),
                **dict.fromkeys(("tuple", "dict"), '["FlattenObservation"]'),
            }.items()
        ),
        (lambda: gym.make("Toy-v0", actions="box"), '{"actions": "box"}', ""),
    ],
)
def test_the_recovered_environment_plays_the_recorded_episodes_again(make, env_kwargs, env_wrappers, home):
    """Seeds and actions give the recorded frames, rewards and ends: it is the environment that was recorded."""
    folder = record(make(), "toys/random-v0")
    pieces, spec = read_pieces(folder)
    assert spec.env_kwargs == env_kwargs
    assert env_wrappers is None or spec.env_wrappers == env_wrappers
    env = make_environment(spec.id, env_kwargs=spec.env_kwargs, env_wrappers=spec.env_wrappers)
    assert env.spec == spec
    for seed, (piece, episode) in enumerate(zip(pieces, minari.load_dataset("toys/random-v0"), strict=True)):
        frames, rewards, steps = [env.reset(seed)], [], []
        for action in episode.actions:  # the actions as recorded: those of the agent are rounded
            obs, reward, terminated, truncated, _ = env.env.step(action)
            frames.append(env.to_frame(obs))
            rewards.append(reward)
            steps.append((terminated, truncated))
        np.testing.assert_array_equal(piece.frames, frames)
        np.testing.assert_array_equal(piece.rewards[:-1], rewards)
        np.testing.assert_allclose(spec.to_env_action(piece.actions[:-1]), episode.actions, rtol=1e-6)
        assert piece.ends.tolist() == [INSIDE] * len(rewards) + [TERMINATED if steps[-1][0] else TRUNCATED]
        assert piece.frames.dtype == env.spec.frame_dtype


def test_training_and_evaluation_use_the_recovered_environment(tmp_path):
    """On ice that is not slippery, two steps to the right are two steps to the right."""
    folder = record(lake(is_slippery=False, max_episode_steps=3), "lake/dry-v0", episodes=20)
    assert main(["data", "convert", str(folder), "-o", str(tmp_path / "data"), "--quiet"]) == 0
    words = "train cql --dataset data --hidden-sizes 8 --num-updates 4 --epoch-updates 2 --evaluation-steps 12"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert main([*words.split(), "--loop", "host", "--run-dir", "run", "--quiet"]) == 0
    assert read_config(tmp_path / "run").env_kwargs == '{"is_slippery": false, "max_episode_steps": 3}'
    rows = (tmp_path / "run" / "evaluations.csv").read_text().splitlines()
    place = rows[0].split(",").index("length")
    assert {int(row.split(",")[place]) for row in rows[1:]} <= {2, 3}


CARTPOLE = {"name": "Foreign", "entry_point": "elsewhere:Foreign", "kwargs": {}}


@pytest.mark.parametrize(
    ("changes", "sentence", "flags"),
    [
        ({"id": "Nowhere-v0"}, "is of 'Nowhere-v0', which is not registered", {"env_id": "CartPole-v1"}),
        ({"entry_point": "elsewhere:CartPole"}, "is of CartPole-v1 as 'elsewhere:CartPole', and the registered", {}),
        ({"additional_wrappers": [CARTPOLE]}, "with the wrapper 'elsewhere:Foreign', which isqn", {"env_wrappers": ""}),
        (
            {"additional_wrappers": [CARTPOLE | {"entry_point": "gymnasium.wrappers.x:ClipReward", "kwargs": None}]},
            "with the wrapper 'gymnasium.wrappers.x:ClipReward', which has no recorded arguments",
            {"env_wrappers": "[]"},
        ),
        ({"additional_wrappers": 7}, "with the wrapper None", {"env_wrappers": ""}),
        ({"kwargs": {"x": float("nan")}}, "which are not JSON", {"env_kwargs": ""}),
        ({"kwargs": [1]}, r"the keyword arguments \[1\]; say", {"env_kwargs": "{}"}),
        ({"max_episode_steps": "long"}, "records max_episode_steps 'long'", {"env_kwargs": ""}),
        ({"kwargs": {"id": "x"}}, "--env-kwargs sets id, which isqn sets itself", {"env_kwargs": ""}),
        ({"kwargs": {"unknown": 1}}, """cannot be made with --env-kwargs {"unknown": 1}""", {"env_kwargs": ""}),
    ],
)
def test_what_cannot_be_recovered_is_refused_unless_flags_replace_it(changes, sentence, flags):
    folder = record(gym.make("CartPole-v1"), "cart/random-v0")
    change_env_spec(folder, **changes)
    with pytest.raises(UserError, match=sentence):
        find_source(folder, None, 1, 1)
    pieces, spec = read_pieces(folder, **(flags or {"env_id": "CartPole-v1"}))
    assert (len(pieces), spec.id, spec.env_kwargs, spec.env_wrappers) == (2, "CartPole-v1", "", "")


def test_a_foreign_wrapper_and_a_missing_environment_are_refused():
    folder = record(Foreign(gym.make("CartPole-v1")), "cart/random-v0")
    with pytest.raises(UserError, match=rf"recorded with the wrapper '{__name__}:Foreign', which isqn does not add"):
        find_source(folder, None, 1, 1)
    change_metadata(folder, env_spec=None)
    with pytest.raises(UserError, match="does not record its environment; say what it is by --env-id ID"):
        find_source(folder, None, 1, 1)
    assert find_source(folder, "CartPole-v1", 1, 1)[1].id == "CartPole-v1"


def test_naming_the_recorded_id_keeps_its_arguments():
    """--env-id FrozenLake-v1 of a lake that is not slippery does not make it slippery; --env-kwargs does."""
    folder = record(lake(is_slippery=False), "lake/dry-v0")
    assert read_pieces(folder, env_id="FrozenLake-v1")[1].env_kwargs == '{"is_slippery": false}'
    assert read_pieces(folder, env_kwargs='{"is_slippery":  true}')[1].env_kwargs == '{"is_slippery": true}'
    assert read_pieces(folder, env_kwargs="{}")[1].env_kwargs == ""
    with pytest.raises(UserError, match="--env-kwargs is 'x'; it must be JSON"):
        find_source(folder, None, 1, 1, env_kwargs="x")
    with pytest.raises(UserError, match="--env-wrappers names 'RecordVideo'"):
        find_source(folder, None, 1, 1, env_wrappers='["RecordVideo"]')


@pytest.mark.parametrize(
    ("name", "space"),
    [
        ("observation_space", spaces.Box(-1, 1, (5,), np.float32)),
        ("observation_space", spaces.Box(-1, 1, (4,), np.float64)),
        ("observation_space", spaces.Discrete(4)),
        ("action_space", spaces.Discrete(3)),
        ("action_space", spaces.Discrete(2, start=1)),
        ("action_space", spaces.Box(-1, 1, (1,))),
    ],
)
def test_other_spaces_than_those_of_the_environment_are_refused(name, space):
    """Also if the flags name the environment: another space is another environment."""
    folder = record(gym.make("CartPole-v1"), "cart/random-v0")
    change_metadata(folder, **{name: serialize_space(space)})
    for env_id in (None, "CartPole-v1"):
        with pytest.raises(UserError, match=rf"was recorded with the {name.replace('_', ' ')} .*, and CartPole-v1 has"):
            find_source(folder, env_id, 1, 1)


def test_other_bounds_of_observations_need_the_environment_by_name():
    folder = record(gym.wrappers.RescaleObservation(gym.make("MountainCar-v0"), -1, 1), "car/scaled-v0")
    change_env_spec(folder, additional_wrappers=[])
    with pytest.raises(UserError, match="was recorded with the observation space"):
        find_source(folder, None, 1, 1)
    assert find_source(folder, "MountainCar-v0", 1, 1)[1].id == "MountainCar-v0"


# -- data is never code


@pytest.fixture
def witness(tmp_path, monkeypatch):
    """A file that the hostile modules on Python's path write when they are imported."""
    path = tmp_path / "witness"
    for name in ("hostile_module.py", "hostile_wrapper.py"):
        (tmp_path / name).write_text(HOSTILE.format(witness=str(path)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    assert not path.exists()
    assert not {"hostile_module", "hostile_wrapper"} & set(sys.modules)


HOSTILE_SPECS: list[dict[str, Any]] = [
    {"entry_point": "hostile_module:Env"},
    {"id": "hostile_module:Env-v0", "entry_point": "hostile_module:Env"},
    {"id": "Unknown-v0", "entry_point": "hostile_module:Env"},
    {"additional_wrappers": [{"name": "W", "entry_point": "hostile_wrapper:W", "kwargs": {}}]},
    {"additional_wrappers": [{"name": "W", "entry_point": "gymnasium.wrappers.../hostile_wrapper:W", "kwargs": {}}]},
    {"vector_entry_point": "hostile_module:Env"},
]


@pytest.mark.parametrize("changes", HOSTILE_SPECS)
@pytest.mark.parametrize("missing", ["", "observation_space", "action_space"])
def test_nothing_that_a_file_names_is_imported(changes, missing, witness, tmp_path, capsys):
    folder = record(gym.make("CartPole-v1"), "cart/random-v0")
    change_env_spec(folder, **changes)
    change_metadata(folder, eval_env_spec=json.dumps(changes), **({missing: None} if missing else {}))
    code = main(["data", "convert", str(folder), "-o", str(tmp_path / "out"), "--quiet"])
    is_harmless = "vector_entry_point" in changes and not missing
    assert code == (0 if is_harmless else 1)
    sentence = capsys.readouterr().err
    assert missing == "" or f"has no {missing}, and isqn does not make what a file names" in sentence
    for env_id in () if missing else ("CartPole-v1", "MountainCar-v0"):
        main(["data", "convert", str(folder), "-o", str(tmp_path / env_id), "--env-id", env_id, "--quiet"])


def test_images_of_another_format_start_no_program(tmp_path, monkeypatch):
    """Pillow would hand an EPS image to Ghostscript, which executes it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\necho executed > {tmp_path / 'witness'}\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    folder = record(gym.make("Toy-v0", observations="channels first"), "toys/eps-v0", episodes=1)
    space = serialize_space(spaces.Box(0, 255, (40, 36), np.uint8))
    change_metadata(folder, jpeg_encoding=True, observation_space=space)
    text = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 36 40\n%%EndComments\n(x) print\n%%EOF\n"
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        del file["episode_0/observations"]
        file["episode_0/observations"] = np.tile(np.frombuffer(text, np.uint8), (5, 1))
    spec = EnvSpec("Toy-v0", "gymnasium", (40, 36, 1), "uint8", 3, first_action=2)
    recording = module.open_recording(folder)
    (part,) = module.source(recording, spec, recording.observation_space).parts
    with pytest.raises(UserError, match="is damaged: episode 0 cannot be read"):
        next(part.pieces())
    assert not (tmp_path / "witness").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data_format": "pickle"}, "its data_format is 'pickle', not hdf5, arrow, parquet"),
        ({"total_episodes": "many"}, "total_episodes of its metadata.json is 'many', not a number"),
        ({"observation_space": '{"type": "Strange"}'}, "its observation_space is not that of a Gymnasium space"),
        ({"env_spec": "[]"}, "its env_spec is not that of an environment"),
        ({"isqn_spec": {"id": "x"}}, "its isqn_spec does not fit its spaces"),
        ({"isqn_spec": ["x"]}, "its isqn_spec does not fit its spaces"),
    ],
)
def test_damaged_metadata_is_refused(changes, sentence):
    folder = record(gym.make("CartPole-v1"), "cart/random-v0")
    change_metadata(folder, **changes)
    with pytest.raises(UserError, match=f"random-v0 cannot be read as a Minari dataset: {sentence}"):
        find_source(folder, None, 1, 1)


# -- episodes


@pytest.mark.parametrize(
    ("column", "values", "sentence"),
    [
        ("rewards", np.ones(3), "episode 1: it has 4 actions, 3 rewards, 4 terminations"),
        ("actions", np.full(4, 5), "episode 1: its actions go from 5 to 5, which is not in Discrete"),
        ("actions", np.full(4, 2.5), "episode 1: its actions are float64"),
        ("terminations", np.array([0, 1, 0, 1], bool), "episode 1: it ends at step 1 and goes on after it"),
        ("observations", np.full(5, 8), "episode 1: its observations go from 8 to 8, which is not in Discrete"),
        ("observations", np.zeros((5, 2), int), "episode 1: its observations have the shape"),
        ("rewards", np.array([0, 0, np.nan, 0]), "minari, episodes: the reward at step 2 of episode 1"),
    ],
)
def test_invalid_episodes_are_refused(column, values, sentence, tmp_path):
    folder = record(gym.make("Toy-v0", observations="discrete"), "toys/random-v0")
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        del file["episode_1"][column]
        file["episode_1"][column] = values
    with pytest.raises(UserError, match=sentence):
        convert(*find_source(folder, None, 1, 1), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        (
            {"observations": "text"},
            r"The observations of \S+ have the space Dict\(.*Text cannot be turned",
        ),
        ({"actions": "multi"}, r"The actions of \S+ have the space MultiDiscrete\(\[2 3\]\); Discrete and Box"),
        ({"actions": "dict"}, r"The actions of \S+ have the space Dict\('a': Discrete\(2\)\); Discrete and Box"),
    ],
)
def test_spaces_that_are_not_supported_are_refused_by_name(kwargs, sentence):
    folder = record(gym.make("Toy-v0", **kwargs), "toys/random-v0", episodes=1)
    with pytest.raises(UserError, match=sentence):
        find_source(folder, None, 1, 1)


# -- Arrow and Parquet

ARROW = pytest.mark.parametrize("data_format", ["arrow", "parquet"])


def replace_columns(folder: Path, data_format: str, columns: dict[str, Any]) -> None:
    """Replace columns of episode 1 (None removes one), as other software could write them."""
    (path,) = (folder / "data" / "1").glob("part-*")
    table = pa.dataset.dataset(path, format=data_format).to_table()
    kept = {name: table[name].combine_chunks() for name in table.column_names} | columns
    write_table(path, pa.table({name: values for name, values in kept.items() if values is not None}))


def write_table(path: Path, table: pa.Table) -> None:
    if path.suffix == ".parquet":
        return pyarrow.parquet.write_table(table, path)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def assert_same_pieces(folder: Path, other: Path) -> None:
    (pieces, spec), (others, other_spec) = read_pieces(folder), read_pieces(other)
    assert spec == other_spec
    for piece, same in zip(pieces, others, strict=True):
        assert_identical([*piece], [*same])


def refusal(folder: Path, out: Path) -> str:
    """Return the sentence that refuses a conversion, which leaves nothing behind."""
    with pytest.raises(UserError) as refused:
        convert(*find_source(folder, None, 1, 1), out)
    assert not out.exists()
    sentence = str(refused.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


@ARROW
@pytest.mark.parametrize("jpeg_encoding", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in OBSERVATIONS if kind != "text"])
def test_arrow_gives_the_transitions_of_hdf5(kind, jpeg_encoding, data_format):
    """Bit by bit, also of composite observations and of images that Minari stores as JPEG."""
    env, options = gym.make("Toy-v0", observations=kind), {"jpeg_encoding": jpeg_encoding}
    folder = record(env, "toys/arrow-v0", data_format=data_format, **options)
    assert_same_pieces(folder, record(env, "toys/hdf5-v0", **options))


@ARROW
def test_arrow_gives_the_continuous_actions_of_hdf5(data_format):
    env = gym.make("Toy-v0", actions="box")
    assert_same_pieces(record(env, "toys/arrow-v0", data_format=data_format), record(env, "toys/hdf5-v0"))


@ARROW
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Minari leaves its temporary folder to the garbage collector
def test_what_the_data_collector_of_minari_writes_is_read(data_format, home):
    """With infos, which are arrays in Taxi and are not read."""
    for name in ("hdf5", data_format):
        env = minari.DataCollector(gym.make("Taxi-v4", max_episode_steps=20), record_infos=True, data_format=name)
        env.action_space.seed(0)
        for seed in range(3):
            env.reset(seed=seed)
            while not any(env.step(env.action_space.sample())[2:4]):
                pass
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            env.create_dataset(f"taxi/{name}-v0", algorithm_name="random")
        env.close()
    assert_same_pieces(home / "taxi" / f"{data_format}-v0", home / "taxi" / "hdf5-v0")


@ARROW
def test_long_and_empty_episodes_of_arrow_are_read_as_those_of_hdf5(data_format):
    """Minari itself loads only the first batch of an episode. An episode without steps gives no piece."""

    def episode(steps: int) -> EpisodeBuffer:
        rng = np.random.default_rng(steps)
        frames, actions = rng.normal(size=(steps + 1, 3)), rng.integers(2, 5, steps)
        ends = (np.arange(steps) == steps - 1).tolist()
        return EpisodeBuffer(
            observations=frames,
            actions=actions,
            rewards=rng.normal(size=steps).tolist(),
            terminations=ends,
            truncations=[False] * steps,
        )

    env, episodes = gym.make("Toy-v0"), [episode(steps) for steps in (70_000, 0, 1)]
    folder = create("toys/arrow-v0", episodes, env, data_format=data_format)
    assert [piece.num_transitions for piece in read_pieces(folder)[0]] == [70_000, 1]
    (first,) = minari.load_dataset("toys/arrow-v0").storage.get_episodes([0])
    assert len(first["rewards"]) < 70_000  # if this fails, Minari reads whole episodes, and could read them for isqn
    assert_same_pieces(folder, create("toys/hdf5-v0", [episodes[0], episodes[2]], env))


@ARROW
@pytest.mark.parametrize("missing", ["", "observation_space", "action_space"])
@pytest.mark.parametrize("changes", HOSTILE_SPECS)
def test_nothing_that_an_arrow_dataset_names_is_imported(changes, missing, data_format, witness, tmp_path, capsys):
    """Minari would make the environment of a dataset that lacks a space, so its reader is never called."""
    folder = record(gym.make("CartPole-v1"), "cart/random-v0", data_format=data_format)
    change_env_spec(folder, **changes)
    change_metadata(folder, eval_env_spec=json.dumps(changes), **({missing: None} if missing else {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.import_storage(), "read", None)
        code = main(["data", "convert", str(folder), "-o", str(tmp_path / "out"), "--quiet"])
    assert code == (0 if "vector_entry_point" in changes and not missing else 1)
    assert missing == "" or f"has no {missing}, and isqn does not make what a file names" in capsys.readouterr().err


@ARROW
@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"actions": [5] * 5}, "episode 1: its actions go from 5 to 5, which is not in Discrete"),
        ({"actions": [2.5] * 5}, "episode 1: its actions are float64"),
        ({"terminations": [False, True, False, True, False]}, "episode 1: it ends at step 1 and goes on after it"),
        ({"observations": [8] * 5}, "episode 1: its observations go from 8 to 8, which is not in Discrete"),
        ({"rewards": [0, 0, np.nan, 0, 0]}, "minari, episodes: the reward at step 2 of episode 1"),
        ({"rewards": [0, 0, -np.inf, 0, 0]}, "minari, episodes: the reward at step 2 of episode 1"),
        ({"rewards": [0, 0, None, 0, 0]}, "episode 1 cannot be read (its rewards have missing values (1 of 4))"),
        ({"terminations": [None] * 5}, "episode 1 cannot be read (its terminations have missing values (4 of 4))"),
        ({"rewards": ["a"] * 5}, "episode 1 cannot be read (its rewards are string, not numbers)"),
        ({"observations": [[3]] * 5}, "episode 1 cannot be read (its observations are list<"),
        ({"truncations": None}, "episode 1 cannot be read (it has no truncations)"),
    ],
)
def test_invalid_episodes_of_arrow_are_refused(columns, sentence, data_format, tmp_path):
    folder = record(gym.make("Toy-v0", observations="discrete"), "toys/random-v0", data_format=data_format)
    replace_columns(folder, data_format, columns)
    assert sentence in refusal(folder, tmp_path / "out")


@ARROW
@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [
        ("vector", pa.array([[1.0] * 4] * 5, pa.list_(pa.float64(), 4)), "not lists of 3 numbers as Box"),
        ("vector", pa.array([[1.0] * 3] * 5, pa.list_(pa.float64())), "not lists of 3 numbers as Box"),
        ("vector", pa.array([[1.0] * 3] * 4 + [None], pa.list_(pa.float64(), 3)), "missing values (1 of 5)"),
        ("vector", pa.array([[1.0, 2, None]] * 5, pa.list_(pa.float64(), 3)), "missing values (5 of 15)"),
        ("dict", pa.array([{"zebra": 1}] * 5), "its observations have no ape"),
        ("dict", pa.array([1] * 5), "its observations are int64, not a struct as Dict"),
        ("photo", pa.array([b"%!PS-Adobe-3.0 EPSF-3.0\n"] * 5), "image 0 of its observations is not a JPEG image"),
        ("photo", pa.array(["text"] * 5), "its observations are string, not lists of 4320 numbers"),
    ],
)
def test_observations_that_do_not_fit_their_space_are_refused(kind, values, sentence, data_format, tmp_path):
    folder = record(gym.make("Toy-v0", observations=kind), "toys/random-v0", data_format=data_format)
    replace_columns(folder, data_format, {"observations": values})
    assert sentence in refusal(folder, tmp_path / "out")


def test_images_of_another_size_are_refused_by_their_header(tmp_path):
    env = gym.make("Toy-v0", observations="photo")
    folder = record(env, "toys/random-v0", data_format="arrow", jpeg_encoding=True)
    space = serialize_space(spaces.Box(0, 255, (36, 40, 3), np.uint8))
    change_metadata(folder, observation_space=space)
    recording = module.open_recording(folder)
    (part,) = module.source(recording, make_environment("Toy-v0").spec, recording.observation_space).parts
    with pytest.raises(UserError, match=r"image 0 of its observations is RGB \(40, 36, 3\), not Box"):
        next(part.pieces())


@ARROW
def test_damaged_files_of_arrow_are_refused_in_one_sentence(data_format, tmp_path):
    folder = record(gym.make("Toy-v0"), "toys/random-v0", data_format=data_format)
    inner, path = folder / "data" / "1", folder / "data" / "1" / f"part-0.{data_format}"
    content, metadata = path.read_bytes(), (inner / "metadata.json").read_bytes()
    for damaged in (b"", content[:-20], content[: len(content) // 2], content[:-90] + bytes(80) + content[-10:]):
        path.write_bytes(damaged)
        assert "random-v0 is damaged: episode 1 cannot be read (" in refusal(folder, tmp_path / "out")
    path.write_bytes(content)
    for damaged in (b"", b"[" * 10_000, b"[]", b"{}", b'{"total_steps": 3}'):
        (inner / "metadata.json").write_bytes(damaged)
        assert "random-v0 is damaged: episode 1 cannot be read (" in refusal(folder, tmp_path / "out")
    assert "it has 3 steps in its metadata.json and 5 rows; L steps need L + 1 rows" in refusal(
        folder, tmp_path / "out"
    )
    (inner / "metadata.json").write_bytes(metadata)
    (inner / f"part-1.{data_format}").write_bytes(content)
    assert "it has 2 files, and Minari writes one" in refusal(folder, tmp_path / "out")
    shutil.rmtree(inner)
    assert "random-v0 is damaged: episode 1 cannot be read (" in refusal(folder, tmp_path / "out")


def test_offsets_outside_of_an_arrow_file_are_refused(tmp_path):
    """Following them would end the process."""
    env = gym.make("Toy-v0", observations="photo")
    folder = record(env, "toys/random-v0", data_format="arrow", jpeg_encoding=True)
    offsets = pa.py_buffer(np.array([0, 2**30, -(2**30), 2**30, 2**30, 64], np.int32))
    images = pa.Array.from_buffers(pa.binary(), 5, [None, offsets, pa.py_buffer(bytes(64))])
    replace_columns(folder, "arrow", {"observations": images})
    assert "random-v0 is damaged: episode 1 cannot be read (" in refusal(folder, tmp_path / "out")


@ARROW
def test_arrow_without_pyarrow_is_answered_with_the_install_line(data_format, tmp_path, monkeypatch, capsys):
    folder = record(gym.make("Toy-v0"), "toys/random-v0", data_format=data_format)
    monkeypatch.setitem(sys.modules, "pyarrow.dataset", None)
    assert main(["data", "convert", str(folder), "-o", str(tmp_path / "out")]) == 1
    sentence = f'random-v0 is stored as {data_format}; reading it needs `pip install "isqn[offline]"`.'
    assert sentence in capsys.readouterr().err


@ARROW
def test_other_episodes_of_arrow_are_another_source(data_format):
    """A stopped conversion does not go on with them."""
    folder = record(gym.make("Toy-v0"), "toys/random-v0", data_format=data_format)
    before = find_source(folder, None, 1, 1)[0].identity
    replace_columns(folder, data_format, {"note": pa.array(["x"] * 5)})
    assert find_source(folder, None, 1, 1)[0].identity != before


# -- written datasets


def write(folder: Path, spec: EnvSpec, pieces: list[Piece]) -> None:
    writer = DatasetWriter(folder, spec, Provenance("somebody"))
    for piece in pieces:
        writer.extend(piece)
    writer.save()


BOXES = {
    "discrete": {"num_actions": 3, "first_action": 2},
    "halves": {"num_actions": 2, "action_low": (-0.3, 0.0), "action_high": (0.7, 1.0), "action_box": (2,)},
    "matrix": {
        "num_actions": 2,
        "action_low": (-9.1, 1.0),
        "action_high": (0.7, 1e3),
        "action_box": (1, 2),
        "action_type": "float64",
    },
}
FRAMES = {
    "states": {"frame_shape": (5,), "frame_dtype": "float32", "first_state": 3},
    "float32": {"frame_shape": (3,), "frame_dtype": "float32"},
    "float64": {"frame_shape": (3,), "frame_dtype": "float64"},
    "image": {"frame_shape": (4, 3, 1), "frame_dtype": "uint8"},
    "floats": {"frame_shape": (4, 3, 2), "frame_dtype": "float32"},
    "booleans": {"frame_shape": (4, 4, 2), "frame_dtype": "bool"},
    "channels first": {"frame_shape": (8, 6, 3), "frame_dtype": "uint8", "channels_first": True},
    "large": {"frame_shape": (40, 40, 3), "frame_dtype": "uint8"},  # Minari would store it as JPEG
}


@st.composite
def recordings(draw) -> tuple[EnvSpec, list[Piece]]:
    """Draw a specification and pieces of its episodes: with context, without steps, terminated and truncated."""
    frames, box = draw(st.sampled_from([*FRAMES])), draw(st.sampled_from([*BOXES]))
    stack = draw(st.integers(1, 3))
    spec = EnvSpec("Elsewhere-v0", "toy", frame_stack=stack, **{**FRAMES[frames], **BOXES[box]})
    rng, pieces = np.random.default_rng(draw(st.integers(0, 99))), []
    ends = st.sampled_from([TERMINATED, TRUNCATED])
    for steps, end, context in draw(st.lists(st.tuples(st.integers(0, 5), ends, st.integers(0, 2)), min_size=1)):
        rows = steps + 1 + context
        if spec.first_state is not None:
            images = np.eye(5, dtype=np.float32)[rng.integers(5, size=rows)]
        elif spec.frame_dtype.startswith("float"):
            images = rng.normal(size=(rows, *spec.frame_shape)).astype(spec.frame_dtype)
        else:
            high = 2 if spec.frame_dtype == "bool" else 256
            images = rng.integers(high, size=(rows, *spec.frame_shape)).astype(spec.frame_dtype)
        drawn = np.stack([spec.random_action(rng) for _ in range(rows)])
        drawn = np.where(rng.random(drawn.shape) < 0.3, np.sign(drawn), drawn) if spec.is_continuous else drawn
        roles = np.array([CONTEXT] * context + [INSIDE] * steps + [end], np.uint8)
        starts = roles == INSIDE
        rewards = np.where(starts, rng.normal(size=rows), 0)
        pieces.append(Piece(images, drawn * starts.reshape(-1, *[1] * (drawn.ndim - 1)), rewards, roles))
    pieces.append(Piece(*(column[-2:] for column in _one_step(spec))))
    return spec, pieces


def _one_step(spec: EnvSpec) -> Piece:
    """Return a step, so that a dataset has at least one."""
    frames = np.zeros((2, *spec.frame_shape), spec.frame_dtype)
    frames[:, ..., 0] = 1
    return Piece(frames, np.zeros((2, *spec.action_shape)), np.zeros(2), np.array([INSIDE, TERMINATED], np.uint8))


@settings(max_examples=60, deadline=None)
@given(recording=recordings())
def test_minari_keeps_every_bit_of_a_dataset(recording):
    """The same specification, and the same transitions with their stacks, bit by bit."""
    spec, pieces = recording
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "ours", spec, pieces)
        assert export_to_minari(folder / "ours", folder / "theirs-v0")
        source, again = find_source(folder / "theirs-v0", None, 1, 1)
        assert (again, source.policy) == (spec, "somebody")
        convert(source, again, folder / "again")
        assert_identical(transitions(folder / "again"), transitions(folder / "ours"))


@pytest.mark.parametrize("kind", ["discrete", "vector", "bytes", "image", "colours", "channels first", "booleans"])
def test_isqn_gives_minari_its_observations_back(kind, tmp_path, home):
    """Minari -> isqn -> Minari: spaces, observations, actions, rewards, ends and the environment are the same.

    A dataset holds vectors in float32, so float64 is rounded once.
    """
    folder = record(gym.make("Toy-v0", observations=kind, size=3), "toys/random-v0")
    convert(*find_source(folder, None, 1, 1), tmp_path / "ours")
    assert export_to_minari(tmp_path / "ours", home / "toys" / "again-v0")
    first, second = minari.load_dataset("toys/random-v0"), minari.load_dataset("toys/again-v0")
    assert (second.observation_space, second.action_space) == (first.observation_space, first.action_space)
    for one, other in zip(first, second, strict=True):
        for name in ("observations", "actions", "rewards", "terminations", "truncations"):
            expected = getattr(one, name)
            if name == "observations" and expected.dtype == np.float64:
                expected = expected.astype(np.float32).astype(np.float64)
            assert_identical([getattr(other, name)], [expected])
    with second.recover_environment() as env:
        assert (env.unwrapped.size, env.observation_space) == (3, first.observation_space)


def test_minari_loads_lists_and_recovers_what_is_written(tmp_path, home):
    convert(*find_source(record(lake(is_slippery=False), "lake/dry-v0"), None, 1, 1), tmp_path / "ours")
    words = ["data", "convert", str(tmp_path / "ours"), "--to", "minari", "-o", "minari:lakes/of-ice/ours-v1"]
    assert main([*words, "--quiet"]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as of a misconfigured dataset
        listed = minari.list_local_datasets()
        dataset = minari.load_dataset("lakes/of-ice/ours-v1")
    assert [*listed] == ["lake/dry-v0", "lakes/of-ice/ours-v1"]
    assert {"minari_version", "env_spec", "total_episodes", "total_steps", "dataset_size", "algorithm_name"} <= set(
        listed["lakes/of-ice/ours-v1"]
    )
    assert minari.namespace.list_local_namespaces() == ["lake", "lakes", "lakes/of-ice"]
    with dataset.recover_environment() as env:
        assert env.spec.kwargs["is_slippery"] is False
    original = minari.load_dataset("lake/dry-v0")
    assert (dataset.total_steps, dataset.total_episodes) == (original.total_steps, original.total_episodes)
    assert [len(episode) for episode in dataset.iterate_episodes()] == [len(episode) for episode in original]
    for words in (["list", "local"], ["show", "lakes/of-ice/ours-v1"]):
        result = CliRunner().invoke(app, words)
        assert (result.exit_code, "ours-v1" in result.output) == (0, True), result.output
    combined = minari.combine_datasets([original, dataset], "lake/both-v0")
    pieces, spec = read_pieces(Path(combined.spec.data_path).parent)
    assert (len(pieces), spec.env_kwargs) == (4, '{"is_slippery": false}')


def test_an_environment_that_gymnasium_cannot_make_elsewhere_is_left_out(tmp_path):
    """Minari then says so itself, and isqn still knows the environment."""
    env = make_environment("MinAtar/Breakout")
    writer = DatasetWriter(tmp_path / "ours", env.spec, Provenance("nobody"))
    writer.add_first(env.reset(0))
    writer.add(1, 0.0, True, False, env.step(1).frame)
    writer.save()
    export_to_minari(tmp_path / "ours", tmp_path / "theirs-v0")
    dataset = minari.MinariDataset(tmp_path / "theirs-v0" / "data")
    assert dataset.observation_space == env.env.observation_space
    with pytest.raises(ValueError, match="cannot be recovered"):
        dataset.recover_environment()
    assert read_pieces(tmp_path / "theirs-v0")[1] == env.spec


NAMES = st.lists(st.text(alphabet="ab-_v0. /ä:", min_size=1, max_size=8), min_size=1, max_size=3).map("/".join)


@settings(max_examples=300, deadline=None)
@given(name=NAMES, is_at_home=st.booleans())
def test_malformed_ids_are_never_written(name, is_at_home):
    """In Minari's folder the id is the path, so a bad path is refused; elsewhere the name of the folder is mended."""
    home = module.root()
    folder = (home if is_at_home else home.parent / "elsewhere") / name.lstrip("/")
    with suppress(UserError) if is_at_home else nullcontext():
        parse_dataset_id(module.dataset_id(folder))


@pytest.mark.parametrize("name", ["bad", "a b-v0", "x/short-namespace-v0", "data/x-v0", "../out-v0/..", "."])
def test_a_refused_id_leaves_no_file(name, tmp_path, home, capsys):
    convert(*find_source(record(lake(), "lake/wet-v0"), None, 1, 1), tmp_path / "ours")
    before = sorted(home.rglob("*"))
    assert main(["data", "convert", str(tmp_path / "ours"), "--to", "minari", "-o", f"minari:{name}"]) == 1
    assert sorted(home.rglob("*")) == before
    assert "isqn: --out" in capsys.readouterr().err


def test_a_dataset_inside_another_one_is_refused(tmp_path, home):
    convert(*find_source(record(lake(), "lake/wet-v0"), None, 1, 1), tmp_path / "ours")
    with pytest.raises(UserError, match="lies in the dataset"):
        export_to_minari(tmp_path / "ours", home / "lake" / "wet-v0" / "inner-v0")


# -- local datasets by their ids


def test_local_datasets_are_converted_by_their_ids(tmp_path, home, capsys):
    record(lake(), "lake/wet-v0")
    assert main(["data", "convert", "minari:lake/wet-v0", "-o", str(tmp_path / "out"), "--quiet"]) == 0
    assert read_index(tmp_path / "out")["source"] == "minari"
    shutil.copytree(home / "lake" / "wet-v0", tmp_path / "outside-v0")
    for name in ("lake/dry-v0", "lake", "", "../outside-v0", str(tmp_path / "outside-v0")):
        assert main(["data", "convert", f"minari:{name}", "-o", str(tmp_path / "other")]) == 1
        said = capsys.readouterr().err
        assert f"isqn: minari:{name} is not a local dataset of Minari: in {home}, there are lake/wet-v0." in said
    assert main(["data", "convert", "minari:lake/wet-v0", "-o", "minari:lake/new-v0"]) == 1
    assert "--out minari:lake/new-v0 is for --to minari; give --out a folder." in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_flags_of_an_environment_are_for_minari(tmp_path):
    convert(*find_source(record(lake(), "lake/wet-v0"), None, 1, 1), tmp_path / "ours")
    with pytest.raises(UserError, match="--env-kwargs is for Minari datasets"):
        find_source(tmp_path / "ours", None, 1, 1, env_kwargs="{}")


# -- Atari, and exports of earlier versions


def atari(**changes: Any) -> gym.Env:
    kwargs = {"frameskip": 1, "repeat_action_probability": 0.25, "max_num_frames_per_episode": 108_000} | changes
    return gym.make("ALE/Pong-v5", **kwargs)


def record_atari(env: gym.Env) -> Path:
    return record(gym.wrappers.TimeLimit(env, 3), "atari/pong-v0", episodes=1)


def preprocessed(**changes: Any) -> gym.Env:
    return gym.wrappers.AtariPreprocessing(atari(**changes), noop_max=0, grayscale_newaxis=True)


def test_atari_under_a_protocol_is_recognised(tmp_path, home):
    import ale_py  # noqa: F401 - registers the games

    folder = record_atari(preprocessed())
    change_env_spec(folder, max_episode_steps=None)
    pieces, spec = read_pieces(folder)
    assert (spec.id, spec.protocol, spec.frame_stack) == ("ALE/Pong-v5", "machado2018-v1", 4)
    assert [piece.frames.shape for piece in pieces] == [(4, 84, 84, 1)]
    convert(*find_source(folder, None, 1, 1), tmp_path / "ours")
    export_to_minari(tmp_path / "ours", home / "atari" / "again-v0")
    change_metadata(home / "atari" / "again-v0", isqn_spec=None)  # what Gymnasium's specification says is enough
    assert read_pieces(home / "atari" / "again-v0")[1] == spec
    with minari.load_dataset("atari/again-v0").recover_environment() as env:
        assert env.observation_space == minari.load_dataset("atari/again-v0").observation_space


def test_atari_under_no_protocol_is_refused():
    import ale_py  # noqa: F401 - registers the games

    folder = record_atari(preprocessed(repeat_action_probability=0.1))
    with pytest.raises(UserError, match=r"which is no protocol of isqn\. If it was recorded under the"):
        find_source(folder, None, 1, 1)
    assert read_pieces(folder, env_id="ALE/Pong-v5")[1].protocol == "machado2018-v1"
    shutil.rmtree(folder)
    folder = record_atari(atari())
    for env_id in (None, "ALE/Pong-v5"):
        with pytest.raises(UserError, match=r"whole screens, Box\(0, 255, \(210, 160, 3\), uint8\)\. A frame"):
            find_source(folder, env_id, 1, 1)


def test_exports_of_earlier_versions_are_read(tmp_path):
    """They held frames instead of observations, the id of the environment alone, and no version of Minari."""
    convert(*find_source(record(lake(), "lake/wet-v0"), None, 1, 1), tmp_path / "ours")
    export_to_minari(tmp_path / "ours", tmp_path / "old")
    ones = np.eye(16, dtype=np.float32)
    with h5py.File(tmp_path / "old" / "data" / "main_data.hdf5", "a") as file:
        for episode in file.values():
            states = episode["observations"][()]
            del episode["observations"]
            episode["observations"] = ones[states]
    space = json.dumps({"type": "Box", "dtype": "float32", "shape": [16], "low": [-1e9] * 16, "high": [1e9] * 16})
    removed = dict.fromkeys(("isqn_spec", "env_spec", "minari_version"))
    change_metadata(tmp_path / "old", isqn_env_id="FrozenLake-v1", observation_space=space, **removed)
    convert(*find_source(tmp_path / "old", None, 1, 1), tmp_path / "again")
    assert_identical(transitions(tmp_path / "again"), transitions(tmp_path / "ours"))

"""Steps in named arrays (HDF5, .npz): their episodes are recovered, and wrong values are refused by file and row."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from isqn.cli import main
from isqn.data import arrays
from isqn.data.convert import convert
from isqn.data.dataset import Dataset
from isqn.data.sample import CONTEXT, INSIDE, TERMINATED, TRUNCATED
from isqn.train.source import find_source
from isqn.types import EnvSpec, UserError

DATA = Path(__file__).parent / "data"
VECTOR = EnvSpec("Vector", "test", (2,), "float32", 3, first_action=1)
IMAGE = EnvSpec("Image", "test", (2, 2, 1), "uint8", 3, frame_stack=3)
CONTINUOUS = EnvSpec("Box", "test", (2,), "float32", 2, action_low=(-2.0, 0.0), action_high=(2.0, 1.0), action_box=(2,))
STATES = EnvSpec("States", "test", (5,), "float32", 2, first_state=3)

TO_FRAME = {
    "Vector": lambda obs: np.array(obs, np.float32),
    "Box": lambda obs: np.array(obs, np.float32),
    "Image": lambda obs: np.array(obs, np.uint8)[..., None],
    "States": lambda obs: np.eye(5, dtype=np.float32)[int(obs) - 3],
}


def steps(count: int, terminals: tuple[int, ...] = (), timeouts: tuple[int, ...] | None = None, **more: Any) -> dict:
    """Return arrays of so many steps; observation t is (t, -t), its action t modulo 3 and its reward t."""
    rows = np.arange(count)
    columns = {
        "observations": np.stack([rows, -rows], 1).astype(np.float32),
        "actions": rows % 3 + 1,
        "rewards": rows.astype(np.float32),
        "terminals": np.isin(rows, terminals),
    }
    if timeouts is not None:
        columns["timeouts"] = np.isin(rows, timeouts)
    return {name: value for name, value in (columns | more).items() if value is not None}


def write(path: Path, columns: dict[str, Any]) -> Path:
    if path.suffix == ".npz":
        np.savez_compressed(path, **columns)
    else:
        with h5py.File(path, "w") as file:
            for name, values in columns.items():
                file.create_dataset(name, data=values, compression="gzip" if len(values) else None)
            file.create_dataset("infos/qpos", data=np.zeros(3))
            file.create_dataset("metadata/algorithm", data=b"SAC")
    return path


def read(path: Path, spec: EnvSpec = VECTOR) -> list:
    source = arrays.arrays(path, arrays.arrays_format(path), spec, TO_FRAME[spec.id])
    return [piece for part in source.parts for piece in part.pieces()]


def greys(pieces: list) -> list[list[int]]:
    return [piece.frames.reshape(len(piece.frames), -1)[:, 0].astype(int).tolist() for piece in pieces]


@pytest.fixture(params=["steps.npz", "steps.hdf5"])
def path(request, tmp_path):
    return tmp_path / request.param


# -- episodes


def test_episodes_end_at_terminals_and_timeouts(path):
    """A terminal step keeps its reward; the next observation after a timeout and the end of the file is unknown."""
    pieces = read(write(path, steps(9, terminals=(2,), timeouts=(5,))))
    assert greys(pieces) == [[0, 1, 2, 2], [3, 4, 5], [6, 7, 8]]
    assert [piece.ends.tolist() for piece in pieces] == [
        [INSIDE, INSIDE, INSIDE, TERMINATED],
        [INSIDE, INSIDE, TRUNCATED],
        [INSIDE, INSIDE, TRUNCATED],
    ]
    assert [piece.rewards.tolist() for piece in pieces] == [[0, 1, 2, 0], [3, 4, 0], [6, 7, 0]]
    assert [piece.actions.tolist() for piece in pieces] == [[0, 1, 2, 0], [0, 1, 0], [0, 1, 0]]


def test_the_order_of_arrays_in_memory_does_not_matter(path):
    """pandas and transposed arrays give columns in Fortran's order, and numpy writes that to the file."""
    columns = steps(9, terminals=(2,), timeouts=(5,))
    columns["observations"] = np.asfortranarray(columns["observations"])
    assert greys(read(write(path, columns))) == [[0, 1, 2, 2], [3, 4, 5], [6, 7, 8]]


def test_without_timeouts_only_the_end_of_the_file_is_unknown(path):
    pieces = read(write(path, steps(6, terminals=(2,))))
    assert greys(pieces) == [[0, 1, 2, 2], [3, 4, 5]]


def test_a_step_that_terminates_and_is_cut_terminates(path):
    pieces = read(write(path, steps(3, terminals=(2,), timeouts=(2,))))
    assert [piece.ends[-1] for piece in pieces] == [TERMINATED]


def test_next_observations_keep_every_step(path):
    """With them no step is left out, and a row that does not lead to the next one ends its episode."""
    columns = steps(6, terminals=(1,), timeouts=(3,))
    following = columns["observations"] + np.float32([[1, -1]])
    following[4] += 50  # no flag says that row 5 belongs to another episode
    pieces = read(write(path, columns | {"next_observations": following}))
    assert greys(pieces) == [[0, 1, 2], [2, 3, 4], [4, 55], [5, 6]]
    assert [piece.ends[-1] for piece in pieces] == [TERMINATED, TRUNCATED, TRUNCATED, TRUNCATED]
    assert sum(piece.num_transitions for piece in pieces) == 6


@pytest.mark.parametrize("has_next", [False, True])
def test_parts_and_chunks_do_not_change_transitions(has_next, path, tmp_path, monkeypatch):
    """Transitions with stacks of 3 frames are the same however many rows are read at a time."""
    rows = np.arange(40, dtype=np.uint8)
    images = rows[:, None, None] * np.ones((1, 2, 2), np.uint8)
    columns = steps(40, (9, 30), (17,), observations=images, actions=rows % 3, next_observations=None)
    if has_next:
        columns["next_observations"] = images + np.uint8(1)
        columns["next_observations"][22] += 100
    write(path, columns)
    batches = []
    for part_bytes, chunk in ((2**20, 4_096), (4 * 7, 5), (4 * 3, 1)):
        monkeypatch.setattr(arrays, "PART_BYTES", part_bytes)
        monkeypatch.setattr(arrays, "READ_ROWS", chunk)
        source = arrays.arrays(path, arrays.arrays_format(path), IMAGE, TO_FRAME["Image"])
        convert(source, IMAGE, tmp_path / f"{part_bytes}")
        dataset = Dataset.open(tmp_path / f"{part_bytes}")
        batches.append(dataset.rows.gather(dataset.rows.valid_starts()))
    assert len(batches[0].action) == (40 if has_next else 38)
    for other in batches[1:]:
        for mine, theirs in zip(other[:5], batches[0][:5], strict=True):
            np.testing.assert_array_equal(mine, theirs)


# -- actions and observations


@pytest.mark.parametrize("form", ["integers", "column", "floats", "one-hot", "small integers"])
def test_forms_of_discrete_actions(form, path):
    """Integers count as the environment does, here from 1; one-hot columns are in its order."""
    numbers = np.array([3, 1, 2, 3])
    actions = {
        "integers": numbers,
        "column": numbers[:, None],
        "floats": numbers.astype(np.float64),
        "one-hot": np.eye(3, dtype=np.float32)[numbers - 1],
        "small integers": numbers.astype(np.uint8),
    }[form]
    (piece,) = read(write(path, steps(4, terminals=(3,), actions=actions)))
    assert piece.actions.tolist() == [2, 0, 1, 2, 0]


def test_continuous_actions_are_scaled(path):
    actions = np.array([[-2, 0], [0, 0.5], [2, 1]], np.float32)
    (piece,) = read(write(path, steps(3, terminals=(2,), actions=actions)), CONTINUOUS)
    assert piece.actions.tolist() == [[-1, -1], [0, 0], [1, 1], [0, 0]]


def test_states_are_one_hot(path):
    (piece,) = read(
        write(path, steps(3, terminals=(2,), observations=np.array([[3], [7], [4]]), actions=[0, 1, 0])), STATES
    )
    assert piece.frames.argmax(1).tolist() == [0, 4, 1, 1]


def test_columns_may_have_an_axis_of_length_1(path):
    columns = steps(6, terminals=(2,), timeouts=(4,))
    for name in ("rewards", "terminals", "timeouts"):
        columns[name] = columns[name].astype(np.float32)[:, None]
    assert greys(read(write(path, columns))) == [[0, 1, 2, 2], [3, 4]]


BAD = steps(6)["observations"].copy()
BAD[4, 1] = np.nan


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (steps(6, rewards=None), "has no array rewards; it needs observations, actions, rewards, terminals, and may"),
        (steps(6, rewards=np.zeros(5)), "rewards has the shape (5,), and observations 6 rows."),
        (steps(6, rewards=np.zeros((6, 2))), "rewards has the shape (6, 2); it must be (6,) or (6, 1)."),
        (steps(6, observations=np.zeros((6, 3))), "observations has the shape (3,); one of Vector has shape (2,)."),
        (steps(6, actions=np.zeros((6, 2))), "has the shape (2,); one of Vector has one number, or one-hot of 3."),
        (steps(6, actions=np.array([1, 2, 3, 1, 4, 1])), "actions, row 4: values are not in 1 to 3 (Vector)."),
        (steps(6, actions=np.array([1, 2, 0, 1, 1, 1])), "actions, row 2: values are not in 1 to 3 (Vector)."),
        (steps(6, actions=np.array([1, 2.5, 3, 1, 1, 1])), "actions, row 1: values are not whole numbers."),
        (steps(6, actions=np.ones((6, 3))), "actions, row 0: values are not one-hot."),
        (steps(6) | {"terminals": np.array([0, 0, 0, 2, 0, 0])}, "terminals, row 3: values are neither 0 nor 1."),
        (steps(6, rewards=np.array([0, 0, np.inf, 0, 0, 0])), "rewards, row 2: values are not finite numbers."),
        (steps(6, rewards=np.array([0, 0, 0, 1e39, 0, 0])), "rewards, row 3: values are not finite numbers."),
        (steps(6, observations=BAD), "observations, row 4: values are not finite numbers."),
        (steps(6, next_observations=BAD), "next_observations, row 4: values are not finite numbers."),
        (steps(6, rewards=np.array([b"a"] * 6)), "rewards holds |S1; arrays hold numbers."),
        (steps(0), "has no rows."),
    ],
)  # fmt: skip
def test_wrong_arrays_are_refused_by_file_and_row(columns, sentence, path):
    with pytest.raises(UserError) as refused:
        read(write(path, columns))
    assert str(refused.value).startswith(f"{path}")
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("spec", "columns", "sentence"),
    [
        (CONTINUOUS, {"actions": np.float32([[0, 0], [0, 1.1], [0, 0]])}, "actions, row 1: values lie outside of the"),
        (CONTINUOUS, {"actions": np.array([1, 2, 3])}, "an action has the shape (); one of Box has shape (2,)."),
        (STATES, {"observations": np.array([3, 8, 3])}, "observations, row 1: values are not whole numbers in 3 to 7"),
        (STATES, {"observations": np.array([3, 4, 2])}, "observations, row 2: values are not whole numbers in 3 to 7"),
        (STATES, {"observations": np.zeros((3, 2))}, "a row of observations has the shape (2,); one of States has one"),
        (IMAGE, {"observations": np.zeros((3, 2, 2))}, "observations holds float64; observations of Image are uint8."),
        (IMAGE, {"observations": np.zeros((3, 4), np.uint8)}, "a row of observations has the shape (4, 1); Image has"),
    ],
)
def test_values_outside_of_the_spaces_are_refused(spec, columns, sentence, path):
    actions = np.zeros((3, 2)) if spec.is_continuous else np.zeros(3, int)
    with pytest.raises(UserError) as refused:
        read(write(path, steps(3, **({"actions": actions} | columns))), spec)
    assert sentence in str(refused.value)


def test_context_is_not_a_start(path, monkeypatch):
    monkeypatch.setattr(arrays, "PART_BYTES", 4 * 3)
    rows = np.arange(7, dtype=np.uint8)[:, None, None] * np.ones((1, 2, 2), np.uint8)
    pieces = read(write(path, steps(7, (6,), observations=rows, actions=np.zeros(7, int))), IMAGE)
    assert greys(pieces) == [[0, 1, 2, 3], [1, 2, 3, 4, 5, 6], [4, 5, 6, 6]]
    assert pieces[1].ends.tolist() == [CONTEXT, CONTEXT, INSIDE, INSIDE, INSIDE, TRUNCATED]


# -- Stable-Baselines3, and the command


@pytest.mark.parametrize(
    ("name", "env_id", "lengths"),
    [("cartpole", "CartPole-v1", None), ("pendulum", "Pendulum-v1", [20, 20, 20, 10])],
)
def test_replay_buffers_of_stable_baselines3(name, env_id, lengths, tmp_path, capsys):
    """Every step of the buffer is a transition; Pendulum was cut after 20 steps."""
    path = DATA / "sb3" / f"{name}.npz"
    assert main(["data", "convert", str(path), "-o", str(tmp_path / "out"), "--env-id", env_id]) == 0
    dataset = Dataset.open(tmp_path / "out")
    batch = dataset.rows.gather(dataset.rows.valid_starts())
    with np.load(path) as file:
        np.testing.assert_array_equal(batch.obs, file["observations"])
        np.testing.assert_array_equal(batch.next_obs, file["next_observations"])
        np.testing.assert_array_equal(batch.reward, file["rewards"])
        np.testing.assert_array_equal(batch.discount == 0, file["terminals"] == 1)
        taken = dataset.spec.to_env_action(batch.action).reshape(len(batch.action), -1)
        np.testing.assert_allclose(taken, file["actions"], atol=1e-6)
    first, last = dataset.episodes()
    assert lengths is None or (last - first).tolist() == lengths


class Hostile:
    def __reduce__(self):
        return (Path.touch, (Path("witness"),))


def test_pickles_are_refused_and_never_read(tmp_path, monkeypatch):
    """By their first byte, by their name, and inside an archive or an HDF5 file."""
    monkeypatch.chdir(tmp_path)
    Path("buffer.data").write_bytes(pickle.dumps(Hostile()))
    Path("buffer.pkl").write_bytes(pickle.dumps(Hostile(), protocol=0))
    for name in ("buffer.data", "buffer.pkl"):
        with pytest.raises(UserError, match="is a pickle, and reading a pickle runs the code in it; save its arrays"):
            find_source(Path(name), "CartPole-v1", 1, 1)
    np.savez("objects.npz", **steps(3) | {"rewards": np.array([Hostile()] * 3, object)})
    with pytest.raises(UserError, match=r"objects.npz: rewards is damaged .* Python objects, which only a pickle"):
        find_source(Path("objects.npz"), "CartPole-v1", 1, 1)
    assert not Path("witness").exists()


def test_unknown_files_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(UserError, match=r"is not a dataset of a known format; .* or a file: HDF5 or \.npz"):
        find_source(tmp_path / "notes.txt", "CartPole-v1", 1, 1)
    write(tmp_path / "a.npz", steps(3))
    with pytest.raises(UserError, match="is not recorded; give it by --env-id"):
        find_source(tmp_path / "a.npz", None, 1, 1)
    (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:50])
    with pytest.raises(UserError, match=r"a.npz is damaged: it is not a zip archive of arrays"):
        find_source(tmp_path / "a.npz", "CartPole-v1", 1, 1)


# -- claims and links


def header(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    """Return the header of an array that claims a shape."""
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def test_members_that_claim_terabytes_are_refused(tmp_path):
    write(tmp_path / "a.npz", steps(3, observations=None))
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("observations.npy", header((2**35, 2)))
    with pytest.raises(UserError, match=r"a.npz: observations claims 274,877,906,944 bytes, of which .* are stored"):
        read(tmp_path / "a.npz")


def test_datasets_that_claim_terabytes_are_refused(tmp_path):
    """Rows that HDF5 never stored would be read as zeros."""
    write(tmp_path / "a.hdf5", steps(3, observations=None))
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        file.create_dataset("observations", (2**38, 2), "f4", chunks=(1024, 2))
    with pytest.raises(UserError, match=r"a.hdf5: observations claims 2,199,023,255,552 bytes, of which 0 are stored"):
        read(tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        del file["observations"]
        file.create_dataset("observations", (3, 2), "f4", chunks=(2**28, 2), maxshape=(None, 2))
    with pytest.raises(UserError, match=r"observations is stored in chunks of \(268435456, 2\); at most 256 MiB"):
        read(tmp_path / "a.hdf5")


def test_links_to_other_files_are_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(bytes(64))
    write(tmp_path / "other.hdf5", steps(3))
    layout = h5py.VirtualLayout((3,), "f4")
    layout[:] = h5py.VirtualSource(tmp_path / "other.hdf5", "rewards", (3,))
    for number, add in enumerate(
        (
            lambda file: file.__setitem__("rewards", h5py.ExternalLink(tmp_path / "other.hdf5", "rewards")),
            lambda file: file.create_dataset("rewards", (3,), "f4", external=[(tmp_path / "secret", 0, 12)]),
            lambda file: file.create_virtual_dataset("rewards", layout),
            lambda file: file.__setitem__("rewards", h5py.SoftLink("/terminals")),
        )
    ):
        path = write(tmp_path / f"{number}.hdf5", steps(3, rewards=None))
        with h5py.File(path, "a") as file:
            add(file)
        with pytest.raises(UserError, match="rewards is not an array in this file; links to other files are not"):
            read(path)

"""Datasets: they return the same transitions as a replay buffer, and damaged files are refused."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import DISCOUNT, FRAMES, make_spec, play_episodes
from isqn.data import dataset as module
from isqn.data.convert import check_subset, convert, first_transitions, select_subset
from isqn.data.dataset import Dataset, DatasetWriter, Piece, Provenance, damaged_files
from isqn.data.frames import Layout, RawFrames, StoredFrames
from isqn.data.index import INDEX, read_index
from isqn.data.inspect import summarise
from isqn.data.replay import Replay
from isqn.data.sample import CONTEXT, INSIDE, TERMINATED, TRUNCATED
from isqn.data.sources import Part, Source, own_dataset
from isqn.types import UserError

EPISODES = st.lists(
    st.tuples(st.integers(1, 30), st.sampled_from(["terminated", "truncated"])), min_size=1, max_size=12
)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(module, "SHARD_ROWS", 32)


def play(*args) -> None:
    for _ in play_episodes(*args):
        pass


def write_dataset(folder: Path, spec, episodes, seed=0, **about) -> DatasetWriter:
    writer = DatasetWriter(folder, spec, Provenance("somebody", **about))
    play(spec, episodes, seed, writer)
    writer.save()
    return writer


@settings(max_examples=40, deadline=None)
@given(
    frame=st.sampled_from(FRAMES),
    stack=st.integers(1, 4),
    n=st.integers(1, 3),
    clip=st.sampled_from([None, 0.5]),
    episodes=EPISODES,
    seed=st.integers(0, 99),
)
def test_dataset_returns_the_same_transitions_as_a_replay(frame, stack, n, clip, episodes, seed):
    spec = make_spec(*frame, stack=stack)
    replay = Replay(spec, 1_000, compress=False, num_steps_return=n, discount=DISCOUNT, reward_clip=clip)
    with tempfile.TemporaryDirectory() as folder:
        writer = DatasetWriter(Path(folder), spec, Provenance("somebody"))
        play(spec, episodes, seed, replay, writer)
        writer.save()
        dataset = Dataset.open(Path(folder), num_steps_return=n, discount=DISCOUNT, reward_clip=clip)
        starts = dataset.rows.valid_starts()
        np.testing.assert_array_equal(starts, replay.valid_starts())
        for mine, theirs in zip(dataset.rows.gather(starts), replay.gather(starts), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert dataset.num_transitions == sum(length for length, _ in episodes)
        assert len([*dataset.pieces()]) == len(episodes)


@pytest.mark.parametrize("frame", [((4, 4, 1), "uint8"), ((3,), "float32")])
@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 50, 64])
def test_a_restored_writer_writes_the_same_files(frame, rows, tmp_path):
    """Restore at different rows: inside a block, at the end of a shard, between a frame and its action."""
    spec, steps = make_spec(*frame), [(20, "terminated")] * 5
    whole = write_dataset(tmp_path / "whole", spec, steps).save()

    class Stopped(DatasetWriter):
        """Writer that is saved after `rows` rows, then replaced by a restored one."""

        def _append(self, *row):
            super()._append(*row)
            if self.total == rows:
                described = json.loads(json.dumps(self.save()))
                self.__init__(self.folder, self.spec, self.about)
                self.restore(described)

    stopped = Stopped(tmp_path / "stopped", spec, Provenance("somebody"))
    play(spec, steps, 0, stopped)
    assert stopped.save(tidy=True) == whole
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("whole", "stopped")]
    assert names[0] == names[1]


@pytest.mark.parametrize("frame", FRAMES)
def test_batches_are_the_same_from_memory_and_from_disk(frame, tmp_path, monkeypatch):
    spec = make_spec(*frame, stack=3)
    write_dataset(tmp_path, spec, [(40, "terminated"), (9, "truncated"), (30, "terminated")])
    size = 82 * Layout.of(spec, 1).frame_bytes  # an episode of L steps has L + 1 rows
    assert module.in_memory_bytes(spec, 82) == size
    drawn = []
    for most, kind in ((size, RawFrames), (size - 1, StoredFrames)):
        monkeypatch.setattr(module, "UNPACKED_BYTES", most)
        dataset = Dataset.open(tmp_path)
        drawn.append([dataset.sample(20, np.random.default_rng(seed)) for seed in range(3)])
        assert isinstance(dataset.rows.frames, kind)
    for one, other in zip(*drawn, strict=True):
        for mine, theirs in zip(one[:5], other[:5], strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_an_unfinished_last_episode_counts_as_truncated(tmp_path):
    spec = make_spec()
    writer = DatasetWriter(tmp_path, spec, Provenance("somebody"))
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (4, *spec.frame_shape)).astype(np.uint8)
    writer.add_first(frames[0])
    for frame in frames[1:]:
        writer.add(1, 2.0, False, False, frame)
    writer.save()
    dataset = Dataset.open(tmp_path)
    assert dataset.rows.valid_starts().tolist() == [0, 1, 2]
    assert dataset.rows.gather(np.array([2])).discount == np.float32(0.99)


def test_context_rows_appear_in_stacks_but_start_no_transition(tmp_path):
    """A transition with both of its frame stacks has five frames, and only one of them starts a step."""
    spec = make_spec((2, 2, 1), stack=4)
    frames = np.arange(1, 11, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 1), np.uint8)
    ends = np.array([CONTEXT] * 3 + [INSIDE, TERMINATED], np.uint8)
    writer = DatasetWriter(tmp_path, spec, Provenance("somebody"))
    for half in (frames[:5], frames[5:]):
        writer.extend(Piece(half, np.array([0, 0, 0, 3, 0]), np.array([0, 0, 0, 7.0, 0]), ends))
    writer.save()
    dataset = Dataset.open(tmp_path)
    assert dataset.rows.valid_starts().tolist() == [3, 8]
    batch = dataset.rows.gather(np.array([3, 8]))
    assert batch.obs[:, 0, 0].tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert batch.next_obs[:, 0, 0].tolist() == [[2, 3, 4, 5], [7, 8, 9, 10]]
    assert (batch.action.tolist(), batch.reward.tolist(), batch.discount.tolist()) == ([3, 3], [7, 7], [0, 0])


def test_large_frames_make_small_shards(monkeypatch, tmp_path):
    """Shards hold whole blocks, at least one, and the index records their number of rows."""
    monkeypatch.setattr(module, "SHARD_BYTES", 300)
    spec = make_spec((4, 4, 1))
    assert module.shard_rows(spec) == 16  # 18 frames of 16 bytes would fit
    assert module.shard_rows(make_spec((40, 40, 1))) == 8
    write_dataset(tmp_path, spec, [(20, "terminated")])
    assert [file["rows"] for file in read_index(tmp_path)["files"]] == [16, 5]
    monkeypatch.undo()
    assert Dataset.open(tmp_path).frames(0, 21).shape == (21, 4, 4, 1)


# -- damage


@pytest.fixture
def folder(tmp_path) -> Path:
    write_dataset(tmp_path / "data", make_spec(), [(40, "terminated")] * 3)
    return tmp_path / "data"


def test_reading_a_damaged_block_names_it(folder):
    shard = sorted(folder.glob("rows-*"))[1]
    content = bytearray(shard.read_bytes())
    place = content.index(b"\x28\xb5\x2f\xfd") + 12  # inside the first zstd block
    content[place] ^= 255
    shard.write_bytes(content)
    dataset = Dataset.open(folder)  # its columns are intact
    with pytest.raises(UserError, match=rf"{shard.name} is damaged: block 0, at byte 0 of its frames"):
        dataset.frames(32, 40)
    assert [*damaged_files(folder)] == [f"{shard} is not what was written: its checksum differs."]


def damage_a_reward(path: Path) -> None:
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    content[8 + length + json.loads(content[8 : 8 + length])["rewards"]["data_offsets"][0]] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: path.unlink(), "is missing; copy or make the dataset again"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes and was written with"),
        (lambda path: damage_a_reward(path), "the checksum of its columns differs"),
        (lambda path: path.write_bytes(b"\xff" * path.stat().st_size), "cannot be read"),
    ],
)
def test_damaged_files_are_refused(damage, sentence, folder):
    damage(sorted(folder.glob("rows-*"))[0])
    with pytest.raises(UserError, match=sentence):
        Dataset.open(folder)


def test_uncompressed_frames_are_verified_on_opening(tmp_path):
    write_dataset(tmp_path, make_spec((3,), "float32"), [(20, "terminated")])
    (shard,) = tmp_path.glob("rows-*")
    content = bytearray(shard.read_bytes())
    length = int.from_bytes(content[:8], "little")
    content[8 + length + json.loads(content[8 : 8 + length])["frames"]["data_offsets"][0]] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match="the checksum of its columns differs"):
        Dataset.open(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"format": 1, "index_sha256": "0"}'])
def test_a_damaged_index_is_refused(content, folder):
    (folder / INDEX).write_text(content)
    with pytest.raises(UserError, match=r"index\.json is damaged"):
        Dataset.open(folder)


def test_errors_for_a_folder_without_an_index(tmp_path):
    with pytest.raises(UserError, match=r"is not a dataset: there is no index\.json in it; `isqn data collect`"):
        Dataset.open(tmp_path)
    with pytest.raises(UserError, match=r"nowhere is not a dataset: there is no such folder; `isqn data collect`"):
        Dataset.open(tmp_path / "nowhere")
    (tmp_path / "config.toml").touch()
    with pytest.raises(UserError, match=r"it is a run; `isqn data collect \S+ -o DIR` makes a dataset"):
        Dataset.open(tmp_path)
    write_dataset(tmp_path / "dataset", make_spec(), [(3, "terminated")])
    with pytest.raises(UserError, match=rf"it is a run; its dataset is {tmp_path / 'dataset'}\."):
        Dataset.open(tmp_path)


def test_output_must_be_a_folder_outside_other_datasets(folder, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match=r"letter\.txt is a file; give --out a folder\."):
        convert(own_dataset(folder, 1), make_spec(), tmp_path / "letter.txt")
    with pytest.raises(UserError, match=rf"lies in the dataset {folder}; give --out another folder\."):
        convert(own_dataset(folder, 1), make_spec(), folder / "deep" / "inside")


# -- subsets


def test_first_transitions_of_a_piece():
    ends = np.array([CONTEXT, INSIDE, INSIDE, INSIDE, TERMINATED], np.uint8)
    piece = Piece(np.arange(5), np.arange(10, 15), np.arange(20.0, 25.0), ends)
    assert first_transitions(piece, 3) is piece
    cut = first_transitions(piece, 2)
    assert cut.frames.tolist() == [0, 1, 2, 3]
    assert cut.ends.tolist() == [CONTEXT, INSIDE, INSIDE, TRUNCATED]
    assert cut.actions.tolist() == [10, 11, 12, 0]
    assert cut.num_transitions == 2


def test_subset_first_takes_the_start_of_each_part(tmp_path):
    """300 steps in 10 parts: a fraction of 0.1 is the first 3 steps of each part."""
    spec = make_spec()
    write_dataset(tmp_path / "all", spec, [(10, "terminated")] * 30)
    source = own_dataset(tmp_path / "all", 10)
    assert [part.size for part in source.parts] == [30] * 10
    convert(source, spec, tmp_path / "part", subset="first", fraction=0.1)
    part, whole = Dataset.open(tmp_path / "part"), Dataset.open(tmp_path / "all")
    assert part.num_transitions == 30
    mine, theirs = (d.rows.gather(d.rows.valid_starts()) for d in (part, whole))
    for column, of_all in zip(mine[:4], theirs[:4], strict=True):
        np.testing.assert_array_equal(column, of_all.reshape(10, 30, *of_all.shape[1:])[:, :3].reshape(column.shape))
    index = read_index(tmp_path / "part")
    assert (index["subset"], index["fraction"], index["num_checkpoints"]) == ("first", 0.1, 10)


@pytest.mark.parametrize("stack", [1, 3])
def test_parts_may_start_and_end_inside_an_episode(stack, tmp_path):
    """Together, the parts hold every step once, with its original frame stack."""
    spec = make_spec(stack=stack)
    write_dataset(tmp_path / "all", spec, [(50, "terminated"), (7, "truncated"), (30, "terminated")])
    source, whole = own_dataset(tmp_path / "all", 9), Dataset.open(tmp_path / "all")
    assert [sum(piece.num_transitions for piece in part.pieces()) for part in source.parts] == [
        part.size for part in source.parts
    ]
    writer = DatasetWriter(tmp_path / "again", spec, Provenance("somebody"))
    for part in source.parts:
        for piece in part.pieces():
            writer.extend(piece)
    writer.save()
    again = Dataset.open(tmp_path / "again")
    mine, theirs = (d.rows.gather(d.rows.valid_starts()) for d in (again, whole))
    for column, of_all in zip(mine[:5], theirs[:5], strict=True):
        np.testing.assert_array_equal(column, of_all)
    with pytest.raises(UserError, match=r"--checkpoints is 88; \S+ has 87 transitions, and each part needs one\."):
        own_dataset(tmp_path / "all", 88)


def test_random_episodes_are_whole_and_depend_on_the_seed():
    pieces = [Piece(*[np.full(2, i)] * 3, np.array([INSIDE, TERMINATED], np.uint8)) for i in range(2_000)]
    part = Part("all", 0, 2_000, lambda: iter(pieces))
    taken = [[int(p.frames[0]) for p in select_subset(part, "random-episodes", 0.1, seed)] for seed in (0, 0, 1)]
    assert taken[0] == taken[1] != taken[2]
    assert 150 < len(taken[0]) < 250


@pytest.mark.parametrize("stopped_in", [0, 1, 2])
def test_an_interrupted_conversion_resumes(stopped_in, tmp_path):
    """The result is bitwise equal, and finished parts are not read again."""
    spec = make_spec()
    write_dataset(tmp_path / "all", spec, [(10, "terminated")] * 12)
    source = own_dataset(tmp_path / "all", 3)
    convert(source, spec, tmp_path / "whole")
    read = []

    def part(number: int, fails: bool) -> Part:
        def pieces():
            read.append(number)
            for index, piece in enumerate(source.parts[number].pieces()):
                if fails and index == 2:
                    raise KeyboardInterrupt
                yield piece

        return source.parts[number]._replace(pieces=pieces)

    broken = source._replace(parts=[part(number, number == stopped_in) for number in range(3)])
    with pytest.raises(KeyboardInterrupt):
        convert(broken, spec, tmp_path / "part")
    read.clear()
    whole = source._replace(parts=[part(number, False) for number in range(3)])
    assert convert(whole, spec, tmp_path / "part")
    assert read == list(range(stopped_in, 3))
    assert read_index(tmp_path / "part") == read_index(tmp_path / "whole")
    read.clear()
    assert not convert(whole, spec, tmp_path / "part")  # already complete
    assert not read


def test_conversion_refuses_a_folder_with_other_content(tmp_path):
    spec = make_spec()
    write_dataset(tmp_path / "all", spec, [(10, "terminated")] * 4)
    writer = DatasetWriter(tmp_path / "part", spec, Provenance("somebody", "isqn", "first", 0.5))
    play(spec, [(3, "terminated")], 0, writer)
    writer.save(done=[], complete=False, identity="")
    with pytest.raises(UserError, match="holds another dataset"):
        convert(own_dataset(tmp_path / "all", 1), spec, tmp_path / "part", subset="first", fraction=0.25)
    write_dataset(tmp_path / "another", spec, [(10, "terminated")] * 4, seed=1)
    convert(own_dataset(tmp_path / "another", 1), spec, tmp_path / "whole")
    with pytest.raises(UserError, match="holds another dataset"):  # other files of the same format
        convert(own_dataset(tmp_path / "all", 1), spec, tmp_path / "whole")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="is not empty and not a dataset"):
        convert(own_dataset(tmp_path / "all", 1), spec, tmp_path / "other")


def test_conversion_resumes_after_a_crash_before_the_first_index(tmp_path):
    spec = make_spec()
    write_dataset(tmp_path / "all", spec, [(10, "terminated")] * 8)
    convert(own_dataset(tmp_path / "all", 1), spec, tmp_path / "whole")
    write_dataset(tmp_path / "part", spec, [(10, "terminated")] * 8, seed=1)
    (tmp_path / "part" / INDEX).unlink()
    convert(own_dataset(tmp_path / "all", 1), spec, tmp_path / "part")
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("whole", "part")]
    assert names[0] == names[1]


def test_subsets_may_skip_parts_but_not_be_empty(tmp_path):
    """A random subset may leave out some parts; a subset without any transition is refused."""
    spec = make_spec()
    write_dataset(tmp_path / "all", spec, [(10, "terminated")] * 6)
    source = own_dataset(tmp_path / "all", 6)
    convert(source, spec, tmp_path / "some", subset="random-episodes", fraction=0.4, seed=3)
    assert 0 < len([*Dataset.open(tmp_path / "some").pieces()]) < 6
    with pytest.raises(UserError, match=r"The subset contains no transition; take a larger fraction than 0\.01\."):
        convert(source, spec, tmp_path / "none", subset="first", fraction=0.01)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"subset": "frist"}, "subset is 'frist'; choose one of all, first, random-episodes."),
        ({"fraction": 0}, "fraction is 0; it must be above 0 and at most 1."),
        ({"fraction": "x"}, "fraction is 'x'; it must be above 0 and at most 1."),
        ({"fraction": 0.5}, "fraction is 0.5 and subset all; it must be 1 for all"),
        ({"subset": "first"}, "fraction is 1 and subset first; it must be 1 for all"),
        ({"checkpoints": 0}, "checkpoints is 0; it must be a whole number of at least 1."),
    ],
)
def test_invalid_subset_settings_are_refused(part, sentence):
    with pytest.raises(UserError) as refused:
        check_subset(**{"subset": "all", "fraction": 1.0, "checkpoints": 50} | part)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("column", "name"), [(0, "observation"), (1, "action"), (2, "reward")])
def test_numbers_that_are_not_finite_are_refused_where_they_are(value, column, name, tmp_path):
    """The sentence has the part, the episode and the step; rows of context are not counted. No dataset is complete."""
    box = {"num_actions": 1, "action_low": (-1.0,), "action_high": (1.0,), "action_box": (1,)}
    spec = replace(make_spec((3,), "float32", stack=2), **box)

    def piece(*, is_bad: bool) -> Piece:
        columns = [np.ones((5, 3), np.float32), np.ones((5, 1), np.float32), np.ones(5)]
        if is_bad:
            columns[column].flat[3 * columns[column].size // 5] = value
        return Piece(*columns, np.array([CONTEXT, INSIDE, INSIDE, INSIDE, TERMINATED], np.uint8))

    parts = [
        Part("file 1", 0, 3, lambda: iter([piece(is_bad=False)])),
        Part("file 2", 1, 6, lambda: iter([piece(is_bad=False), piece(is_bad=True)])),
    ]
    source = Source("numbers", "somebody", parts, "")
    sentence = rf"^numbers, file 2: the {name} at step 2 of episode 1 \(both from 0\) is NaN or infinite; correct it"
    with pytest.raises(UserError, match=sentence):
        convert(source, spec, tmp_path / "out")
    assert not read_index(tmp_path / "out")["complete"]


def test_a_reward_too_large_for_float32_is_refused(tmp_path):
    piece = Piece(np.zeros((2, 3), np.float32), np.zeros(2), np.array([1e39, 0]), np.array([INSIDE, TERMINATED]))
    source = Source("numbers", "somebody", [Part("all", 0, 1, lambda: iter([piece]))], "")
    with pytest.raises(UserError, match="the reward at step 0 of episode 0"):
        convert(source, make_spec((3,), "float32"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- summary


def test_summary_of_a_dataset(tmp_path):
    spec = make_spec(num_actions=3)
    writer = DatasetWriter(tmp_path, spec, Provenance("somebody"))
    blank = np.zeros(spec.frame_shape, np.uint8)
    for returns in ([1.0, 0.0], [1.0, -1.0, 1.0, 1.0]):
        writer.add_first(blank)
        for step, reward in enumerate(returns, start=1):
            writer.add(step % 2, reward, step == len(returns), False, blank)
    writer.save()
    dataset = Dataset.open(tmp_path)
    summary = summarise(dataset)
    assert (summary["transitions"], summary["episodes"], summary["terminated"]) == (6, 2, 2)
    assert (summary["returns"]["mean"], summary["returns"]["least"], summary["returns"]["most"]) == (1.5, 1.0, 2.0)
    assert summary["lengths"]["median"] == 3.0
    assert summary["actions"] == [0.5, 0.5, 0.0]
    assert summary["notes"] == [
        "all rewards are -1, 0 or 1: if they were clipped, returns are not the scores of the game",
        "actions never taken: 2",
        "100% of frames are the same as the one before",
    ]

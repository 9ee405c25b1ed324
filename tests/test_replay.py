"""The host replay buffer compared with a plain list of transitions, and its saving and restoring."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import DISCOUNT, FRAMES, make_spec, play_episodes, random_frame
from isqn.data.files import DamagedFile, files_needed
from isqn.data.replay import Replay, memory_needed
from isqn.types import EnvSpec, Transition, UserError


@dataclass
class Episode:
    first_row: int
    frames: list[Any]
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    end: str = ""


@dataclass
class ListReplay:
    """Reference implementation: whole episodes in lists, transitions built one at a time."""

    spec: EnvSpec
    capacity: int
    n: int
    reward_clip: float | None
    episodes: list[Episode] = field(default_factory=list)
    total: int = 0

    def add_first(self, frame):
        if self.episodes and not self.episodes[-1].end:
            self.episodes[-1].end = "truncated"
        self.episodes.append(Episode(self.total, [frame]))
        self.total += 1

    def add(self, action, reward, terminated, truncated, frame):
        episode = self.episodes[-1]
        episode.actions.append(action)
        episode.rewards.append(np.float32(reward))
        episode.frames.append(frame)
        episode.end = "terminated" if terminated else "truncated" if truncated else ""
        self.total += 1

    def stack(self, episode, index):
        frames = [
            episode.frames[i] if i >= 0 else np.zeros(self.spec.frame_shape, self.spec.frame_dtype)
            for i in range(index - self.spec.frame_stack + 1, index + 1)
        ]
        return np.concatenate(frames, axis=-1)

    def observation(self):
        return self.stack(self.episodes[-1], len(self.episodes[-1].frames) - 1)

    def transitions(self):
        result = {}
        for episode in self.episodes:
            length = len(episode.actions)
            for i in range(length):
                if episode.first_row + i < self.total - self.capacity:
                    continue
                if i + self.n > length and not episode.end:
                    continue
                steps = min(self.n, length - i)
                reward = 0.0
                for k in range(steps):
                    r = float(episode.rewards[i + k])
                    if self.reward_clip is not None:
                        r = max(-self.reward_clip, min(self.reward_clip, r))
                    reward += DISCOUNT**k * r
                terminated = episode.end == "terminated" and i + steps == length
                result[episode.first_row + i] = Transition(
                    self.stack(episode, i),
                    episode.actions[i],
                    reward,
                    0.0 if terminated else DISCOUNT**steps,
                    self.stack(episode, i + steps),
                )
        return result


def assert_same_content(replay, reference):
    expected = reference.transitions()
    starts = replay.valid_starts()
    assert starts.tolist() == list(expected)
    np.testing.assert_array_equal(replay.observation(), reference.observation())
    if not expected:
        return
    got = replay.gather(starts)
    for name in ("obs", "action", "next_obs"):
        want = np.stack([getattr(transition, name) for transition in expected.values()])
        np.testing.assert_array_equal(getattr(got, name), want, err_msg=name)
    for name in ("reward", "discount"):
        want = [getattr(transition, name) for transition in expected.values()]
        np.testing.assert_allclose(getattr(got, name), want, rtol=1e-6, atol=1e-6, err_msg=name)
    dtypes = (np.dtype(replay.spec.frame_dtype), np.int32, np.float32, np.float32, np.dtype(replay.spec.frame_dtype))
    assert tuple(column.dtype for column in got[:5]) == dtypes
    assert got[5:] == ((), ())  # `ended` and `explored` are only set for streaming agents
    assert got.obs.shape == (len(starts), *replay.spec.obs_shape)


def assert_same_replay(one, other):
    np.testing.assert_array_equal(one.valid_starts(), other.valid_starts())
    np.testing.assert_array_equal(one.observation(), other.observation())
    if len(one.valid_starts()):
        for seed in range(3):
            samples = [r.sample(7, np.random.default_rng(seed)) for r in (one, other)]
            for a, b in zip(*samples, strict=True):
                np.testing.assert_array_equal(a, b)
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        assert one.save(Path(a)) == other.save(Path(b))  # names and checksums of every stored byte


ends = st.sampled_from(["terminated", "truncated", "both", "abandoned"])
episode_lists = st.lists(st.tuples(st.integers(0, 12), ends), min_size=1, max_size=14)
replay_settings = st.fixed_dictionaries(
    {
        "frame": st.sampled_from(FRAMES),
        "stack": st.integers(1, 4),
        "n": st.integers(1, 4),
        "capacity": st.integers(5, 40),
        "compress": st.booleans(),
        "reward_clip": st.sampled_from([None, 1.0]),
    }
)


def make_replay_and_reference(frame, stack, n, capacity, compress, reward_clip):
    spec = make_spec(*frame, stack)

    def make():
        return Replay(spec, capacity, compress=compress, num_steps_return=n, discount=DISCOUNT, reward_clip=reward_clip)

    return spec, make, ListReplay(spec, capacity, n, reward_clip)


@settings(max_examples=80, deadline=None)
@given(replay_settings, episode_lists, st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_replay_matches_a_list_of_transitions(replay_config, episodes, check_every, seed):
    spec, make, reference = make_replay_and_reference(**replay_config)
    replay = make()
    for row, _ in enumerate(play_episodes(spec, episodes, seed, replay, reference)):
        if row % check_every == 0:
            assert_same_content(replay, reference)
    assert_same_content(replay, reference)
    assert replay.num_rows == min(reference.total, replay_config["capacity"])


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("stack", [1, 4])
def test_replay_matches_a_list_with_several_blocks_per_segment(compress, stack):
    replay_config = {"frame": FRAMES[2], "stack": stack, "n": 3, "capacity": 1600, "reward_clip": None}
    spec, make, reference = make_replay_and_reference(**replay_config, compress=compress)
    replay = make()
    episodes = [(length, "truncated" if length % 3 else "terminated") for length in range(1, 90)]
    for row, _ in enumerate(play_episodes(spec, episodes, 0, replay, reference)):
        if row % 997 == 0:
            assert_same_content(replay, reference)
    assert reference.total > 2 * 1600
    assert_same_content(replay, reference)


@pytest.mark.parametrize("compress", [True, False])
def test_samples_are_uniform_over_the_valid_starts(compress):
    spec, make, reference = make_replay_and_reference(FRAMES[4], 2, 2, 30, compress, None)
    replay = make()
    for _ in play_episodes(
        spec, [(3, "terminated"), (5, "truncated"), (1, "terminated"), (9, "abandoned")], 0, replay, reference
    ):
        pass
    starts = replay.valid_starts()
    batch = 20_000
    sample = replay.sample(batch, np.random.default_rng(0))
    # All float frames are different, so an observation identifies its row.
    row_of = {obs.tobytes(): row for row, obs in zip(starts.tolist(), replay.gather(starts).obs, strict=True)}
    counts = np.bincount([row_of[obs.tobytes()] for obs in sample.obs], minlength=reference.total)
    assert set(np.flatnonzero(counts)) == set(starts.tolist())
    mean = batch / len(starts)
    assert np.abs(counts[starts] - mean).max() < 5 * np.sqrt(mean)


def test_samples_are_uniform_when_almost_no_row_is_valid():
    """Rejection sampling gives up, and the rest is drawn from the list of valid starts."""
    spec = make_spec((1,), "float32", stack=1)
    replay = Replay(spec, 2000, compress=False, num_steps_return=1, discount=DISCOUNT)
    for row in range(2000):
        replay.add_first(np.array([row], np.float32))
        if row in (700, 1900):
            replay.add(1, 0.0, True, False, np.array([-1], np.float32))
    first, second = replay.valid_starts()
    sample = replay.sample(4000, np.random.default_rng(0))
    assert abs((sample.obs[:, 0] == 1900).sum() - 2000) < 200
    assert set(sample.obs[:, 0]) == {700, 1900}
    assert second - first == 1201


def three_step_replay(terminated, compress=True, reward_clip=None):
    spec = make_spec((1,), "uint8", stack=2)
    replay = Replay(spec, 100, compress=compress, num_steps_return=3, discount=0.5, reward_clip=reward_clip)
    replay.add_first(np.array([10], np.uint8))
    replay.add(0, 1.0, False, False, np.array([11], np.uint8))
    replay.add(1, 2.0, False, False, np.array([12], np.uint8))
    replay.add(2, 4.0, False, False, np.array([13], np.uint8))
    replay.add(3, 8.0, terminated, not terminated, np.array([14], np.uint8))
    replay.add_first(np.array([20], np.uint8))
    replay.add(4, 100.0, False, False, np.array([21], np.uint8))
    return replay


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("compress", [False, True])
def test_three_step_return_by_hand(terminated, compress):
    replay = three_step_replay(terminated, compress)
    # Rows 0 to 4 are the first episode; no step starts at row 4, its last. The return from row 5 is incomplete.
    assert replay.valid_starts().tolist() == [0, 1, 2, 3]
    got = replay.gather(np.array([0, 1, 2, 3]))
    assert got.reward.tolist() == [1 + 2 / 2 + 4 / 4, 2 + 4 / 2 + 8 / 4, 4 + 8 / 2, 8]
    end = 0.0 if terminated else 1.0
    assert got.discount.tolist() == [0.125, 0.125 * end, 0.25 * end, 0.5 * end]
    assert got.action.tolist() == [0, 1, 2, 3]
    assert got.obs.tolist() == [[0, 10], [10, 11], [11, 12], [12, 13]]
    assert got.next_obs.tolist() == [[12, 13], [13, 14], [13, 14], [13, 14]]
    assert replay.observation().tolist() == [20, 21]


def test_each_reward_is_clipped_before_summing():
    assert three_step_replay(True, reward_clip=1.5).gather(np.array([0, 3])).reward.tolist() == [
        1 + 1.5 / 2 + 1.5 / 4,
        1.5,
    ]


def test_sampling_depends_only_on_the_generator_and_the_content():
    replay = three_step_replay(True)
    draws = [replay.sample(50, np.random.default_rng(seed)).obs.tolist() for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_sampling_without_a_complete_transition_is_refused():
    replay = Replay(make_spec(), 100, compress=True, num_steps_return=3, discount=DISCOUNT)
    frame = np.zeros((4, 4, 1), np.uint8)
    with pytest.raises(UserError, match="0 rows and no complete 3-step"):
        replay.sample(1, np.random.default_rng(0))
    replay.add_first(frame)
    replay.add(0, 0.0, False, False, frame)
    with pytest.raises(UserError, match="2 rows and no complete 3-step"):
        replay.sample(1, np.random.default_rng(0))


def test_misuse_is_refused():
    replay = Replay(make_spec(), 100, compress=True, discount=DISCOUNT)
    frame = np.zeros((4, 4, 1), np.uint8)
    with pytest.raises(ValueError, match="add_first"):
        replay.add(0, 0.0, False, False, frame)
    with pytest.raises(ValueError, match="float32"):
        replay.add_first(frame.astype(np.float32))
    with pytest.raises(ValueError, match=r"\(4, 4\)"):
        replay.add_first(frame[..., 0])
    replay.add_first(frame)
    replay.add(0, 0.0, True, False, frame)
    with pytest.raises(ValueError, match="add_first"):
        replay.add(0, 0.0, False, False, frame)
    with pytest.raises(ValueError, match="starts at rows"):
        replay.gather(np.array([1]))
    with pytest.raises(UserError, match="capacity"):
        Replay(make_spec(), 3, compress=True, num_steps_return=3, discount=DISCOUNT)


def test_returned_arrays_do_not_alias_the_buffer():
    for compress in (True, False):
        replay = three_step_replay(True, compress)
        before = replay.observation()
        batch = replay.sample(4, np.random.default_rng(0))
        obs = batch.obs.copy()
        replay.observation()[:] = 77
        with pytest.raises(ValueError, match="read-only"):
            batch.obs[:] = 77
        np.testing.assert_array_equal(replay.observation(), before)
        replay.add(0, 0.0, True, False, np.array([99], np.uint8))
        np.testing.assert_array_equal(batch.obs, obs)


@settings(max_examples=40, deadline=None)
@given(replay_settings, episode_lists, st.data(), st.integers(0, 2**32 - 1))
def test_a_restored_replay_continues_exactly_as_the_saved_one(replay_config, episodes, data, seed):
    """Save and restore at several rows, inside episodes or not, and compare with a replay that was never saved."""
    spec, make, reference = make_replay_and_reference(**replay_config)
    never_saved, saved = make(), make()
    total = sum(length + 1 for length, _ in episodes)
    save_rows = data.draw(st.sets(st.integers(0, total - 1), max_size=4))

    class Current:
        """Forwards to the replay that was restored last."""

        def __init__(self):
            self.replay = saved

        def add_first(self, *args):
            self.replay.add_first(*args)

        def add(self, *args):
            self.replay.add(*args)

    current = Current()
    with tempfile.TemporaryDirectory() as folder:
        for row, _ in enumerate(play_episodes(spec, episodes, seed, never_saved, reference, current)):
            if row in save_rows:
                description = json.loads(json.dumps(current.replay.save(Path(folder))))
                current.replay = make()
                current.replay.restore(description, Path(folder))
                assert_same_replay(current.replay, never_saved)
    assert_same_replay(current.replay, never_saved)
    assert_same_content(current.replay, reference)


@pytest.mark.parametrize("compress", [True, False])
def test_an_empty_replay_can_be_saved(tmp_path, compress):
    spec, make, reference = make_replay_and_reference(FRAMES[2], 4, 1, 20, compress, None)
    description = make().save(tmp_path)
    replay = make()
    replay.restore(description, tmp_path)
    for _ in play_episodes(spec, [(3, "terminated")], 0, replay, reference):
        pass
    assert_same_content(replay, reference)


@pytest.mark.parametrize("compress", [True, False])
def test_saving_writes_only_new_segments(tmp_path, monkeypatch, compress):
    spec, make, _ = make_replay_and_reference(FRAMES[2], 4, 1, 1600, compress, None)  # segments of 24 rows
    replay = make()
    steps = play_episodes(spec, [(150, "truncated")] * 30, 0, replay)

    def advance(rows):
        for _ in range(rows):
            next(steps)

    built = []
    build = Replay._segment
    monkeypatch.setattr(Replay, "_segment", lambda self, number: built.append(number) or build(self, number))

    def contents():
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()}

    advance(240 + 5)
    first = replay.save(tmp_path)
    before = contents()
    assert len(files_needed(first)) == len(before) == 11  # ten full segments and the tail
    assert replay.save(tmp_path) == first
    assert contents() == before

    built.clear()
    advance(24)
    second = replay.save(tmp_path)
    assert built == [10, 11]  # no other segment is read
    after = contents()
    assert len(set(after) - set(before)) == 2  # the segment that is now full, and the new tail
    assert {name: after[name] for name in before} == before
    assert set(files_needed(first)) <= set(after)
    assert set(files_needed(second)) <= set(after)

    old = make()  # an older description remains valid
    old.restore(first, tmp_path)
    assert old.num_rows == 245

    restored = make()  # a restored replay knows what is on disk
    restored.restore(second, tmp_path)
    built.clear()
    assert restored.save(tmp_path) == second
    assert built == [11]
    assert contents() == after

    advance(3000)
    third = replay.save(tmp_path)
    assert not set(files_needed(third)) & set(files_needed(first))  # files of overwritten rows are no longer listed
    assert len(files_needed(third)) <= 1600 // 24 + 2


def test_diverging_from_an_old_checkpoint_overwrites_no_file(tmp_path):
    spec, make, _ = make_replay_and_reference(FRAMES[2], 4, 1, 100, True, None)
    replay = make()
    for _ in play_episodes(spec, [(29, "truncated")], 0, replay):
        pass
    early = replay.save(tmp_path)
    for _ in play_episodes(spec, [(29, "truncated")], 1, replay):
        pass
    late = replay.save(tmp_path)
    other = make()
    other.restore(early, tmp_path)
    for _ in play_episodes(spec, [(29, "truncated")], 2, other):
        pass
    other_late = other.save(tmp_path)
    assert files_needed(other_late) != files_needed(late)
    for description, original in ((late, replay), (other_late, other)):
        again = make()
        again.restore(description, tmp_path)
        assert_same_replay(again, original)


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("which", [0, -1])
def test_damage_is_detected(tmp_path, compress, which):
    spec, make, _ = make_replay_and_reference(FRAMES[2], 4, 1, 100, compress, None)
    replay = make()
    for _ in play_episodes(spec, [(50, "terminated")], 0, replay):
        pass
    description = replay.save(tmp_path)
    make().restore(description, tmp_path)
    path = tmp_path / files_needed(description)[which]
    good = path.read_bytes()
    for position in (0, len(good) // 2, len(good) - 1):
        bad = bytearray(good)
        bad[position] ^= 1
        path.write_bytes(bad)
        with pytest.raises(DamagedFile, match=path.name):
            make().restore(description, tmp_path)
    path.write_bytes(good[:-1])
    with pytest.raises(DamagedFile, match=path.name):
        make().restore(description, tmp_path)
    path.unlink()
    with pytest.raises(DamagedFile, match="missing"):
        make().restore(description, tmp_path)


def test_restoring_with_other_settings_is_refused(tmp_path):
    _, make, _ = make_replay_and_reference(FRAMES[2], 4, 1, 100, True, None)
    description = make().save(tmp_path)
    _, other, _ = make_replay_and_reference(FRAMES[2], 3, 1, 100, True, None)
    with pytest.raises(UserError, match="frame_stack is 4, this run's is 3"):
        other().restore(description, tmp_path)


@pytest.mark.parametrize("compress", [True, False])
def test_memory_needed_predicts_the_size_of_a_full_replay(compress):
    spec = make_spec((16, 16, 1), stack=4)
    needed = memory_needed(spec, 2000, compress)
    replay = Replay(spec, 2000, compress=compress, discount=DISCOUNT)
    for _ in play_episodes(spec, [(99, "truncated")] * 45, 0, replay):  # noise is the worst case
        pass
    if compress:
        assert needed.columns + needed.frames < replay.nbytes <= needed.columns + needed.max_frames
        assert "at most" in str(needed)
    else:
        assert replay.nbytes == needed.total
        assert needed.max_frames == needed.frames >= 2000 * 256
    atari = EnvSpec("ALE/Pong-v5", "machado2018", (84, 84, 1), "uint8", 18, frame_stack=4)
    assert str(memory_needed(atari, 1_000_000, False)).startswith("7.12 GB")
    assert memory_needed(atari, 1_000_000, True).total < 300e6


def test_similar_frames_compress_well():
    spec = make_spec((84, 84, 1))
    rng = np.random.default_rng(0)
    frame = random_frame(spec, rng)
    replay = Replay(spec, 800, compress=True, discount=DISCOUNT)
    replay.add_first(frame)
    for step in range(799):
        frame = frame.copy()
        frame[step % 84, :5] += 1
        replay.add(0, 0.0, False, False, frame)
    assert replay.nbytes < 800 * frame.nbytes / 7  # a block holds one frame and seven small differences

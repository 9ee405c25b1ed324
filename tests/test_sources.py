"""Readers of other dataset formats: they recover the episodes, and refuse damaged files with one sentence."""

from __future__ import annotations

import gzip
import io
import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from isqn.data import sources
from isqn.data.convert import convert
from isqn.data.dataset import Dataset, DatasetWriter, Piece, Provenance
from isqn.data.npy import NpyStream, read_column
from isqn.data.sample import CONTEXT, INSIDE, TERMINATED, TRUNCATED
from isqn.data.tfrecord import masked_crc, parse_example, read_examples
from isqn.envs.adapter import make_environment
from isqn.train.source import export_to_minari, find_source
from isqn.types import EnvSpec, UserError

DATA = Path(__file__).parent / "data"
SPEC = EnvSpec("ALE/Pong-v5", "machado2018", (84, 84, 1), "uint8", 6, frame_stack=4, frames_per_step=4)
SMALL = EnvSpec("Small", "toy", (2, 2, 1), "uint8", 6, frame_stack=4)


def frames(first: int, count: int, side: int = 2) -> np.ndarray:
    """Return uniform frames, each identified by its grey level."""
    return np.arange(first, first + count, dtype=np.uint8)[:, None, None] * np.ones((1, side, side), np.uint8)


def write_npy(path: Path, array: Any) -> None:
    box = io.BytesIO()
    np.save(box, array)
    path.write_bytes(gzip.compress(box.getvalue(), 1))


def write_log(
    folder: Path, number: int, spec: EnvSpec, episodes: list[tuple[int, bool]], cursor: int = 0, pad=True
) -> None:
    """Write episodes, given as (length, is terminal), in Dopamine's format; their frames have the greys 1, 2, 3, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    images, actions, rewards, terminals, grey = [], [], [], [], 1
    side = spec.frame_shape[0]
    for length, terminal in episodes:
        if pad:
            images.append(np.zeros((3, side, side), np.uint8))
            for column in (actions, rewards, terminals):
                column += [0, 0, 0]
        images.append(frames(grey, length, side))
        actions += [(grey + i) % spec.num_actions for i in range(length)]
        rewards += [float(grey + i) for i in range(length)]
        terminals += [0] * (length - 1) + [int(terminal)]
        grey += length
    columns = {
        "observation": np.concatenate(images),
        "action": np.array(actions, np.int32),
        "reward": np.array(rewards, np.float32),
        "terminal": np.array(terminals, np.uint8),
    }
    for name, column in columns.items():
        write_npy(folder / f"$store$_{name}_ckpt.{number}.gz", np.roll(column, cursor, axis=0))
    write_npy(folder / f"add_count_ckpt.{number}.gz", np.array(len(actions) + cursor, np.int64))


def grey_levels(pieces: list[Piece]) -> list[list[int]]:
    return [piece.frames[:, 0, 0, 0].tolist() for piece in pieces]


def zip_steps(pieces: list[Piece]) -> list[tuple[int, int]]:
    """Return the grey level and the role of each row."""
    return [
        (grey, end)
        for piece, greys in zip(pieces, grey_levels(pieces), strict=True)
        for grey, end in zip(greys, piece.ends.tolist(), strict=True)
    ]


def read(folder: Path, spec: EnvSpec = SMALL) -> list[Piece]:
    return [piece for part in sources.dopamine(folder, spec).parts for piece in part.pieces()]


# -- DQN replay


def test_episodes_of_a_dopamine_log(tmp_path):
    """Padding rows are skipped, terminal steps repeat their frame, and the last step of the log is left out."""
    write_log(tmp_path, 0, SMALL, [(3, True), (2, True), (4, False)])
    pieces = read(tmp_path)
    assert grey_levels(pieces) == [[1, 2, 3, 3], [4, 5, 5], [6, 7, 8, 9]]
    assert [piece.ends.tolist() for piece in pieces] == [
        [INSIDE, INSIDE, INSIDE, TERMINATED],
        [INSIDE, INSIDE, TERMINATED],
        [INSIDE, INSIDE, INSIDE, TRUNCATED],
    ]
    assert [piece.actions.tolist() for piece in pieces] == [[1, 2, 3, 0], [4, 5, 0], [0, 1, 2, 0]]
    assert [piece.rewards.tolist() for piece in pieces] == [[1, 2, 3, 0], [4, 5, 0], [6, 7, 8, 0]]


@pytest.mark.parametrize("zeros", [1, 2, 3])
def test_padding_at_the_end_of_a_log_is_not_an_episode(zeros, tmp_path):
    write_log(tmp_path, 0, SMALL, [(3, True), (1, False)])
    for name in ("observation", "action", "reward", "terminal"):
        path = tmp_path / f"$store$_{name}_ckpt.0.gz"
        write_npy(path, np.load(io.BytesIO(gzip.decompress(path.read_bytes())))[: 6 + zeros])
    (tmp_path / "add_count_ckpt.0.gz").unlink()
    assert grey_levels(read(tmp_path)) == [[1, 2, 3, 3]]


def test_a_full_ring_is_split_at_its_write_position(tmp_path):
    """Rows are not consecutive at the write position, and the oldest rows lack their frame stacks."""
    write_log(tmp_path, 0, SMALL, [(20, False)], cursor=8, pad=False)
    (newer, older) = read(tmp_path)  # the array starts in the middle of the episode
    assert grey_levels([newer, older]) == [[*range(13, 21)], [*range(1, 13)]]
    assert newer.ends.tolist() == [CONTEXT] * 3 + [INSIDE] * 4 + [TRUNCATED]
    assert older.ends.tolist() == [CONTEXT] * 3 + [INSIDE] * 8 + [TRUNCATED]


def test_a_partly_filled_ring_ends_at_its_write_position(tmp_path):
    """Later rows belong to the previous checkpoint, as in the last checkpoint of the DQN replay dataset."""
    write_log(tmp_path, 0, SMALL, [(3, True), (4, True), (5, True)])
    write_npy(tmp_path / "add_count_ckpt.0.gz", np.array(3 + 3 + 3 + 2))  # in the middle of the second episode
    pieces = read(tmp_path)
    assert grey_levels(pieces) == [[1, 2, 3, 3], [4, 5]]
    assert pieces[-1].ends.tolist() == [INSIDE, TRUNCATED]
    write_npy(tmp_path / "add_count_ckpt.0.gz", np.array(-1))
    with pytest.raises(UserError, match=r"add_count_ckpt\.0\.gz is damaged: it holds -1, not a number"):
        read(tmp_path)


@pytest.mark.parametrize("value", [0xFF, 0x7F, 0x01])
def test_rows_that_were_never_written_are_not_read(value, tmp_path):
    """The result does not depend on the rows after `add_count`, which hold what `np.empty` found in memory."""
    write_log(tmp_path, 0, SMALL, [(3, True), (4, False)])
    expected = grey_levels(read(tmp_path))
    for name in ("observation", "action", "reward", "terminal"):
        path = tmp_path / f"$store$_{name}_ckpt.0.gz"
        rows = np.load(io.BytesIO(gzip.decompress(path.read_bytes())))
        garbage = np.full(rows.nbytes, value, np.uint8).view(rows.dtype).reshape(rows.shape)
        write_npy(path, np.concatenate([rows, garbage]))
    assert grey_levels(read(tmp_path)) == expected == [[1, 2, 3, 3], [4, 5, 6, 7]]


def test_a_buffer_of_dopamine_that_was_never_full():
    """Episodes of 5, 6 (cut by the step limit) and 3 steps; the step before a cut has no next frame."""
    pieces = read(DATA / "dopamine" / "partial", SPEC)
    assert grey_levels(pieces) == [[1, 2, 3, 4, 5, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 14]]
    assert [piece.ends[-1] for piece in pieces] == [TERMINATED, TRUNCATED, TERMINATED]
    assert pieces[1].actions.tolist() == [0, 1, 2, 3, 4, 0]
    assert pieces[1].rewards.tolist() == [6, 7, 8, 9, 10, 0]


def test_a_buffer_of_dopamine_that_is_full():
    """The frames 10 to 17 and 25 to 30 are of truncated episodes; frame 24, at index 0, is an incomplete stack."""
    pieces = read(DATA / "dopamine" / "full", SPEC)
    assert grey_levels(pieces) == [[*range(25, 31)], [*range(10, 18)], [*range(18, 24)]]
    assert all(piece.ends.tolist() == [INSIDE] * (len(piece.ends) - 1) + [TRUNCATED] for piece in pieces)


@pytest.mark.parametrize("rows", range(1, 41))
def test_padding_is_never_a_transition(rows, tmp_path):
    """Wherever a log stops, no step starts at a padding row and none leads to one."""
    write_log(tmp_path, 0, SMALL, [(5, False), (4, True), (6, False), (3, False), (7, True)])
    (tmp_path / "episode_end_indices_ckpt.0.gz").touch()
    write_npy(tmp_path / "add_count_ckpt.0.gz", np.array(rows))
    starts = [grey for grey, end in zip_steps(read(tmp_path)) if end == INSIDE]
    assert all(grey > 0 for grey, _ in zip_steps(read(tmp_path)))
    written = [
        grey for first, length in ((1, 5), (6, 4), (10, 6), (16, 3), (19, 7)) for grey in range(first, first + length)
    ]
    assert set(starts) <= set(written) - {5, 15, 18}


def test_splitting_long_episodes_keeps_all_transitions(tmp_path, monkeypatch):
    """Transitions and their stacks do not depend on the length of a piece or of a chunk."""
    write_log(tmp_path / "log", 0, SMALL, [(23, True), (9, True), (31, False)])
    batches = []
    for rows, chunk in ((1_000, 1_000), (7, 1_000), (11, 5), (5, 1)):
        monkeypatch.setattr(sources, "MAX_PIECE_ROWS", rows)
        monkeypatch.setattr(sources, "CHUNK_ROWS", chunk)
        convert(sources.dopamine(tmp_path / "log", SMALL), SMALL, tmp_path / f"{rows}")
        dataset = Dataset.open(tmp_path / f"{rows}")
        batches.append(dataset.rows.gather(dataset.rows.valid_starts()))
    assert len(batches[0].action) == 23 + 9 + 30
    for other in batches[1:]:
        for mine, theirs in zip(other[:5], batches[0][:5], strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_d4rl_atari_logs(tmp_path):
    write_log(tmp_path / "log", 7, SMALL, [(3, True), (4, False)])
    for name in ("observation", "action", "reward", "terminal"):
        (tmp_path / "Pong" / "2" / "7").mkdir(parents=True, exist_ok=True)
        path = tmp_path / "log" / f"$store$_{name}_ckpt.7.gz"
        path.rename(tmp_path / "Pong" / "2" / "7" / f"{name}.gz")
    source = sources.d4rl_atari(tmp_path / "Pong" / "2", SMALL)
    assert [(part.name, part.checkpoint) for part in source.parts] == [("checkpoint 7", 7)]
    assert grey_levels([*source.parts[0].pieces()]) == [[1, 2, 3, 3], [4, 5, 6, 7]]


def test_checkpoints_are_read_in_numerical_order(tmp_path):
    for number in (10, 9, 2):
        write_log(tmp_path, number, SMALL, [(2, True)])
    assert [part.checkpoint for part in sources.dopamine(tmp_path, SMALL).parts] == [2, 9, 10]


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("action", None, "$store$_action_ckpt.0.gz is missing"),
        ("action", lambda a: a[:-1], "has 15 rows and $store$_observation_ckpt.0.gz 16"),
        ("action", lambda a: a + 6, "has actions from 6 to 11; Small has 6"),
        ("reward", lambda a: a[:, None], "float32 of shape (16, 1); it must be one column of numbers"),
        ("observation", lambda a: a[:, :1], "uint8 of shape (16, 1, 2); frames of Small are uint8 (2, 2)"),
        ("observation", lambda a: a.astype(np.float32), "holds float32 of shape (16, 2, 2)"),
    ],
)
def test_invalid_columns_are_refused(name, change, sentence, tmp_path):
    write_log(tmp_path, 0, SMALL, [(5, True), (5, True)])
    path = tmp_path / f"$store$_{name}_ckpt.0.gz"
    array = np.load(io.BytesIO(gzip.decompress(path.read_bytes())))
    path.unlink()
    if change:
        write_npy(path, change(array))
    with pytest.raises(UserError) as refused:
        read(tmp_path)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "column", "sentence"),
    [
        ("action", np.full(6, 2.7, np.float32), "action_ckpt.0.gz holds float32; actions are whole numbers."),
        ("terminal", np.full(6, 7, np.uint8), "terminal_ckpt.0.gz has 7 to 7; it must be 0 or 1."),
        (
            "reward",
            np.full(6, np.nan, np.float32),
            "dqn-replay, checkpoint 0: the reward at step 0 of episode 0 (both from 0) is NaN or infinite; correct it "
            "in the source, or leave the episode out there.",
        ),
    ],
)
def test_invalid_values_are_refused(name, column, sentence, tmp_path):
    write_log(tmp_path / "log", 0, SMALL, [(3, True)])
    write_npy(tmp_path / "log" / f"$store$_{name}_ckpt.0.gz", column)
    with pytest.raises(UserError) as refused:
        convert(sources.dopamine(tmp_path / "log", SMALL), SMALL, tmp_path / "out")
    assert str(refused.value).endswith(sentence)
    assert not (tmp_path / "out").exists()


def test_errors_for_a_truncated_file_name_the_position(tmp_path):
    write_log(tmp_path, 0, SMALL, [(2_000, True)])
    path = tmp_path / "$store$_observation_ckpt.0.gz"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"observation_ckpt\.0\.gz is damaged at byte [\d,]+ of its decompressed data"):
        read(tmp_path)


# -- RL Unplugged


def varint(number: int) -> bytes:
    number &= 2**64 - 1
    encoded = b""
    while number > 127:
        encoded, number = encoded + bytes([number & 127 | 128]), number >> 7
    return encoded + bytes([number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(**values: Any) -> bytes:
    """Encode a tf.Example of lists of bytes, floats or integers."""
    entries = b""
    for name, value in values.items():
        if isinstance(value[0], bytes):
            kind, content = 1, b"".join(field(1, item) for item in value)
        elif isinstance(value[0], float):
            kind, content = 2, field(1, struct.pack(f"<{len(value)}f", *value))
        else:
            kind, content = 3, field(1, b"".join(map(varint, value)))
        entries += field(1, field(1, name.encode()) + field(2, field(kind, content)))
    return field(1, entries)


def record(payload: bytes) -> bytes:
    head = struct.pack("<Q", len(payload))
    return head + struct.pack("<I", masked_crc(head)) + payload + struct.pack("<I", masked_crc(payload))


def png(frame: np.ndarray) -> bytes:
    box = io.BytesIO()
    Image.fromarray(frame).save(box, "PNG")
    return box.getvalue()


def episode(first: int, length: int, last_discount: float, **changes: Any) -> bytes:
    values = {
        "checkpoint_idx": [0],
        "observations": [png(frame) for frame in frames(first, length)],
        "actions": [(first + i) % 6 for i in range(length)],
        "clipped_rewards": [float(first + i) for i in range(length)],
        "unclipped_rewards": [1e6] * length,
        "discounts": [1.0] * (length - 1) + [last_discount],
    }
    return record(example(**{name: value for name, value in (values | changes).items() if value is not None}))


def test_examples_are_parsed():
    parsed = parse_example(example(texts=[b"a", b""], floats=[0.5, -2.0], numbers=[3, -1, 2**40]))
    assert parsed["texts"] == [b"a", b""]
    assert parsed["floats"].tolist() == [0.5, -2.0]
    assert parsed["numbers"].tolist() == [3, -1, 2**40]
    # unpacked lists, as older writers produce them: fields of wire types 5 and 0
    floats = b"".join(varint(1 << 3 | 5) + struct.pack("<f", number) for number in (0.5, -2.0))
    numbers = b"".join(varint(1 << 3) + varint(number) for number in (3, -1, 2**40))
    for kind, content, expected in ((2, floats, [0.5, -2.0]), (3, numbers, [3, -1, 2**40])):
        entry = field(1, field(1, b"x") + field(2, field(kind, content)))
        assert parse_example(field(1, entry))["x"].tolist() == expected


def test_masked_checksum_matches_tensorflow():
    """The CRC-32C of "123456789" is E3069283 (RFC 3720); rotated right by 15 bits it is 2507C60D; A282EAD8 is added."""
    assert masked_crc(b"123456789") == 0xC78AB0E5


def test_ordered_episodes(tmp_path):
    """An episode terminates if its last discount is 0; otherwise its last step is left out."""
    content = episode(1, 3, 0.0) + episode(4, 3, 1.0)
    (tmp_path / "run_1-00004-of-00050").write_bytes(gzip.compress(content))
    (tmp_path / "run_2-00004-of-00050").write_bytes(gzip.compress(content))
    source = sources.rl_unplugged(tmp_path, SMALL, 1)
    assert source.kind == "rl-unplugged, ordered episodes"
    assert [part.checkpoint for part in source.parts] == [4]
    pieces = [*source.parts[0].pieces()]
    assert grey_levels(pieces) == [[1, 2, 3, 3], [4, 5, 6]]
    assert [piece.ends[-1] for piece in pieces] == [TERMINATED, TRUNCATED]
    assert [piece.rewards.tolist() for piece in pieces] == [[1, 2, 3, 0], [4, 5, 0]]
    assert [piece.actions.tolist() for piece in pieces] == [[1, 2, 3, 0], [4, 5, 0]]


def test_single_transitions(tmp_path):
    def transition(first: int, discount: float) -> bytes:
        images = [png(frame) for frame in frames(first, 5)]
        return record(example(o_t=images[:4], o_tp1=images[1:], a_t=[2], r_t=[0.5], d_t=[discount], episode_id=[9]))

    (tmp_path / "run_1-00000-of-00100").write_bytes(gzip.compress(transition(1, 1.0) + transition(11, 0.0)))
    source = sources.rl_unplugged(tmp_path, SMALL, 1)
    assert source.kind == "rl-unplugged, transitions"
    convert(source, SMALL, tmp_path / "out")
    dataset = Dataset.open(tmp_path / "out")
    batch = dataset.rows.gather(dataset.rows.valid_starts())
    assert batch.obs[:, 0, 0].tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]
    assert batch.next_obs[:, 0, 0].tolist() == [[2, 3, 4, 5], [12, 13, 14, 15]]
    assert batch.discount.tolist() == [np.float32(0.99), 0.0]
    assert (batch.action.tolist(), batch.reward.tolist()) == ([2, 2], [0.5, 0.5])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"actions": None}, "example 0 is not rl-unplugged, ordered episodes: 'actions' is missing."),
        ({"actions": [1, 2]}, "its columns have lengths [2, 3]"),
        ({"actions": [1, 2, 6]}, "its actions go from 1 to 6; Small has 6"),
        ({"observations": [b"no picture"] * 3}, "a frame is not a PNG image"),
        ({"observations": [png(np.zeros((3, 2), np.uint8))] * 3}, "a frame is L (3, 2), not L (2, 2) (8-bit grey)"),
    ],
)
def test_unexpected_examples_are_refused(changes, sentence, tmp_path):
    (tmp_path / "run_1-00000-of-00050").write_bytes(gzip.compress(episode(1, 3, 0.0, **changes)))
    with pytest.raises(UserError) as refused:
        [*sources.rl_unplugged(tmp_path, SMALL, 1).parts[0].pieces()]
    assert sentence in str(refused.value)
    assert "run_1-00000-of-00050" in str(refused.value)


@pytest.mark.parametrize("place", [3, 9, 20, -2])
def test_checksums_detect_a_flipped_bit(place, tmp_path):
    """The flipped bit is in the length, its checksum, the payload, or the payload's checksum."""
    first, second = episode(1, 3, 0.0), bytearray(episode(4, 3, 0.0))
    second[place] ^= 1
    (tmp_path / "run_1-00000-of-00050").write_bytes(gzip.compress(first + bytes(second)))
    with pytest.raises(UserError, match=f"in the record at byte {len(first):,} of its decompressed data: .* checksum"):
        [*read_examples(tmp_path / "run_1-00000-of-00050")]


# -- random damage


MUTATIONS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4)


def mutated(content: bytes, changes: list[tuple[int, int]], length: float) -> bytes:
    changed = bytearray(content[: round(length * len(content))])
    for place, byte in changes:
        if changed:
            changed[place % len(changed)] = byte
    return bytes(changed)


MESSAGE = example(a=[b"x"], b=[1.0], c=[7])
RECORDS = episode(1, 3, 0.0) + episode(4, 2, 1.0)
FUZZ = settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_robust(action) -> None:
    """Run a reader: it may only fail with a `UserError`, and must need little memory whatever a header claims."""
    tracemalloc.start()
    with suppress(UserError):
        action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000


@FUZZ
@given(changes=MUTATIONS, length=st.floats(0, 1), packed=st.booleans())
def test_damaged_records_are_read_or_refused(changes, length, packed, tmp_path):
    path, whole = tmp_path / "records", gzip.compress(RECORDS, 1)
    path.write_bytes(mutated(whole, changes, length) if packed else gzip.compress(mutated(RECORDS, changes, length), 1))
    check_robust(lambda: [*read_examples(path)])


@FUZZ
@given(payload=st.one_of(st.binary(max_size=200), st.builds(mutated, st.just(MESSAGE), MUTATIONS, st.floats(0, 1))))
def test_damaged_messages_are_parsed_or_refused(payload):
    with suppress(ValueError):  # `read_examples` turns it into a `UserError` with the file and the position
        parse_example(payload)


@FUZZ
@given(content=st.binary(max_size=300))
def test_random_bytes_are_refused_as_arrays(content, tmp_path):
    for name, packed in (("raw", content), ("packed", gzip.compress(content, 1))):
        (tmp_path / name).write_bytes(packed)
        check_robust(lambda name=name: read_column(tmp_path / name))
        check_robust(lambda name=name: [*NpyStream(tmp_path / name).rows(10)])


@FUZZ
@given(changes=MUTATIONS, length=st.floats(0, 1), packed=st.booleans())
def test_damaged_arrays_are_read_or_refused(changes, length, packed, tmp_path):
    box = io.BytesIO()
    np.save(box, np.arange(300, dtype=np.int32))
    content, path = box.getvalue(), tmp_path / "array"
    whole = gzip.compress(content, 1)
    path.write_bytes(mutated(whole, changes, length) if packed else gzip.compress(mutated(content, changes, length), 1))
    check_robust(lambda: read_column(path))


# -- Minari, and detection of formats


def test_minari_round_trip_of_boolean_frames(tmp_path):
    env = make_environment("MinAtar/Breakout")
    writer = DatasetWriter(tmp_path / "ours", env.spec, Provenance("nobody"))
    writer.add_first(env.reset(0))
    for action in (0, 1, 2, 0):
        frame, reward, terminated, truncated = env.step(action)
        writer.add(action, reward, terminated, truncated, frame)
    writer.save()
    export_to_minari(tmp_path / "ours", tmp_path / "theirs")
    source, spec = find_source(tmp_path / "theirs", None, 1, 1)
    convert(source, spec, tmp_path / "again")
    first, second = Dataset.open(tmp_path / "ours"), Dataset.open(tmp_path / "again")
    assert second.rows.actions.tolist() == [0, 1, 2, 0, 0]
    np.testing.assert_array_equal(first.frames(0, 5), second.frames(0, 5))


def test_minari_round_trip(tmp_path):
    write_log(tmp_path / "Pong" / "1", 0, SPEC, [(3, True), (4, False)])
    source, spec = find_source(tmp_path / "Pong" / "1", None, 1, 1)
    assert (source.kind, spec.id, spec.num_actions) == ("dqn-replay", "ALE/Pong-v5", 6)
    convert(source, spec, tmp_path / "ours")
    assert export_to_minari(tmp_path / "ours", tmp_path / "theirs")
    assert not export_to_minari(tmp_path / "ours", tmp_path / "theirs")  # already exported
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Pong", "ours", "theirs"]
    source, spec = find_source(tmp_path / "theirs", None, 1, 1)
    assert (source.kind, spec.id) == ("minari", "ALE/Pong-v5")
    convert(source, spec, tmp_path / "again")
    first, second = Dataset.open(tmp_path / "ours"), Dataset.open(tmp_path / "again")
    starts = first.rows.valid_starts()
    np.testing.assert_array_equal(second.rows.valid_starts(), starts)
    for mine, theirs in zip(first.rows.gather(starts)[:5], second.rows.gather(starts)[:5], strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_damaged_minari_metadata(tmp_path):
    (tmp_path / "metadata.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read as a Minari dataset"):
        find_source(tmp_path, None, 1, 1)


def test_damaged_minari_data(tmp_path):
    write_log(tmp_path / "Pong" / "1", 0, SPEC, [(3, True)])
    convert(sources.dopamine(tmp_path / "Pong" / "1", SPEC), SPEC, tmp_path / "ours")
    export_to_minari(tmp_path / "ours", tmp_path / "theirs")
    (file,) = (tmp_path / "theirs" / "data").glob("*.hdf5")
    file.write_bytes(file.read_bytes()[:2_000])
    with pytest.raises(UserError, match="theirs is damaged: episode 0 cannot be read"):
        convert(*find_source(tmp_path / "theirs", "ALE/Pong-v5", 1, 1), tmp_path / "again")


def test_unknown_folders_and_environments_are_refused(tmp_path):
    with pytest.raises(UserError, match="is not a dataset of a known format; the formats are a dataset"):
        find_source(tmp_path, None, 1, 1)
    write_log(tmp_path / "games", 0, SPEC, [(3, True)])
    with pytest.raises(UserError, match="is not recorded; give it by --env-id"):
        find_source(tmp_path / "games", None, 1, 1)
    for named in ("ALE/Breakout-v5", "Breakout"):
        assert find_source(tmp_path / "games", named, 1, 1)[1].num_actions == 4

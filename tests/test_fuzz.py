"""Damaged datasets are read or refused: never a crash, a hang, or an allocation much larger than the file."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
from PIL import Image

from fuzzing import (
    ALLOWED_BYTES,
    MANY,
    PARTS,
    Reader,
    check_all,
    damage_bytes,
    damage_json,
    list_files,
    run_child,
)
from isqn.data import arrays, minari, rlds, sources
from isqn.data.dataset import Dataset, DatasetWriter, Piece, Provenance
from isqn.data.index import INDEX
from isqn.data.sample import INSIDE, TERMINATED
from isqn.data.tfrecord import masked_crc, read_examples
from isqn.train.source import find_source
from isqn.types import EnvSpec, UserError

SMALL = EnvSpec("Small", "toy", (2, 2, 1), "uint8", 6, frame_stack=4)
VECTOR = EnvSpec("Vector", "toy", (3,), "float32", 6)
QUICK = 1_000  # cases in `make test`
FOLDER = Path(__file__).parent / "data"


# -- valid datasets: a function that writes files, and one that reads them


def png(frame: np.ndarray) -> bytes:
    box = io.BytesIO()
    Image.fromarray(frame).save(box, "PNG")
    return box.getvalue()


FRAMES = np.random.default_rng(0).integers(0, 256, (24, 2, 2), np.uint8)
PNGS = [png(frame) for frame in FRAMES]
COLUMNS = {
    "observation": FRAMES,
    "action": (np.arange(24) % 6).astype(np.int32),
    "reward": np.arange(24, dtype=np.float32),
    "terminal": (np.arange(24) % 7 == 6).astype(np.uint8),
}
STEPS = {
    "observations": np.arange(60, dtype=np.float32).reshape(20, 3),
    "actions": np.arange(20) % 6,
    "rewards": np.arange(20, dtype=np.float32),
    "terminals": np.arange(20) % 7 == 6,
    "timeouts": np.arange(20) % 9 == 8,
    "next_observations": np.arange(60, dtype=np.float32).reshape(20, 3) + 3,
}


def npy(array: Any) -> bytes:
    box = io.BytesIO()
    np.save(box, array)
    return box.getvalue()


def varint(number: int) -> bytes:
    encoded = b""
    while number > 127:
        encoded, number = encoded + bytes([number & 127 | 128]), number >> 7
    return encoded + bytes([number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(columns: dict[str, Any]) -> bytes:
    entries = b""
    for name, values in columns.items():
        if isinstance(values[0], bytes):
            feature = field(1, b"".join(field(1, value) for value in values))
        elif isinstance(values[0], float):
            feature = field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
        else:
            feature = field(3, field(1, b"".join(map(varint, values))))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def record(payload: bytes) -> bytes:
    head = struct.pack("<Q", len(payload))
    return head + struct.pack("<I", masked_crc(head)) + payload + struct.pack("<I", masked_crc(payload))


EPISODE = example(
    {
        "observations": PNGS[:6],
        "actions": [0, 1, 2, 3, 4, 5],
        "clipped_rewards": [0.0, 1.0, -1.0] * 2,
        "discounts": [1.0] * 5 + [0.0],
    }
)
TRANSITION = example({"o_t": PNGS[:4], "o_tp1": PNGS[1:5], "a_t": [2], "r_t": [1.0], "d_t": [0.0]})
PREPARED = FOLDER / "rl_unplugged" / "rlu_atari_checkpoints_ordered" / "Pong_run_1" / "1.1.0"
PONG = EnvSpec("ALE/Pong-v5", "toy", (84, 84, 1), "uint8", 6, frame_stack=4)


def write_dopamine(folder: Path) -> None:
    for name, column in COLUMNS.items():
        (folder / f"$store$_{name}_ckpt.0.gz").write_bytes(gzip.compress(npy(column), 1))
    (folder / "add_count_ckpt.0.gz").write_bytes(gzip.compress(npy(np.array(30)), 1))
    (folder / "episode_end_indices_ckpt.0.gz").touch()


def write_d4rl_atari(folder: Path) -> None:
    (folder / "3").mkdir()
    for name, column in COLUMNS.items():
        (folder / "3" / f"{name}.gz").write_bytes(gzip.compress(npy(column), 1))


def write_records(payload: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "run_1-00000-of-00001").write_bytes(gzip.compress(record(payload) * 2, 1)) and None


def write_prepared(folder: Path) -> None:
    shutil.copytree(PREPARED, folder, dirs_exist_ok=True)


def write_npz(folder: Path) -> None:
    np.savez_compressed(folder / "steps.npz", **STEPS)


def write_hdf5(folder: Path) -> None:
    with h5py.File(folder / "steps.hdf5", "w") as file:
        for name, values in STEPS.items():
            file.create_dataset(name, data=values, **({"chunks": True, "compression": "gzip"} if "o" in name else {}))


def write_dataset(spec: EnvSpec) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        writer = DatasetWriter(folder, spec, Provenance("nobody"))
        rng = np.random.default_rng(0)
        for _ in range(3):
            frames = rng.integers(0, 100, (11, *spec.frame_shape)).astype(spec.frame_dtype)
            ends = np.full(11, INSIDE, np.uint8)
            ends[-1] = TERMINATED
            writer.extend(Piece(frames, np.arange(11) % 6, np.ones(11, np.float32), ends))
        writer.save(complete=True)

    return write


def read_source(source: sources.Source) -> None:
    for part in source.parts:
        for _ in part.pieces():
            pass


def read_arrays(folder: Path) -> None:
    (path,) = folder.iterdir()
    kind = arrays.arrays_format(path)
    if kind:
        read_source(arrays.arrays(path, kind, VECTOR, lambda obs: np.array(obs, np.float32)))


def write_minari(env_id: str) -> Callable[[Path], None]:
    """Return a function that writes two episodes by Minari's own storage."""

    def write(folder: Path) -> None:
        write_dataset(VECTOR if env_id else SMALL)(folder / "dataset")
        env_spec = gym.spec(env_id) if env_id else None
        minari.export(folder / "dataset", folder / "exported", env_spec)
        shutil.rmtree(folder / "dataset")
        for path in (folder / "exported" / "data").iterdir():
            path.rename(folder / path.name)
        shutil.rmtree(folder / "exported")

    return write


def write_minari_files(data_format: str) -> Callable[[Path], None]:
    """Return a function that writes two episodes by Minari's own storage, a file each."""
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    space = gym.spaces.Dict(a=gym.spaces.Discrete(3), b=gym.spaces.Box(0, 255, (2, 2), np.uint8))
    columns = {"a": np.arange(6) % 3, "b": FRAMES[:6]}
    rewards, terminations, truncations = [1.0] * 5, [False] * 4 + [True], [False] * 5

    def write(folder: Path) -> None:
        spec = gym.spec("CartPole-v1")
        storage = MinariStorage.new(folder.resolve(), space, gym.spaces.Discrete(3), spec, data_format)
        storage.update_metadata({"dataset_id": "small/fuzz-v0", "algorithm_name": "nobody"})
        storage.update_episodes(
            EpisodeBuffer(number, None, None, columns, np.arange(5) % 3, rewards, terminations, truncations)
            for number in range(2)
        )

    return write


def read_minari(folder: Path) -> None:
    read_source(find_source(folder, None, 1, 1)[0])


def read_minari_files(folder: Path) -> None:
    recording = minari.open_recording(folder)
    minari.require_supported(recording)
    spec = EnvSpec("Small", "toy", (7,), "float32", 3)  # one of 3 states, and 4 pixels
    read_source(minari.source(recording, spec, recording.observation_space))


def read_dataset(folder: Path) -> None:
    dataset = Dataset.open(folder)
    for _ in dataset.pieces():
        pass
    dataset.sample(4, np.random.default_rng(0))


def resume_dataset(spec: EnvSpec) -> Callable[[Path], None]:
    return lambda folder: DatasetWriter(folder, spec, Provenance("nobody")).resume() and None


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "dopamine": (write_dopamine, lambda folder: read_source(sources.dopamine(folder, SMALL))),
    "d4rl-atari": (write_d4rl_atari, lambda folder: read_source(sources.d4rl_atari(folder, SMALL))),
    "episodes": (write_records(EPISODE), lambda folder: read_source(sources.rl_unplugged(folder, SMALL, 1))),
    "transitions": (write_records(TRANSITION), lambda folder: read_source(sources.rl_unplugged(folder, SMALL, 1))),
    "prepared": (write_prepared, lambda folder: read_source(rlds.rlds(folder, PONG))),
    "npz": (write_npz, read_arrays),
    "hdf5": (write_hdf5, read_arrays),
    "minari": (write_minari(""), read_minari),
    "minari with env": (write_minari("CartPole-v1"), read_minari),
    "minari arrow": (write_minari_files("arrow"), read_minari_files),
    "minari parquet": (write_minari_files("parquet"), read_minari_files),
    "images": (write_dataset(SMALL), read_dataset),
    "vectors": (write_dataset(VECTOR), read_dataset),
    "resumed images": (write_dataset(SMALL), resume_dataset(SMALL)),
    "resumed vectors": (write_dataset(VECTOR), resume_dataset(VECTOR)),
}


# -- damage


def damage_inside(path: Path, rng: np.random.Generator) -> bytes:
    """Damage what is inside of compression and checksums, which are then right."""
    content = path.read_bytes()
    if path.name.endswith(".gz") and content:
        return gzip.compress(damage_bytes(gzip.decompress(content), rng), 1)
    if "-of-" in path.name:
        is_gzipped = path.name.startswith("run_")
        raw = gzip.decompress(content) if is_gzipped else content
        (length,) = struct.unpack("<Q", raw[:8])
        raw = record(damage_bytes(raw[12 : 12 + length], rng)) + raw[16 + length :]
        return gzip.compress(raw, 1) if is_gzipped else raw
    if path.suffix == ".json":
        return json.dumps(damage_json(json.loads(content), rng)).encode()
    if path.suffix == ".npz":
        box = io.BytesIO()
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(box, "w", zipfile.ZIP_DEFLATED) as new:
            chosen = rng.integers(len(old.namelist()))
            for number, name in enumerate(old.namelist()):
                new.writestr(name, damage_bytes(old.read(name), rng) if number == chosen else old.read(name))
        return box.getvalue()
    return damage_bytes(content, rng)


def sign_dataset(folder: Path) -> None:
    """Make all checksums of a dataset right, as someone would who wants the damage to be read."""
    try:
        index = json.loads((folder / INDEX).read_text())
        for file in index["files"]:
            content = (folder / file["name"]).read_bytes()
            file["bytes"], file["sha256"] = len(content), hashlib.sha256(content).hexdigest()
            length = int.from_bytes(content[:8], "little")
            header, checksum = json.loads(content[8 : 8 + length]), 0
            names = ("block_ends", "open_frames") if "block_ends" in header else ("frames",)
            for name in ("actions", "rewards", "ends", *names):
                start, end = header[name]["data_offsets"]
                checksum = zlib.crc32(content[8 + length + start : 8 + length + end], checksum)
            file["columns_crc32"] = checksum
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    else:
        (folder / INDEX).write_text(json.dumps(index))
    try:
        index = json.loads((folder / INDEX).read_text())
        index.pop("index_sha256", None)
        text = json.dumps(index, sort_keys=True).encode()
        (folder / INDEX).write_text(json.dumps({**index, "index_sha256": hashlib.sha256(text).hexdigest()}))
    except (OSError, ValueError, TypeError, AttributeError):
        pass


def damage(folder: Path, rng: np.random.Generator) -> Path:
    """Damage one file of a dataset."""
    paths = list_files(folder)
    path = paths[rng.integers(len(paths))]
    path.write_bytes(damage_inside(path, rng) if rng.random() < 0.7 else damage_bytes(path.read_bytes(), rng))
    if (folder / INDEX).is_file() and rng.random() < 0.9:
        sign_dataset(folder)
    return path


READERS = {name: Reader(write, read, damage) for name, (write, read) in KINDS.items()}


# -- claims that are refused before anything is allocated, and paths that leave their folder


def write(name: str, folder: Path) -> Path:
    folder.mkdir()
    KINDS[name][0](folder)
    return folder


def check_refused(name: str, folder: Path, sentence: str) -> None:
    tracemalloc.start()
    with pytest.raises(UserError) as refused:
        KINDS[name][1](folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sentence in str(refused.value)
    assert peak < ALLOWED_BYTES


def header(shape: tuple[int, ...], descr: str) -> bytes:
    """Return the header of an array that claims a shape."""
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def test_columns_that_claim_terabytes(tmp_path):
    folder = write("dopamine", tmp_path / "log")
    path = folder / "$store$_action_ckpt.0.gz"
    path.write_bytes(gzip.compress(header((2**40,), "<i4")))
    check_refused("dopamine", folder, "action_ckpt.0.gz: its column claims 4,398,046,511,104 bytes")
    path.write_bytes(gzip.compress(npy(COLUMNS["action"])))
    (folder / "add_count_ckpt.0.gz").write_bytes(gzip.compress(header((2**40,), "<i8")))
    check_refused("dopamine", folder, "add_count_ckpt.0.gz is damaged: it does not hold a number of rows")


def test_a_gzip_bomb(tmp_path):
    """A record whose gigabyte of zeros is compressed to a megabyte."""
    folder = write("episodes", tmp_path / "records")
    head = struct.pack("<Q", 2**30)
    packer = zlib.compressobj(1, wbits=31)
    content = packer.compress(head + struct.pack("<I", masked_crc(head)))
    content += b"".join(packer.compress(bytes(2**20)) for _ in range(64)) + packer.flush()
    (folder / "run_1-00000-of-00001").write_bytes(content)
    check_refused("episodes", folder, "the record at byte 0 claims 1,073,741,824 bytes")


@pytest.mark.parametrize("side", [9_000, 60_000])
def test_frames_that_claim_many_pixels(side, tmp_path):
    """Only the header of the image is read; Pillow itself refuses the larger one."""
    start = b"IHDR" + struct.pack(">II", side, side) + PNGS[0][24:29]
    hostile = PNGS[0][:12] + start + struct.pack(">I", zlib.crc32(start)) + PNGS[0][33:]
    columns = {"o_t": [hostile] * 4, "o_tp1": PNGS[:4], "a_t": [2], "r_t": [1.0], "d_t": [0.0]}
    folder = write("transitions", tmp_path / "records")
    (folder / "run_1-00000-of-00001").write_bytes(gzip.compress(record(example(columns))))
    check_refused("transitions", folder, "a frame is ")


def shard_of(folder: Path) -> Path:
    (path,) = folder.glob("rows-*")
    return path


def test_compressed_blocks_that_claim_a_petabyte(tmp_path):
    """A frame of zstd says how large it is; with the magic bytes, 0xE0 says that 8 bytes of size follow."""
    folder = write("images", tmp_path / "dataset")
    content = bytearray(shard_of(folder).read_bytes())
    length = int.from_bytes(content[:8], "little")
    start = 8 + length + json.loads(content[8 : 8 + length])["frames"]["data_offsets"][0]
    content[start : start + 13] = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**50)
    shard_of(folder).write_bytes(content)
    sign_dataset(folder)
    check_refused("images", folder, "block 0, at byte 0 of its frames (it claims 1,125,899,906,842,624 bytes, not 32)")


def test_shards_with_a_huge_header(tmp_path):
    folder = write("vectors", tmp_path / "dataset")
    content = shard_of(folder).read_bytes()
    shard_of(folder).write_bytes(struct.pack("<Q", 2**60) + content[8:])
    check_refused("vectors", folder, "cannot be read")


def test_names_in_an_index_stay_in_its_folder(tmp_path):
    """Neither `..`, an absolute path nor a link leads out; a link to another file of the folder is followed."""
    folder = write("vectors", tmp_path / "dataset")
    path = shard_of(folder)
    index = json.loads((folder / INDEX).read_text())
    outside = tmp_path / path.name
    shutil.copy(path, outside)
    for name in (f"../{path.name}", str(outside), "..", "", f"{path.name}/"):
        index["files"][0]["name"] = name
        (folder / INDEX).write_text(json.dumps(index))
        sign_dataset(folder)
        check_refused("vectors", folder, f"describes a file named {name!r}, which is not a name in this folder.")
    index["files"][0]["name"] = path.name
    (folder / INDEX).write_text(json.dumps(index))
    sign_dataset(folder)
    path.rename(folder / "other")
    path.symlink_to("other")
    KINDS["vectors"][1](folder)
    path.unlink()
    path.symlink_to(outside)
    check_refused("vectors", folder, "which lies outside of this folder")


# -- many cases


def test_valid_datasets_are_read(tmp_path):
    for name, (write, read) in KINDS.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name)
        read(tmp_path / name)
    assert len([*read_examples(tmp_path / "episodes" / "run_1-00000-of-00001")]) == 2


def test_damaged_datasets_are_read_or_refused():
    check_all(READERS, __file__, 0, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_damaged_datasets_are_read_or_refused(part):
    check_all(READERS, __file__, QUICK + part * MANY // PARTS, MANY // PARTS)


if __name__ == "__main__":
    run_child(READERS)

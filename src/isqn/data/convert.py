"""Conversion of a source to a dataset: all of it or a subset of each checkpoint. Stopped conversions can resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from isqn.data.dataset import Dataset, DatasetWriter, Piece, Provenance, check_output_folder
from isqn.data.sample import CONTEXT, INSIDE, TERMINATED, TRUNCATED
from isqn.data.sources import Part, Source, minari_digest, minari_storage
from isqn.keys import host_generator
from isqn.types import EnvSpec, Interrupted, UserError

SUBSETS = ("all", "first", "random-episodes")


def check_subset(subset: str, fraction: float, checkpoints: int, where: str = "") -> None:
    """Check the subset settings of `isqn data convert` or of a study; `where` precedes their names in messages."""
    if subset not in SUBSETS:
        raise UserError(f"{where}subset is {subset!r}; choose one of {', '.join(SUBSETS)}.")
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise UserError(f"{where}fraction is {fraction!r}; it must be above 0 and at most 1.")
    if (subset == "all") != (fraction == 1):
        raise UserError(
            f"{where}fraction is {fraction:g} and {where}subset {subset}; it must be 1 for all, and below 1 for first "
            "and random-episodes."
        )
    if type(checkpoints) is not int or checkpoints < 1:
        raise UserError(f"{where}checkpoints is {checkpoints!r}; it must be a whole number of at least 1.")


def convert(
    source: Source,
    spec: EnvSpec,
    out: Path,
    *,
    subset: str = "all",
    fraction: float = 1.0,
    seed: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    report: Callable[[int], None] = lambda transitions: None,
) -> bool:
    """Write the dataset part by part; return False if it was already complete.

    After a crash, the finished parts are intact, and the same call resumes from there.
    """
    if not source.parts:
        raise UserError("There is nothing to convert: no file of the source was found.")
    checkpoints = len({part.checkpoint for part in source.parts})
    writer = DatasetWriter(out, spec, Provenance(source.policy, source.kind, subset, fraction, seed, checkpoints))
    index = writer.resume(identity=source.identity)
    if index.get("complete"):
        return False
    done, transitions = list(index.get("done", ())), index.get("transitions", 0)
    for part in source.parts:
        if part.name in done:
            continue
        part = part._replace(pieces=partial(finite_pieces, source.kind, part))
        for piece in prefetch(select_subset(part, subset, fraction, seed)):
            if should_stop():
                raise Interrupted(
                    f"stopped after {len(done)} of {len(source.parts)} parts; run the same command to resume"
                )
            writer.extend(piece)
            transitions += piece.num_transitions
            report(transitions)
        done.append(part.name)
        complete = len(done) == len(source.parts)
        if complete and not writer.total:
            hint = f"; take a larger fraction than {fraction:g}" if subset != "all" else ""
            raise UserError(f"The subset contains no transition{hint}.")
        writer.save(tidy=True, identity=source.identity, done=done, transitions=transitions, complete=complete)
    return True


def finite_pieces(kind: str, part: Part) -> Iterator[Piece]:
    """Yield the pieces of a part; refuse one whose observations, actions or rewards are not finite."""
    for number, piece in enumerate(part.pieces()):
        with np.errstate(over="ignore"):
            rewards = np.asarray(piece.rewards, np.float32)  # as they are stored
        columns = {"observation": piece.frames, "action": piece.actions, "reward": rewards}
        for name, column in columns.items():
            if column.dtype.kind != "f" or (is_finite := np.isfinite(column.reshape(len(column), -1)).all(1)).all():
                continue
            row = int((~is_finite).argmax())
            step = row - int((piece.ends == CONTEXT).sum())
            where = f"step {step}" if step >= 0 else f"row {row} of its context"
            raise UserError(
                f"{kind}, {part.name}: the {name} at {where} of episode {number} (both from 0) is NaN or infinite; "
                "correct it in the source, or leave the episode out there."
            )
        yield piece


def prefetch(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield the same pieces, reading each one in a thread while the previous one is compressed."""
    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(next, pieces, None)
        while (piece := pending.result()) is not None:
            pending = thread.submit(next, pieces, None)
            yield piece


def select_subset(part: Part, subset: str, fraction: float, seed: int) -> Iterator[Piece]:
    """Yield all of a checkpoint, its first transitions, or a random subset of its episodes."""
    remaining = round(fraction * part.size)
    for number, piece in enumerate(part.pieces()):
        if subset == "random-episodes":
            if host_generator(seed, "subset", part.checkpoint, number).random() < fraction:
                yield piece
        elif subset == "all":
            yield piece
        else:
            if remaining <= 0:
                return
            yield first_transitions(piece, remaining)
            remaining -= piece.num_transitions


def first_transitions(piece: Piece, max_transitions: int) -> Piece:
    """Truncate a piece after at most so many transitions."""
    starts = np.flatnonzero(piece.ends == INSIDE)
    if len(starts) <= max_transitions:
        return piece
    rows = int(starts[max_transitions]) + 1  # including the row that the last step leads to
    cut = Piece(*(column[:rows].copy() for column in piece))
    cut.ends[-1], cut.actions[-1], cut.rewards[-1] = TRUNCATED, 0, 0
    return cut


def export_to_minari(folder: Path, out: Path) -> bool:
    """Export a dataset to Minari, without stacking frames; return False if it was already exported."""
    dataset, storage_class = Dataset.open(folder), minari_storage()
    dataset.require_complete()
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer

    check_output_folder(out)
    if out.exists() and any(out.iterdir()):
        if minari_digest(out) == dataset.digest:
            return False
        raise UserError(f"{out} is not empty; give --out another folder.")
    spec = dataset.spec
    dtype: Any = np.dtype(spec.frame_dtype)
    if dtype.kind == "b":
        observation_space: spaces.Space[Any] = spaces.MultiBinary(spec.frame_shape)
    else:
        low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        observation_space = spaces.Box(low, high, spec.frame_shape, dtype)
    action_space: spaces.Space[Any] = spaces.Discrete(spec.num_actions, start=spec.first_action)
    if spec.is_continuous:
        action_dtype: Any = np.dtype(spec.action_type)
        bounds = (spec.action_low, spec.action_high)
        lowest, highest = (np.array(bound, action_dtype).reshape(spec.action_box) for bound in bounds)
        action_space = spaces.Box(lowest, highest, dtype=action_dtype)
    temporary = out.with_name(f".{out.name}.writing")  # left by a crash, it is removed by the next call
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "data").mkdir(parents=True)
    storage = storage_class.new((temporary / "data").resolve(), observation_space, action_space, jpeg_encoding=False)

    def episodes() -> Iterator[Any]:
        for number, piece in enumerate(piece for piece in dataset.pieces() if piece.num_transitions):
            rows = np.flatnonzero(piece.ends != CONTEXT)
            length = len(rows) - 1
            ended = np.zeros((2, length), bool)
            ended[0 if piece.ends[-1] == TERMINATED else 1, -1] = True
            yield EpisodeBuffer(
                id=number,
                observations=piece.frames[rows],
                actions=spec.to_env_action(piece.actions[rows[:-1]].astype(spec.action_dtype)),
                rewards=piece.rewards[rows[:-1]].tolist(),
                terminations=ended[0].tolist(),
                truncations=ended[1].tolist(),
            )

    storage.update_episodes(episodes())
    # Minari's naming scheme
    name = f"{spec.id.partition('-v')[0].replace('/', '-').lower()}/{folder.resolve().name}-v0"
    extra = {"isqn_env_id": spec.id, "isqn_digest": dataset.digest}
    storage.update_metadata({"dataset_id": name, "algorithm_name": dataset.index["policy"], **extra})
    temporary.replace(out)
    return True

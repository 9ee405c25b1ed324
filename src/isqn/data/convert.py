"""Conversion of a source to a dataset: all of it or a subset of each checkpoint. Stopped conversions can resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from isqn.data.dataset import DatasetWriter, Piece, Provenance
from isqn.data.files import lock_folder
from isqn.data.sample import CONTEXT, INSIDE, TRUNCATED
from isqn.data.sources import Part, Source
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
    with lock_folder(out, "choose another --out"):
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

"""Damaged run folders, checkpoints, models, study files and data of words are read or refused.

Checksums are mostly made right again after the damage, so that the damage itself is read. A sentence that refuses a
file names it, and the line if it is a table or has no syntax.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fuzzing import (
    ALLOWED_BYTES,
    MANY,
    PARTS,
    Reader,
    check_all,
    damage_file,
    damage_json,
    list_files,
    run_child,
    sign,
)
from helpers import gpt2_weights, make_spec, play_episodes, run_config, write_run, write_table
from isqn import Model
from isqn.analysis.results import Results, read_run, read_score_dict, write_score_dict
from isqn.data.files import DamagedFile
from isqn.data.replay import Replay
from isqn.envs.adapter import make_run_environment
from isqn.envs.registry import make_native
from isqn.language import training
from isqn.language.data import People, read_ilql_json, simulate_people, source_from_file, write_tweets
from isqn.language.game import SPEC
from isqn.language.gpt2 import load_weights
from isqn.language.words import COMMON, read_words
from isqn.report.collect import collect
from isqn.study.cell import Cell
from isqn.study.grid import read_study, to_toml
from isqn.study.jobs import _seeds_trained_with
from isqn.train import checkpoint, compiled, host, offline, online, record, run
from isqn.train.evaluate import load_agent_state
from isqn.train.functions import compile_agent, make_run_agent, zero_totals
from isqn.train.progress import Progress
from isqn.train.seeds import load_rows
from isqn.train.tables import require_tables
from isqn.types import UserError

DATA = Path(__file__).parent / "data"
RESUME = DATA / "resume"
QUICK = 600  # cases in `make test`
EXAMPLES = Path(__file__).parents[1] / "examples"
SUMMARY_NOISE = {"versions": {"jax": "1"}, "imports": [], "learned_from": {"games": "games", "words": 3}}
EPOCHS = [1.0, [2.5, -3.0], 4.0]


def attempt(*readers: Callable[[], Any]) -> None:
    """Call every reader; raise all refusals as one."""
    refusals = []
    for read in readers:
        try:
            read()
        except UserError as error:
            refusals.append(str(error))
    if refusals:
        raise UserError("\n".join(refusals))


HAS_LINE = re.compile(r", line \d+|\(at line \d+")
NO_LINE = ("is missing", "shorter than", "digits", "recursion", "is empty")


def check_sentences(path: Path, message: str) -> None:
    """Each sentence names the damaged file or its folder, and the line where a table or syntax is damaged."""
    for sentence in message.splitlines():
        assert str(path) in sentence or str(path.parent) in sentence, sentence
        is_of_a_line = path.suffix == ".csv" or re.search("not UTF-8|not JSON|not valid TOML", sentence)
        if str(path) in sentence and is_of_a_line and not any(words in sentence for words in NO_LINE):
            assert HAS_LINE.search(sentence), sentence


def check_path(path: Path, message: str) -> None:
    assert str(path) in message, message


def check_model(path: Path, message: str) -> None:
    """A model that does not fit its config names its folder, because either can be damaged."""
    assert message.startswith(str(path.parents[path.parent.name == "model"])), message


# -- run folders

CONFIG = run_config(epochs=len(EPOCHS))


def write_runs(folder: Path) -> None:
    """Write a finished run and an unfinished one."""
    for seed, finished in ((0, True), (1, False)):
        config = CONFIG.replace(seed=seed)
        write_run(
            folder / f"seed-{seed}", config, EPOCHS, finished=finished, metrics={"loss": [1, 2, ""]}, **SUMMARY_NOISE
        )


def read_runs(folder: Path) -> None:
    readers: list[Callable[[], Any]] = [lambda: collect(folder)]
    for seed in (0, 1):
        readers += readers_of_run(folder / f"seed-{seed}", CONFIG.replace(seed=seed), ("episodes", "metrics"))
    attempt(*readers)


def half_length(path: Path) -> int:
    """Return the length of about half of the rows."""
    content = path.read_bytes()
    return content.rfind(b"\n", 0, len(content) // 2) + 1


def readers_of_run(run_dir: Path, config: Any, tables: tuple[str, ...]) -> list[Callable[[], Any]]:
    lengths = {name: half_length(run_dir / f"{name}.csv") for name in tables}
    return [
        lambda: record.read_config(run_dir),
        lambda: record.read_summary(run_dir, strict=True),
        lambda: record.run_state(run_dir),
        lambda: read_run(run_dir, config, config.env_id, config.label),
        lambda: require_tables(run_dir, lengths),
        lambda: run._folders_of_program(run_dir),
        lambda: _seeds_trained_with(run_dir, 0),
    ]


def write_offline_run(folder: Path) -> None:
    shutil.copytree(RESUME / "cql", folder / "seed-0")
    write_table(folder / "seed-0" / "measures.csv", {"epoch": [0, 1], "step": [0, 20], "score": [0.5, ""]})


def read_offline_run(folder: Path) -> None:
    config = cql_run()[0]
    tables = ("evaluations", "metrics", "measures")
    attempt(lambda: collect(folder), *readers_of_run(folder / "seed-0", config, tables))


def damage_texts(folder: Path, rng: np.random.Generator) -> Path:
    """Damage one of the text files of run folders."""
    for path in list_files(folder):
        if path.suffix not in (".toml", ".csv", ".json") or path.name == "manifest.json":
            path.unlink()
    for path in sorted(folder.rglob("manifest.json")):
        path.unlink()
    return damage_file(folder, rng)


@cache
def study() -> Any:
    return read_study(EXAMPLES / "quickstart.toml").only(seeds=(0,))


def write_study_folder(folder: Path) -> None:
    (folder / "study.toml").write_text(to_toml(study()))
    for cell in study().cells:
        config: Any = cell.config.replace(seed=0)
        write_run(cell.folder(folder, 0), config, [1.0] * config.num_epochs)


def read_study_folder(folder: Path) -> None:
    cells: list[Cell] = list(study().cells)
    attempt(
        lambda: collect(folder), *(lambda cell=cell: _seeds_trained_with(cell.folder(folder, 0), 0) for cell in cells)
    )


def check_study_folder(path: Path, message: str) -> None:
    for sentence in message.splitlines():
        assert str(path) in sentence or "/runs/" in sentence or path.name == "study.toml", sentence


# -- checkpoints


def sign_runs(folder: Path) -> None:
    """Make all checksums of checkpoints, models and the files beside them right."""
    for path in folder.rglob("manifest.json"):
        try:
            manifest = json.loads(path.read_text())
            for name in checkpoint.SHARED_FOLDERS:
                sign_files(manifest.get(name, {}), path.parents[2] / name)
            manifest["state_sha256"] = checkpoint._digest(path.with_name("state.safetensors"))
            path.write_text(json.dumps(sign(manifest, "manifest_sha256")))
        except (OSError, ValueError, AttributeError, TypeError, RecursionError):
            pass


def sign_files(description: Any, folder: Path) -> Any:
    """Set the sizes and checksums of the files that a description names, where it is as it should be."""
    try:
        for file in description["files"]:
            content = (folder / file["name"]).read_bytes()
            file["bytes"], file["sha256"] = len(content), hashlib.sha256(content).hexdigest()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return description


def damage_and_sign(folder: Path, rng: np.random.Generator) -> Path:
    path = damage_file(folder, rng)
    if rng.random() < 0.9:
        sign_runs(folder)
    return path


def write_resumable(name: str) -> Callable[[Path], Any]:
    """Return a function that copies a run of an earlier version, without what a resumed run does not read."""

    def write(folder: Path) -> None:
        shutil.copytree(RESUME / name, folder / "run", ignore=shutil.ignore_patterns("best-*"))

    return write


@cache
def host_agent(name: str) -> Any:
    config: Any = record.read_config(RESUME / name)
    with make_run_environment(config) as env:
        return make_run_agent(config, env.spec)


@cache
def host_run(name: str) -> Any:
    config: Any = record.read_config(RESUME / name)
    env = make_run_environment(config)
    agent = make_run_agent(config, env.spec)
    totals = zero_totals(agent, config, env.spec)
    return config, env, online.make_replay_factory(config, env.spec), compile_agent(agent), totals


def read_host_run(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        config, *parts = host_run(name)
        *_, session = host._open(config, folder / "run", *parts, Progress(1, enabled=False))
        session.close()

    return read


@cache
def compiled_run() -> Any:
    config: Any = record.read_config(RESUME / "dqn-compiled" / "seed-0").replace(num_seeds=2)
    env = make_native(config.env_id)
    agent, replay = make_run_agent(config, env.spec), online.make_device_replay(config, env.spec)
    loop = compiled.make_loop(config, agent, env, replay)
    template = jax.eval_shape(loop.init, np.arange(2))
    totals = jax.tree.map(lambda leaf: np.zeros((2, *leaf.shape), leaf.dtype), zero_totals(agent, config, env.spec))
    return template, totals, replay


def read_compiled_run(folder: Path) -> None:
    compiled._restore([folder / "run" / f"seed-{seed}" for seed in (0, 1)], *compiled_run())


@cache
def cql_run() -> Any:
    config: Any = record.read_config(RESUME / "cql")
    env = make_run_environment(config)
    agent = make_run_agent(config, env.spec)
    return config, jax.jit(agent.init)(0), zero_totals(agent, config, env.spec)


def read_cql_run(folder: Path) -> None:
    class Source:
        folder = "data"
        digest = "digest"

    _, state, totals = cql_run()
    with suppress(IndexError, ValueError, KeyError, TypeError):
        Source.digest = json.loads(next((folder / "run").glob("checkpoints/*/manifest.json")).read_text())[
            "learned_from"
        ]
    offline._restore(folder / "run", state, totals, Source(), lambda state: state, Progress(1, enabled=False))


def read_agent(folder: Path) -> None:
    """Load an agent as `isqn eval` does."""
    agent = host_agent("dqn-host")
    attempt(*(lambda which=which: load_agent_state(folder / "run", agent, which) for which in ("last", "best")))


def write_config(folder: Path) -> None:
    """Write a checkpoint with the settings of its run, whose config.toml is missing."""
    run_dir = folder / "run"
    checkpoint.write(checkpoint.folder_of(run_dir, 5), {"x": np.zeros(3)}, {"config": CONFIG.to_json(), "counters": {}})


def read_restored_config(folder: Path) -> None:
    attempt(lambda: run._require_unchanged(folder / "run", CONFIG), lambda: record.restore_config(folder / "run"))


# -- files of replay buffers

FRAME = make_spec((3, 3, 2), "uint8", 2)


def make_replay(compress: bool) -> Replay:
    return Replay(FRAME, 40, compress=compress, discount=0.9)


def write_replay(compress: bool) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        replay = make_replay(compress)
        for _ in play_episodes(FRAME, [(9, "terminated"), (30, "truncated"), (13, "none")], 0, replay):
            pass
        (folder / "replay.json").write_text(json.dumps(replay.save(folder / "replay")))

    return write


def read_replay(compress: bool) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        replay = make_replay(compress)
        try:
            replay.restore(json.loads((folder / "replay.json").read_text()), folder / "replay")
        except DamagedFile as error:
            raise UserError(str(error)) from None
        replay.gather(replay.valid_starts())

    return read


def damage_replay(folder: Path, rng: np.random.Generator) -> Path:
    """Damage the description of a replay buffer or one of its files, and make the checksums right."""
    description = json.loads((folder / "replay.json").read_text())
    if rng.random() < 0.4:
        description, path = damage_json(description, rng), folder / "replay.json"
    else:
        path = damage_file(folder / "replay", rng)
    if rng.random() < 0.9:
        sign_files(description, folder / "replay")
    (folder / "replay.json").write_text(json.dumps(description))
    return path


# -- models, weights and policies


def write_model(folder: Path) -> None:
    shutil.copytree(DATA / "model-0.1.0", folder / "model", ignore=shutil.ignore_patterns("expected.json"))


def read_weights(folder: Path) -> None:
    load_weights(folder / "gpt2.safetensors", gpt2_template())


@cache
def gpt2_template() -> Any:
    from isqn.language.gpt2 import GPT2, Size

    tokens = np.zeros((1, 2), np.int32)
    return jax.jit(GPT2(Size(35, 7, 4, 2, 2)).init)(jax.random.key(0), tokens)["params"]


@cache
def ilql_run() -> Any:
    config: Any = record.read_config(RESUME / "ilql")
    return config, jax.jit(make_run_agent(config, SPEC).init)(0).policy


def read_policy(folder: Path) -> None:
    training._load_policy(folder / "run", *ilql_run())


# -- studies, scores and words


def read_a_study(folder: Path) -> None:
    attempt(*(lambda code=code: read_study(folder / "study.toml", import_code=code) for code in (False, True)))


def write_scores(folder: Path) -> None:
    scores = {"DQN": np.arange(24.0).reshape(2, 3, 4), "TF-DQN": np.ones((2, 3, 4))}
    write_score_dict(folder / "scores.json", Results(("a", "b", "c"), (0, 1), {}, (), ("a note",)), scores, "a scale")


def write_games(folder: Path) -> None:
    grids = [["<b><y><g><b><b>", "<g><g><g><g><g>"], ["<b><b><b><b><b>"] * 6, ["<y><y><b><b><b>"]]
    content = {"games": [["panic", grid] for grid in grids * 4], "transitions": {"a": 1}}
    (folder / "games.json").write_text(json.dumps(content))
    (folder / "human_train_idxs.json").write_text(json.dumps([*range(9)]))
    (folder / "human_eval_idxs.json").write_text(json.dumps([9, 10, 11]))


def write_some_tweets(folder: Path) -> None:
    write_tweets(folder / "tweets.csv", simulate_people(2, 0, COMMON, People()))


READERS = {
    "runs": Reader(write_runs, read_runs, damage_file, check_sentences),
    "offline run": Reader(write_offline_run, read_offline_run, damage_texts, check_sentences),
    "study folder": Reader(write_study_folder, read_study_folder, damage_file, check_study_folder),
    "host checkpoint": Reader(write_resumable("dqn-host"), read_host_run("dqn-host"), damage_and_sign),
    "recording checkpoint": Reader(
        write_resumable("dqn-host-chain-of-copies"), read_host_run("dqn-host-chain-of-copies"), damage_and_sign
    ),
    "compiled checkpoint": Reader(write_resumable("dqn-compiled"), read_compiled_run, damage_and_sign),
    "offline checkpoint": Reader(write_resumable("cql"), read_cql_run, damage_and_sign),
    "policy checkpoint": Reader(write_resumable("ilql"), read_policy, damage_and_sign),
    "agent": Reader(
        lambda folder: shutil.copytree(RESUME / "dqn-host", folder / "run", ignore=shutil.ignore_patterns("replay")),
        read_agent,
        damage_and_sign,
    ),
    "config in a checkpoint": Reader(write_config, read_restored_config, damage_and_sign),
    "model": Reader(write_model, lambda folder: Model.load(folder / "model"), damage_and_sign, check_model),
    "raw replay": Reader(write_replay(False), read_replay(False), damage_replay),
    "compressed replay": Reader(write_replay(True), read_replay(True), damage_replay),
    "study": Reader(
        lambda folder: shutil.copy(EXAMPLES / "quickstart.toml", folder / "study.toml"),
        read_a_study,
        damage_file,
        check_sentences,
    ),
    "scores": Reader(write_scores, lambda folder: read_score_dict(folder / "scores.json"), damage_file, check_path),
    "words": Reader(
        lambda folder: (folder / "words.txt").write_text("\n".join(COMMON[:20]) + "\n"),
        lambda folder: read_words(folder / "words.txt"),
        damage_file,
        check_path,
    ),
    "tweets": Reader(
        write_some_tweets, lambda folder: source_from_file(folder / "tweets.csv", COMMON), damage_file, check_path
    ),
    "games": Reader(
        write_games,
        lambda folder: attempt(
            lambda: read_ilql_json(folder / "games.json"), lambda: source_from_file(folder / "games.json", COMMON)
        ),
        damage_file,
        check_path,
    ),
    "GPT-2 weights": Reader(
        lambda folder: save_file(gpt2_weights(4, 2, 35, 9), folder / "gpt2.safetensors"),
        read_weights,
        damage_file,
        check_path,
    ),
}


# -- claims that are refused before anything is allocated


def peak_while(read: Callable[[], Any]) -> int:
    tracemalloc.start()
    read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def check_refused(read: Callable[[], Any], sentence: str) -> None:
    def refused() -> None:
        with pytest.raises((UserError, DamagedFile), match=re.escape(sentence)):
            read()

    assert peak_while(refused) < ALLOWED_BYTES


def test_an_epoch_does_not_decide_how_long_a_list_is(tmp_path):
    folder = write_run(tmp_path / "run", CONFIG, EPOCHS, finished=False)
    path = folder / "episodes.csv"
    path.write_text(path.read_text().replace("\n2,3,", "\n99999999999999,3,"))
    sentence = f"{path}, line 5, is damaged: epoch is 99999999999999, and the run has at most 100,000."
    check_refused(lambda: read_run(folder, CONFIG, "task", "method"), sentence)


def test_a_key_of_many_parts_is_refused_with_its_line(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(
        'question = "..............................................................."\n' + "a." * 20_000 + "a = 1\n"
    )
    check_refused(lambda: read_study(path), f"{path}, line 2, is damaged: a key has too many parts.")
    path.write_text("hidden_sizes = [" + "1.5, " * 20_000 + "]\n" + 'note = "' + "some words. " * 20_000 + '"\n')
    check_refused(lambda: read_study(path), f"{path}: 'hidden_sizes' is not a field of a study")


def test_rows_that_claim_terabytes(tmp_path):
    write_resumable("dqn-compiled")(tmp_path)
    (path,) = (tmp_path / "run" / "seed-0").glob("checkpoints/*/manifest.json")
    files = json.loads(path.read_text())["replay"]["files"]
    files[1]["since"] += 2**40
    folder, replay = tmp_path / "run" / "seed-0" / "replay", compiled_run()[2]
    check_refused(lambda: load_rows(folder, files, replay), "which do not follow one another.")
    files = [{**files[-1], "since": 0, "until": 2**40}]
    check_refused(lambda: load_rows(folder, files, replay), "its arrays are not those of 1,099,511,627,776 rows.")


def test_compressed_blocks_of_a_replay_buffer_that_claim_a_petabyte(tmp_path):
    """A frame of zstd says how large it is; with the magic bytes, 0xE0 says that 8 bytes of size follow."""
    write_replay(True)(tmp_path)
    for path in (tmp_path / "replay").iterdir():
        arrays = load_file(path)
        if arrays["frames"].size:
            arrays["frames"][:13] = np.frombuffer(b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**50), np.uint8)
            save_file(arrays, path)
    description = json.loads((tmp_path / "replay.json").read_text())
    (tmp_path / "replay.json").write_text(json.dumps(sign_files(description, tmp_path / "replay")))
    check_refused(lambda: read_replay(True)(tmp_path), "it claims 1,125,899,906,842,624 bytes, not 144")


# -- many cases


def test_damaged_runs_are_read_or_refused():
    check_all(READERS, __file__, 0, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_damaged_runs_are_read_or_refused(part):
    check_all(READERS, __file__, QUICK + part * MANY // PARTS, MANY // PARTS)


if __name__ == "__main__":
    run_child(READERS)

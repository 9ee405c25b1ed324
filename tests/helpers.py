"""Small things that several tests use."""

from __future__ import annotations

import csv
import shutil
import sys
import time
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import gymnasium
import jax
import numpy as np

from isqn import imports
from isqn.agents import dqn
from isqn.agents import registry as agent_registry
from isqn.agents.dqn import DqnConfig
from isqn.config.toml import to_toml
from isqn.data.replay import Replay
from isqn.data.text import read_table
from isqn.envs import registry as env_registry
from isqn.losses import LOSSES
from isqn.schemes import SCHEMES
from isqn.torsos import TORSOS
from isqn.train import checkpoint, online, record, run, tables
from isqn.types import EnvSpec, Transition

SMALL = EnvSpec("small", "test", (3,), "float32", 4)
ALL_SCHEMES = [
    ("target-based", 1),
    ("target-free", 1),
    ("iterated-shared", 3),
    ("ensemble-shared", 2),
    ("iterated-target-based", 3),
]


TINY_WRITER = {"num_layers": 1, "model_width": 8, "attention_heads": 2, "head_hidden_size": 6, "num_words": 8}


def gpt2_weights(width: int, layers: int, vocabulary: int, positions: int) -> dict[str, np.ndarray]:
    """Drawn at random, under the usual names."""
    rng, w = np.random.default_rng(1), width
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, w), "wpe.weight": (positions, w)}
    norms = ["ln_f", *(f"h.{layer}.ln_{n}" for layer in range(layers) for n in (1, 2))]
    for layer in range(layers):
        for name, ins, outs in (
            *(("attn.c_attn", w, 3 * w), ("attn.c_proj", w, w)),
            *(("mlp.c_fc", w, 4 * w), ("mlp.c_proj", 4 * w, w)),
        ):
            shapes |= {f"h.{layer}.{name}.weight": (ins, outs), f"h.{layer}.{name}.bias": (outs,)}
    shapes |= {f"{norm}.{part}": (w,) for norm in norms for part in ("weight", "bias")}
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def random_batch(spec: EnvSpec = SMALL, size: int = 8, seed: int = 0) -> Transition:
    rng = np.random.default_rng(seed)

    def observations() -> np.ndarray:
        shape = (size, *spec.obs_shape)
        if spec.frame_dtype == "float32":
            return rng.normal(size=shape).astype(np.float32)
        return rng.integers(0, 256, shape).astype(spec.frame_dtype)

    return Transition(
        obs=observations(),
        action=rng.integers(0, spec.num_actions, size).astype(np.int32),
        reward=rng.normal(size=size).astype(np.float32),
        discount=(0.9 * (rng.random(size) < 0.8)).astype(np.float32),
        next_obs=observations(),
    )


def make_agent(spec: EnvSpec = SMALL, **fields):
    config = DqnConfig(**{"hidden_sizes": (5,), "learning_rate": 0.01} | fields)
    return config, dqn.make(config, spec)


def assert_trees_close(actual, expected, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


# -- runs

CLOCKS = {"seconds", "steps_per_second", "memory_mb", "waiting_share"}


def final(run_dir: Path) -> dict:
    """Everything that must not depend on interruptions: parameters, counters, replay, files, tables without clocks."""
    step = checkpoint.steps(run_dir)[0]
    arrays, manifest = checkpoint.read(checkpoint.folder_of(run_dir, step))
    rows = {
        path.name: [{k: v for k, v in row.items() if k not in CLOCKS} for row in read_table(path)]
        for path in (run_dir / "metrics.csv", tables.results_table(run_dir))
    }
    counters = {k: v for k, v in manifest["counters"].items() if k != "seconds"}
    best = {path.name: checkpoint.read(path)[0] for path in run_dir.glob("best-*")}
    return {
        "arrays": arrays,
        "best": best,
        "counters": counters,
        "tables": rows,
        "rows": replay_rows(run_dir, manifest) if "replay" in manifest else {},
        "files": {name: manifest.get(name, {}).get("files", []) for name in checkpoint.SHARED_FOLDERS},
    }


def replay_rows(run_dir: Path, manifest: dict) -> dict:
    """The replay itself, whatever files it is spread over."""
    config = record.read_config(run_dir)
    spec = run.specification(config)
    if online.uses_compiled_loop(config):
        from isqn.train.compiled import load_rows

        return load_rows(
            run_dir / "replay", manifest["replay"]["files"], online.make_device_replay(config, spec)
        )._asdict()
    replay: Replay = online.make_replay_factory(config, spec)()
    replay.restore(manifest["replay"], run_dir / "replay")
    return replay.gather(replay.valid_starts())._asdict()


def assert_same(left, right, path="run"):
    if isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_same(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, np.ndarray):
        np.testing.assert_array_equal(left, right, err_msg=path)
    else:
        assert left == right, path


def copy_unfinished(finished: Path, folder: Path) -> Path:
    """Copy a run, as it was before its last epoch."""
    shutil.copytree(finished, folder)
    shutil.rmtree(checkpoint.folder_of(folder, checkpoint.steps(folder)[0]))
    record.write_summary(folder, {"status": "running", "trained_with": ["."]})
    return folder


def stop_after(monkeypatch, calls: int):
    """Ask the loop to stop, after it has checked for that `calls` times."""

    @contextmanager
    def asked():
        left = iter(range(calls))
        yield lambda: next(left, None) is None

    monkeypatch.setattr(run, "stop_on_signals", asked)


# -- processes

WAIT_SECONDS = 300.0  # timeout of waits for what must come; no test of speed


def wait_for(condition, process=None):
    """Wait for a state that must come, and return it. A process that ends before that fails the test."""
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        if value := condition():
            return value
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("the state never came")


# -- compiled agents


def compile_functions(agent):
    """Return the agent with each of its functions compiled, once for all tests that share it."""
    names = ("init", "observe", "act", "update", "refresh", "sync")
    return agent._replace(**{name: jax.jit(getattr(agent, name)) for name in names})


@cache
def make_compiled_agent(spec: EnvSpec = SMALL, **fields):
    """Do the same as `make_agent`, but compile the agent, and return the same one for the same settings."""
    config, agent = make_agent(spec, **fields)
    return config, compile_functions(agent)


# -- code of a user


@contextmanager
def registries_restored():
    """Forget afterwards what the imports of a test register. Modules of installed packages stay imported."""
    for name in agent_registry.agent_names():
        agent_registry.find_agent(name)  # the built-in agents register themselves when they are first found
    registries = (LOSSES, SCHEMES, TORSOS, agent_registry._KINDS, env_registry._ENTRIES)
    imported, files, paths = list(imports.IMPORTED), set(imports._IMPORTED_FILES), list(sys.path)
    modules, environments = set(sys.modules), set(gymnasium.registry)
    with ExitStack() as stack:
        for registry in registries:
            stack.enter_context(patch.dict(registry))
        try:
            yield
        finally:
            imports.IMPORTED[:], sys.path[:] = imported, paths
            imports._IMPORTED_FILES.clear()
            imports._IMPORTED_FILES.update(files)
            own = {name for name in set(sys.modules) - modules if _is_of_a_user(sys.modules[name])}
            for env_id in set(gymnasium.registry) - environments:
                entry_point = gymnasium.registry[env_id].entry_point
                if not isinstance(entry_point, str) or entry_point.split(":")[0] in own:
                    del gymnasium.registry[env_id]
            for name in own:
                del sys.modules[name]


def _is_of_a_user(module) -> bool:
    """Whether the file of a module belongs neither to an installed package nor to this one."""
    file = getattr(module, "__file__", None)
    installed = (sys.prefix, sys.base_prefix, str(Path(imports.__file__).parent))
    return file is not None and not any(Path(file).is_relative_to(folder) for folder in installed)


# -- episodes for replays and datasets

DISCOUNT = 0.9
FRAMES = [  # (shape, dtype): words of 1, 2, 4 and 8 bytes; one or several channels
    ((3, 3, 1), "uint8"),
    ((2, 3, 3), "uint8"),
    ((4, 4, 1), "uint8"),
    ((2, 3, 2), "bool"),
    ((3,), "float32"),
    ((2,), "float64"),
]


def make_spec(shape=(4, 4, 1), dtype="uint8", stack=4, num_actions=5):
    return EnvSpec("Toy", "toy", shape, dtype, num_actions, frame_stack=stack)


def random_frame(spec, rng):
    if spec.frame_dtype in ("uint8", "bool"):
        return rng.integers(0, 2 if spec.frame_dtype == "bool" else 256, spec.frame_shape).astype(spec.frame_dtype)
    return rng.normal(size=spec.frame_shape).astype(spec.frame_dtype)


def play_episodes(spec, episodes, seed, *replays):
    """Add the same episodes, given as (length, end), to every replay, and yield after each row."""
    rng = np.random.default_rng(seed)
    for length, end in episodes:
        frame = random_frame(spec, rng)
        for replay in replays:
            replay.add_first(frame)
        yield
        for step in range(length):
            ends = (end in ("terminated", "both"), end in ("truncated", "both"))
            ends = ends if step == length - 1 else (False, False)
            transition = (int(rng.integers(spec.num_actions)), float(rng.normal() * 2), *ends, random_frame(spec, rng))
            for replay in replays:
                replay.add(*transition)
            yield


# -- run folders for analyses

METRICS = ("step", "frame", "updates", "epsilon", "loss", "q_value", "steps_per_second", "memory_mb", "seconds")


def write_table(path: Path, columns: dict[str, list]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def write_run(
    folder: Path, config: DqnConfig, epochs: list, *, finished: bool = True, metrics: dict | None = None, **summary
) -> Path:
    """Write a run folder. `epochs` has for each epoch the return of its only episode, or a list of returns."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    episodes = [
        (e, r) for e, returns in enumerate(epochs) for r in (returns if isinstance(returns, list) else [returns])
    ]
    rows = [(e, i, 10 * i + 10, 10 * i + 10, r, 10, i) for i, (e, r) in enumerate(episodes)]
    columns = zip(tables.EPISODE_COLUMNS, zip(*rows, strict=True) if rows else [()] * 7, strict=True)
    write_table(folder / "episodes.csv", {name: list(column) for name, column in columns})
    steps = [config.epoch_end(e) for e in range(len(epochs))]
    frames = 4 if config.env_id.startswith("ALE/") else 2  # different from steps, to catch a confusion of the two
    given = {"step": steps, **(metrics or {})}
    given["frame"] = [frames * step for step in given["step"]]
    given = {"seconds": [0.01 * step for step in given["step"]], "memory_mb": [250] * len(given["step"])} | given
    write_table(
        folder / "metrics.csv", {name: given.get(name, [""] * len(given["step"])) for name in (*METRICS, *given)}
    )
    about = {
        "protocol": "gymnasium",
        "trained_with": ["."],
        "cores": 1,
        "command": "/opt/bin/isqn train dqn",
        **summary,
    }
    record.write_summary(folder, {"status": "running", **about})
    if finished:
        record.write_summary(folder, {"status": "finished", **about, **tables.results(folder)})
    return folder


def run_config(task: str = "CartPole-v1", seed: int = 0, epochs: int = 3, **settings) -> DqnConfig:
    return DqnConfig(env_id=task, seed=seed, epoch_steps=1_000, total_timesteps=1_000 * epochs, **settings)

"""Small things that several tests use."""

from __future__ import annotations

import sys
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
from isqn.data.replay import Replay
from isqn.envs import registry as env_registry
from isqn.losses import LOSSES
from isqn.networks.torsos import MIN_IMAGE_SIDE, TORSOS
from isqn.schemes import SCHEMES
from isqn.train import checkpoint, online, record, run
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
    """Everything that must not depend on interruptions: parameters, counters, replay, tables without clocks."""
    step = checkpoint.steps(run_dir)[0]
    arrays, manifest = checkpoint.read(checkpoint.folder_of(run_dir, step))
    tables = {
        path.name: [{k: v for k, v in row.items() if k not in CLOCKS} for row in record.read_table(path)]
        for path in (run_dir / "metrics.csv", record.results_table(run_dir))
    }
    counters = {k: v for k, v in manifest["counters"].items() if k != "seconds"}
    best = {path.name: checkpoint.read(path)[0] for path in run_dir.glob("best-*")}
    return {
        "arrays": arrays,
        "best": best,
        "counters": counters,
        "tables": tables,
        "rows": replay_rows(run_dir, manifest) if "replay" in manifest else {},
    }


def replay_rows(run_dir: Path, manifest: dict) -> dict:
    """The replay itself, whatever files it is spread over."""
    config = record.read_config(run_dir)
    spec = run.specification(config)
    if online.uses_compiled_loop(config):
        from isqn.train.compiled import load_rows

        return load_rows(run_dir / "replay", manifest["replay"]["files"], online.device_replay(config, spec))._asdict()
    replay: Replay = online.replay_factory(config, spec)()
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


def stop_after(monkeypatch, calls: int):
    """Ask the loop to stop, after it has checked for that `calls` times."""

    @contextmanager
    def asked():
        left = iter(range(calls))
        yield lambda: next(left, None) is None

    monkeypatch.setattr(run, "stop_on_signals", asked)


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
    registries = (LOSSES, SCHEMES, TORSOS, MIN_IMAGE_SIDE, agent_registry._KINDS, env_registry._ENTRIES)
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
                module = entry_point.split(":")[0] if isinstance(entry_point, str) else entry_point.__module__
                if module in own or module == env_registry.__name__:
                    del gymnasium.registry[env_id]
            for name in own:
                del sys.modules[name]


def _is_of_a_user(module) -> bool:
    """Whether the file of a module belongs neither to an installed package nor to this one."""
    file = getattr(module, "__file__", None)
    installed = (sys.prefix, sys.base_prefix, str(Path(imports.__file__).parent))
    return file is not None and not any(Path(file).is_relative_to(folder) for folder in installed)

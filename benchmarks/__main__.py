"""`make bench`: every speed that the project claims, as ratios of interleaved calls in one process.

    python -m benchmarks [--only NAME ...] [--json results/benchmarks.json]

The machine may be busy, so the calls that are compared take turns. Reported are the median and the quartiles of the
ratios of neighbouring calls.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents import dqn
from isqn.agents.base import Agent
from isqn.agents.dqn import DqnConfig
from isqn.agents.registry import find_agent, make_agent
from isqn.compiler import jit
from isqn.data import dataset as dataset_module
from isqn.data.convert import convert
from isqn.data.dataset import Dataset, DatasetWriter, Provenance
from isqn.data.replay import Replay
from isqn.data.sources import dopamine
from isqn.data.text import read_table
from isqn.envs.adapter import make_environment, make_run_environment
from isqn.envs.registry import make_native
from isqn.language.data import source_from_players
from isqn.language.game import SPEC
from isqn.language.learning import make_learner
from isqn.language.words import load_words
from isqn.losses import make_loss
from isqn.presets import preset_config
from isqn.train import checkpoint, compiled, host, offline, online, run
from isqn.train.compiled import make_loop
from isqn.train.functions import compile_agent, zero_totals
from isqn.train.play import play
from isqn.train.progress import Control, Progress
from isqn.types import EnvSpec, Transition, Values

ONES = (1.0,) * 38
DOG = EnvSpec(
    "dog", "dmc", (223,), "float32", 38, action_low=tuple(-x for x in ONES), action_high=ONES, action_box=(38,)
)
ATARI = EnvSpec("ALE/Asterix-v5", "machado2018-v1", (84, 84, 1), "uint8", 9, frame_stack=4, frames_per_step=4)


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """Return the seconds of each call in each round; the order rotates, so that no call always follows the same one."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for name in names:
        jax.block_until_ready(calls[name]())  # compile
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            taken[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in taken.items()}


def ratio(over: np.ndarray, under: np.ndarray) -> dict[str, float]:
    low, median, high = np.percentile(over / under, [25, 50, 75])
    return {"median": float(median), "q25": float(low), "q75": float(high)}


def atari_batch(size: int = 32) -> Transition:
    rng = np.random.default_rng(0)
    obs, next_obs = rng.integers(0, 256, (2, size, 84, 84, 4), dtype=np.uint8)
    action = rng.integers(0, 9, size).astype(np.int32)
    return Transition(obs, action, rng.normal(size=size).astype(np.float32), np.full(size, 0.99, np.float32), next_obs)


def dog_batch(size: int) -> Transition:
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(size=(2, size, *DOG.obs_shape)).astype(np.float32)
    action, reward = rng.uniform(-1, 1, (size, DOG.num_actions)), rng.random(size)
    return Transition(
        obs, action.astype(np.float32), reward.astype(np.float32), np.full(size, 0.99, np.float32), next_obs
    )


def updater(config: Any, make: Callable[..., Agent] = make_agent) -> Callable[[], Any]:
    """Return a call that updates the agent of a config once."""
    if find_agent(config.agent).actions == "continuous":
        return update_repeatedly(make(config, DOG), dog_batch(config.update_batch_size))
    return update_repeatedly(make(config, ATARI), atari_batch())


def update_repeatedly(agent: Agent, batch: Any) -> Callable[[], Any]:
    update, state = jit(agent.update, donate_argnums=0), jit(agent.init)(0)

    def call() -> Any:
        nonlocal state
        state, _ = update(state, batch)
        return state

    return call


def joint_pass(config: DqnConfig, spec: EnvSpec) -> Agent:
    """Return an agent whose update is one concatenated pass, to be compared with two applies."""
    import optax

    agent = dqn.make(config, spec)
    optimizer = dqn.make_optimizer(config)
    loss = make_loss(config.loss, config)
    online, target = np.array(config.target_scheme.online), np.array(config.target_scheme.target)

    def update(state: Any, batch: Transition) -> tuple[Any, Any]:
        def total(params: Any) -> Any:
            both, _ = agent.network.apply(params, state.statistics, jnp.concatenate([batch.obs, batch.next_obs]))
            now, then = jnp.split(both, 2)
            values = Values(now, jax.lax.stop_gradient(then))
            aims = jax.lax.stop_gradient(jax.tree.map(lambda q: q[:, target], values))
            predictions = jax.tree.map(lambda q: q[:, online], values)
            return jax.vmap(jax.vmap(loss, in_axes=(0, 0, None)))(predictions, aims, batch).mean(axis=0).sum()

        steps, optimizer_state = optimizer.update(jax.grad(total)(state.params), state.optimizer, state.params)
        return state._replace(params=optax.apply_updates(state.params, steps), optimizer=optimizer_state), {}

    return agent._replace(update=update)


def update_ratios(rounds: int) -> dict[str, Any]:
    """Nature CNN + LayerNorm, batch 32, 9 actions."""
    base = preset_config("atari-cnn-ln")

    def scheme(name: str, k: int = 1) -> DqnConfig:
        return base.replace(scheme=name, num_bellman_iterations=k)

    free = scheme("target-free")
    taken = interleaved(
        {
            "TF": updater(free),
            "TF, one joint pass": updater(free, joint_pass),
            "TF, no LayerNorm": updater(free.replace(layer_norm=False)),
            "TB": updater(scheme("target-based")),
            "iS K=9": updater(scheme("iterated-shared", 9)),
            "iS K=49": updater(scheme("iterated-shared", 49)),
        },
        rounds,
    )
    return {
        "two applies / one joint pass (at most 0.7)": ratio(taken["TF"], taken["TF, one joint pass"]),
        "iS K=9 / TF (at most 1.05)": ratio(taken["iS K=9"], taken["TF"]),
        "iS K=49 / TF (at most 1.15)": ratio(taken["iS K=49"], taken["TF"]),
        "TB / TF": ratio(taken["TB"], taken["TF"]),
        "LayerNorm / none": ratio(taken["TF"], taken["TF, no LayerNorm"]),
        "milliseconds of the TF update": {"median": float(1e3 * np.median(taken["TF"]))},
    }


def layer_norm_ratios(rounds: int) -> dict[str, Any]:
    """Our LayerNorm against flax's, forward and backward, at the two shapes of the Nature CNN."""
    import flax.linen as nn

    from isqn.networks.layers import layer_norm

    found = {}
    for shape in ((32, 21, 21, 32), (32, 11, 11, 64)):
        x, g = jax.random.normal(jax.random.key(0), (2, *shape))
        scale, bias = jnp.ones(shape[-1]), jnp.zeros(shape[-1])

        def theirs(x: Any, scale: Any, bias: Any) -> Any:
            return nn.LayerNorm().apply({"params": {"scale": scale, "bias": bias}}, x)

        def both(function: Any, x: Any = x, g: Any = g, scale: Any = scale, bias: Any = bias) -> Callable[[], Any]:
            compiled = jit(lambda x, s, b, g: jax.vjp(function, x, s, b)[1](g))
            return lambda: compiled(x, scale, bias, g)

        taken = interleaved({"ours": both(layer_norm), "flax": both(theirs)}, 3 * rounds)
        found[f"LayerNorm ours / flax at {shape}"] = ratio(taken["ours"], taken["flax"])
    return found


def compiler_option_ratio(rounds: int) -> dict[str, Any]:
    """The update under `isqn.compiler.jit` against plain `jax.jit`."""
    config = preset_config("atari-cnn-ln").replace(scheme="target-free")
    agent, batch = dqn.make(config, ATARI), atari_batch()
    calls = {}
    for name, program in (
        ("ours", jit(agent.update, donate_argnums=0)),
        ("plain", jax.jit(agent.update, donate_argnums=0)),
    ):
        states = [agent.init(0)]

        def call(program: Any = program, states: list[Any] = states) -> Any:
            states[0], _ = program(states[0], batch)
            return states[0]

        calls[name] = call
    taken = interleaved(calls, rounds)
    return {"compiler option / plain jit": ratio(taken["ours"], taken["plain"])}


def atari_loop(rounds: int) -> dict[str, Any]:
    """Shares of the parts of a step of the host loop on Asterix, with the paper's settings and iS K=9."""
    base = preset_config("atari-cnn-ln").replace(learning_starts=200, checkpoint_minutes=1000.0, log_period_steps=400)
    steps = 420 + 40 * rounds
    config = base.replace(
        scheme="iterated-shared", num_bellman_iterations=9, total_timesteps=steps, max_episode_steps=100
    )
    env = make_run_environment(config)
    agent = dqn.make(config, env.spec)
    functions = compile_agent(agent)
    clock = Clock()
    timed_update = clock.around("update", functions.update)
    updates = itertools.count()

    def update(*args: Any) -> Any:
        if next(updates) == 55:  # by then everything, the first row of metrics too, has been compiled
            clock.start()
        result = timed_update(*args)
        marks[:] = [clock.stop(), dict(clock.spent)]  # the last one is before the checkpoint at the end
        return result

    marks: list[Any] = []
    env.step = clock.around("emulator", env.step)  # type: ignore[method-assign]
    functions = functions._replace(update=update, act=clock.around("act", functions.act))
    with (
        TemporaryDirectory() as folder,
        _wrapped(Replay, ("sample", "add"), clock),
        _wrapped(checkpoint, ("write",), clock),
    ):
        make_replay = online.make_replay_factory(config, env.spec)
        control = Control(Progress(steps, False), lambda: False)
        list(host.train(config, Path(folder), agent, env, make_replay, functions, control))
    seconds, spent = marks
    shares = {part: spent[part] / seconds for part in ("update", "emulator", "act", "sample", "add")}
    rate = (steps - 420) / seconds
    return {
        "update + emulator, share of a step (at least 0.85)": {"median": shares["update"] + shares["emulator"]},
        **{f"share of {part}": {"median": share} for part, share in shares.items()},
        "Asterix steps per second, iS K=9": {"median": rate},
        "a checkpoint, share of an epoch of 250,000 steps (at most 0.02)": {
            "median": clock.spent["write"] / 2 / (250_000 / rate)
        },
    }


class Clock:
    """Seconds spent in some functions between start and stop."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = collections.defaultdict(float)
        self._began = time.perf_counter()

    def start(self) -> None:
        self.spent.clear()
        self._began = time.perf_counter()

    def stop(self) -> float:
        return time.perf_counter() - self._began

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return jax.block_until_ready(function(*args, **kwargs))
            finally:
                self.spent[name] += time.perf_counter() - start

        return call


@contextmanager
def _wrapped(owner: Any, names: tuple[str, ...], clock: Clock) -> Iterator[None]:
    real = {name: getattr(owner, name) for name in names}
    for name, function in real.items():
        setattr(owner, name, clock.around(name, function))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(owner, name, function)


def minatar_loop(rounds: int) -> dict[str, Any]:
    """Compiled MinAtar Breakout, iS K=9: steps per second of all seeds together, and the share of the update."""
    found, stretch = {}, 400
    for seeds in (1, 3, 10):
        config = preset_config("minatar").replace(scheme="iterated-shared", num_bellman_iterations=9, num_seeds=seeds)
        env = make_native(config.env_id)
        loop = make_loop(config, dqn.make(config, env.spec), env, online.make_device_replay(config, env.spec))
        state, _, _ = loop.run(loop.init(jnp.arange(seeds)), 0, num_steps=stretch, learning=False)
        states = [state]

        def run_stretch(learning: bool, states: list[Any] = states, loop: Any = loop) -> Any:
            states[0], _, _ = loop.run(states[0], stretch, num_steps=stretch, learning=learning)
            return states[0]

        calls = {"learn": partial(run_stretch, True), "act": partial(run_stretch, False)}
        taken = interleaved(calls, max(5, rounds // 4))
        found[f"MinAtar steps per second, {seeds} seeds"] = per_second(seeds * stretch, taken["learn"])
        share = 1 - taken["act"] / taken["learn"]
        found[f"MinAtar share of the update, {seeds} seeds"] = {"median": float(np.median(share))}
    return found


def time_by_heads(preset: str, stepper: Callable[[DqnConfig], Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """Return the seconds of the same steps by TF and by iS with 1, 3 and 9 heads."""
    config = preset_config(preset)
    calls = {"TF": stepper(config.replace(scheme="target-free"))}
    calls |= {f"iS K={k}": stepper(config.replace(num_bellman_iterations=k)) for k in (1, 3, 9)}
    return interleaved(calls, rounds)


def control_ratios(rounds: int) -> dict[str, Any]:
    """SAC with SimbaV2 at the paper's size, on dog-walk: the two updates of a step in one program."""
    base = preset_config("dmc-hard")
    calls = {"TF": updater(base.replace(scheme="target-free")), "TB": updater(base.replace(scheme="target-based"))}
    calls |= {f"iS K={k}": updater(base.replace(num_bellman_iterations=k)) for k in (1, 9)}
    taken = interleaved(calls, max(5, rounds // 3))
    return {
        "SAC, iS K=1 / TF (at most 1.05)": ratio(taken["iS K=1"], taken["TF"]),
        "SAC, iS K=9 / TF (at most 1.15)": ratio(taken["iS K=9"], taken["TF"]),
        "SAC, TB / TF": ratio(taken["TB"], taken["TF"]),
        "SAC, updates per second, TF": per_second(base.updates_per_step, taken["TF"]),
    }


def stream_ratios(rounds: int) -> dict[str, Any]:
    """Stream Q(λ) on Breakout, in the host loop: a step of iS over one of TF."""
    taken = time_by_heads("atari-stream", atari_stream, max(5, rounds // 3))
    limits = {"iS K=3": " (at most 1.6)"}
    return {
        **{f"Stream Q, Breakout, {k} / TF{limits.get(k, '')}": ratio(taken[k], taken["TF"]) for k in list(taken)[1:]},
        "Stream Q, Breakout steps per second, TF": per_second(STREAM_STEPS, taken["TF"]),
    }


def stream_minatar(rounds: int) -> dict[str, Any]:
    """Stream Q(λ) in compiled MinAtar, on one core, as a study runs it.

    A step passes over the traces of a head four times: to decay them, for their norm, and to move the torso. For TF
    this is a third of a step and fits into the core's second cache; the traces of three heads do not fit.
    """
    taken = time_by_heads("minatar-stream", minatar_stream, rounds)
    return {
        **{f"Stream Q, MinAtar on one core, {k} / TF": ratio(taken[k], taken["TF"]) for k in list(taken)[1:]},
        "Stream Q, MinAtar steps per second on one core, TF (at least 5,000)": per_second(1_000, taken["TF"]),
    }


STREAM_STEPS = 50


def atari_stream(config: DqnConfig) -> Callable[[], Any]:
    """Steps as the host loop takes them: act, emulate, normalise, learn, refresh."""
    env = make_run_environment(config)
    agent, replay = make_agent(config, env.spec), online.make_replay_factory(config, env.spec)()
    call = compile_agent(agent)
    state, totals, choice = call.init(0), zero_totals(agent, config, env.spec), None

    def choose(step: int, episode: int) -> Any:
        nonlocal choice
        choice = call.act(state, replay.observation(), np.float32(0.1), step, episode)
        return choice.action

    def observe(*seen: Any) -> np.ndarray:
        nonlocal state
        state, obs = call.observe(state, *seen)
        return obs

    played = zip(itertools.count(1), play(config, env, replay, choose, 0, observe), strict=False)

    def steps() -> Any:
        nonlocal state, totals
        for step, _ in itertools.islice(played, STREAM_STEPS):
            state, totals = call.update(state, totals, replay.latest(explored=bool(choice.explored)))
            if agent.refreshes and step % config.target_update_period == 0:
                state = call.refresh(state)
        return totals

    return steps


def minatar_stream(config: DqnConfig) -> Callable[[], Any]:
    """1,000 steps of the compiled loop, one seed."""
    env = make_native(config.env_id)
    loop = make_loop(config, make_agent(config, env.spec), env, online.make_device_replay(config, env.spec))
    state = loop.init(jnp.arange(1))

    def steps() -> Any:
        nonlocal state
        state, ended, _ = loop.run(state, 0, num_steps=1_000, learning=True)
        return ended

    return steps


def per_second(steps: int, taken: np.ndarray) -> dict[str, float]:
    low, median, high = np.percentile(steps / taken, [25, 50, 75])
    return {"median": float(median), "q25": float(low), "q75": float(high)}


def checkpoint_share(rounds: int) -> dict[str, Any]:
    """Share of the training time of the small presets that checkpoints take, once compiled."""
    found = {}
    for name, steps in (("classic", 40_000), ("minatar", 50_000)):
        clock = Clock()
        with (
            TemporaryDirectory() as folder,
            _wrapped(checkpoint, ("write", "tidy"), clock),
            _wrapped(compiled, ("_save_rows",), clock),
        ):
            run.start(preset_config(name).replace(total_timesteps=steps), Path(folder) / "run", quiet=True)
            rows = read_table(Path(folder) / "run" / "metrics.csv")
        learning = float(rows[-1]["seconds"]) - float(rows[1]["seconds"])
        found[f"checkpoints, share of the time, {name} (at most 0.02)"] = {
            "median": sum(clock.spent.values()) / learning
        }
    return found


def offline_waiting(rounds: int) -> dict[str, Any]:
    """Cost of drawing batches from a dataset in a thread.

    Measures how long updates wait for a batch, and their time over that of updates from one fixed batch: the thread
    shares the cores with the updates.
    """
    found = {}
    for preset, rows, updates in (("atari-cql", 3_000, 8), ("minatar-cql", 20_000, 400)):
        on_disk = preset == "atari-cql"  # so few rows would be unpacked into memory
        with mock.patch.object(dataset_module, "UNPACKED_BYTES", 0 if on_disk else dataset_module.UNPACKED_BYTES):
            taken, waited = drawn_and_fixed(preset, rows, updates, max(5, rounds // 3))
        found[f"offline, share of the time that waits, {preset} (at most 0.05)"] = ratio(waited, taken["drawn"])
        found[f"offline, drawn / fixed batches, {preset}"] = ratio(taken["drawn"], taken["fixed"])
        found[f"offline, updates per second, {preset}, K=9"] = per_second(updates, taken["drawn"])
    return found


def drawn_and_fixed(preset: str, rows: int, updates: int, rounds: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the seconds of updates from drawn and from fixed batches, and the seconds spent waiting for drawn ones."""
    config = preset_config(preset).replace(num_bellman_iterations=9)
    env, rng = make_environment(config.env_id), np.random.default_rng(0)
    with TemporaryDirectory() as folder:
        writer: Any = DatasetWriter(Path(folder), env.spec, Provenance("random play"))
        for _ in itertools.islice(play(config, env, writer, lambda *_: env.spec.random_action(rng), 0), rows):
            pass
        writer.save()
        dataset = Dataset.open(Path(folder), reward_clip=config.reward_clip)
        agent = make_agent(config, env.spec)
        call = compile_agent(agent)
        size = offline.GROUP * config.batch_size
        batches = offline.Batches(lambda group: offline.split(dataset.sample(size, np.random.default_rng(group))), 0)
        fixed = next(batches)
        states: dict[str, Any] = {
            name: (call.init(0), zero_totals(agent, config, env.spec)) for name in ("drawn", "fixed")
        }

        waited: list[float] = []

        def draw() -> Any:
            began = time.perf_counter()
            batch = next(batches)
            waited[-1] += time.perf_counter() - began
            return batch

        def learn(name: str, draw: Callable[[], Any]) -> Any:
            if name == "drawn":
                waited.append(0.0)
            for _ in range(updates):
                states[name] = call.update(*states[name], draw())
            return states[name]

        calls = {"drawn": lambda: learn("drawn", draw), "fixed": lambda: learn("fixed", lambda: fixed)}
        taken = interleaved(calls, rounds)
        batches.close()
    return taken, np.array(waited[-rounds:])  # there may be calls before the first round, to compile


def conversion(rounds: int) -> dict[str, Any]:
    """Time to convert a DQN replay log of random play, over the time of gunzip to unpack its frames."""
    env, rng, rows = make_environment("ALE/Breakout-v5"), np.random.default_rng(0), 10_000
    frames, actions, terminals = [], [], []
    over, episode = True, 0
    while len(frames) < rows:
        if over:
            frame, episode = env.reset(episode), episode + 1
            frames += [np.zeros((84, 84), np.uint8)] * 3
            actions, terminals = actions + [0] * 3, terminals + [0] * 3
        action = int(rng.integers(4))
        frames.append(frame[..., 0])
        frame, _, over, _ = env.step(action)
        actions.append(action)
        terminals.append(int(over))
    columns = {
        "observation": np.stack(frames),
        "action": np.array(actions, np.int32),
        "reward": np.zeros(len(frames), np.float32),
        "terminal": np.array(terminals, np.uint8),
    }
    with TemporaryDirectory() as folder:
        source = Path(folder) / "Breakout"
        source.mkdir()
        for name, column in columns.items():
            with gzip.open(source / f"$store$_{name}_ckpt.0.gz", "wb") as file:
                np.save(file, column)
        packed = source / "$store$_observation_ckpt.0.gz"

        def unpack() -> None:
            subprocess.run(["gunzip", "-c", str(packed)], stdout=subprocess.DEVNULL, check=True)

        def whole() -> None:
            with TemporaryDirectory() as out:
                convert(dopamine(source, env.spec), env.spec, Path(out) / "dataset")

        taken = interleaved({"convert": whole, "gunzip": unpack}, rounds)
    return {
        "conversion of DQN replay / gunzip of its frames (at most 1)": ratio(taken["convert"], taken["gunzip"]),
        "conversion, rows per second": per_second(len(frames), taken["convert"]),
    }


def language_ratios(rounds: int) -> dict[str, Any]:
    """ILQL with a GPT-2 of 4 layers and width 256, and with GPT-2 small.

    A pass through two of three torsos takes 2/3. Gradients cost two more passes of the values and of the policy,
    whatever the scheme. A target network adds one pass to 3, or to 6 with the policy, so an update without one takes
    3/4 or 6/7 at best.
    """
    config = preset_config("wordle").replace(batch_size=8, micro_batch_size=0)
    sizes = {"num_layers": 4, "model_width": 256, "attention_heads": 4, "head_hidden_size": 512, "num_positions": 74}
    words = source_from_players(load_words("common"), 0.5)

    def make_call(config: Any, name: str, part: str) -> Callable[[], Any]:
        scheme, k = {"TB": ("target-based", 1), "TF": ("target-free", 1), "iS": ("iterated-shared", 9)}[name]
        given = {"policy_checkpoint": "taken from a run"} if part == "values" else {}
        config = config.replace(scheme=scheme, num_bellman_iterations=k, **given)
        games, agent = words.sample(config.batch_size, np.random.default_rng(0)), make_agent(config, SPEC)
        if part == "pass":
            return partial(jit(make_learner(config, SPEC).loss), jit(agent.init)(0), games)
        return update_repeatedly(agent, games)

    cases = [("TB", "pass"), ("TF", "pass"), ("iS", "pass")]
    cases += [(name, part) for part in ("values", "both") for name in ("TB", "iS")]
    taken = interleaved({" ".join(one): make_call(config.replace(**sizes), *one) for one in cases}, rounds)
    pair = config.replace(batch_size=2)
    small = interleaved({name: make_call(pair, name, "values") for name in ("TB", "iS")}, rounds)
    return {
        "ILQL: passes, iS K=9 / TB (at most 0.75)": ratio(taken["iS pass"], taken["TB pass"]),
        "ILQL: passes, iS K=9 / TF": ratio(taken["iS pass"], taken["TF pass"]),
        "ILQL: update of the values, iS K=9 / TB (at most 0.75)": ratio(taken["iS values"], taken["TB values"]),
        "ILQL: update of values and policy, iS K=9 / TB": ratio(taken["iS both"], taken["TB both"]),
        "ILQL with GPT-2 small, batch 2: update of the values, iS K=9 / TB": ratio(small["iS"], small["TB"]),
    }


SUITES = {
    "update": update_ratios,
    "layer-norm": layer_norm_ratios,
    "compiler": compiler_option_ratio,
    "atari": atari_loop,
    "minatar": minatar_loop,
    "control": control_ratios,
    "stream": stream_ratios,
    "stream-minatar": stream_minatar,
    "checkpoint": checkpoint_share,
    "offline": offline_waiting,
    "language": language_ratios,
    "conversion": conversion,
}


ON_ONE_CORE = ("stream-minatar",)  # in a process of their own: XLA has as many threads as there are cores at its start


def run_suite(name: str, rounds: int) -> dict[str, Any]:
    cores = os.sched_getaffinity(0)
    if name not in ON_ONE_CORE or len(cores) == 1:
        return SUITES[name](rounds)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, "-m", "benchmarks", "--only", name, "--rounds", str(rounds), "--json", str(file)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        os.sched_setaffinity(process.pid, {min(cores)})
        if process.wait():
            raise SystemExit(f"{' '.join(command)} failed")
        return json.loads(file.read_text())["results"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name in args.only:
        for label, value in run_suite(name, args.rounds).items():
            results[label] = value
            spread = f"   ({value['q25']:.3g} to {value['q75']:.3g})" if "q25" in value else ""
            print(f"{label:55s} {value['median']:10.4g}{spread}", flush=True)
    if args.json:
        command = f"python -m benchmarks --only {' '.join(args.only)} --rounds {args.rounds}"
        args.json.write_text(
            json.dumps({"command": command, "jax": jax.__version__, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

"""`isqn.Model`: learn, fit, predict, save and load."""

from __future__ import annotations

import json
import shutil
import weakref
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents.base import Agent, AgentState, identity_observe
from isqn.agents.registry import agent_names, config_from_mapping, find_agent
from isqn.config.fields import (
    field_names,
    name_as_given,
    name_settings,
    nearest,
    require,
    require_effect,
    resolve_aliases,
)
from isqn.config.toml import to_toml
from isqn.data.files import DamagedFile, writing
from isqn.envs.adapter import Environment, make_environment, make_run_environment
from isqn.imports import import_module_of
from isqn.presets import default_config, preset_config
from isqn.schemes import TargetScheme, infer_k
from isqn.train import checkpoint, record, run
from isqn.train.evaluate import Episode, load_agent_state
from isqn.train.evaluate import evaluate as play
from isqn.train.functions import make_run_agent
from isqn.train.player import require_environment_agent
from isqn.types import Array, EnvSpec, UserError


class Model:
    """An agent with its config and its environment.

    `env`, an environment id or a `gymnasium.Env`, must be given; `scheme` comes from `isqn.schemes`. All other settings
    of the agent can be given by name or alias. They change a preset, by default the one for the environment.
    """

    @name_settings()
    def __init__(
        self,
        algorithm: str = "dqn",
        env: str | gym.Env[Any, Any] | None = None,
        *,
        scheme: TargetScheme | None = None,
        preset: str = "auto",
        **fields: Any,
    ):
        if not isinstance(scheme, TargetScheme | None):
            raise UserError(f"scheme is {scheme!r}; it must come from isqn, such as isqn.iterated_shared(9).")
        if algorithm not in agent_names():
            raise UserError(f"algorithm {algorithm!r} is not known; {nearest(str(algorithm), agent_names())}")
        if env is None:
            if "env_id" not in fields:
                raise UserError("isqn.Model needs an environment: an id such as env='CartPole-v1', or a gymnasium.Env.")
            env = fields.pop("env_id")
        elif "env_id" in fields:
            raise UserError("isqn.Model: env and env_id are the same setting; give one.")
        if isinstance(env, str):
            import_module_of(env, f"env {env}")
        self._env = None if isinstance(env, str) else make_environment(env)
        env_id = self._env.spec.id if self._env else str(env)
        base = default_config(algorithm, env_id) if preset == "auto" else preset_config(preset, algorithm)
        settings = resolve_aliases(fields, type(base), "isqn.Model")
        if scheme is not None:
            if "num_bellman_iterations" in settings:
                raise UserError("isqn.Model: scheme has its number of pairs already; leave num_bellman_iterations out.")
            settings |= {"scheme": scheme.name, "num_bellman_iterations": infer_k(scheme)}
        if self._env and "loop" in field_names(type(base)):
            settings["loop"] = "host"  # the environment is a Python object
        with name_as_given(type(base), fields):
            config = config_from_mapping({**settings, "env_id": env_id}, "isqn.Model", base)
            require_effect(config, base)
            if self._env and (config.env_kwargs or config.env_wrappers):
                raise UserError("isqn.Model: env is made already; env_kwargs and env_wrappers are for its id.")
            one = "must be 1 for a Model; `isqn train` and `isqn study` train several seeds"
            require(config, "num_seeds", config.num_seeds == 1, one)
        self._set_config(config)
        self.state: AgentState = jax.jit(self._agent.init)(self.config.seed)

    def _set_config(self, config: Any, spec: EnvSpec | None = None) -> None:
        require_environment_agent(config, "isqn.Model")
        self.config = config
        self.spec = spec or (self._env.spec if self._env else run.specification(config))
        self.num_timesteps = 0
        self._run_dir: Path | None = None
        self._agent = make_run_agent(config, self.spec)
        self._deterministic_agent = make_run_agent(config.deterministic(), self.spec)
        self._act = {False: self._make_act(self._agent), True: self._make_act(self._deterministic_agent)}
        self._num_sampled = 0

    def _make_act(self, agent: Agent) -> Any:
        """Return a function from a batch of observations to actions.

        An agent that observes in evaluations too, such as a streaming one, takes each observation as the next one
        after those of its training.
        """
        width = self.spec.frame_shape[-1]

        def choose(state: AgentState, obs: Array, epsilon: Array, step: Array) -> Array:
            if agent.observe_eval is identity_observe:
                return agent.act(state, obs, epsilon, step, jnp.int32(0)).action
            frames = jnp.split(obs, obs.shape[-1] // width, axis=-1)  # from the oldest to the newest
            has_begun = jnp.bool(False)
            for index, frame in enumerate(frames):
                has_begun = (
                    has_begun | frame.any() | (index == len(frames) - 1)
                )  # zeros before the first frame stay zeros
                old = (state, jnp.zeros_like(frame))
                state, frames[index] = jax.tree.map(
                    partial(jnp.where, has_begun), agent.observe_eval(state, frame), old
                )
            return agent.act(state, jnp.concatenate(frames, axis=-1), epsilon, step, jnp.int32(0)).action

        return jax.jit(jax.vmap(choose, in_axes=(None, 0, None, 0)))

    @name_settings()
    def learn(
        self, total_timesteps: int | None = None, *, run_dir: str | Path | None = None, quiet: bool = True
    ) -> Model:
        """Train for `total_timesteps` more steps, in whole epochs. The default of `run_dir` is a temporary folder."""
        self._require_offline(False, "learn")
        steps = _require_count(
            "total_timesteps", self.config.total_timesteps if total_timesteps is None else total_timesteps
        )
        if self._run_dir is None:
            if self.num_timesteps:
                raise UserError(
                    "A loaded model cannot continue training: its counters, results and replay buffer are in its run "
                    "folder. Train with `learn(run_dir=...)`, and continue with `isqn resume RUN_DIR`."
                )
            config = self.config.replace(total_timesteps=steps, epoch_steps=min(steps, self.config.epoch_steps))
        else:
            if run_dir is not None and Path(run_dir) != self._run_dir:
                raise UserError(f"This model learns in {self._run_dir}; it cannot go on in {run_dir}.")
            # In the host loop an epoch has a length; in the compiled loop it has an end.
            counts_from_zero = self._env is None and run.loop_of(self.config).trains_seeds_together(self.config)
            done = self.num_timesteps if counts_from_zero else self.config.num_epochs * self.config.epoch_steps
            config = self.config.replace(total_timesteps=done + steps)
        run.require_possible(config, self.spec, on_host=self._env is not None)
        folder = self._run_dir or (Path(run_dir) if run_dir is not None else self._temporary())
        with record.lock_run([folder]):
            if self._run_dir is None:
                record.create_run(folder, config)
            else:
                record.replace_text(folder / "config.toml", to_toml(config))
            self.config, self._run_dir = config, folder
            run.train(config, [folder], quiet=quiet, env=self._env)
        self.state, self.num_timesteps = load_agent_state(folder, self._agent)
        return self

    @name_settings()
    def fit(
        self,
        dataset: str | Path,
        num_updates: int | None = None,
        *,
        run_dir: str | Path | None = None,
        quiet: bool = True,
    ) -> Model:
        """Learn from a dataset alone in `num_updates` gradient steps, with evaluations as configured (for "cql")."""
        self._require_offline(True, "fit")
        if self.num_timesteps:
            raise UserError("A model is fitted once, from its start; make another one to fit again.")
        updates = _require_count("num_updates", self.config.num_updates if num_updates is None else num_updates)
        epoch_updates = min(updates, self.config.epoch_updates)
        config = self.config.replace(dataset=str(dataset), num_updates=updates, epoch_updates=epoch_updates)
        spec = run.specification(config)
        _require_same_shapes(self.spec, spec)
        run.require_possible(config, spec, on_host=True)
        folder = Path(run_dir) if run_dir is not None else self._temporary()
        with record.lock_run([folder]):
            record.create_run(folder, config)
            run.train(config, [folder], quiet=quiet, env=self._env)
        self.config, self._run_dir = config, folder
        self.state, self.num_timesteps = load_agent_state(folder, self._agent)
        return self

    def _require_offline(self, offline: bool, method: str) -> None:
        """Refuse `learn` for agents that learn from a dataset, and `fit` for all others."""
        is_offline = self.config.is_offline
        if is_offline != offline:
            instead = "fit(dataset)" if is_offline else "learn(total_timesteps)"
            raise UserError(f"A model of {self.config.agent!r} has no {method}; call {instead}.")

    def _temporary(self) -> Path:
        """Return a folder that is deleted with this object."""
        folder = mkdtemp(prefix="isqn-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder) / "run"

    def predict(self, obs: Any, deterministic: bool = True) -> tuple[Any, None]:
        """Return an action for an observation, or actions for a batch, and None, which SB3's loops expect.

        A deterministic action is the best one by the mean of the online heads, or the mean of a policy. Otherwise the
        agent acts as in training, with its last epsilon, or samples its policy. If frames are stacked, an observation
        is the stack. Observations and actions are those of the environment: numbers if a space is Discrete.
        """
        obs, shape = np.asarray(obs), self.spec.obs_shape
        if self.spec.first_state is not None and np.issubdtype(obs.dtype, np.integer):
            obs = self._one_hot(obs - self.spec.first_state)
        if obs.dtype.kind not in "biuf" or not np.isfinite(obs).all():
            raise UserError(f"The observation must contain only finite numbers, but is {obs.tolist()!r:.60}.")
        obs = obs.astype(self.spec.frame_dtype)
        if self.spec.channels_first and obs.ndim in (3, 4):
            obs = np.moveaxis(obs, -3, -1)
        accepted = (shape, shape[:-1]) if self.spec.is_image and shape[-1] == 1 else (shape,)
        is_single = obs.shape in accepted
        if not is_single and obs.shape[1:] not in accepted:
            raise UserError(f"The observation has shape {obs.shape}; {self.spec.id} observes {shape}.")
        batch = obs.reshape(-1, *self.spec.obs_shape)
        epsilon = 0.0 if deterministic else self.config.last_epsilon
        steps = self._num_sampled + np.arange(len(batch))
        self._num_sampled += 0 if deterministic else len(batch)
        actions = self.spec.to_env_action(np.asarray(self._act[deterministic](self.state, batch, epsilon, steps)))
        if is_single:
            actions = actions[0] if self.spec.is_continuous else int(actions[0])
        return actions, None

    def _one_hot(self, states: np.ndarray) -> np.ndarray:
        (count,) = self.spec.frame_shape
        if ((states < 0) | (states >= count)).any():
            first = self.spec.first_state or 0
            raise UserError(f"The observations of {self.spec.id} are the numbers {first} to {first + count - 1}.")
        return np.eye(count)[states]

    def save(self, path: str | Path) -> None:
        """Save to a folder: the config as TOML, the agent as safetensors and a manifest as JSON. It holds no code."""
        folder = Path(path)
        if (folder / "checkpoints").is_dir():
            raise UserError(f"{folder} is a run, which `Model.load` reads as it is; save to another folder.")
        if record.run_state(folder) != "new" and not (folder / "model" / "manifest.json").is_file():
            raise UserError(f"{folder} holds something else; save to a folder of its own.")
        manifest = {"kind": "model", "step": self.num_timesteps, "spec": self.spec.to_json()}
        with writing(folder, "choose another path"):
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.write(folder / "model", checkpoint.flatten({"agent": self.state}), manifest)
            record.replace_text(folder / "config.toml", to_toml(self.config))

    @classmethod
    def load(cls, path: str | Path, env: gym.Env[Any, Any] | None = None) -> Model:
        """Load a saved model, or the last checkpoint of a run folder.

        `env` is needed if the model was trained in a `gymnasium.Env` that has no registered id.
        """
        folder = Path(path)
        if not (folder / "config.toml").is_file() and not checkpoint.steps(folder):
            raise UserError(f"{folder} is neither a saved model nor a run: there is no config.toml in it.")
        model = cls.__new__(cls)
        model._env = None if env is None else make_environment(env)
        config = record.read_config(folder)
        if not (folder / "model").is_dir():
            with record.naming_missing_imports(folder):
                model._set_config(config)
            model.state, model.num_timesteps = load_agent_state(folder, model._agent)
            return model
        try:
            arrays, manifest = checkpoint.read(folder / "model")
            spec, step = _read_spec(folder / "model", manifest["spec"]), manifest["step"]
        except DamagedFile as error:
            raise UserError(f"{folder} cannot be loaded: {error}") from None
        if model._env:
            _require_same_shapes(spec, model._env.spec)
        model._set_config(config, spec)
        tree = checkpoint.unflatten({"agent": jax.eval_shape(model._agent.init, 0)}, arrays, folder)
        model.state, model.num_timesteps = jax.tree.map(jnp.asarray, tree["agent"]), step
        return model

    def __repr__(self) -> str:
        return f"Model({self.config.label!r}, {json.dumps(self.spec.id)}, {self.num_timesteps:,} steps)"


def _read_spec(folder: Path, fields: dict[str, Any]) -> EnvSpec:
    """Return the specification of the environment of a saved model; raises `DamagedFile`."""
    try:
        spec = EnvSpec.from_json(fields)
        spec.check_types()
    except (TypeError, ValueError, OverflowError) as error:
        raise DamagedFile(f"{folder / 'manifest.json'} does not describe an environment ({error}).") from None
    return spec


def _require_count(name: str, value: Any) -> int:
    """Return a whole number of at least 1; refuse anything else."""
    if not isinstance(value, int | np.integer) or value < 1:
        raise UserError(f"{name} is {value!r}; it must be a whole number of at least 1.")
    return int(value)


def _require_same_shapes(learned: EnvSpec, other: EnvSpec) -> None:
    """Refuse an environment whose observations or actions differ from those that a model was made for."""
    bounds = [(spec.action_low, spec.action_high, spec.action_box) for spec in (learned, other)]
    shapes = [(spec.obs_shape, spec.num_actions, spec.is_continuous) for spec in (learned, other)]
    if shapes[0] == shapes[1] and bounds[0] != bounds[1]:
        raise UserError(
            f"The model was made for {learned.id}, with actions from {learned.action_low} to {learned.action_high}; "
            f"those of {other.id} are from {other.action_low} to {other.action_high}."
        )
    if shapes[0] != shapes[1]:
        raise UserError(
            f"The model was made for {learned.id}, with observations {learned.obs_shape} and {learned.num_actions} "
            f"actions; {other.id} has {other.obs_shape} and {other.num_actions}."
        )


def evaluate(
    model: Model,
    env: str | gym.Env[Any, Any] | None = None,
    episodes: int = 10,
    *,
    seed: int = 100,
    epsilon: float | None = None,
) -> list[Episode]:
    """Play whole episodes with a model, in its own environment or in `env`; return the seed, return and length of each.

    A policy acts by its mean. Other agents act as in training, with `epsilon`, by default 0.001.
    """
    if not isinstance(model, Model):
        raise UserError(f"model is {model!r}; it must be an isqn.Model, such as isqn.Model.load(folder).")
    episodes = _require_count("episodes", episodes)
    if epsilon is not None and not 0 <= epsilon <= 1:
        raise UserError(f"epsilon is {epsilon!r}; it must be between 0 and 1.")
    own_env: Environment | None = model._env if env is None else None
    used_env = own_env or (make_environment(env) if env else make_run_environment(model.config))
    _require_same_shapes(model.spec, used_env.spec)
    results = play(
        model._deterministic_agent if find_agent(model.config.agent).evaluation_rule else model._agent,
        model.state,
        used_env,
        episodes=episodes,
        seed=seed,
        epsilon=model.config.evaluation_epsilon if epsilon is None else epsilon,
        max_episode_steps=model.config.max_episode_steps,
    )
    if own_env is None and (env is None or isinstance(env, str)):
        used_env.close()
    return results

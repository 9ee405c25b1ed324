"""A configuration is checked where it is made, and a file of it says the same as the object."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import pytest

from helpers import registries_restored
from isqn import losses
from isqn.agents import dqn
from isqn.agents.cql import CqlConfig
from isqn.agents.dqn import DqnConfig
from isqn.agents.registry import (
    agent_names,
    config_class,
    config_from_mapping,
    make_config,
    read_config_file,
    register_agent,
    register_loss,
)
from isqn.agents.stream_q import StreamQConfig
from isqn.config.fields import MAX_INTEGER, alias, field_names, flag, nearest, nearest_path, read_docs
from isqn.config.parts import PairLoss
from isqn.config.run import Run
from isqn.config.toml import END, START, to_toml
from isqn.imports import import_all
from isqn.losses import LOSSES
from isqn.presets import preset_config, presets_of
from isqn.schemes import SCHEMES, register_scheme
from isqn.train.announce import advise_lower, remarks
from isqn.train.run import loop_of
from isqn.types import UserError

TRAINED = (*presets_of("dqn"), *presets_of("stream-q"))
AT_LEAST_ONE = (
    *("num_bellman_iterations", "num_seeds", "total_timesteps", "max_episode_steps", "num_steps_return", "batch_size"),
    *("update_period", "target_update_period", "target_sync_period", "buffer_size"),
    *("epoch_steps", "log_period_steps", "analysis_samples"),
)
AT_LEAST_ZERO = (
    *("seed", "learning_starts", "learning_rate", "adam_epsilon", "epsilon_decay_steps", "checkpoint_minutes"),
    *("meta_learning_rate", "conservative_weight", "head_weight_discount"),
)
FLOATS = {name for name, value in dataclasses.asdict(DqnConfig()).items() if isinstance(value, float)}


def refusal(**fields: Any) -> str:
    with pytest.raises(UserError) as error:
        DqnConfig(**fields)
    return str(error.value)


@pytest.mark.parametrize("name", AT_LEAST_ONE)
def test_counts_and_periods_are_at_least_one(name):
    allowed = {"num_bellman_iterations": "between 1 and 1000", "analysis_samples": "between 1 and 100000"}
    assert refusal(**{name: 0}) == f"{flag(name)} is 0; it must be {allowed.get(name, 'at least 1')}."
    least = 2 if name == "buffer_size" else 1  # a transition has two ends
    assert getattr(DqnConfig(**{"learning_starts": 0} | {name: least}), name) == least


@pytest.mark.parametrize("name", AT_LEAST_ZERO)
def test_what_may_be_zero_may_not_be_less(name):
    value = -0.5 if name in FLOATS else -1
    assert refusal(**{name: value}) == f"{flag(name)} is {value}; it must be at least 0."
    assert getattr(DqnConfig(**{name: 0}), name) == 0


@pytest.mark.parametrize("name", ["discount", "epsilon_start", "epsilon_end"])
def test_shares_are_between_0_and_1(name):
    for value in (-0.01, 1.01):
        assert refusal(**{name: value}) == f"{flag(name)} is {value}; it must be between 0 and 1."
    assert [getattr(DqnConfig(**{name: value}), name) for value in (0, 1)] == [0.0, 1.0]


@pytest.mark.parametrize("name", ["mellowmax_temperature", "munchausen_temperature", "width_factor", "reward_clip"])
def test_scales_are_above_0(name):
    assert refusal(**{name: 0.0}) == f"{flag(name)} is 0.0; it must be above 0."


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"target_step_size": 0.0}, "--target-step-size is 0.0; it must be above 0 and at most 1."),
        ({"target_step_size": 1.5}, "--target-step-size is 1.5; it must be above 0 and at most 1."),
        ({"hidden_sizes": (8, 0)}, "--hidden-sizes is (8, 0); it must be sizes of at least 1."),
        (
            {"update_period": 3, "target_update_period": 200},
            "--target-update-period is 200; it must be a multiple of --update-period (3).",
        ),
        (
            {"learning_starts": 50, "buffer_size": 50},
            "--learning-starts is 50; it must be below --buffer-size (50).",
        ),
        (
            {"num_steps_return": 50, "buffer_size": 50, "learning_starts": 49},
            "--num-steps-return is 50; it must be below --buffer-size (50).",
        ),
        (
            {"num_steps_return": 5, "learning_starts": 3},
            "--learning-starts is 3; it must be at least 4, for a first return of 5 steps.",
        ),
        (
            {"num_bellman_iterations": 3, "head_weights": (1.0, 2.0)},
            "--head-weights is (1.0, 2.0); it must be empty or one for each of the 3 pairs.",
        ),
        (
            {"meta_gradient": "adam", "batch_norm": True},
            "--batch-norm is True; it cannot be combined with --meta-gradient.",
        ),
        (
            {"meta_gradient": "sgd", "head_weights": (1.0,)},
            "--head-weights is (1.0,); it cannot be combined with --meta-gradient.",
        ),
        (
            {"meta_gradient": "adam", "acting_rule": "mean"},
            "--acting-rule is 'mean'; it must be uniform with --meta-gradient, which draws the head by the learned "
            "weights.",
        ),
        ({"seed": MAX_INTEGER + 1}, "--seed is 2147483648; it must be at most 2147483647."),
        (
            {"seed": MAX_INTEGER, "num_seeds": 2},
            "--seed is 2147483647; it must be at most 2147483646, with --num-seeds 2.",
        ),
        ({"scheme": "iterated-shard"}, "--scheme is 'iterated-shard'; did you mean iterated-shared?"),
        ({"loss": "??"}, "--loss is '??'; choose one of dqn, huber, double, mellowmax, munchausen, cql, cloning."),
        ({"compute_dtype": "bfloat"}, "--compute-dtype is 'bfloat'; did you mean bfloat16?"),
        ({"loop": None}, "--loop is None; choose one of auto, host, compiled."),
    ],
)
def test_a_refusal_names_the_flag_the_value_and_what_is_allowed(fields, sentence):
    assert refusal(**fields) == sentence


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"seed": 1.5}, "--seed is 1.5; it must be a whole number."),
        ({"seed": True}, "--seed is True; it must be a whole number."),
        ({"layer_norm": 1}, "--layer-norm is 1; it must be true or false."),
        ({"env_id": 3}, "--env-id is 3; it must be a text."),
        ({"learning_rate": "fast"}, "--learning-rate is 'fast'; it must be a number."),
        ({"learning_rate": True}, "--learning-rate is True; it must be a number."),
        ({"learning_rate": None}, "--learning-rate is None; it must be a number."),
        ({"reward_clip": "1"}, "--reward-clip is '1'; it must be a number."),
        ({"hidden_sizes": 64}, "--hidden-sizes is 64; it must be a list of whole numbers."),
        ({"hidden_sizes": "big"}, "--hidden-sizes is 'big'; it must be a list of whole numbers."),
        ({"hidden_sizes": (64.0,)}, "--hidden-sizes is (64.0,); it must be a list of whole numbers."),
        ({"head_weights": ("1",)}, "--head-weights is ('1',); it must be a list of numbers."),
        ({"head_weights": (True,)}, "--head-weights is (True,); it must be a list of numbers."),
    ],
)
def test_a_value_of_another_type_is_refused(fields, sentence):
    assert refusal(**fields) == sentence


def test_whole_numbers_become_floats_and_lists_become_tuples():
    config = DqnConfig(learning_rate=1, hidden_sizes=[8, 4], head_weights=[2], reward_clip=1)
    assert config == DqnConfig(learning_rate=1.0, hidden_sizes=(8, 4), head_weights=(2.0,), reward_clip=1.0)
    assert isinstance(config.learning_rate, float)
    assert isinstance(config.head_weights[0], float)
    hash(config)


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DqnConfig().seed = 1  # type: ignore[misc]


# -- files ---------------------------------------------------------------------------------------------------

UNUSUAL = DqnConfig(
    hidden_sizes=(),
    reward_clip=None,
    layer_norm=True,
    learning_rate=1e-30,
    checkpoint_minutes=math.inf,
    num_bellman_iterations=2,
    head_weights=(0.1, 2.0),
    discount=1 / 3,
    experiment='a "quoted" \\ name\nof two lines, é and 🧊',
    seed=MAX_INTEGER,
)


@pytest.mark.parametrize(
    "config",
    [*map(preset_config, TRAINED), UNUSUAL, DqnConfig(reward_clip=0.5, hidden_sizes=(3, 2, 1))],
    ids=[*TRAINED, "unusual", "clipped"],
)
def test_a_file_says_the_same_as_the_object(config, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    again = read_config_file(path)
    assert again == config
    for field in dataclasses.fields(type(config)):
        assert type(getattr(again, field.name)) is type(getattr(config, field.name)), field.name


@pytest.mark.parametrize("agent", agent_names())
def test_a_file_holds_the_fields_of_its_agent_under_their_docstrings(agent):
    config = make_config(agent)
    text = to_toml(config)
    unset = {name for name, value in dataclasses.asdict(config).items() if value is None}
    assert tomllib.loads(text).keys() == {"agent", *field_names(type(config))} - unset
    for name, doc in read_docs(type(config)).items():
        assert re.search(rf"^# {re.escape(doc)}\n(# )?{name} ", text, re.MULTILINE)


def test_a_setting_that_is_not_set_is_a_comment():
    assert "# reward_clip is not set\n" in to_toml(DqnConfig(reward_clip=None))


@pytest.mark.parametrize("agent", agent_names())
def test_every_field_has_a_docstring(agent):
    for name, text in read_docs(config_class(agent)).items():
        assert text.endswith((".", ")")), name
        assert "\n" not in text, f"{name}: a comment of config.toml is one line"
        assert len(text) <= 120, name
        assert text.split()[0] not in ("Of", "What", "That", "Those", "Who", "Whose", "How", "By", "As"), name


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_bytes(text.encode("latin-1"))
    return path


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("batch_sise = 3", "sets 'batch_sise', which is not a field of a run; did you mean batch_size?"),
        ("[agents]\nlr = 3", "sets 'agents', which is not a field of a run; did you mean agent?"),
        ("[agent]\nlr = 3", ": agent is {'lr': 3}; choose one of dqn, stream-q, sac, cql, ilql."),
        ("agent = 'stream'", ": agent is 'stream'; did you mean stream-q?"),
        (
            "agent = 'stream-q'\nbatch_size = 32",
            "sets 'batch_size'; it is for `isqn train dqn` or `isqn train sac` or `isqn train cql` or ",
        ),
        ("trace_decay = 0.9", "sets 'trace_decay'; it is for `isqn train stream-q`, not for dqn."),
        ("agent = 'stream-q'\ntrace_decay = 1.1", ": trace_decay is 1.1; it must be between 0 and 1."),
        ("agent = 'stream-q'\nobgd_kappa = 0", ": obgd_kappa is 0.0; it must be above 0."),
        ("batch_size = '3'", ": batch_size is '3'; it must be a whole number."),
        ("batch_size = 3.0", ": batch_size is 3.0; it must be a whole number, written as 3."),
        ("layer_norm = 1", ": layer_norm is 1; it must be true or false."),
        ("hidden_sizes = [8, 'x']", ": hidden_sizes is [8, 'x']; it must be a list of whole numbers."),
        ("hidden_sizes = {a = 1}", ": hidden_sizes is {'a': 1}; it must be a list of whole numbers."),
        ("discount = 2", ": discount is 2.0; it must be between 0 and 1."),
        ("learning_rate = nan", ": learning_rate is nan; it must be a finite number of 32 bits."),
        ("learning_rate = 1e39", ": learning_rate is 1e+39; it must be a finite number of 32 bits."),
        ("max_episode_steps = 3000000000", ": max_episode_steps is 3000000000; it must be at most 2147483647."),
        ("analysis_samples = 100001", ": analysis_samples is 100001; it must be between 1 and 100000."),
        ("num_bellman_iterations = 1001", ": num_bellman_iterations is 1001; it must be between 1 and 1000."),
        ("buffer_size = 2147483648", ": buffer_size is 2147483648; it must be at most 2147483647."),
        ("", "is empty; give the config.toml of a run."),
        ("# nothing", "is empty; give the config.toml of a run."),
        ("batch_size = ", "is not valid TOML: Invalid value (at line 1, the last)."),
        ("env_id = 1\nenv_id = '\xe9'", ", line 2, is damaged: byte 0xe9 is not UTF-8."),
        (f"{START}\nenv_id = 'x'\n", f", line 2, is damaged: it ends here, before {END!r}."),
    ],
)
def test_a_file_that_is_wrong_is_named_with_what_is_wrong(text, sentence, tmp_path):
    path = file(tmp_path, text)
    with pytest.raises(UserError) as error:
        read_config_file(path)
    assert str(error.value).startswith(f"{path}{'' if sentence[:1] in (':', ',') else ' '}{sentence}")


def test_a_file_may_begin_with_the_mark_of_its_encoding(tmp_path):
    (tmp_path / "config.toml").write_bytes(b"\xef\xbb\xbfbatch_size = 7\n")
    assert read_config_file(tmp_path / "config.toml").batch_size == 7


def test_a_path_that_is_not_there_is_answered_with_the_one_beside_it(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    with pytest.raises(UserError) as error:
        read_config_file(tmp_path / "run" / "confg.toml")
    assert str(error.value) == f"{tmp_path}/run/confg.toml does not exist; did you mean {tmp_path}/run/config.toml?"
    assert nearest_path(tmp_path / "rum" / "config.toml") == f"; did you mean {tmp_path}/run?"
    assert nearest_path(tmp_path / "run") == ""
    with pytest.raises(UserError, match=r"elsewhere/x\.toml does not exist; give the config\.toml of a run\."):
        read_config_file(tmp_path / "elsewhere" / "x.toml")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\); give the config.toml of a run."):
        read_config_file(tmp_path / "run")


def test_a_file_changes_only_what_it_sets():
    base = preset_config("minatar")
    assert config_from_mapping({"batch_size": 7}, "here", base) == base.replace(batch_size=7)
    assert config_from_mapping({}, "here") == DqnConfig()


# -- what follows from the fields ------------------------------------------------------------------------------


def test_epsilon_falls_linearly_and_stays():
    config = DqnConfig(epsilon_start=0.9, epsilon_end=0.1, epsilon_decay_steps=1_000)
    assert [config.epsilon(step) for step in (0, 250, 500, 1_000, 1_001, 10**9)] == pytest.approx(
        [0.9, 0.7, 0.5, 0.1, 0.1, 0.1], abs=1e-12
    )
    traced = jax.jit(jax.vmap(config.epsilon))(jnp.array([0, 500, 1_000, 5_000]))
    assert traced.tolist() == pytest.approx([0.9, 0.5, 0.1, 0.1], abs=1e-6)


def test_without_decay_only_the_first_step_is_at_the_start():
    config = DqnConfig(epsilon_start=1.0, epsilon_end=0.2, epsilon_decay_steps=0)
    assert [config.epsilon(step) for step in (0, 1, 2)] == [1.0, 0.2, 0.2]


@pytest.mark.parametrize(
    ("total", "epoch", "row", "ends", "row_period"),
    [
        (1_000, 250, 100, [250, 500, 750, 1_000], 100),
        (1_001, 250, 100, [250, 500, 750, 1_000, 1_001], 100),  # the last epoch takes what is left
        (100, 250, 200, [100], 100),  # a run shorter than an epoch is one epoch, with at least one row
        (250, 250, 1_000, [250], 250),
    ],
)
def test_a_run_is_made_of_epochs(total, epoch, row, ends, row_period):
    config = DqnConfig(total_timesteps=total, epoch_steps=epoch, log_period_steps=row)
    assert [config.epoch_end(e) for e in range(config.num_epochs)] == ends
    assert config.row_length == row_period
    offline = CqlConfig(num_updates=total, epoch_updates=epoch, log_period_updates=row)
    assert [offline.epoch_end(e) for e in range(offline.num_epochs)] == [0, *ends]  # with an evaluation at the start
    assert offline.row_length == row_period


def test_probes_need_a_second_batch():
    assert [DqnConfig(batch_size=5, analysis=analysis).sampled_batch_size for analysis in (False, True)] == [5, 10]
    assert [StreamQConfig(analysis=analysis).sampled_batch_size for analysis in (False, True)] == [1, 33]


def test_pair_weights_are_the_given_ones_times_powers_of_the_discount():
    three = DqnConfig(num_bellman_iterations=3)
    assert three.pair_weights == (1.0, 1.0, 1.0)
    assert three.replace(head_weight_discount=0.25).pair_weights == (1.0, 0.25, 0.0625)
    assert three.replace(head_weights=(1, 2, 3), head_weight_discount=0.5).pair_weights == (1.0, 1.0, 0.75)


LABELS = {
    "target-based": "TB-{}",
    "target-free": "TF-{}",
    "iterated-shared": "iS-{} K=4",
    "ensemble-shared": "ES-{} N=4",
    "iterated-target-based": "i-{} K=4",
}
ALGORITHMS = {
    "dqn": "DQN",
    "huber": "DQN-Huber",
    "double": "DDQN",
    "mellowmax": "Mellow",
    "munchausen": "M-DQN",
    "cql": "CQL",
}


def test_labels_are_the_papers_names():
    assert LABELS.keys() == SCHEMES.keys()
    assert ALGORITHMS.keys() == LOSSES.keys() - {"cloning"}  # which has no target, and so no scheme
    for scheme, pattern in LABELS.items():
        for loss, algorithm in ALGORITHMS.items():
            config = DqnConfig(scheme=scheme, loss=loss, num_bellman_iterations=4)
            assert config.label == pattern.format(algorithm)
            assert config.replace(meta_gradient="adam").label == f"Meta {config.label}"
            assert config.replace(meta_gradient="sgd").label == f"Meta-SGD {config.label}"
            offline = CqlConfig(scheme=scheme, loss=loss, num_bellman_iterations=4)
            assert offline.label == pattern.format(algorithm if loss == "cql" else f"offline {algorithm}")
            assert offline.replace(meta_gradient="adam").label == f"Meta {offline.label}"
    assert CqlConfig(scheme="target-free", loss="cloning", meta_gradient="adam").label == "BC"


# -- agents of a user ------------------------------------------------------------------------------------------------


def make_nothing(config, spec):
    raise AssertionError


def test_an_agent_is_registered_by_the_name_that_its_config_has():
    @dataclasses.dataclass(frozen=True)
    class Mine(DqnConfig):
        """A config without a name of its own."""

    @dataclasses.dataclass(frozen=True)
    class Ours(DqnConfig):
        """A config with the name of another agent."""

    with registries_restored():
        with pytest.raises(UserError, match=r"Mine\.agent is 'dqn'; it must be 'mine'\."):
            register_agent("mine", Mine, make_nothing)
        sentence = "the package has an agent 'dqn'; choose another name"
        with pytest.raises(UserError, match=sentence):
            register_agent("dqn", Ours, make_nothing)
        with pytest.raises(UserError, match=sentence):
            register_agent("dqn", Ours, dqn.make)


def test_a_docstring_of_several_lines_is_a_comment_of_several_lines(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Mine(DqnConfig):
        """A config with a setting that takes some explaining."""

        agent = "mine"
        patience: int = 3
        """Number of epochs.

        batch_size = 7
        """

    text = to_toml(Mine())
    assert "# Number of epochs.\n#\n# batch_size = 7\npatience = 3\n" in text
    assert tomllib.loads(text)["batch_size"] == 32


def test_presets_of_another_agent_leave_the_defaults_of_an_agent_alone():
    """The preset `toy` sets the discount, but neither the batch size nor the learning rate."""

    @dataclasses.dataclass(frozen=True)
    class Mine(DqnConfig):
        """Deep Q-learning with other defaults."""

        agent = "mine"
        batch_size: int = 64
        learning_rate: float = 7e-4

    with registries_restored():
        register_agent("mine", Mine, make_nothing, presets="isqn.presets.dqn")
        config: Any = preset_config("toy", "mine")
    assert (config.agent, config.discount, config.batch_size, config.learning_rate) == ("mine", 0.9, 64, 7e-4)


@dataclasses.dataclass(frozen=True)
class Timeless(Run):
    """A config that says nothing about the length of a run."""

    agent = "mine"


@dataclasses.dataclass(frozen=True)
class Optimistic(PairLoss):
    """Settings of a loss."""

    optimism: float = 0.5
    """Weight of positive errors."""


@dataclasses.dataclass(frozen=True)
class MoreOptimistic(Optimistic):
    """Settings of another loss, which needs those of the first, too."""

    more: float = 0.5
    """Weight of errors above one."""


@dataclasses.dataclass(frozen=True)
class Undocumented(PairLoss):
    """Settings without help."""

    optimism: float = 0.5


@dataclasses.dataclass(frozen=True)
class Colliding(PairLoss):
    """Settings of which an agent has one, too."""

    buffer_size: int = 3
    """Capacity of something else."""


@dataclasses.dataclass(frozen=True)
class CollidingByAlias(PairLoss):
    """Settings with an alias that is the name of a setting."""

    optimism: Annotated[float, alias("gamma")] = 0.5
    """Weight of positive errors."""


class NoDataclass(PairLoss):
    """Settings that would be lost."""

    optimism: float = 0.5
    """Weight of positive errors."""


def optimistic(online, target, transition, *, optimism):
    return optimism * losses.dqn(online, target, transition)


@pytest.mark.parametrize(
    ("config", "settings", "sentence"),
    [
        (3, {}, "register_agent: config is 3; it must be a frozen dataclass that extends Run."),
        (Timeless, {}, "register_agent: Timeless has no length; it must extend Interaction or Offline of isqn.config."),
        (DqnConfig, {"make": 3}, "register_agent: make is 3; it must be a function (config, spec) -> Agent."),
        (DqnConfig, {"actions": "words"}, "register_agent: actions is 'words'; choose one of discrete, continuous, "),
    ],
)
def test_an_agent_that_cannot_be_trained_is_refused_at_once(config, settings, sentence):
    name = getattr(config, "agent", "mine")
    name = "mine" if config is DqnConfig else name
    mine = type("Mine", (DqnConfig,), {"agent": "mine"}) if config is DqnConfig else config
    with registries_restored(), pytest.raises(UserError) as error:
        register_agent(name, mine, **{"make": make_nothing, **settings})
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("function", "settings", "sentence"),
    [
        (optimistic, None, "its argument 'optimism' is not a setting of `isqn train dqn`; give it a default, or give "),
        (lambda online, target: 0, None, "<lambda> ("),
        (optimistic, 3, "settings is 3; it must be a frozen dataclass that extends PairLoss."),
        (optimistic, NoDataclass, "settings is NoDataclass ("),
        (optimistic, Undocumented, "the setting 'optimism' has no docstring; it is its line in --help."),
        (losses.dqn, Colliding, "`isqn train dqn` has --buffer-size already; rename the setting 'buffer_size'."),
        (losses.dqn, CollidingByAlias, "`isqn train dqn` has --gamma already; rename the setting 'optimism'."),
    ],
)
def test_a_loss_that_cannot_work_is_refused_at_once(function, settings, sentence):
    with registries_restored(), pytest.raises(UserError) as error:
        register_loss("mine", function, "Mine", settings=settings)
    assert str(error.value).startswith(f"register_loss: the loss 'mine': {sentence}")


def test_losses_may_share_settings_but_not_the_name_of_a_setting():
    @dataclasses.dataclass(frozen=True)
    class Other(PairLoss):
        """Settings of another loss."""

        optimism: float = 0.1
        """Weight of something else."""

    with registries_restored():
        for name, settings in (("one", Optimistic), ("one", Optimistic), ("two", Optimistic), ("more", MoreOptimistic)):
            register_loss(name, optimistic, "Mine", settings=settings)
        config: Any = make_config("dqn", optimism=0.2, more=0.3)
        assert (config.optimism, config.more) == (0.2, 0.3)
        with pytest.raises(UserError, match="the loss 'one' has a setting 'optimism' already; choose another name"):
            register_loss("three", optimistic, "Mine", settings=Other)


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (
            "no.such.module",
            "which cannot be imported (No module named 'no'); it must be a module with IS_DISTR",
        ),
        ("isqn.keys", "which lacks IS_DISTRIBUTED, WORK, specification, trains_seeds_together, "),
    ],
)
def test_a_module_that_is_no_loop_is_refused_with_what_a_loop_offers(loop, sentence):
    mine = type("Mine", (DqnConfig,), {"agent": "mine"})
    with registries_restored():
        register_agent("mine", mine, make_nothing, loop=loop)
        with pytest.raises(UserError) as error:
            loop_of(make_config("mine"))
    assert str(error.value).startswith(f"register_agent: the agent 'mine' has the loop {loop!r}, {sentence}")


def test_every_agent_is_trained_by_a_loop():
    for agent in agent_names():
        assert callable(loop_of(make_config(agent)).train)


# -- settings by name ------------------------------------------------------------------------------------------------


def test_settings_are_made_by_name_or_alias():
    assert make_config("dqn", k=3, gamma=0.5) == DqnConfig(num_bellman_iterations=3, discount=0.5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"learning_rate": -1}, "isqn.make_config: learning_rate is -1.0; it must be at least 0."),
        ({"k": 0}, "isqn.make_config: k is 0; it must be between 1 and 1000."),
        (
            {"buffer_size": 10, "min_replay_history": 20},
            "isqn.make_config: min_replay_history is 20; it must be below buffer_size (10).",
        ),
        ({"tau": 1, "target_step_size": 1}, "isqn.make_config sets 'tau' and 'target_step_size', which are the same "),
        (
            {"total_timesteps": 1e6},
            "isqn.make_config: total_timesteps is 1000000.0; it must be a whole number, ",
        ),
        ({"trace_decay": 0.5}, "isqn.make_config sets 'trace_decay'; it is for `isqn train stream-q`, not for dqn."),
    ],
)
def test_a_refusal_in_python_names_settings_as_they_were_given(settings, sentence):
    with pytest.raises(UserError) as error:
        make_config("dqn", **settings)
    assert str(error.value).startswith(sentence)


def test_only_near_names_are_suggested(tmp_path):
    assert nearest("--lambda", ["--gamma", "--loop"], "none.") == "none."
    assert nearest("--gama", ["--gamma", "--loop"]) == "did you mean --gamma?"
    (tmp_path / "mine.toml").touch()
    assert nearest_path(tmp_path / "nope.toml") == ""  # only the ending is alike
    assert nearest_path(tmp_path / "mime.toml") == f"; did you mean {tmp_path}/mine.toml?"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, []),
        ({"total_timesteps": 1_001}, []),
        (
            {"total_timesteps": 1_000},
            ["nothing is learned in 1,000 steps: the first gradient step is after step 1,001"],
        ),
        (
            {"total_timesteps": 1_003, "update_period": 4},
            ["nothing is learned in 1,003 steps: the first gradient step is after step 1,004 (--learning-starts, "],
        ),
        (
            {"batch_size": 2_001, "buffer_size": 2_000},
            ["a batch repeats transitions: it has 2,001 (--batch-size), and the replay buffer never holds more "],
        ),
        ({"batch_size": 2_000, "buffer_size": 2_000}, []),
    ],
)
def test_probable_mistakes_are_remarked_on(fields, said):
    found = list(remarks(DqnConfig(**{"target_update_period": 200, **fields})))
    assert len(found) == len(said)
    assert all(one.startswith(start) for one, start in zip(found, said, strict=True))


def test_a_mapping_cannot_change_the_agent_of_its_base():
    with pytest.raises(UserError, match="here sets 'agent' to 'sac', and these are settings of 'dqn'; leave it out"):
        config_from_mapping({"agent": "sac"}, "here", DqnConfig())


def test_losses_and_schemes_of_the_package_are_not_replaced():
    with registries_restored():
        with pytest.raises(UserError, match="the package has a loss 'dqn'; choose another name"):
            register_loss("dqn", make_nothing, "Mine")
        with pytest.raises(UserError, match="the package has a scheme 'target-free'; choose another name"):
            register_scheme("target-free", make_nothing)


def test_a_scheme_is_registered_by_its_own_name():
    with registries_restored(), pytest.raises(UserError, match="it must be a TargetScheme named 'mine'"):
        register_scheme("mine", SCHEMES["target-free"])


def test_the_advice_on_memory_names_what_the_agent_has():
    advice = advise_lower(DqnConfig(scheme="target-free", loop="host"))
    assert advice == "Lower --num-seeds, --hidden-sizes or --width-factor."
    assert advise_lower(Timeless(scheme="target-free"), "seed") == "Lower --seed."
    assert advise_lower(Timeless(scheme="target-free")) == "Choose a smaller network."


def test_two_files_cannot_register_one_name(tmp_path):
    text = "import isqn\ndef loss(online, target, transition):\n    return online.now[0]\n"
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(f"# {name}\n{text}isqn.register_loss('mine', loss, 'Mine')\n")
    with registries_restored():
        import_all([str(tmp_path / "first.py")])
        with pytest.raises(UserError, match="register_loss: the module first has a loss 'mine'; choose another name"):
            import_all([str(tmp_path / "second.py")])

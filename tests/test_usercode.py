"""Errors in the user's own code: one sentence names the component, the file and the line."""

from __future__ import annotations

from pathlib import Path

import pytest

import isqn
from helpers import registries_restored
from isqn.cli import main
from isqn.usercode import UserCodeError, find_user_line, named

LOSS = """
import isqn
def mine(online, target, transition):
    {line}
isqn.register_loss("mine", mine, "Mine")
"""
SCHEME = """
import isqn
def mine(k):
    {line}
    return isqn.TargetScheme("mine", {prefix!r}, num_heads=1, online=(0,), target=(0,), size={size!r})
isqn.register_scheme("mine", mine)
"""
TORSO = """
import flax.linen as nn
import isqn
class Mine(nn.Module):
    settings: object
    @nn.compact
    def __call__(self, x, train):
        return {value}
isqn.register_torso("mine", Mine)
"""
AGENT = """
from dataclasses import dataclass
import isqn
from isqn.agents import dqn
@dataclass(frozen=True)
class MineConfig(dqn.DqnConfig):
    agent = "mine"
def make(config, spec):
    agent = dqn.make(config, spec)
    return {agent}
isqn.register_agent("mine", MineConfig, make)
"""
ENVIRONMENT = """
import gymnasium as gym
import numpy as np
import isqn
class Mine(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    {actions} = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {{}}
    def step(self, action):
        return {result}
isqn.register_environment("Mine-v0", entry_point=Mine)
"""
FINE = "np.zeros(2, np.float32), 0.0, False, False, {}"


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        (
            LOSS.format(line="return transition.rewrd"),
            "dqn --loss mine",
            "The loss 'mine' failed (mine.py, line 4): AttributeError: 'Transition' object has no attribute 'rewrd'. "
            "(add --debug for the traceback)",
        ),
        (
            LOSS.format(line="return 1.0 if transition.reward > 0 else 0.0"),
            "dqn --loss mine",
            "The loss 'mine' failed (mine.py, line 4): TracerBoolConversionError: `if`, `and`, `or` and `not` do not "
            "work on values that JAX traces; use jnp.where. (add --debug for the traceback)",
        ),
        (
            SCHEME.format(line="assert k < 2", prefix="M", size=""),
            "dqn --scheme mine --k 2",
            "The scheme 'mine' failed (mine.py, line 4): AssertionError. (add --debug for the traceback)",
        ),
        (
            SCHEME.format(line="", prefix="iS", size=""),
            "dqn --scheme mine",
            "--import: 'mine.py' cannot be imported: register_scheme: the scheme 'mine' has the prefix 'iS' of "
            "iterated-shared; choose another one, because labels and run folders begin with it.",
        ),
        (
            SCHEME.format(line="", prefix="M", size=None),
            "dqn --scheme mine",
            "--import: 'mine.py' cannot be imported: register_scheme: the scheme 'mine' has the size None; it must be "
            "a text.",
        ),
        (
            TORSO.format(value="nn.Dense(8)(x) + missing"),
            "dqn --torso mine",
            "The torso 'mine' failed (mine.py, line 8): NameError: name 'missing' is not defined. (add --debug for the "
            "traceback)",
        ),
        (
            TORSO.format(value="x[:, None]"),
            "dqn --torso mine",
            "The torso 'mine' returns an array of shape ('B', 1, 8); it must return a batch of feature vectors, "
            "('B', features).",
        ),
        (
            AGENT.format(agent="None"),
            "mine",
            "The agent 'mine': make(config, spec) returns NoneType; it must return an Agent of isqn.agents.base.",
        ),
        (
            AGENT.format(agent="agent._replace(update=lambda state, batch: None)"),
            "mine",
            "The agent 'mine': update() returns NoneType; it must return an AgentState and a dictionary of metrics.",
        ),
        (
            AGENT.format(agent="agent._replace(act=lambda *given: 1)"),
            "mine",
            "The agent 'mine': act() returns int; it must return a Choice(action, explored).",
        ),
        (
            AGENT.format(agent="agent._replace(update=lambda state, batch: state.nothing)"),
            "mine",
            "The agent 'mine' failed (mine.py, line 10): AttributeError: 'AgentState' object has no attribute "
            "'nothing'. (add --debug for the traceback)",
        ),
        (
            ENVIRONMENT.format(actions="action_space", result="1 / 0"),
            "dqn --env-id Mine-v0",
            "Mine-v0 failed in step() (mine.py, line 11): ZeroDivisionError: division by zero. (add --debug for the "
            "traceback)",
        ),
        (
            ENVIRONMENT.format(actions="actions", result=FINE),
            "dqn --env-id Mine-v0",
            "Mine-v0 has no action_space; set it to a gymnasium.Space in __init__().",
        ),
        (
            "\nraise ValueError('boom')",
            "dqn",
            "--import: 'mine.py' cannot be imported (mine.py, line 2): ValueError: boom. (add --debug for the "
            "traceback)",
        ),
        (
            "\nx = (",
            "dqn",
            "--import: 'mine.py' cannot be imported (mine.py, line 2): SyntaxError: '(' was never closed. (add --debug "
            "for the traceback)",
        ),
        (
            LOSS.format(line="return 0.0").replace('"mine"', '"dqn"'),
            "dqn",
            "--import: 'mine.py' cannot be imported: register_loss: the package has a loss 'dqn'; choose another name.",
        ),
    ],
)
def test_an_error_in_a_component_names_it_with_file_and_line(text, words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(text)
    with registries_restored():
        short = "--total-timesteps 200 --epoch-steps 200 --learning-starts 100 --run-dir run"
        assert main(["train", *words.split(), "--import", "mine.py", *short.split()]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"isqn: {sentence}"


def test_debug_shows_the_original_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("raise ValueError('boom')")
    with registries_restored(), pytest.raises(UserCodeError) as error:
        main(["list", "envs", "--import", "mine.py", "--debug"])
    assert isinstance(error.value.__cause__, ValueError)


def test_an_error_of_the_package_stays_as_it_is():
    """It is a bug, and not the fault of the user's component."""
    with pytest.raises(TypeError):
        named("The loss 'mine'", isqn.TargetScheme)()


def test_the_innermost_line_of_the_user_is_named():
    def fail():
        sorted([1, "a"], key=lambda value: value + 1)

    with pytest.raises(TypeError) as error:
        fail()
    line = fail.__code__.co_firstlineno + 1
    assert find_user_line(error.value).endswith(f"test_usercode.py, line {line}")


@pytest.mark.parametrize("make", [isqn.iterated_shared, isqn.ensemble_shared, isqn.iterated_target_based])
@pytest.mark.parametrize("pairs", ["9", 2.5, 0, None])
def test_the_number_of_pairs_is_a_whole_number(make, pairs):
    with pytest.raises(isqn.UserError, match="the number of pairs must be a whole number of at least 1"):
        make(pairs)

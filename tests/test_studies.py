"""Studies: the paper's grids, which setting overrides which, names of methods, and refusals of bad files."""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import math
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isqn.agents.registry import agent_names, config_class
from isqn.cli import main
from isqn.config.fields import field_names
from isqn.envs.scores import RANDOM_RETURNS, SCORES, game_name
from isqn.presets import preset_config
from isqn.schemes import SCHEMES
from isqn.study.catalogue import MINI, QUESTIONS, find_study
from isqn.study.catalogue import PAPER as GRIDS
from isqn.study.drive import duration_key
from isqn.study.grid import Cell, Study, read_study, to_toml
from isqn.train.record import slug
from isqn.types import UserError

TEXT = json.loads((Path(__file__).parent / "data" / "paper_tables.json").read_text())["text"]

find = cache(find_study)


def paper(name: str) -> Study:
    return find(name, "paper")


def mini(name: str) -> Study:
    return find(name, "mini")


def small(**changes: Any) -> Study:
    """Return a study of two methods on one task."""
    fields: dict[str, Any] = {
        "name": "small",
        "question": "Which?",
        "baseline": "TB-DQN",
        "seeds": (0, 1),
        "tasks": ({"env_id": "CartPole-v1"},),
        "methods": ({"scheme": "target-based"}, {"scheme": "target-free"}),
    }
    return Study(**fields | changes)


def methods(study: Study) -> list[str]:
    return list(dict.fromkeys(cell.method for cell in study.cells))


def values(study: Study, field: str) -> set[Any]:
    return {getattr(cell.config, field, None) for cell in study.cells}


# -- the paper's grids

# study -> numbers of tasks, methods and seeds: games and seeds from section 5, methods from the figures
SIZES = {
    "online-ln": (15, 2 + 4, 5),  # TB, TF, K = 1, 3, 9, 49
    "online-plain": (15, 2 + 4, 5),
    "online-impala": (10, 2 + 4, 5),
    "online-batchnorm": (5, 2, 5),  # with and without
    "offline": (10, 2 + 2 + 1, 5),  # and the ensemble
    "continuous": (7, 3 + 2, 10),
    "language": (1, 2 + 2, 5),
    "streaming": (7, 1 + 3, 5),  # there is no TB
    "mellowmax": (2, 2 + 2, 5),
    "ablation-period": (1, 5 + 1 + 5, 5),
    "ablation-heads": (2, 3 * (1 + 5), 5),
    "meta": (3, 2 + 1, 5),
    "mixed-precision": (1, 2 * (2 + 2), 5),
    "analysis": (15, 2 + 2, 5),
    "training-time": (1, 2 + 4, 1),
}


def test_there_is_a_study_for_each_figure():
    assert list(SIZES) == list(QUESTIONS) == list(GRIDS) == list(MINI)


@pytest.mark.parametrize("name", SIZES)
def test_studies_have_the_runs_of_the_paper(name):
    study = paper(name)
    lists = [[len(v) if isinstance(v, list) else 1 for v in method.values()] for method in study.methods]
    sizes = len(study.tasks), sum(map(math.prod, lists)), len(study.seeds)
    assert sizes == SIZES[name]
    folders = {cell.folder(Path("out"), seed) for cell in study.cells for seed in study.seeds}
    assert len(folders) == math.prod(sizes)


@pytest.mark.parametrize("name", QUESTIONS)
def test_runs_have_the_length_of_the_paper(name):
    appendix_d = ("mellowmax", "ablation-period", "ablation-heads", "meta", "mixed-precision")
    frames = 40_000_000 if name in appendix_d else 100_000_000
    steps = 500_000 if name == "continuous" else frames // 4
    if name == "offline":
        assert values(paper(name), "num_updates") == {50 * 62_500}
    elif name == "language":  # 600,000 micro-batches
        assert values(paper(name), "num_updates") == {600_000 // 16}
    else:
        assert values(paper(name), "total_timesteps") == {steps}


@pytest.mark.parametrize("name", QUESTIONS)
def test_other_settings_are_those_of_the_preset(name):
    """Settings that the study does not vary are the preset's, for every method and game."""
    varied = {
        "mellowmax": {"loss", "mellowmax_temperature"},
        "ablation-period": {"target_update_period"},
        "ablation-heads": {"width_factor"},
        "meta": {"meta_gradient"},
        "mixed-precision": {"compute_dtype"},
        "online-batchnorm": {"batch_norm"},
        "analysis": {"analysis"},
        "continuous": {"analysis", "joint_batch_norm"},
        "offline": {"analysis", "dataset"},
    }.get(name, set())
    presets = {"online-plain": "atari-cnn", "online-batchnorm": "atari-cnn", "online-impala": "atari-impala-ln"}
    presets |= {"streaming": "atari-stream", "continuous": "dmc-hard", "offline": "atari-cql", "language": "wordle"}
    expected = preset_config(presets.get(name, "atari-cnn-ln")).resume_fields()
    for cell in paper(name).cells:
        allowed = {"scheme", "num_bellman_iterations", "env_id", "experiment", *varied}
        differ = {field for field, value in cell.config.resume_fields().items() if value != expected[field]}
        assert differ <= allowed
        assert cell.config.env_id == cell.task
        assert cell.config.experiment == name


def test_studies_have_the_values_of_k_of_the_paper():
    ks = {name: {c.config.num_bellman_iterations for c in paper(name).cells if "iS" in c.method} for name in QUESTIONS}
    assert ks == {
        **{name: {1, 3, 9, 49} for name in ("online-ln", "online-plain", "online-impala", "training-time")},
        **{name: {1, 9} for name in ("offline", "continuous", "mellowmax", "meta", "mixed-precision", "analysis")},
        "language": {1, 9},
        "ablation-heads": {1, 3, 9, 29, 49},
        "ablation-period": {9},
        "online-batchnorm": set(),
        "streaming": {1, 3, 9},
    }


def test_ablations_vary_the_settings_of_the_paper():
    assert values(paper("ablation-period"), "target_update_period") == {2_000, 4_000, 8_000, 16_000, 32_000}
    assert {512 * factor for factor in values(paper("ablation-heads"), "width_factor")} == {256, 512, 1_024}
    assert values(paper("mixed-precision"), "compute_dtype") == {"float32", "bfloat16"}
    assert values(paper("online-batchnorm"), "batch_norm") == {False, True}
    assert values(paper("analysis"), "analysis") == {True}
    assert values(paper("meta"), "meta_gradient") == {"none", "adam"}
    temperatures = {(c.task, c.config.loss, c.config.mellowmax_temperature) for c in paper("mellowmax").cells}
    assert temperatures == {("ALE/Breakout-v5", "mellowmax", 1_000), ("ALE/Seaquest-v5", "mellowmax", 30)}


def test_studies_have_the_games_of_the_paper():
    games = {name: {game_name(task["env_id"]) for task in paper(name).tasks} for name in QUESTIONS}
    assert games["online-ln"] == games["online-plain"] == games["analysis"] == SCORES.keys() - {"Seaquest"}
    assert games["online-impala"] < games["online-ln"]
    assert games["offline"] - games["online-impala"] == {"Qbert"}  # appendix A: in place of Tutankham
    assert games["online-impala"] - games["offline"] == {"Tutankham"}
    assert games["mellowmax"] == {"Breakout", "Seaquest"}
    assert games["ablation-period"] == {"Tutankham"}
    assert games["ablation-heads"] == {"CrazyClimber", "Tutankham"}
    assert games["training-time"] == {"Asterix"}
    assert all(games[name] <= SCORES.keys() for name in QUESTIONS if name not in ("continuous", "language"))
    assert {task["env_id"].split("-")[0] for task in paper("continuous").tasks} == {
        "dm_control/dog",
        "dm_control/humanoid",
    }


def test_grids_have_the_numbers_of_the_text():
    tasks = {name: len(paper(name).tasks) for name in QUESTIONS}
    seeds = {name: len(paper(name).seeds) for name in QUESTIONS}
    assert TEXT["section 5"] == {
        "seeds per Atari game": seeds["online-ln"],
        "seeds per DMC Hard task": seeds["continuous"],
        "seeds for Wordle": seeds["language"],
        "games for the CNN": tasks["online-ln"],
        "games for IMPALA": tasks["online-impala"],
    }
    assert TEXT["section 5.2"]["offline Atari games"] == tasks["offline"]
    assert TEXT["section 5.3"]["DMC Hard tasks"] == tasks["continuous"]
    assert TEXT["section 5.5"]["streaming games"] == tasks["streaming"]
    (short,), (long,) = (values(paper(name), "total_timesteps") for name in ("meta", "online-ln"))
    budgets = {"budget in million frames": short / 250_000, "budget elsewhere in million frames": long / 250_000}
    assert TEXT["appendix D"] == budgets
    omegas = [task["mellowmax_temperature"] for task in paper("mellowmax").tasks]
    assert TEXT["appendix D.1"] == {"omega on Breakout": omegas[0], "omega on Seaquest": omegas[1]}
    assert TEXT["appendix D.2"] == {"values of T": len(values(paper("ablation-period"), "target_update_period"))}
    factors = values(paper("ablation-heads"), "width_factor")
    ks = values(paper("ablation-heads"), "num_bellman_iterations")
    assert TEXT["appendix D.3"] == {
        "half the width": 512 * min(factors),
        "twice the width": 512 * max(factors),
        "fewest heads (K=1)": min(ks) + 1,
        "most heads (K=49)": max(ks) + 1,
    }
    assert TEXT["appendix D.4"] == {"K": max(values(paper("meta"), "num_bellman_iterations")), "games": tasks["meta"]}
    assert TEXT["appendix F.3"] == {"games with BatchNorm": tasks["online-batchnorm"]}


# -- the small scale


@pytest.mark.parametrize("name", MINI)
def test_the_small_study_asks_the_same_question(name):
    small, large = mini(name), paper(name)
    for field in ("question", "paper", "agent", "along", "flops"):
        assert getattr(small, field) == getattr(large, field)
    assert small.panels == large.panels or name == "ablation-period"  # the small one also has runs without LayerNorm
    for field in ("loss", "layer_norm", "batch_norm", "compute_dtype", "meta_gradient", "analysis"):
        assert values(small, field) == values(large, field) | (
            {False} if field == small.panels == "layer_norm" else set()
        ), field
    assert values(small, "scheme") >= values(large, "scheme")
    assert (small.scale, large.scale) == ("mini", "paper")


@pytest.mark.parametrize("name", MINI)
def test_the_small_study_has_new_seeds_and_tasks_with_normalised_scores(name):
    study = mini(name)
    assert min(study.seeds) > 2  # seeds 0 to 2 were used for tuning
    for task in study.tasks:
        assert "random_score" in task or task["env_id"] in RANDOM_RETURNS or game_name(task["env_id"]) in SCORES


# -- which setting overrides which

LAYERS = ("study", "task", "scheme", "method")


@pytest.mark.parametrize("is_set", list(itertools.product((False, True), repeat=4)))
def test_each_layer_overrides_those_before_it(is_set):
    """The last layer that sets the learning rate decides it."""
    rates = dict(zip(LAYERS, (0.1, 0.2, 0.3, 0.4), strict=True))
    tables = {
        layer: {"learning_rate": rates[layer]} if sets else {} for layer, sets in zip(LAYERS, is_set, strict=True)
    }
    study = small(
        settings=tables["study"],
        tasks=({"env_id": "CartPole-v1", **tables["task"], "target-free": tables["scheme"]},),
        methods=({"scheme": "target-free", **tables["method"]}, {"scheme": "target-based"}),
    )
    first, other = study.cells
    given = [rates[layer] for layer in LAYERS if tables[layer]]
    assert first.config.learning_rate == (given or [preset_config("classic").learning_rate])[-1]
    for_all = [rates[layer] for layer in ("study", "task") if tables[layer]]  # the others are of target-free
    assert other.config.learning_rate == (for_all or [1e-3])[-1]


@pytest.mark.parametrize("by", ["settings", "tasks", "methods", "default"])
def test_the_table_of_a_scheme_applies_wherever_the_scheme_is_set(by):
    scheme = {} if by == "default" else {"scheme": "ensemble-shared"}
    tables = {"iterated-shared": {"target_update_period": 300}, "ensemble-shared": {"target_update_period": 500}}
    given = {where: scheme if where == by else {} for where in ("settings", "tasks", "methods")}
    study = small(
        settings=given["settings"],
        tasks=({"env_id": "CartPole-v1", **given["tasks"], **tables},),
        methods=({**given["methods"], "name": "mine"},),
        baseline="mine",
    )
    (cell,) = study.cells
    assert cell.config.scheme == scheme.get("scheme", "iterated-shared")
    assert cell.config.target_update_period == (500 if scheme else 300)


def test_every_table_can_name_a_preset_and_override_it():
    atari = preset_config("atari-cnn-ln").learning_rate
    assert small(settings={"preset": "toy"}).cells[0].config.discount == 0.9
    task = {"env_id": "CartPole-v1", "preset": "atari-cnn-ln", "layer_norm": False}
    config = small(settings={"preset": "toy", "discount": 0.5}, tasks=(task,)).cells[0].config
    assert (config.learning_rate, config.discount, config.layer_norm) == (atari, 0.5, False)
    method = {"scheme": "target-based", "preset": "classic"}
    config = small(settings={"preset": "toy"}, tasks=(task,), methods=(method,)).cells[0].config
    assert config == preset_config("classic").replace(env_id="CartPole-v1", scheme="target-based", experiment="small")


@pytest.mark.parametrize(("env_id", "preset"), [("ALE/Pong-v5", "atari-cnn-ln"), ("Acrobot-v1", "classic")])
def test_the_environment_chooses_the_default_preset(env_id, preset):
    config = small(tasks=({"env_id": env_id},)).cells[0].config
    assert config == preset_config(preset).replace(env_id=env_id, scheme="target-based", experiment="small")


def test_scores_are_not_settings():
    study = small(tasks=({"env_id": "CartPole-v1", "random_score": -5, "reference_score": 0.5},))
    assert study.cells[0].config == small().cells[0].config


# -- names and places


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ({"scheme": "target-based"}, ["TB-DQN"]),
        ({"scheme": ["target-based", "target-free"]}, ["TB-DQN", "TF-DQN"]),
        ({"num_bellman_iterations": 9}, ["iS-DQN K=9"]),
        ({"num_bellman_iterations": [1, 9]}, ["iS-DQN K=1", "iS-DQN K=9"]),
        ({"scheme": "ensemble-shared", "num_bellman_iterations": 5}, ["ES-DQN N=5"]),
        (
            {"num_bellman_iterations": [1, 9], "target_update_period": [200, 400]},
            ["iS-DQN K=1, T=200", "iS-DQN K=1, T=400", "iS-DQN K=9, T=200", "iS-DQN K=9, T=400"],
        ),
        ({"target_update_period": 400}, ["iS-DQN K=1"]),
        ({"target_update_period": [400]}, ["iS-DQN K=1"]),
        ({"loss": ["dqn", "mellowmax"]}, ["iS-DQN K=1", "iS-Mellow K=1"]),
        ({"meta_gradient": ["none", "adam"]}, ["iS-DQN K=1", "Meta iS-DQN K=1"]),
        ({"learning_rate": [1e-3, 0.00025]}, ["iS-DQN K=1, lr=0.001", "iS-DQN K=1, lr=0.00025"]),
        ({"width_factor": [0.5, 2]}, ["iS-DQN K=1, width x0.5", "iS-DQN K=1, width x2"]),
        ({"compute_dtype": ["float32", "bfloat16"]}, ["iS-DQN K=1, float32", "iS-DQN K=1, bfloat16"]),
        ({"batch_norm": [False, True]}, ["iS-DQN K=1, no BN", "iS-DQN K=1, BN"]),
        ({"layer_norm": [True, False]}, ["iS-DQN K=1, LN", "iS-DQN K=1, no LN"]),
        ({"acting_rule": ["mean", "last"]}, ["iS-DQN K=1, acting rule mean", "iS-DQN K=1, acting rule last"]),
        ({"name": "mine", "num_bellman_iterations": 9}, ["mine"]),
        ({"name": "mine", "num_bellman_iterations": [1, 9]}, ["mine, K=1", "mine, K=9"]),
        ({"name": ""}, ["iS-DQN K=1"]),
    ],
)
def test_names_of_methods(method, names):
    assert methods(small(methods=(method,), baseline=names[0])) == names


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ([64, 32], [(64, 32)]),
        ([], [()]),
        ([[64, 32]], [(64, 32)]),
        ([[64], [64, 32]], [(64,), (64, 32)]),
        ([[], [8]], [(), (8,)]),
        ((64, 32), [(64, 32)]),
    ],
)
def test_a_setting_that_is_a_list_takes_a_list_of_lists(given, sizes):
    study = small(methods=({"name": "mine", "hidden_sizes": given}, {"scheme": "target-based"}))
    assert [cell.config.hidden_sizes for cell in study.cells] == [*sizes, (128, 128)]


def test_head_weights_take_a_list_of_lists():
    method = {"num_bellman_iterations": 2, "head_weights": [[1, 1], [1, 0.5]]}
    study = small(methods=({"scheme": "target-based"}, method))
    assert [cell.config.pair_weights for cell in study.cells] == [(1.0,), (1.0, 1.0), (1.0, 0.5)]


def test_a_method_is_the_grid_of_its_lists():
    lists = {"num_bellman_iterations": [1, 3, 9], "learning_rate": [1e-3, 1e-4], "width_factor": [0.5, 1, 2, 4]}
    study = small(methods=({"scheme": "target-based"}, {**lists, "batch_size": 64}))
    cells = study.cells[1:]
    found = [(c.config.num_bellman_iterations, c.config.learning_rate, c.config.width_factor) for c in cells]
    assert found == list(itertools.product(*lists.values()))
    assert {c.config.batch_size for c in cells} == {64}
    assert len(methods(study)) == 1 + 3 * 2 * 4


def test_folders_of_runs():
    cell = next(c for c in paper("ablation-period").cells if c.method == "iS-DQN K=9, T=4000")
    assert cell.folder(Path("out"), 3) == Path("out/runs/ALE-Tutankham-v5/iS-DQN-K9-T4000/seed-3")
    assert slug("my_module:Mine-v0") == "my_module-Mine-v0"


def axes(cell: Cell) -> tuple[Any, ...]:
    return cell.panel, cell.in_panel, cell.line, cell.position


def test_without_panels_and_axis_every_name_is_the_methods():
    for name in ("online-ln", "online-batchnorm", "mellowmax", "meta"):
        assert all(axes(cell) == ("", cell.method, cell.method, None) for cell in paper(name).cells)


def test_lines_along_the_target_update_period():
    cells = paper("ablation-period").cells
    assert paper("ablation-period").baseline == "TB-DQN, T=8000"
    assert [axes(cell) for cell in cells[:2]] == [
        ("", "TB-DQN, T=2000", "TB-DQN", 2_000.0),
        ("", "TB-DQN, T=4000", "TB-DQN", 4_000.0),
    ]
    assert [axes(cell) for cell in cells[5:7]] == [
        ("", "TF-DQN", "TF-DQN", None),  # a constant: it does not depend on T
        ("", "iS-DQN K=9, T=2000", "iS-DQN K=9", 2_000.0),
    ]
    assert len({cell.line for cell in cells}) == 3


def test_panels_of_widths_with_lines_along_k():
    study = paper("ablation-heads")
    on_one = [cell for cell in study.cells if cell.task == study.tasks[0]["env_id"]]
    assert {cell.panel for cell in on_one} == {"width x0.5", "width x1", "width x2"}
    for panel in ("width x0.5", "width x1", "width x2"):
        inside = [cell for cell in on_one if cell.panel == panel]
        assert [cell.in_panel for cell in inside] == [study.baseline, *(f"iS-DQN K={k}" for k in (1, 3, 9, 29, 49))]
        assert [cell.line for cell in inside] == ["TF-DQN"] + 5 * ["iS-DQN"]
        assert [cell.position for cell in inside] == [None, 1, 3, 9, 29, 49]
        assert [cell.method for cell in inside] == [f"{cell.in_panel}, {panel}" for cell in inside]


def test_panels_of_precisions():
    cells = paper("mixed-precision").cells
    assert [(cell.panel, cell.in_panel) for cell in cells] == [
        (panel, name)
        for names in (["TB-DQN"], ["TF-DQN"], ["iS-DQN K=1"], ["iS-DQN K=9"])
        for name in names
        for panel in ("float32", "bfloat16")
    ]


def test_lines_of_ensembles_along_their_size():
    method = {"scheme": ["iterated-shared", "ensemble-shared"], "num_bellman_iterations": [2, 3]}
    study = small(methods=({"scheme": "target-based"}, method), along="num_bellman_iterations")
    assert [(cell.line, cell.position) for cell in study.cells] == [
        ("TB-DQN", None),
        *(("iS-DQN", 2), ("iS-DQN", 3), ("ES-DQN", 2), ("ES-DQN", 3)),
    ]


def test_lines_of_a_named_method():
    method = {"name": "my K=2", "num_bellman_iterations": [2, 3], "learning_rate": [1e-3, 1e-4]}
    study = small(methods=({"scheme": "target-based"}, method), along="num_bellman_iterations")
    assert [cell.line for cell in study.cells[1:3]] == ["my K=2, lr=0.001", "my K=2, lr=0.0001"]


# -- parts of a study


def test_a_part_has_some_tasks_and_other_seeds():
    study = paper("online-ln")
    assert study.only() is study
    some = study.only(("ALE/Pong-v5", "ALE/Asterix-v5"), (7,))
    assert [task["env_id"] for task in some.tasks] == ["ALE/Pong-v5", "ALE/Asterix-v5"]
    assert some.seeds == (7,)
    assert set(some.cells) == {c for c in study.cells if c.task in ("ALE/Pong-v5", "ALE/Asterix-v5")}
    assert study.only(seeds=(7,)).tasks == study.tasks
    some = paper("offline").only(("ALE/Pong-v5",))
    assert some.tasks == ({"env_id": "ALE/Pong-v5", "dataset": "data/Pong/{seed}"},)


# -- files


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "scale"), [*((name, "paper") for name in QUESTIONS), *((name, "mini") for name in MINI)]
)
def test_a_study_survives_its_file(name, scale, tmp_path):
    study = find(name, scale)
    again = read_study(write(tmp_path / "another-name.toml", to_toml(study)))
    assert to_toml(again) == to_toml(study)
    assert (again.name, again.scale, again.seeds, again.agent) == (name, study.scale, study.seeds, study.agent)
    assert again.cells == study.cells


def test_the_file_of_a_small_study():
    study = small(
        settings={"preset": "toy"},
        tasks=({"env_id": "CartPole-v1", "target-free": {"learning_rate": 1e-5}, "reference_score": 500},),
        methods=({"scheme": "target-based", "hidden_sizes": (8, 8)}, {"scheme": "target-free", "layer_norm": True}),
        flops=True,
    )
    assert (
        to_toml(study)
        == """\
# isqn study FILE.toml; the settings are those of `isqn train dqn --help`.
name = "small"
question = "Which?"
baseline = "TB-DQN"
flops = true
seeds = [0, 1]

[settings]
preset = "toy"

[[tasks]]
env_id = "CartPole-v1"
reference_score = 500
[tasks.target-free]
learning_rate = 1e-05

[[methods]]
scheme = "target-based"
hidden_sizes = [8, 8]

[[methods]]
scheme = "target-free"
layer_norm = true
"""
    )


def test_a_study_without_a_name_has_that_of_its_file(tmp_path):
    text = to_toml(small()).replace('name = "small"', "")
    study = read_study(write(tmp_path / "my-question.toml", text))
    assert study == small(name="my-question")
    assert (study.scale, study.agent, study.settings, study.flops) == ("own", "dqn", {}, False)


# -- code of the user


MODULE = "import gymnasium, pathlib; pathlib.Path(__file__).with_name('executed').touch()\n"


def test_reading_a_study_imports_the_modules_of_its_environments(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / "my_grid_world.py", MODULE)
    study = small(tasks=({"env_id": "my_grid_world:Mine-v0"}, {"env_id": "my_grid_world:Other-v0"}))
    assert study.modules == ["my_grid_world"]
    path = write(tmp_path / "mine.toml", to_toml(study))
    assert read_study(path, import_code=False) == study
    assert not (tmp_path / "executed").exists()
    assert read_study(path) == study
    assert (tmp_path / "executed").exists()


def test_a_module_of_an_environment_that_cannot_be_imported(tmp_path):
    study = small(tasks=({"env_id": "no_such_module:Mine-v0"},))
    path = write(tmp_path / "mine.toml", to_toml(study))
    with pytest.raises(UserError) as error:
        read_study(path)
    reason = f"it is neither in {Path.cwd()} nor installed"
    assert str(error.value) == f"{path}: tasks: 'no_such_module' cannot be imported: {reason}."


def test_a_study_can_be_read_without_executing_its_imports(tmp_path):
    write(tmp_path / "mine.py", MODULE)
    study = small(imports=(str(tmp_path / "mine.py"),))
    path = write(tmp_path / "mine.toml", to_toml(study, tmp_path))
    assert read_study(path, import_code=False) == study
    path.write_text(path.read_text().replace("target-free", "two-chains"))
    with pytest.raises(UserError, match=r"'two-chains'.* The study was trained with --import .*mine\.py; add it\."):
        read_study(path, import_code=False)
    assert not (tmp_path / "executed").exists()


def test_imports_of_the_command_line_become_those_of_a_study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = small(imports=(str(tmp_path / "a.py"),))
    assert study.with_imports([]) is study
    assert study.with_imports(["a.py", "b.py", "module"]).imports == (
        *(str(tmp_path / name) for name in ("a.py", "b.py")),
        "module",
    )


# -- every bad study is refused by one sentence

TB, TF, CARTPOLE = {"scheme": "target-based"}, {"scheme": "target-free"}, {"env_id": "CartPole-v1"}
SEEDS = "they must be different whole numbers from 0 to 2147483647."
FOLDER = "it must be a text that can name a folder, of at most 100 bytes."
VALUE = "it must be a text, a finite number of at most 64 bits, true or false, or a list of those."
HELP = "the settings are those of `isqn train dqn --help`."
OTHER = "give one of them another `name`, or leave it out."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        # its own fields
        ({"name": ".."}, f"study ..: name is '..'; {FOLDER}"),
        ({"name": ""}, f"study : name is ''; {FOLDER}"),
        ({"name": "../a"}, "study ../a: name is '../a'; it must be a name, not a path."),
        ({"scale": "x"}, "study small: scale is 'x', which is not a scale; choose one of own, mini, paper."),
        ({"agent": "dqnn"}, "study small: agent is 'dqnn', which is not an agent; did you mean dqn?"),
        ({"seeds": ()}, "study small: seeds is empty; give at least one."),
        ({"tasks": ()}, "study small: tasks is empty; give at least one."),
        ({"methods": ()}, "study small: methods is empty; give at least one."),
        ({"seeds": (3, 1, 3)}, f"study small: seeds is [3, 1, 3]; {SEEDS}"),
        ({"seeds": (-1,)}, f"study small: seeds is [-1]; {SEEDS}"),
        ({"seeds": (2**31,)}, f"study small: seeds is [2147483648]; {SEEDS}"),
        ({"seeds": (True,)}, f"study small: seeds is [True]; {SEEDS}"),
        ({"seeds": (0.0,)}, f"study small: seeds is [0.0]; {SEEDS}"),
        ({"seeds": ("0",)}, f"study small: seeds is ['0']; {SEEDS}"),
        ({"seeds": ([0],)}, f"study small: seeds is [[0]]; {SEEDS}"),
        # names of settings
        (
            {"settings": {"learning_rat": 1}},
            "study small: settings sets 'learning_rat', which is not a setting there; did you mean learning_rate?",
        ),
        (
            {"settings": {"k": 3}},
            "study small: settings sets 'k', which is not a setting there; did you mean num_bellman_iterations?",
        ),
        ({"settings": {"xyz": 1}}, f"study small: settings sets 'xyz', which is not a setting there; {HELP}"),
        (
            {"settings": {"seed": 1}},
            "study small: settings sets 'seed', which is not a setting there; a study says it by `seeds`.",
        ),
        (
            {"methods": ({**TB, "env_id": "CartPole-v1"},)},
            "study small: method 1 sets 'env_id', which is not a setting there; a study says it by `tasks`.",
        ),
        (
            {"methods": (TB, {**TF, "experiment": "mine"})},
            "study small: method 2 sets 'experiment', which is not a setting there; a study says it by `name`.",
        ),
        (
            {"settings": {"trace_decay": 0.5}},
            "study small: settings sets 'trace_decay'; it is for `isqn train stream-q`, not for dqn.",
        ),
        (
            {"agent": "sac", "settings": {"width_factor": 2.0}},
            "study small: settings sets 'width_factor'; it is for `isqn train dqn` or `isqn train stream-q` or "
            "`isqn train cql`, not for sac.",
        ),
        (
            {"agent": "sac", "along": "width_factor"},
            "study small: along is 'width_factor', which is not a setting that is a number; the settings are those of "
            "`isqn train sac --help`.",
        ),
        ({"datasets": {"subset": "all"}}, "study small: datasets are for the agent cql."),
        (
            {"methods": ({**TB, "nme": "a"},)},
            "study small: method 1 sets 'nme', which is not a setting there; did you mean name?",
        ),
        (
            {"settings": {"name": "a"}},
            f"study small: settings sets 'name', which is not a setting there; {HELP}",
        ),
        (
            {"tasks": ({**CARTPOLE, "random_scor": 1},)},
            "study small, CartPole-v1 sets 'random_scor', which is not a setting there; did you mean random_score?",
        ),
        (
            {"tasks": ({**CARTPOLE, "target_free": {}},)},
            "study small, CartPole-v1 sets 'target_free', which is not a setting there; did you mean target-free?",
        ),
        (
            {"tasks": ({**CARTPOLE, "ensemble-shared": {"learning_rat": 1}},)},
            "study small, CartPole-v1, ensemble-shared sets 'learning_rat', which is not a setting there; "
            "did you mean learning_rate?",
        ),
        # their values
        ({"settings": {"learning_rate": {}}}, f"study small: settings: learning_rate is {{}}; {VALUE}"),
        ({"settings": {"learning_rate": math.nan}}, f"study small: settings: learning_rate is nan; {VALUE}"),
        ({"settings": {"discount": 2**63}}, f"study small: settings: discount is 9223372036854775808; {VALUE}"),
        (
            {"settings": {"torso": datetime.date(2026, 1, 2)}},
            f"study small: settings: torso is datetime.date(2026, 1, 2); {VALUE}",
        ),
        (
            {"settings": {"target_update_period": [200, 400]}},
            "study small, CartPole-v1: target_update_period is [200, 400]; it must be a whole number.",
        ),
        (
            {"methods": ({**TB, "learning_rate": [1e-3, "a"]},)},
            "study small, CartPole-v1: learning_rate is 'a'; it must be a number.",
        ),
        (
            {"methods": ({**TB, "hidden_sizes": [[8], 8]},)},
            "study small, CartPole-v1: hidden_sizes is 8; it must be a list of whole numbers.",
        ),
        (
            {"methods": ({**TB, "learning_rate": []},)},
            "study small: method 1: learning_rate is an empty list; give at least one value.",
        ),
        ({"methods": ({**TB, "name": 5},)}, "study small: method 1: name is 5; it must be a text."),
        ({"methods": ({**TB, "name": ["a", "b"]},)}, "study small: method 1: name is ['a', 'b']; it must be a text."),
        (
            {"methods": ({"scheme": "target-base"},)},
            "study small, CartPole-v1: scheme is 'target-base'; did you mean target-based?",
        ),
        (
            {"methods": ({"scheme": [["a"], ["b"]]},)},
            "study small, CartPole-v1: scheme is ['a']; choose one of target-based, target-free, iterated-shared, "
            "ensemble-shared, iterated-target-based.",
        ),
        (
            {"settings": {"preset": "clasic"}},
            "study small: settings: preset is 'clasic', which is not a preset of the agent dqn; did you mean classic?",
        ),
        (
            {"methods": ({**TB, "preset": "wordle"},)},
            "study small: method 1: preset is 'wordle', which is not a preset of the agent dqn; choose one of "
            "atari-cnn-ln, atari-cnn, atari-batchnorm, atari-impala-ln, atari-smoke, minatar, classic, toy.",
        ),
        (
            {"agent": "ilql", "settings": {"preset": "wordl"}},
            "study small: settings: preset is 'wordl', which is not a preset of the agent ilql; did you mean wordle?",
        ),
        ({"settings": {"preset": ["toy"]}}, "study small: settings: preset is ['toy']; it must be a text."),
        ({"settings": {"preset": 0}}, "study small: settings: preset is 0; it must be a text."),
        (
            {"settings": {"mellowmax_temperature": 3.0}},
            "study small: mellowmax_temperature has no effect in any run: it needs loss mellowmax.",
        ),
        # tasks
        ({"tasks": ({},)}, "study small: a task has no env_id; `isqn list envs` shows what there is."),
        ({"tasks": ({"env_id": 5},)}, "study small: a task has no env_id; `isqn list envs` shows what there is."),
        ({"tasks": ({"env_id": ""},)}, f"study small, : env_id is ''; {FOLDER}"),
        (
            {"tasks": (CARTPOLE, {"env_id": "Acrobot-v1"}, {**CARTPOLE, "discount": 0.9})},
            "study small: the tasks 'CartPole-v1' and 'CartPole-v1' have the same folder name; leave one of them out.",
        ),
        (
            {"tasks": ({"env_id": "a/b"}, {"env_id": "a:b"})},
            "study small: the tasks 'a/b' and 'a:b' have the same folder name; leave one of them out.",
        ),
        (
            {"tasks": ({**CARTPOLE, "random_score": "22"},)},
            "study small, CartPole-v1: random_score is '22'; it must be a number.",
        ),
        (
            {"tasks": ({**CARTPOLE, "reference_score": True},)},
            "study small, CartPole-v1: reference_score is True; it must be a number.",
        ),
        (
            {"tasks": ({**CARTPOLE, "reference_score": math.inf},)},
            "study small, CartPole-v1: reference_score is inf; it must be a number.",
        ),
        (
            {"tasks": ({**CARTPOLE, "random_score": [1]},)},
            "study small, CartPole-v1: random_score is [1]; it must be a number.",
        ),
        (
            {"tasks": ({**CARTPOLE, "random_score": 22, "reference_score": 22.0},)},
            "study small, CartPole-v1: random_score is 22; it must be below reference_score (22.0).",
        ),
        (
            {"tasks": ({**CARTPOLE, "target-free": 0.1},)},
            "study small, CartPole-v1: target-free is 0.1; it must be a table of other settings.",
        ),
        (
            {"tasks": ({**CARTPOLE, "target-free": TB},)},
            "study small, CartPole-v1: target-free is {'scheme': 'target-based'}; "
            "it must be a table of other settings.",
        ),
        # what cannot be told apart
        ({"methods": (TB, TB)}, f"study small: the methods 'TB-DQN' and 'TB-DQN' have the same folder name; {OTHER}"),
        (
            {"methods": (TB, {**TB, "learning_rate": 0.1})},
            f"study small: the methods 'TB-DQN' and 'TB-DQN' have the same folder name; {OTHER}",
        ),
        (
            {"methods": (TB, {**TF, "learning_rate": [0.1, 0.1]})},
            f"study small: the methods 'TF-DQN, lr=0.1' and 'TF-DQN, lr=0.1' have the same folder name; {OTHER}",
        ),
        (
            {"methods": (TB, {**TF, "name": "a b"}, {**TF, "name": "a-b"})},
            f"study small: the methods 'a b' and 'a-b' have the same folder name; {OTHER}",
        ),
        ({"methods": ({**TB, "name": "."},)}, f"study small: the name of a method is '.'; {FOLDER}"),
        (
            {"tasks": (CARTPOLE, {"env_id": "Acrobot-v1", "num_bellman_iterations": 3}), "methods": (TB, {})},
            "study small: one method is named 'iS-DQN K=1' on CartPole-v1 and 'iS-DQN K=3' on Acrobot-v1; "
            "move the setting in which they differ from [[tasks]] to [[methods]].",
        ),
        (
            {"tasks": (CARTPOLE, {"env_id": "Acrobot-v1", "layer_norm": True}), "panels": "layer_norm"},
            "study small: one method is named 'TB-DQN in no LN' on CartPole-v1 and 'TB-DQN in LN' on Acrobot-v1; "
            "move the setting in which they differ from [[tasks]] to [[methods]].",
        ),
        (
            {"methods": ({**TB, "width_factor": [0.5, 1]}, TB), "panels": "width_factor"},
            f"study small, width x1: the methods 'TB-DQN' and 'TB-DQN' have the same folder name; {OTHER}",
        ),
        # the baseline and the axes
        (
            {"baseline": "TB"},
            "study small: baseline is 'TB', which is not a method; choose one of TB-DQN, TF-DQN.",
        ),
        (
            {"baseline": "TB-DQ"},
            "study small: baseline is 'TB-DQ', which is not a method; did you mean TB-DQN?",
        ),
        (
            {"methods": (TB, {**TF, "width_factor": [0.5, 1]}), "panels": "width_factor"},
            "study small, width x0.5: baseline is 'TB-DQN', which is not a method; did you mean TF-DQN?",
        ),
        ({"along": "loss"}, f"study small: along is 'loss', which is not a setting that is a number; {HELP}"),
        (
            {"along": "learning_rat"},
            "study small: along is 'learning_rat', which is not a setting that is a number; did you mean "
            "learning_rate?",
        ),
        ({"along": "discount"}, "study small: along is 'discount', and no method has a list of it."),
        (
            {"along": "discount", "panels": "discount"},
            "study small: along and panels are both 'discount'; let panels be another setting.",
        ),
        ({"panels": "layer_norm"}, "study small: panels is 'layer_norm', and all methods have the same."),
        ({"panels": "env_id"}, f"study small: panels is 'env_id', which is not a setting; {HELP}"),
        ({"panels": "widht"}, f"study small: panels is 'widht', which is not a setting; {HELP}"),
        (
            {"along": "target_update_period", "methods": (TB, {**TB, "target_update_period": [100, 400]})},
            f"study small: the lines 'TB-DQN' and 'TB-DQN' have the same folder name; {OTHER}",
        ),
        (
            {"methods": (TB, {**TF, "name": "tb-dqn"})},
            f"study small: the methods 'TB-DQN' and 'tb-dqn' have the same folder name; {OTHER}",
        ),
        (
            {"settings": {"epoch_steps": 100, "total_timesteps": 400}, "methods": (TB, {**TF, "total_timesteps": 800})},
            "study small: TB-DQN on CartPole-v1 has num_epochs 4 and TF-DQN on CartPole-v1 8; set their "
            "total_timesteps and epoch_steps alike.",
        ),
        (
            {
                "settings": {"epoch_steps": 100, "total_timesteps": 400},
                "methods": (TB, {**TF, "total_timesteps": 800, "epoch_steps": 200}),
            },
            "study small: TB-DQN on CartPole-v1 has total_timesteps 400 and TF-DQN on CartPole-v1 800; set their "
            "total_timesteps and epoch_steps alike.",
        ),
    ],
)
def test_a_bad_study_is_refused_by_one_sentence(changes, sentence):
    with pytest.raises(UserError) as error:
        small(**changes)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("tasks", "seeds", "sentence"),
    [
        (("CartPole",), (), "study small: --tasks is 'CartPole', which is not a task of it; did you mean CartPole-v1?"),
        (("xyz",), (), "study small: --tasks is 'xyz', which is not a task of it; choose one of CartPole-v1."),
        (
            ("CartPole-v1", "CartPole-v1"),
            (),
            "study small: the tasks 'CartPole-v1' and 'CartPole-v1' have the same folder name; leave one of them out.",
        ),
        ((), (1, 1), f"study small: seeds is [1, 1]; {SEEDS}"),
    ],
)
def test_a_bad_part_of_a_study_is_refused(tasks, seeds, sentence):
    with pytest.raises(UserError) as error:
        small().only(tasks, seeds)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"name =", " is not valid TOML: Invalid value"),
        (b"name = 1\nname = 2", " is not valid TOML: Cannot overwrite a value"),
        (b"\xff", ", line 1, is damaged: byte 0xff is not UTF-8."),
        (b"a = " + 5_000 * b"9", " is not valid TOML: "),
        (b"a = " + 100_000 * b"[", " is not valid TOML: "),
    ],
)
def test_a_file_that_is_not_toml_is_refused(content, reason, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(f"{path}{reason}")):
        read_study(path)


def test_the_table_of_a_scheme_with_a_name_that_needs_quotes(tmp_path, monkeypatch):
    monkeypatch.setitem(SCHEMES, "two chains.1", SCHEMES["iterated-shared"])
    odd = small(tasks=({**CARTPOLE, "two chains.1": {"target_update_period": 7}},))
    assert read_study(write(tmp_path / "small.toml", to_toml(odd))) == odd


def test_a_missing_file_is_answered_with_the_nearest(tmp_path):
    write(tmp_path / "mine.toml", "")
    with pytest.raises(UserError) as error:
        read_study(tmp_path / "mime.toml")
    assert str(error.value) == f"{tmp_path / 'mime.toml'} does not exist; did you mean {tmp_path / 'mine.toml'}?"
    with pytest.raises(UserError) as error:
        read_study(tmp_path / "xyz")
    assert str(error.value) == f"{tmp_path / 'xyz'} does not exist; give a study file."
    with pytest.raises(UserError) as error:
        read_study(tmp_path)
    assert str(error.value) == f"{tmp_path} cannot be read (Is a directory); give a study file."


# -- arbitrary files


def dumps(value: Any) -> str:
    """Write any value of TOML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {dumps(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(dumps, value)) + "]"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")


def dumps_file(values: dict[str, Any]) -> str:
    return "\n".join(f"{json.dumps(key)} = {dumps(value)}" for key, value in values.items())


GOOD: dict[str, Any] = {
    "name": "small",
    "question": "Which?",
    "baseline": "TB-DQN",
    "seeds": [0, 1],
    "settings": {"preset": "toy", "hidden_sizes": [8]},
    "tasks": [{"env_id": "CartPole-v1", "random_score": 22, "target-free": {"learning_rate": 0.1}}],
    "methods": [
        {"scheme": "target-based", "name": "TB-DQN", "layer_norm": [False, True]},
        {"scheme": "target-free", "learning_rate": [0.1, 0.2], "layer_norm": [False, True]},
    ],
    "along": "learning_rate",
    "panels": "layer_norm",
}
STUDY_KEYS = [*Study.__dataclass_fields__, "x y"]
SETTINGS = dict.fromkeys(name for agent in agent_names() for name in field_names(config_class(agent)))
TABLE_KEYS = [*SETTINGS, "agent", "name", "preset", "random_score", "reference_score", *SCHEMES, "x y", ""]
texts = st.sampled_from(
    ["", "TB-DQN", "target-free", "toy", "wordle", "cql", "loss", "seed", "batch_size", "..", "a/b", "λ", "\n", "\x00"]
)
numbers = st.sampled_from([-1, 0, 1, 2, 1_000, 2**63, 10**400, -0.5, 0.5, 1.0, math.nan, math.inf, -math.inf])
dates = st.sampled_from([datetime.date(2026, 1, 2), datetime.time(1, 2), datetime.datetime(2026, 1, 2, 3, 4)])
simple = st.one_of(texts, numbers, st.booleans())
anything = st.recursive(
    simple | dates,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TABLE_KEYS), inner, max_size=3),
    max_leaves=6,
)
likely = st.one_of(simple, st.lists(simple, max_size=3), st.lists(st.lists(simple, max_size=2), max_size=2), anything)


def containers(value: Any) -> list[list[Any] | dict[str, Any]]:
    """Return every table and list inside a value."""
    if not isinstance(value, dict | list):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value, *itertools.chain.from_iterable(map(containers, inner))]


@st.composite
def nearly_good(draw) -> dict[str, Any]:
    """Return the good file with a few entries replaced, added or removed."""
    values = copy.deepcopy(GOOD)
    for _ in range(draw(st.integers(1, 3))):
        table = draw(st.sampled_from(containers(values)))
        if isinstance(table, dict):
            key = draw(st.sampled_from([*table, *(STUDY_KEYS if table is values else TABLE_KEYS)]))
            table[key] = draw(likely)
            if draw(st.integers(0, 9)) == 0:
                del table[key]
        else:
            table.insert(draw(st.integers(0, len(table))), draw(likely))
    return values


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("studies") / "any.toml"


def test_the_good_file_is_accepted(file):
    write(file, dumps_file(GOOD))
    names = ["TB-DQN", "TF-DQN, lr=0.1", "TF-DQN, lr=0.2"]
    cells = read_study(file).cells
    for panel in ("no LN", "LN"):
        assert [cell.in_panel for cell in cells if cell.panel == panel] == names


MISSING = "`isqn study online-plain --show` is an example of a study."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        *(
            ({name: ...}, f"{name} is missing; {MISSING}")
            for name in ("question", "baseline", "seeds", "tasks", "methods")
        ),
        ({"taks": []}, "'taks' is not a field of a study; did you mean tasks?"),
        (
            {"xyz": 0},
            "'xyz' is not a field of a study; choose one of name, question, baseline, seeds, tasks, methods, settings, "
            "scale, paper, along, panels, flops, agent, datasets, imports.",
        ),
        ({"seeds": 5}, "seeds is 5; it must be a list."),
        ({"seeds": [-1]}, f"study small: seeds is [-1]; {SEEDS}"),
        ({"name": 5}, "name is 5; it must be a text."),
        ({"baseline": ["TB-DQN"]}, "baseline is ['TB-DQN']; it must be a text."),
        ({"flops": 1}, "flops is 1; it must be true or false."),
        ({"settings": []}, "settings is []; it must be a table."),
        ({"tasks": CARTPOLE}, "tasks is {'env_id': 'CartPole-v1'}; it must be tables, each under [[tasks]]."),
        ({"methods": [TB, 1]}, f"methods is [{TB}, 1]; it must be tables, each under [[methods]]."),
    ],
)
def test_a_bad_file_is_refused_by_one_sentence(changes, sentence, file):
    left = {key: value for key, value in (GOOD | changes).items() if value is not ...}
    write(file, dumps_file(left))
    with pytest.raises(UserError) as error:
        read_study(file)
    assert str(error.value) == f"{file}: {sentence}"


ROOT = Path(__file__).parents[1]
STUDY_FILES = [path for folder in ("results", "examples") for path in sorted((ROOT / folder).glob("*.toml"))]


@pytest.mark.parametrize("path", STUDY_FILES, ids=lambda path: path.name)
def test_the_study_files_of_the_repository_are_accepted(path):
    """Commands in results/README.md and the examples train these files."""
    assert read_study(path).cells


@settings(max_examples=400)
@given(values=nearly_good() | st.dictionaries(st.sampled_from(STUDY_KEYS), anything, max_size=8))
def test_any_file_is_accepted_or_refused_by_one_sentence(file, values):
    write(file, dumps_file(values))
    try:
        study = read_study(file)
    except UserError as error:
        sentence = str(error)
    else:
        write(file, to_toml(study))
        again = read_study(file)
        assert to_toml(again) == to_toml(study)
        assert again.cells == study.cells
        sentence = f"{file} is good."
    assert re.fullmatch(rf"{re.escape(str(file))}:? .+[.?]", sentence)


# -- the command


def test_studies_are_listed(capsys):
    assert main(["list", "studies", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(QUESTIONS)
    assert [(row["question"], row["paper"]) for row in rows.values()] == list(QUESTIONS.values())
    assert main(["list", "studies"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(QUESTIONS)


@pytest.mark.parametrize("words", [["online-plain"], ["online-plain", "--scale", "paper"], ["offline"]])
def test_show_prints_the_file_of_a_study(words, capsys, tmp_path):
    assert main(["study", *words, "--show"]) == 0
    shown = capsys.readouterr().out
    study = read_study(write(tmp_path / "mine.toml", shown))
    assert study == find(words[0], "paper" if "paper" in words else "mini")
    assert main(["study", str(tmp_path / "mine.toml"), "--show"]) == 0
    assert capsys.readouterr().out == shown


def test_show_prints_the_file_of_a_part(capsys, tmp_path):
    command = ["study", "online-ln", "--scale", "paper", "--tasks", "ALE/Pong-v5", "--seeds", "8", "9", "--show"]
    assert main(command) == 0
    part = read_study(write(tmp_path / "part.toml", capsys.readouterr().out))
    assert ([task["env_id"] for task in part.tasks], part.seeds) == (["ALE/Pong-v5"], (8, 9))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["online-lm"],
            "There is no study 'online-lm'; did you mean online-ln? A study of your own is a .toml file.",
        ),
        (
            ["xyz"],
            f"There is no study 'xyz'; choose one of {', '.join(QUESTIONS)}. A study of your own is a .toml file.",
        ),
        (["no-such-folder/mine.toml"], "no-such-folder/mine.toml does not exist; give a study file."),
        (["mine.toml", "--scale", "paper"], "--scale is for the studies of the paper; mine.toml says its own sizes."),
        (
            ["online-ln", "--scale", "paper", "--tasks", "ALE/Pnog-v5"],
            "study online-ln: --tasks is 'ALE/Pnog-v5', which is not a task of it; did you mean ALE/Pong-v5?",
        ),
        (["online-ln", "--scale", "paper", "--seeds", "-1"], f"study online-ln: seeds is [-1]; {SEEDS}"),
    ],
)
def test_bad_flags_are_refused_by_one_sentence(words, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["study", *words]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"isqn: {sentence}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("preset", "is_equal"), [("minatar", True), ("minatar-cql", True), ("minatar-stream", False), ("dmc-small", False)]
)
def test_duration_keys_of_runs_with_other_heads(preset, is_equal):
    """Heads cost little with batches; in a stream each has a trace of its own, and small critics have many atoms."""
    config = preset_config(preset)
    few, many = (duration_key(config.replace(num_bellman_iterations=k)) for k in (1, 9))
    assert (few == many) == is_equal


@pytest.mark.parametrize(
    ("changes", "is_equal"),
    [
        ({"env_id": "MinAtar/Asterix-v1", "seed": 3, "experiment": "mine"}, True),
        ({"learning_rate": 0.1, "target_update_period": 8, "head_weights": (2.0,), "total_timesteps": 100}, True),
        ({"env_id": "CartPole-v1"}, False),
        ({"width_factor": 2.0}, False),
        ({"batch_size": 64}, False),
        ({"update_period": 2}, False),
        ({"hidden_sizes": (8,)}, False),
        ({"loss": "munchausen"}, False),
        ({"analysis": True}, False),
    ],
)
def test_duration_keys_of_runs_with_other_settings(changes, is_equal):
    config = preset_config("minatar")
    assert (duration_key(config) == duration_key(config.replace(**changes))) == is_equal


def test_describing_studies_does_not_import_jax():
    code = "import sys, isqn.study.catalogue as c; c.find_study('offline', 'mini'); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

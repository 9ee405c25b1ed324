"""Reading runs, combining them in arrays, and normalising their returns."""

from __future__ import annotations

import json

import numpy as np
import pytest

from helpers import run_config, write_run
from isqn.analysis.results import (
    IncomparableError,
    Run,
    format_ranges,
    gather,
    normalise,
    read_run,
    read_score_dict,
    write_score_dict,
)
from isqn.config.toml import to_toml
from isqn.train import checkpoint, record
from isqn.types import UserError


def run(method: str, seed: int, *returns: float, task: str = "CartPole-v1", epochs: int = 3, **more) -> Run:
    """Make a run as `read_run` returns it. It is finished if it has all its epochs."""
    steps = 1_000.0 * np.arange(1, len(returns) + 1)
    fields = {
        "finished": len(returns) == epochs,
        "summary": {"protocol": "gymnasium"},
        "metrics": {"step": steps},
    } | more
    return Run(task, method, run_config(task, seed, epochs), returns, **fields)


def table(tasks=("CartPole-v1",), methods=("TB", "TF"), seeds=(0, 1, 2), but=(), **more) -> list[Run]:
    """Make every run of a small study with returns 1, 2, 3. Runs in `but` replace those with the same key."""
    runs = {r.key: r for t in tasks for m in methods for s in seeds for r in [run(m, s, 1, 2, 3, task=t, **more)]}
    return list((runs | {r.key: r for r in but}).values())


TASK, METHODS, SEEDS = ("CartPole-v1",), ("TB", "TF"), (0, 1, 2)


# -- reading a run ---------------------------------------------------------------------------------------------------


def test_a_finished_run_is_read_back(tmp_path):
    rows = {"step": [1000, 2000], "loss": ["", 0.5]}
    write_run(tmp_path / "run", run_config(seed=7), [[1, 3], 4, [5, 6, 7]], metrics=rows)
    one = read_run(tmp_path / "run", run_config(seed=7), "a task", "a method")
    assert one.key == ("a task", "a method", 7)
    assert one.returns == (2, 4, 6)
    assert one.finished
    assert one.protocol == "gymnasium"
    np.testing.assert_array_equal(one.metrics["step"], [1000, 2000])
    np.testing.assert_array_equal(one.metrics["loss"], [np.nan, 0.5])


def test_the_last_epoch_of_an_unfinished_run_is_in_progress(tmp_path):
    write_run(tmp_path / "run", run_config(), [1, 2, [9, 9]], finished=False)
    one = read_run(tmp_path / "run", run_config(), "t", "m")
    assert one.returns == (1, 2)
    assert not one.finished


def test_a_run_without_a_summary_is_unfinished(tmp_path):
    write_run(tmp_path / "run", run_config(), [1, 2, 3])
    (tmp_path / "run" / "summary.json").unlink()
    one = read_run(tmp_path / "run", run_config(), "t", "m")
    assert (one.returns, one.finished, one.protocol) == ((1, 2), False, "unknown")


@pytest.mark.parametrize(
    ("content", "damage"),
    [
        (b"", "line 1, is damaged: it is not JSON (Expecting value, column 1)."),
        (b'{"status":\n"fini', "line 2, is damaged: it is not JSON (Unterminated string starting at, column 1)."),
        (b'{\n"status": "\xff"}', "line 2, is damaged: byte 0xff is not UTF-8."),
        (b"[1]", "line 1, is damaged: it is not an object."),
        (b"[" * 100_000, "line 1, is damaged: it is not JSON ("),
    ],
)
def test_a_damaged_summary_is_refused_with_its_line(tmp_path, content, damage):
    write_run(tmp_path / "run", run_config(), [1, 2, 3])
    folder = tmp_path / "run"
    (folder / "summary.json").write_bytes(content)
    for advice in (f" Move {folder} away.", f" `isqn resume {folder}` writes it again."):
        with pytest.raises(UserError) as refused:
            read_run(folder, run_config(), "t", "m")
        assert str(refused.value).startswith(f"{folder / 'summary.json'}, {damage}")
        assert str(refused.value).endswith(advice)
        checkpoint.folder_of(folder, 100).mkdir(parents=True, exist_ok=True)


def test_a_run_that_has_just_started_has_no_results(tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(run_config()))
    one = read_run(tmp_path, run_config(), "t", "m")
    assert (one.returns, one.finished, one.metrics) == ((), False, {})


@pytest.mark.parametrize(
    ("epochs", "filled"),
    [([[], 4, [], 6], (4, 4, 4, 6)), ([1, [], [], []], (1, 1, 1, 1)), ([[], [], [], 2], (2, 2, 2, 2)), ([[]] * 4, ())],
)
def test_an_epoch_without_an_episode_has_the_return_of_its_neighbour(tmp_path, epochs, filled):
    write_run(tmp_path / "run", run_config(epochs=4), epochs)
    assert read_run(tmp_path / "run", run_config(epochs=4), "t", "m").returns == filled


@pytest.mark.parametrize(
    ("file", "text", "damage"),
    [
        ("episodes.csv", "epoch,return\n0,high\n1,1\n", "line 2, is damaged: return is 'high', which is not a number."),
        ("episodes.csv", "episode,return\n0,1\n0,1\n", "line 3, is damaged: episode is '0', and should be 1."),
        ("episodes.csv", "episode,return\n0,1\n2,1\n", "line 3, is damaged: episode is '2', and should be 1."),
        ("episodes.csv", "episode,return\n0\n", "line 2, is damaged: it has 1 cells, and the header 2."),
        ("episodes.csv", "episode,episode\n0,0\n", "line 1, is damaged: two columns have the same name."),
        ("metrics.csv", "step\nx\n", "line 2, is damaged: step is 'x', which is not a number."),
        ("metrics.csv", "step\n10\n20\n20\n", "line 4, is damaged: step is '20' after '20'."),
        ("metrics.csv", 'step\n10\n2"0\n', "line 3, is damaged: step is '2\"0', which is not a number."),
    ],
)
def test_a_damaged_table_is_refused_with_its_line(tmp_path, file, text, damage):
    write_run(tmp_path / "run", run_config(), [1, 2, 3], finished=False)
    path = tmp_path / "run" / file
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        read_run(tmp_path / "run", run_config(), "t", "m")
    assert str(refused.value) == f"{path}, {damage} Move {path.parent} away, and train that run again."


def test_a_finished_summary_without_returns_is_refused(tmp_path):
    write_run(tmp_path / "run", run_config(), [1, 2, 3])
    record.write_summary(tmp_path / "run", {"status": "finished"})
    with pytest.raises(UserError, match=r"run/summary\.json is damaged \(KeyError: 'epoch_returns'\)"):
        read_run(tmp_path / "run", run_config(), "t", "m")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch_returns", [1, 2]),
        ("auc", 7),
        ("versions", "new"),
        ("cores", "two"),
        ("trained_with", 3),
        ("command", []),
    ],
)
def test_an_altered_summary_is_refused(tmp_path, field, value):
    """Without this check, missing returns would be filled like epochs without an episode."""
    write_run(tmp_path / "run", run_config(), [1, 2, 3])
    record.write_summary(tmp_path / "run", {**record.read_summary(tmp_path / "run"), field: value})
    with pytest.raises(UserError, match=r"run/summary\.json is damaged"):
        read_run(tmp_path / "run", run_config(), "t", "m")


# -- combining runs --------------------------------------------------------------------------------------------------


def test_axes_are_seeds_tasks_epochs_in_the_requested_order():
    tasks = ("CartPole-v1", "Acrobot-v1")
    runs = [
        run(method, seed, *(1000 * m + 100 * seed + 10 * t + epoch for epoch in range(3)), task=task)
        for m, method in enumerate(METHODS)
        for seed in (5, 3)
        for t, task in enumerate(tasks)
    ]
    found = gather(runs, tasks, METHODS, (5, 3))
    assert list(found.returns) == ["TB", "TF"]
    assert found.returns["TF"].tolist() == [
        [[1500, 1501, 1502], [1510, 1511, 1512]],
        [[1300, 1301, 1302], [1310, 1311, 1312]],
    ]
    assert found.notes == ()
    assert {one.key for one in found.runs} == {one.key for one in runs}


def test_a_run_longer_than_its_settings_is_truncated():
    runs = table(seeds=(0,), but=[run("TB", 0, 1, 2, 3, 4, finished=True)])
    with pytest.raises(UserError, match="different numbers of epochs: 4, and fewer in CartPole-v1 TF seed 0;"):
        gather(runs, TASK, METHODS, (0,))
    found = gather(runs, TASK, METHODS, (0,), missing="truncate")
    assert found.returns["TB"].tolist() == [[[1, 2, 3]]]


def test_runs_that_were_not_requested_are_ignored():
    found = gather([*table(), run("other", 0, 1), run("TB", 9, 1)], TASK, METHODS, SEEDS)
    assert set(found.returns) == {"TB", "TF"}
    assert found.notes == ()


SHORT_RUNS = (run("TB", 2, 5, 6), run("TF", 1))  # one with two epochs, one with none


def test_missing_runs_are_refused_with_their_list():
    runs = [one for one in table(but=SHORT_RUNS) if one.key[1:] != ("TB", 1)]
    with pytest.raises(UserError) as refused:
        gather(runs, TASK, METHODS, SEEDS)
    assert str(refused.value) == (
        "3 of 6 runs are missing, unfinished or without an episode: CartPole-v1 TB seeds 1-2, CartPole-v1 TF seed 1; "
        "train them, longer if no episode ends, or take --missing drop (without their seeds) or truncate (all to the "
        "shortest)."
    )


def test_drop_leaves_out_seeds_with_a_missing_run():
    found = gather(table(but=SHORT_RUNS), TASK, METHODS, SEEDS, missing="drop")
    assert found.seeds == (0,)
    assert found.returns["TB"].tolist() == [[[1, 2, 3]]]
    assert found.notes == ("Left out: seeds 1-2, because 2 of 6 runs are missing, unfinished or without an episode.",)
    assert [one.key for one in found.runs] == [("CartPole-v1", "TB", 0), ("CartPole-v1", "TF", 0)]


def test_truncate_cuts_all_runs_to_the_shortest_and_says_so():
    found = gather(table(but=SHORT_RUNS), TASK, METHODS, SEEDS, missing="truncate")
    assert found.seeds == (0, 2)
    assert found.returns["TB"].tolist() == [[[1, 2]], [[5, 6]]]
    assert found.notes == (
        "Left out: seed 1, because 1 of 6 runs are missing, unfinished or without an episode.",
        "Truncated: all runs to their first 2 of 3 epochs.",
    )
    assert all(one.returns == (1, 2) or one.returns == (5, 6) for one in found.runs)
    assert all(one.metrics["step"].tolist() == [1000, 2000] for one in found.runs)


def test_equally_unfinished_runs_are_noted_as_truncated():
    runs = [run(method, seed, 1, 2) for method in METHODS for seed in SEEDS]
    found = gather(runs, TASK, METHODS, SEEDS, missing="truncate")
    assert found.returns["TF"].shape == (3, 1, 2)
    assert found.notes == ("Truncated: all runs to their first 2 of 3 epochs.",)


@pytest.mark.parametrize("missing", ["fail", "drop", "truncate"])
def test_epochs_of_different_lengths_on_a_task_are_refused(missing):
    """On another task they may be longer."""
    one = run("TB", 1, 7, 8, 9)
    longer = one._replace(config=one.config.replace(epoch_steps=2_000, total_timesteps=6_000))
    with pytest.raises(UserError) as refused:
        gather(table(but=[longer]), TASK, METHODS, SEEDS, missing=missing)
    assert str(refused.value) == (
        "The epochs of CartPole-v1 TB seed 0 have 1000 steps and those of CartPole-v1 TB seed 1 2000; train them with "
        "the same --epoch-steps, or report them apart."
    )
    elsewhere = [one._replace(task="Acrobot-v1", config=longer.config) for one in table(seeds=(1,))]
    found = gather([*table(seeds=(1,)), *elsewhere], ("CartPole-v1", "Acrobot-v1"), METHODS, (1,), missing=missing)
    assert found.returns["TB"].tolist() == [[[1, 2, 3], [1, 2, 3]]]


@pytest.mark.parametrize("missing", ["fail", "drop"])
def test_finished_runs_of_different_lengths_are_refused_unless_truncated(missing):
    runs = table(but=[run("TB", 1, 7, 8, epochs=2)])
    with pytest.raises(UserError) as refused:
        gather(runs, TASK, METHODS, SEEDS, missing=missing)
    assert str(refused.value) == (
        "Runs have different numbers of epochs: 3, and fewer in CartPole-v1 TB seed 1; take --missing truncate, which "
        "cuts all to the shortest."
    )
    assert gather(runs, TASK, METHODS, SEEDS, missing="truncate").returns["TB"].tolist() == [
        [[1, 2]],
        [[7, 8]],
        [[1, 2]],
    ]


@pytest.mark.parametrize("missing", ["drop", "truncate"])
def test_runs_without_a_complete_seed_are_refused(missing):
    runs = [one for one in table(seeds=(0, 1)) if one.key[1:] not in {("TB", 0), ("TF", 1)}]
    with pytest.raises(
        UserError, match=r"2 of 4 runs .*, CartPole-v1 TB seed 0, CartPole-v1 TF seed 1; train them, or"
    ):
        gather(runs, TASK, METHODS, (0, 1), missing=missing)


def test_no_runs_are_refused():
    with pytest.raises(UserError, match=r"^2 of 2 runs are missing, unfinished or without an episode"):
        gather([], TASK, METHODS, (0,))
    with pytest.raises(UserError, match="There are no runs to compare"):
        gather([], TASK, METHODS, ())


def test_an_unknown_policy_for_missing_runs_is_refused():
    with pytest.raises(UserError, match=r"missing is 'dropp'; did you mean drop\?"):
        gather(table(), TASK, METHODS, SEEDS, missing="dropp")


GAMES = ("ALE/Pong-v5", "ALE/Breakout-v5")


def played_under(task: str, seed: int, protocol: str, method: str = "TB") -> Run:
    return run(method, seed, 1, 2, 3, task=task, summary={"protocol": protocol})


def test_protocols_of_a_family_are_pooled_only_if_allowed():
    runs = [played_under(GAMES[0], 0, "machado2018-v1"), played_under(GAMES[1], 0, "streaming-v1")]
    with pytest.raises(UserError) as refused:
        gather(runs, GAMES, ("TB",), (0,))
    assert str(refused.value) == (
        "The runs of ALE were played under different protocols, machado2018-v1 and streaming-v1, and are not "
        "comparable; report them apart, or take --pool-protocols."
    )
    found = gather(runs, GAMES, ("TB",), (0,), pool_protocols=True)
    assert found.notes == ("Pooled: runs of ALE under machado2018-v1 and streaming-v1.",)


def test_an_unknown_protocol_differs_from_a_known_one():
    runs = [played_under(GAMES[0], 0, "machado2018-v1"), run("TB", 1, 1, 2, 3, task=GAMES[0], summary={})]
    with pytest.raises(UserError, match="machado2018-v1 and unknown"):
        gather(runs, GAMES[:1], ("TB",), (0, 1))


def test_protocols_of_other_families_and_of_dropped_runs_do_not_conflict():
    runs = [played_under(GAMES[0], 0, "machado2018-v1"), played_under("CartPole-v1", 0, "gymnasium")]
    assert gather(runs, (GAMES[0], "CartPole-v1"), ("TB",), (0,)).notes == ()
    runs = [
        played_under(GAMES[0], 0, "machado2018-v1"),
        run("TB", 1, 1, task=GAMES[0], summary={"protocol": "streaming-v1"}),
    ]
    found = gather(runs, GAMES[:1], ("TB",), (0, 1), missing="drop")
    assert found.notes == ("Left out: seed 1, because 1 of 2 runs are missing, unfinished or without an episode.",)


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([4], "4"), ([5, 3, 4, 9], "3-5, 9"), ([1, 2], "1-2"), ([0, 2, 4], "0, 2, 4")]
)
def test_format_ranges(numbers, text):
    assert format_ranges(numbers) == text


# -- normalisation ---------------------------------------------------------------------------------------------------


def gather_two_methods(task: str, baseline: tuple[float, ...], other: tuple[float, ...]):
    runs = [run("TB", 0, *baseline, task=task), run("TF", 0, *other, task=task)]
    return gather(runs, (task,), METHODS, (0,))


@pytest.mark.parametrize(
    ("task", "random", "half", "human"), [("ALE/Breakout-v5", 1.7, 16.1, 30.5), ("ALE/Pong-v5", -20.7, -3.05, 14.6)]
)
def test_atari_is_normalised_by_random_play_and_a_human(task, random, half, human):
    scores, scale = normalise(gather_two_methods(task, (random, half, human), (human,) * 3), "TB", {})
    np.testing.assert_allclose(scores["TB"], [[[0, 0.5, 1]]], atol=1e-12)
    np.testing.assert_allclose(scores["TF"], 1)
    assert scale == "0 is random play and 1 a human"


def test_other_tasks_are_normalised_by_random_play_and_the_mean_of_the_baseline():
    results = gather_two_methods("isqn/Chain-v0", (0.863, 1.863, 2.863), (0.863, 2.863, 4.863))  # random play: 0.863
    scores, scale = normalise(results, "TB", {})
    np.testing.assert_allclose(scores["TB"], [[[0, 1, 2]]])
    np.testing.assert_allclose(scores["TF"], [[[0, 2, 4]]])
    assert scale == "0 is random play and 1 the mean return of TB over its training"
    scores, _ = normalise(results, "TF", {})
    np.testing.assert_allclose(scores["TF"], [[[0, 1, 2]]])


def test_a_study_can_set_both_ends_of_the_scale_or_one():
    results = gather_two_methods("CartPole-v1", (10, 20, 30), (60, 60, 60))
    scores, scale = normalise(results, "TB", {"CartPole-v1": (10.0, 60.0)})
    np.testing.assert_allclose(scores["TB"], [[[0, 0.2, 0.4]]])
    assert scale == "0 is random play and 1 the study's reference"
    scores, _ = normalise(results, "TB", {"CartPole-v1": (0.0, None)})
    np.testing.assert_allclose(scores["TF"], 3)  # 60 in units of the baseline's mean of 20
    scores, _ = normalise(results, "TB", {"CartPole-v1": (None, 42.1)})  # random play: 22.1
    np.testing.assert_allclose(scores["TF"], 37.9 / 20)


def test_the_scale_names_the_tasks_of_each_reference():
    tasks = ("ALE/Breakout-v5", "CartPole-v1")
    runs = [run("TB", 0, 30.5, 30.5, 30.5, task=tasks[0]), run("TB", 0, 32.1, 42.1, 52.1, task=tasks[1])]
    scores, scale = normalise(gather(runs, tasks, ("TB",), (0,)), "TB", {})
    np.testing.assert_allclose(scores["TB"], [[[1, 1, 1], [0.5, 1, 1.5]]])
    assert scale == (
        "0 is random play and 1 a human (ALE/Breakout-v5) or the mean return of TB over its training (CartPole-v1)"
    )


def test_a_baseline_no_better_than_random_play_is_refused():
    with pytest.raises(
        IncomparableError, match=r"on MountainCar-v0, the mean return of TB .* is -200, which is not above"
    ):
        normalise(gather_two_methods("MountainCar-v0", (-200,) * 3, (-150,) * 3), "TB", {})


def test_an_unknown_random_return_is_refused():
    with pytest.raises(IncomparableError, match="The return of random play on mine/Env-v0 is not known"):
        normalise(gather_two_methods("mine/Env-v0", (1, 2, 3), (1, 2, 3)), "TB", {})


# -- dictionary of scores --------------------------------------------------------------------------------------------


def test_scores_are_written_and_read_back(tmp_path):
    results = gather(table(tasks=("CartPole-v1", "Acrobot-v1")), ("CartPole-v1", "Acrobot-v1"), METHODS, SEEDS)
    scores = {name: values / 3 for name, values in results.returns.items()}
    write_score_dict(tmp_path / "scores.json", results, scores, "0 is nothing and 1 is three")
    back = read_score_dict(tmp_path / "scores.json")
    assert list(back) == ["TB", "TF"]
    for name, values in scores.items():
        np.testing.assert_array_equal(back[name], values)
    about = json.loads((tmp_path / "scores.json").read_text())
    assert about["axes"] == ["seed", "task", "epoch"]
    assert about["seeds"] == [0, 1, 2]
    assert about["tasks"] == ["CartPole-v1", "Acrobot-v1"]
    assert about["scale"] == "0 is nothing and 1 is three"


def test_a_plain_dictionary_of_scores_is_read(tmp_path):
    (tmp_path / "plain.json").write_text('{"DQN": [[1, 2], [3, 4]], "C51": [[5, 6]]}')
    back = read_score_dict(tmp_path / "plain.json")
    assert {name: values.tolist() for name, values in back.items()} == {"DQN": [[1, 2], [3, 4]], "C51": [[5, 6]]}


@pytest.mark.parametrize("text", ["{", "[1]", '{"DQN": [[1], [1, 2]]}', '{"DQN": {"a": 1}}', '{"DQN": [1, 2]}'])
def test_a_file_that_is_not_a_dictionary_of_scores_is_refused(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(UserError, match=r"bad\.json"):
        read_score_dict(tmp_path / "bad.json")


def test_a_file_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"none\.json holds no scores"):
        read_score_dict(tmp_path / "none.json")

"""Runs of a language agent: files, resuming, initial weights, sources of games, boards, and refused settings."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import isqn
from helpers import TINY_WRITER, assert_same, final, gpt2_weights, stop_after
from isqn.agents.registry import config_from_mapping
from isqn.cli import main
from isqn.config.toml import to_toml
from isqn.language import data, play, training
from isqn.language.data import encode_row, source_from_file, source_from_people, source_from_players, write_tweets
from isqn.language.game import SPEC, encode
from isqn.language.words import WORD_LISTS, load_words
from isqn.presets import preset_config
from isqn.study.grid import read_study
from isqn.train import checkpoint, record, run
from isqn.train.functions import make_run_agent
from isqn.types import Interrupted, UserError

LENGTHS = {"num_updates": 12, "epoch_updates": 6, "log_period_updates": 4, "analysis_samples": 16}
LEARNING = {"batch_size": 4, "micro_batch_size": 2, "dropout": 0.1, "num_bellman_iterations": 2}
SMALL = preset_config("wordle-mini").replace(analysis=True, **TINY_WRITER | LENGTHS | LEARNING)
WORDS = load_words("common", 8)
GAMES = (
    "games of scripted players, 60% of whose guesses repeat their first word, "
    "in place of the tweets that ILQL learned from"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    run.start(SMALL, folder, quiet=True)
    return folder


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_tables_and_summary_of_a_run(trained):
    assert len(rows(trained / "evaluations.csv")) == 3 * 8
    measures = rows(trained / "measures.csv")
    assert [row["step"] for row in measures] == ["0", "6", "12"]
    assert set(measures[0]) == {"epoch", "step", *play.MEASURES}
    assert all(-6 <= float(row["cloned_return"]) <= 0 for row in measures)
    metrics = rows(trained / "metrics.csv")[0]
    assert {"loss", "cloning_loss", "q_value", "v_value"} <= set(metrics)
    assert 1 <= float(metrics["effective_rank"]) <= 8
    assert 0 <= float(metrics["dormant_share"]) <= 1
    assert -1 <= float(metrics["head_cosine"]) <= 1
    summary = record.read_summary(trained)
    assert summary["status"] == "finished"
    assert summary["learned_from"]["words"] == 8


def test_a_run_resumes_to_the_same_bits(trained, tmp_path, monkeypatch):
    """It is stopped in the middle of an epoch; batches, dropout and averages continue."""
    with monkeypatch.context() as patch:
        stop_after(patch, 9)
        with pytest.raises(Interrupted):
            run.start(SMALL, tmp_path / "run", quiet=True)
    assert run.resume(tmp_path / "run", quiet=True)
    assert_same(final(tmp_path / "run"), final(trained))
    assert (tmp_path / "run" / "measures.csv").read_text() == (trained / "measures.csv").read_text()


def test_a_report_describes_the_games(trained, tmp_path):
    assert main(["report", str(trained.parent), "-o", str(tmp_path / "report"), "--baseline", "iS-ILQL K=2"]) == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert f"Learned from {GAMES}; 8 words." in page
    assert "Games at the end" in page
    last = rows(trained / "measures.csv")[-1]
    curve = rows(tmp_path / "report" / "figures" / "cloned-return.csv")
    assert float(curve[-1]["point"]) == pytest.approx(float(last["cloned_return"]))


# -- initial weights


def test_the_policy_of_another_run_is_used_unchanged(trained, tmp_path):
    run.start(SMALL.replace(policy_checkpoint=str(trained), scheme="target-free"), tmp_path / "run", quiet=True)
    policy, expected = (next(checkpoint.newest_good(folder))[1] for folder in (tmp_path / "run", trained))
    for name in policy:
        if name.startswith("agent.policy"):
            np.testing.assert_array_equal(policy[name], expected[name], err_msg=name)
    assert "cloning_loss" not in rows(tmp_path / "run" / "metrics.csv")[0]


def test_a_resumed_run_does_not_need_its_initial_weights(trained, tmp_path, monkeypatch):
    policy = shutil.copytree(trained, tmp_path / "policy")
    with monkeypatch.context() as patch:
        stop_after(patch, 9)
        with pytest.raises(Interrupted):
            run.start(SMALL.replace(policy_checkpoint=str(policy)), tmp_path / "run", quiet=True)
    shutil.rmtree(policy)
    assert run.resume(tmp_path / "run", quiet=True)
    assert record.read_summary(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_checkpoint": "nowhere"}, "--policy-checkpoint nowhere is not a run folder"),
        ({"gpt2_weights": "."}, "--gpt2-weights . is a folder; give the file of safetensors in it"),
        ({"gpt2_weights": "nowhere"}, "nowhere cannot be read as weights of GPT-2"),
        ({"data_path": "nowhere.csv"}, "nowhere.csv cannot be read as tweets"),
        ({"data_path": "nowhere.json"}, "nowhere.json cannot be read as games"),
        ({"word_list": "nowhere.txt"}, "The list of words nowhere.txt cannot be read"),
        ({"num_words": 241, "micro_batch_size": 0}, "The list of words common has 240; 241 were asked for"),
    ],
)
def test_missing_files_are_refused_before_a_folder_is_made(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run.start(SMALL.replace(**changes), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_the_policy_to_be_used_is_not_overwritten(trained):
    with pytest.raises(UserError, match=r"is inside .*, an input of the run; choose another --run-dir"):
        run.start(SMALL.replace(policy_checkpoint=str(trained)), trained, overwrite=True, quiet=True)
    assert checkpoint.steps(trained)


def test_the_name_of_a_word_list_is_never_a_path(tmp_path, monkeypatch):
    """A folder or a file of the same name is neither read nor in the way; any other word list is a file."""
    for name in WORD_LISTS:
        assert SMALL.replace(word_list=name).input_paths == {}
        assert len(load_words(name)) > 200
    monkeypatch.chdir(tmp_path)
    Path("common").mkdir()
    short = SMALL.replace(num_updates=1, epoch_updates=1, log_period_updates=1, analysis=False)
    run.start(short, Path("common") / "run", quiet=True)
    Path("common/run/words.txt").write_text("\n".join(WORDS))
    with pytest.raises(UserError, match=r"common/run would be emptied and contains common/run/words\.txt, an input"):
        run.start(short.replace(word_list="common/run/words.txt"), Path("common/run"), overwrite=True, quiet=True)


STUDY = """
question = "Does it matter whose policy it is?"
agent = "ilql"
baseline = "TF-ILQL"
seeds = [0, 1]
tasks = [{ env_id = "isqn/Wordle-v0", random_score = -6.0, reference_score = 0.0 }]
methods = [{ scheme = "target-free" }]
[settings]
preset = "wordle-mini"
data_path = "../tweets.csv"
policy_checkpoint = "policies/seed-{seed}"
"""


def test_paths_of_a_study_are_relative_to_its_file(tmp_path, monkeypatch):
    """Each seed may use the policy of its own seed; runs with other files do not belong to the study."""
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    Path("common").write_text("a file, not the list")
    Path("policy.toml").write_text(STUDY)
    (cell,) = read_study(Path("policy.toml")).cells
    config = cell.config_in(tmp_path / "out", (1,))
    assert config.policy_checkpoint == str(tmp_path / "inner" / "policies" / "seed-1")
    assert config.data_path == str(tmp_path / "tweets.csv")
    assert config.word_list == "common"
    folder = tmp_path / "runs" / "seed-1"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    assert cell.read_config(folder, 1) == config
    for name, value in (("policy_checkpoint", "policies/seed-0"), ("data_path", ""), ("gpt2_weights", "theirs")):
        (folder / "config.toml").write_text(to_toml(config.replace(**{name: value})))
        with pytest.raises(UserError, match=f"has {name} = '{value}', and the study says"):
            cell.read_config(folder, 1)


def test_a_policy_of_another_size_is_refused(trained, tmp_path):
    with pytest.raises(UserError, match=r"--model-width of --policy-checkpoint .* is 8, and 4 here"):
        run.start(SMALL.replace(policy_checkpoint=str(trained), model_width=4), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text(to_toml(preset_config("toy")))
    with pytest.raises(UserError, match="other is a run of `isqn train dqn`; it must be one of `isqn train ilql`"):
        run.start(SMALL.replace(policy_checkpoint=str(tmp_path / "other")), tmp_path / "run", quiet=True)


def test_gpt2_weights_are_loaded_into_all_torsos(tmp_path):
    weights = gpt2_weights(SMALL.model_width, 1, 35, 1_024)
    save_file(weights, tmp_path / "model.safetensors")
    config = SMALL.replace(gpt2_weights=str(tmp_path / "model.safetensors"), scheme="target-based")
    state = training.initialise(config, jax.jit(make_run_agent(config, SPEC).init)(0))
    for torso in (state.policy, state.params["torso"]["gpt2"], state.copies[0]["torso"]["gpt2"]):
        np.testing.assert_array_equal(torso["tokens"], weights["wte.weight"])
        np.testing.assert_array_equal(torso["layers"]["attend"]["kernel"][0], weights["h.0.attn.c_attn.weight"])
    with pytest.raises(UserError, match="has 1 layers; --num-layers is 2"):
        run.start(config.replace(num_layers=2), tmp_path / "run", quiet=True)


# -- sources of games


def test_simulated_people_are_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = load_words("common")
    source = source_from_people(200, words)
    (file,) = (tmp_path / "isqn").iterdir()
    before = file.stat().st_mtime_ns
    again = source_from_people(200, words)
    assert file.stat().st_mtime_ns == before
    assert source.digest == again.digest
    assert "words, in place of the tweets" in source.describe()
    config = SMALL.replace(players="people", num_people=200, num_words=0)
    assert training.open_source(config).digest == source.digest


def test_files_beside_the_games_say_which_are_held_out(tmp_path):
    """Games in the format that ILQL publishes."""
    games = [["panic", ["<g><g><g><g><g>"]], ["solar", ["<b><b><b><b><b>", "<g><g><g><g><g>"]]]
    path = tmp_path / "random_human_tweet_data_200.json"
    path.write_text(json.dumps({"games": games}))
    for part, numbers in (("train", [0]), ("eval", [1])):
        (tmp_path / f"human_{part}_idxs.json").write_text(json.dumps(numbers))
    source = source_from_file(path, load_words("common"))
    train, held_out = (source.sample(8, np.random.default_rng(0), held_out=part) for part in (False, True))
    assert set(train.num_actions.tolist()) == {1}
    assert set(held_out.num_actions.tolist()) == {2}
    (tmp_path / "human_eval_idxs.json").write_text("[2]")
    with pytest.raises(UserError, match=r"human_eval_idxs\.json must be a list of numbers of games"):
        source_from_file(path, load_words("common"))


def test_games_that_no_words_fit_are_refused_before_a_run_is_overwritten(trained, tmp_path):
    write_tweets(tmp_path / "tweets.csv", np.tile([0, *[encode_row("ybbbb")] * 6], (3, 1)))
    steps = checkpoint.steps(trained)
    config = SMALL.replace(data_path=str(tmp_path / "tweets.csv"), num_words=1)
    with pytest.raises(UserError, match=r"Hardly any game fits the 1 words of the list; take more of them \(--num-wo"):
        run.start(config, trained, overwrite=True, quiet=True)
    assert checkpoint.steps(trained) == steps


def test_one_in_twenty_tweets_is_held_out(tmp_path):
    """Only the held-out games need a second guess, so that the two parts can be told apart."""
    _, held_out = data._split(tmp_path / "tweets.csv", np.arange(100))
    assert len(held_out) == 5
    days = np.tile([0, 0, -1, -1, -1, -1, -1], (100, 1))
    days[held_out, 1:3] = [encode_row("bbbbb"), 0]
    write_tweets(tmp_path / "tweets.csv", days)
    source = source_from_file(tmp_path / "tweets.csv", load_words("common"))
    assert "100 games" in source.describe()
    train, held_out = (source.sample(20, np.random.default_rng(0), held_out=part) for part in (False, True))
    assert set(train.num_actions.tolist()) == {1}
    assert set(held_out.num_actions.tolist()) == {2}


def test_careless_players_repeat_their_first_guess():
    """Careful ones never repeat a guess; entirely careless ones always do."""
    careful, careless = (
        source_from_players(WORDS, share).draw(50, np.random.default_rng(0), False) for share in (0.0, 1.0)
    )
    for guesses in careful.guesses:
        words = guesses[guesses >= 0].tolist()
        assert len(set(words)) == len(words)
    assert all(len(set(guesses[guesses >= 0].tolist())) == 1 for guesses in careless.guesses)
    assert careful.returns.mean() > -2
    assert careless.returns.mean() < -4


def test_different_games_have_different_digests():
    assert source_from_players(WORDS, 0.5).digest != source_from_players(WORDS, 0.6).digest


# -- commands


def test_eval_prints_boards(trained, tmp_path, capsys):
    page = tmp_path / "pages" / "boards.html"
    assert main(["eval", str(trained), "--episodes", "3", "--html", str(page)]) == 0
    output = capsys.readouterr().out
    assert "over 3 games" in output
    assert f"\nlearned from {GAMES}\n" in output
    assert "\x1b[" not in output  # no colours in a pipe
    assert page.read_text().count("<figure>") == 3
    assert main(["eval", str(trained), "--episodes", "3", "--json", "--beta", "0"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["episodes"]) == 3
    assert result["inverse_temperature"] == 0
    assert result["mean_return"] == np.mean([game["return"] for game in result["episodes"]])
    players = result["players"]
    assert result["learned_from"]["games"] == GAMES
    assert players["random"] < players["consistent"] < players["informed"] <= 0


def test_play_prints_the_likeliest_words_of_each_turn(trained, capsys):
    assert main(["play", str(trained), WORDS[0], "--json", "--top", "3"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["word"] == WORDS[0]
    assert 1 <= len(result["turns"]) <= 6
    for turn in result["turns"]:
        probabilities = [candidate["probability"] for candidate in turn["candidates"]]
        assert len(probabilities) == 3
        assert probabilities == sorted(probabilities, reverse=True)
    assert main(["play", str(trained), "Crane"]) == 0
    output = capsys.readouterr().out
    assert f"crane is not among the 8 words it knows, such as {WORDS[0]}, {WORDS[2]}" in output
    assert re.search(r"word +agent +policy alone +Q\n", output)


def test_the_probability_of_a_word_is_the_product_over_its_tokens(trained):
    config, state, _ = training.load_language_agent(trained, "last", "auto", None)
    games, turns = play.trace_game(config, state, WORDS[0], 8, seed=0)
    decoder = play.compile_decoder(config)
    tokens = games.tokens[:1].copy()
    tokens[0, 1:7] = [*encode([turns[0].candidates[0].word])[0], 30]
    scored = decoder.score(state, tokens)
    log_probabilities = np.asarray(jax.nn.log_softmax(scored.scores))[0, np.arange(6), tokens[0, 1:7]]
    assert turns[0].candidates[0].probability == pytest.approx(np.exp(log_probabilities.sum()), rel=1e-4)
    assert turns[0].value == pytest.approx(float(scored.v[0, 0]), rel=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["play", "RUN", "cran"], "The word 'cran' is not possible in Wordle; give five letters from a to z."),
        (["play", "RUN", "crane", "--top", "0"], "--top is 0; it must be at least 1."),
        (["play", "RUN", "crane", "--beta", "-1"], "--beta is -1.0; it must be a number of at least 0."),
        (["eval", "RUN", "--epsilon", "0.1"], "--epsilon is not for runs of `isqn train ilql`"),
        (["eval", "RUN", "--capture-video"], "--capture-video is not for runs of `isqn train ilql`"),
        (["eval", "RUN", "--html", "."], "--html . is a folder; give a file, such as boards.html."),
        (["eval", "RUN", "--acting-rule", "mean"], "--acting-rule is 'mean'; choose one of greedy, sample."),
        (["probe", "RUN"], "`isqn probe` is not for iS-ILQL K=2, which writes words; see `isqn eval` and `isqn play`."),
        (["train", "ilql", "--scheme", "target-based", "--no-target-dropout"], "--target-dropout has no effect"),
        (["data", "collect", "RUN", "-o", "nowhere"], "`isqn data collect` is not for iS-ILQL K=2"),
    ],
)
def test_wrong_options_are_refused_in_one_line(words, message, trained, capsys):
    assert main([str(trained) if word == "RUN" else word for word in words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_model_cannot_be_a_language_agent():
    with pytest.raises(UserError, match=r"isqn\.Model is not for iS-ILQL K=1, which writes words"):
        isqn.Model("ilql", env="isqn/Wordle-v0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": 3}, "--micro-batch-size is 3; it must be 0 or divide --batch-size"),
        ({"model_width": 9}, "--model-width is 9; it must be a multiple of --attention-heads"),
        ({"num_positions": 73}, "--num-positions is 73; it must be at least 74"),
        ({"dropout": 1.0}, "--dropout is 1.0; it must be at least 0 and below 1"),
        ({"expectile_level": 0.0}, "--expectile-level is 0.0; it must be between 0 and 1"),
        ({"env_id": "CartPole-v1"}, "--env-id is 'CartPole-v1'; it must be isqn/Wordle-v0 for ilql"),
        (
            {"scheme": "target-based", "bellman_heads": "B"},
            "--bellman-heads is 'B'; it must be A with a target network",
        ),
        ({"scheme": "target-free", "averaged_heads": "all"}, "--averaged-heads is 'all'"),
        ({"acting_rule": "mean"}, "--acting-rule is 'mean'; choose one of greedy, sample."),
        ({"careless_share": 1.5}, "--careless-share is 1.5; it must be between 0 and 1"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(UserError) as error:
        SMALL.replace(**changes)
    assert message in str(error.value)


def test_a_setting_of_another_agent_is_refused():
    with pytest.raises(UserError, match=r"sets 'hidden_sizes'; it is for .*`isqn train sac`.*, not for ilql\."):
        config_from_mapping({"agent": "ilql", "hidden_sizes": [3]}, "config.toml")


# -- the paper's size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "k"), [("target-based", 1), ("target-free", 1), ("iterated-shared", 1), ("iterated-shared", 9)]
)
def test_a_run_with_gpt2_small_resumes_to_the_same_bits(scheme, k, tmp_path, monkeypatch):
    """Settings are the preset's, but for the lengths and the batch."""
    few = {"batch_size": 2, "micro_batch_size": 1, "num_updates": 2, "epoch_updates": 2, "log_period_updates": 1}
    config = preset_config("wordle").replace(
        scheme=scheme, num_bellman_iterations=k, evaluation_games=2, num_people=2_000, **few
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(play, "HELD_OUT_GAMES", 4)
    run.start(config, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        stop_after(patch, 12)  # after the first evaluation, of six guesses by the values and six by the policy
        with pytest.raises(Interrupted):
            run.start(config, tmp_path / "stopped", quiet=True)
    assert checkpoint.steps(tmp_path / "stopped")[0] == 1
    assert run.resume(tmp_path / "stopped", quiet=True)
    assert_same(final(tmp_path / "stopped"), final(tmp_path / "whole"))

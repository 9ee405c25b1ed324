"""Tweets of Wordle to games of tokens: by hand, and that every row keeps its colours."""

from __future__ import annotations

import json

import numpy as np
import pytest

from isqn.language.data import (
    Fitting,
    People,
    Trajectories,
    _drawn,
    code_of,
    find_grid,
    letters_of,
    read_published,
    read_tweets,
    retrofit,
    simulate,
    to_tokens,
    write_tweets,
)
from isqn.language.game import codes, colours, decode, encode, table
from isqn.language.words import find_words, word_counts
from isqn.types import UserError

WORDS = find_words("common")
LETTERS = encode(WORDS)


@pytest.mark.parametrize("row", ["ggggg", "bbbbb", "gybby", "ybgbg"])
def test_codes_of_rows(row):
    assert letters_of(code_of(row)) == row


def test_codes_are_those_of_the_game():
    assert codes(colours(encode(["eerie"]), encode(["elder"])))[0] == code_of("gyyby")


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("Wordle 210 2/6\n\n⬛🟨⬛⬛🟩\n🟩🟩🟩🟩🟩", ["bybbg", "ggggg"]),
        ("hard! Wordle 210 X/6\n⬜🟦⬜⬜🟧\n🟧🟧🟧🟧🟧 \nat last", ["bybbg", "ggggg"]),
        ("⬛️🟨⬛️⬛️🟩", ["bybbg"]),  # with variation selectors
        ("🟩🟩🟩🟩\n⬛⬛⬛⬛⬛⬛\nno", []),
        ("⬛⬛⬛⬛⬛\n\n🟨⬛⬛⬛⬛\n🟩🟩🟩🟩🟩", ["ybbbb", "ggggg"]),  # the longest run
        ("\n".join(["⬛⬛⬛⬛⬛"] * 8), ["bbbbb"] * 6),
    ],
)
def test_grids_are_found_in_tweets(text, grid):
    assert find_grid(text) == grid


def test_tweets_there_and_back(tmp_path):
    games = simulate(300, 0, WORDS, People())
    write_tweets(tmp_path / "tweets.csv", games)
    found = read_tweets(tmp_path / "tweets.csv")
    np.testing.assert_array_equal(found.rows, games[:, 1:])
    assert found.summary() == "300 games"


def test_bad_rows_are_counted(tmp_path):
    file = tmp_path / "tweets.csv"
    write_tweets(file, simulate(2, 0, WORDS, People()))
    bad = ['9,1,d,u,"⬛⬛⬛⬛⬛"', "210,1,d,u,nothing", "210,1", "²,1,d,u,x", f"{'9' * 5_000},1,d,u,x"]
    bad.append('210,1,d,u,"🟩🟩🟩🟩🟩\n⬛⬛⬛⬛⬛"')
    file.write_text(file.read_text() + "\n".join(bad) + "\n")
    found = read_tweets(file)
    assert len(found.rows) == 2
    assert sum(found.skipped.values()) == len(bad)
    assert "1 without a grid" in found.summary()
    file.write_text("name,age\nann,4\n")
    with pytest.raises(UserError, match=r"holds no game of Wordle: wordle_id, .* belong there"):
        read_tweets(file)
    with pytest.raises(UserError, match=r"cannot be read as tweets \(Is a directory\)"):
        read_tweets(tmp_path)


def test_a_tweet_that_is_no_text_spoils_no_other(tmp_path):
    """Nor does the mark that some programs begin a file with."""
    file = tmp_path / "tweets.csv"
    write_tweets(file, simulate(2, 0, WORDS, People()))
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes() + b"210,1,d,u,\xff\xfe\xee\n")
    assert read_tweets(file).summary() == "2 games; skipped: 1 without a grid"


def test_the_published_file(tmp_path):
    file = tmp_path / "games.json"
    games = [["panic", ["<b><y><g><b><b>", "<g><g><g><g><g>"]], ["panic", ["<b>"]]]
    games += ["x", None, [5, None], ["panic"], ["panic", [5]], ["panic", []], ["panic", 3]]
    file.write_text(json.dumps({"games": games, "transitions": {}}))
    found = read_published(file)
    assert found.rows.tolist() == [[code_of("bygbb"), 0, -1, -1, -1, -1]]
    assert found.summary() == "1 game; skipped: 8 that are no grid"
    for wrong, why in (
        (b"[]", "there must be `games`, a list, in it"),
        (b'{"games": 3}', "there must be `games`, a list, in it"),
        (b'{"games": [', "it is no JSON .*line 1 column 12"),
        (b"\xff\xfe\xee", "it is no JSON"),
        (b"[" * 200_000, "it is no JSON"),
    ):
        file.write_bytes(wrong)
        with pytest.raises(UserError, match=f"cannot be read as games: {why}"):
            read_published(file)


def test_people_play_like_people():
    """The spread of tries, and some games that are lost."""
    rows = simulate(4_000, 0, WORDS, People())[:, 1:]
    tries = (rows >= 0).sum(axis=1)
    lost = (rows[:, -1] > 0).mean()
    assert 0 < lost < 0.1
    assert 3 < tries.mean() < 4.5
    careless = simulate(4_000, 0, WORDS, People(skill=(1.0, 5.0)))[:, 1:]
    assert (careless[:, -1] > 0).mean() > lost


def test_people_who_know_the_answers_of_the_game():
    """The spread of tries, in percent, and the mean return of games made of them, as in the specification."""
    rows = simulate(20_000, 0, find_words("answers"), People(), word_counts())[:, 1:]
    tries = (rows >= 0).sum(axis=1) + (rows[:, -1] > 0)
    shares = 100 * np.bincount(tries, minlength=8)[1:] / len(rows)
    np.testing.assert_allclose(shares, [0.0, 5.6, 26.8, 35.3, 20.9, 7.8, 3.5], atol=1.5)
    games = retrofit(rows, Fitting(encode(find_words("answers-200"))), 20_000, np.random.default_rng(0))
    assert games.returns.mean() == pytest.approx(-2.54, abs=0.04)


def test_words_are_drawn_by_weight_from_those_that_are_allowed():
    allowed = np.tile([True, False, True, False], (20_000, 1))
    drawn = _drawn(allowed, np.array([1.0, 5.0, 3.0, 9.0]), np.random.default_rng(0))
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / len(drawn), [0.25, 0, 0.75, 0], atol=0.01)


@pytest.mark.parametrize("official", [False, True])
def test_every_row_keeps_its_colours(official):
    grids = simulate(2_000, 1, WORDS, People())[:, 1:]
    fitting = Fitting(LETTERS, official=official)
    patterns = table(LETTERS, LETTERS, official=official)
    hidden, guesses, fits = fitting.draw(grids, np.random.default_rng(0))
    assert 0 < fits.mean() < 1
    told = np.where(guesses >= 0, patterns[guesses, hidden[:, None]], -1)
    np.testing.assert_array_equal(told[fits], grids[fits])
    np.testing.assert_array_equal((guesses == hidden[:, None])[fits], (grids == 0)[fits])
    for row in np.flatnonzero(~fits)[:50]:  # some row has no word indeed
        assert not all(code in patterns[:, hidden[row]] for code in grids[row] if code >= 0)


def test_games_are_drawn_by_their_seed():
    grids, fitting = simulate(500, 1, WORDS, People())[:, 1:], Fitting(LETTERS)
    first, again, other = (retrofit(grids, fitting, 100, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert len(first.hidden) == 100
    np.testing.assert_array_equal(first.guesses, again.guesses)
    assert (first.guesses != other.guesses).any()
    with pytest.raises(UserError, match="Hardly any game fits the 1 words of the list"):
        retrofit(np.full((3, 6), code_of("ybbbb")), Fitting(LETTERS[:1]), 1, np.random.default_rng(0))


def test_tokens_of_games_by_hand():
    """One that is solved at the second guess, and one that was shared after its first."""
    words = encode(["panic", "point", "solar"])
    games = Trajectories(np.array([0, 0]), np.array([[2, 0, -1, -1, -1, -1], [1, -1, -1, -1, -1, -1]]))
    found = to_tokens(games, words)
    first = "<a>solar</a><b><b><b><y><b></s>panic</a><g><g><g><g><g></s></eod>"
    assert decode(found.tokens[0]).replace("<|pad|>", "") == first
    assert decode(found.tokens[1]).replace("<|pad|>", "") == "<a>point</a><g><b><y><y><b></s>"
    assert (found.num_actions.tolist(), found.finished.tolist()) == ([2, 1], [True, False])
    assert np.flatnonzero(found.rewards[0]).tolist() == [5]
    assert np.flatnonzero(found.rewards[1]).tolist() == [5]
    assert games.returns.tolist() == found.rewards.sum(axis=1).tolist() == [-1, -1]

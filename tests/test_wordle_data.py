"""Games from tweets: reading and writing, simulated people, and words that fit the colours."""

from __future__ import annotations

import json

import numpy as np
import pytest

from isqn.language.data import (
    People,
    Trajectories,
    WordIndex,
    _draw_words,
    decode_row,
    encode_row,
    fill_in_words,
    find_grid,
    read_ilql_json,
    read_tweets,
    simulate_people,
    to_tokens,
    write_tweets,
)
from isqn.language.game import colour_codes, colour_table, colours, decode, encode
from isqn.language.words import load_words, read_word_counts
from isqn.types import UserError

WORDS = load_words("common")
LETTERS = encode(WORDS)


@pytest.mark.parametrize("row", ["ggggg", "bbbbb", "gybby", "ybgbg"])
def test_rows_are_encoded_and_decoded(row):
    assert decode_row(encode_row(row)) == row


def test_row_codes_agree_with_the_game():
    assert colour_codes(colours(encode(["eerie"]), encode(["elder"])))[0] == encode_row("gyyby")


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("Wordle 210 2/6\n\n⬛🟨⬛⬛🟩\n🟩🟩🟩🟩🟩", ["bybbg", "ggggg"]),
        ("hard! Wordle 210 X/6\n⬜🟦⬜⬜🟧\n🟧🟧🟧🟧🟧 \nat last", ["bybbg", "ggggg"]),
        ("⬛️🟨⬛️⬛️🟩", ["bybbg"]),  # with variation selectors
        ("🟩🟩🟩🟩\n⬛⬛⬛⬛⬛⬛\nno", []),
        ("⬛⬛⬛⬛⬛\n\n🟨⬛⬛⬛⬛\n🟩🟩🟩🟩🟩", ["ybbbb", "ggggg"]),  # the longest run of lines
        ("\n".join(["⬛⬛⬛⬛⬛"] * 8), ["bbbbb"] * 6),
    ],
)
def test_grids_are_found_in_tweets(text, grid):
    assert find_grid(text) == grid


def test_written_tweets_are_read_back(tmp_path):
    games = simulate_people(300, 0, WORDS, People())
    write_tweets(tmp_path / "tweets.csv", games)
    grids = read_tweets(tmp_path / "tweets.csv")
    np.testing.assert_array_equal(grids.rows, games[:, 1:])
    assert grids.summary() == "300 games"


def test_unusable_tweets_are_counted(tmp_path):
    file = tmp_path / "tweets.csv"
    write_tweets(file, simulate_people(2, 0, WORDS, People()))
    bad = ['9,1,d,u,"⬛⬛⬛⬛⬛"', "210,1,d,u,nothing", "210,1", "²,1,d,u,x", f"{'9' * 5_000},1,d,u,x"]
    bad.append('210,1,d,u,"🟩🟩🟩🟩🟩\n⬛⬛⬛⬛⬛"')
    file.write_text(file.read_text() + "\n".join(bad) + "\n")
    grids = read_tweets(file)
    assert len(grids.rows) == 2
    assert sum(grids.skipped.values()) == len(bad)
    assert "1 without a grid" in grids.summary()
    file.write_text("name,age\nann,4\n")
    with pytest.raises(UserError, match=r"holds no game of Wordle: the columns must be wordle_id, .*, with a grid"):
        read_tweets(file)
    with pytest.raises(UserError, match=r"cannot be read as tweets \(Is a directory\)"):
        read_tweets(tmp_path)


def test_a_tweet_of_invalid_text_or_a_byte_order_mark_does_not_spoil_the_file(tmp_path):
    file = tmp_path / "tweets.csv"
    write_tweets(file, simulate_people(2, 0, WORDS, People()))
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes() + b"210,1,d,u,\xff\xfe\xee\n")
    assert read_tweets(file).summary() == "2 games; skipped: 1 without a grid"


def test_the_json_file_of_ilql(tmp_path):
    file = tmp_path / "games.json"
    games = [["panic", ["<b><y><g><b><b>", "<g><g><g><g><g>"]], ["panic", ["<b>"]]]
    games += ["x", None, [5, None], ["panic"], ["panic", [5]], ["panic", []], ["panic", 3]]
    file.write_text(json.dumps({"games": games, "transitions": {}}))
    grids = read_ilql_json(file)
    assert grids.rows.tolist() == [[encode_row("bygbb"), 0, -1, -1, -1, -1]]
    assert grids.summary() == "1 game; skipped: 8 without a grid"
    for content, reason in (
        (b"[]", "there must be `games`, a list, in it"),
        (b'{"games": 3}', "there must be `games`, a list, in it"),
        (b'{"games": [', ".*games.json, line 1, is damaged: it is not JSON .*column 12"),
        (b"\xff\xfe\xee", ".*games.json, line 1, is damaged: byte 0xff is not UTF-8"),
        (b"[" * 200_000, ".*games.json, line 1, is damaged: it is not JSON"),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=f"cannot be read as games: {reason}"):
            read_ilql_json(file)


def test_simulated_people_need_as_many_tries_as_people():
    """They lose a few games; careless people lose more."""
    rows = simulate_people(4_000, 0, WORDS, People())[:, 1:]
    tries = (rows >= 0).sum(axis=1)
    lost = (rows[:, -1] > 0).mean()
    assert 0 < lost < 0.1
    assert 3 < tries.mean() < 4.5
    careless = simulate_people(4_000, 0, WORDS, People(skill=(1.0, 5.0)))[:, 1:]
    assert (careless[:, -1] > 0).mean() > lost


def test_simulated_people_agree_with_the_specification():
    """Distribution of tries in percent, for people who know the answers, and mean return of the games made of them."""
    rows = simulate_people(20_000, 0, load_words("answers"), People(), read_word_counts())[:, 1:]
    tries = (rows >= 0).sum(axis=1) + (rows[:, -1] > 0)
    percent = 100 * np.bincount(tries, minlength=8)[1:] / len(rows)
    np.testing.assert_allclose(percent, [0.0, 5.6, 26.8, 35.3, 20.9, 7.8, 3.5], atol=1.5)
    games = fill_in_words(rows, WordIndex(encode(load_words("answers-200"))), 20_000, np.random.default_rng(0))
    assert games.returns.mean() == pytest.approx(-2.54, abs=0.04)


def test_allowed_words_are_drawn_by_weight():
    allowed = np.tile([True, False, True, False], (20_000, 1))
    drawn = _draw_words(allowed, np.array([1.0, 5.0, 3.0, 9.0]), np.random.default_rng(0))
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / len(drawn), [0.25, 0, 0.75, 0], atol=0.01)


@pytest.mark.parametrize("official", [False, True])
def test_drawn_words_show_the_colours_of_their_rows(official):
    grids = simulate_people(2_000, 1, WORDS, People())[:, 1:]
    index = WordIndex(LETTERS, official=official)
    table = colour_table(LETTERS, LETTERS, official=official)
    hidden, guesses, fits = index.draw(grids, np.random.default_rng(0))
    assert 0 < fits.mean() < 1
    codes = np.where(guesses >= 0, table[guesses, hidden[:, None]], -1)
    np.testing.assert_array_equal(codes[fits], grids[fits])
    np.testing.assert_array_equal((guesses == hidden[:, None])[fits], (grids == 0)[fits])
    for row in np.flatnonzero(~fits)[:50]:  # at least one row has no word
        assert not all(code in table[:, hidden[row]] for code in grids[row] if code >= 0)


def test_drawn_games_depend_on_the_seed_alone():
    grids, index = simulate_people(500, 1, WORDS, People())[:, 1:], WordIndex(LETTERS)
    first, again, other = (fill_in_words(grids, index, 100, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert len(first.hidden) == 100
    np.testing.assert_array_equal(first.guesses, again.guesses)
    assert (first.guesses != other.guesses).any()
    with pytest.raises(UserError, match="Hardly any game fits the 1 words of the list"):
        fill_in_words(np.full((3, 6), encode_row("ybbbb")), WordIndex(LETTERS[:1]), 1, np.random.default_rng(0))


def test_tokens_of_games_by_hand():
    """The first game is solved at the second guess; the second one is broken off after the first guess."""
    words = encode(["panic", "point", "solar"])
    games = Trajectories(np.array([0, 0]), np.array([[2, 0, -1, -1, -1, -1], [1, -1, -1, -1, -1, -1]]))
    tokens = to_tokens(games, words)
    first = "<a>solar</a><b><b><b><y><b></s>panic</a><g><g><g><g><g></s></eod>"
    assert decode(tokens.tokens[0]).replace("<|pad|>", "") == first
    assert decode(tokens.tokens[1]).replace("<|pad|>", "") == "<a>point</a><g><b><y><y><b></s>"
    assert (tokens.num_actions.tolist(), tokens.finished.tolist()) == ([2, 1], [True, False])
    assert np.flatnonzero(tokens.rewards[0]).tolist() == [5]
    assert np.flatnonzero(tokens.rewards[1]).tolist() == [5]
    assert games.returns.tolist() == tokens.rewards.sum(axis=1).tolist() == [-1, -1]

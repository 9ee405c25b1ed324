"""Wordle: colours, tokens and rewards worked out by hand, and players with known returns."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from isqn.envs import registry
from isqn.language import game as wordle
from isqn.language.data import to_tokens
from isqn.language.game import Games, colour_table, colours, decode, encode, parse_guesses
from isqn.language.players import (
    guess_any,
    guess_consistent,
    make_informed,
    mix_players,
    play_games,
)
from isqn.language.words import COMMON, DAYS, load_words
from isqn.types import UserError


def colour_row(guess: str, word: str, **rule) -> str:
    return decode(colours(encode([guess]), encode([word]), **rule)[0]).replace("<", "").replace(">", "")


@pytest.mark.parametrize(
    ("guess", "word", "simple", "official"),
    [
        ("eerie", "elder", "gyyby", "gyybb"),  # the word has two e: one is green, the other is left for one yellow
        ("crane", "crane", "ggggg", "ggggg"),
        ("llama", "elder", "ygbbb", "bgbbb"),  # the only l of the word is green
        ("added", "dread", "yyyyg", "yybyg"),
        ("zzzzz", "panic", "bbbbb", "bbbbb"),
    ],
)
def test_colours_by_hand(guess, word, simple, official):
    assert colour_row(guess, word) == simple
    assert colour_row(guess, word, official=True) == official


def write(games: Games, *texts: str) -> list[list[float]]:
    """Write a guess in each game, token by token; return the rewards."""
    tokens = np.array([[wordle.TOKEN_NAMES.index(t) for t in names] for names in map(token_names, texts)])
    return np.array([games.step(column) for column in tokens.T]).T.tolist()


def token_names(guess: str) -> list[str]:
    """Return the letters of a guess, then its end."""
    return [*guess, *["</a>"] * (6 - len(guess))]


def test_a_game_by_hand():
    games = Games(encode(["elder", "panic"]))
    assert write(games, "eerie", "panic") == [[0, 0, 0, 0, 0, -1], [0, 0, 0, 0, 0, 0]]
    assert games.over.tolist() == [False, True]
    assert decode(games.tokens[1, :14]) == "<a>panic</a><g><g><g><g><g></s></eod>"
    assert games.lengths.tolist() == [13, 14]
    for guess in ("solar", "point", "crimp", "shard"):
        write(games, guess, "aaaaa")  # a game that is over ignores tokens
    assert write(games, "elder", "aaaaa")[0] == [0] * 6
    assert games.solved.tolist() == [True, True]
    assert games.returns.tolist() == [-5, 0]
    assert games.lengths.tolist() == [74, 14]  # 12 n + 2
    assert parse_guesses(games.tokens[0])[0] == ("eerie", "gyyby")
    assert parse_guesses(games.tokens[0])[-1] == ("elder", "ggggg")


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("ab</a>", "<a>ab</a>"),
        ("</a>", "<a></a>"),
        ("abcdef", "<a>abcdef</a>"),  # the end after six letters is written by the game
        ("ab<y>de</a>", "<a>ab<y>de</a>"),
    ],
)
def test_an_invalid_guess_costs_a_try_and_has_no_answer(tokens, text):
    games = Games(encode(["panic"]))
    names = tokens.replace("<", " <").replace(">", "> ").split()
    rewards = [games.step(np.array([wordle.TOKEN_NAMES.index(t)]))[0] for n in names for t in ([n] if "<" in n else n)]
    assert rewards == [0] * (len(rewards) - 1) + [-1]
    assert decode(games.tokens[0, : games.lengths[0]]) == text
    assert (games.num_guesses[0], games.over[0]) == (1, False)
    assert parse_guesses(games.tokens[0])[0][1] is None


def test_six_wrong_guesses_end_a_game():
    games = Games(encode(["panic"]))
    for _ in range(5):
        games.step(np.array([wordle.END_ACTION]))
    assert not games.over[0]
    write(games, "solar")
    assert (games.over[0], games.solved[0], games.returns[0]) == (True, False, -6)
    assert decode(games.tokens[0, games.lengths[0] - 1 : games.lengths[0]]) == "</eod>"


def test_the_gymnasium_environment():
    registry.register_own()
    env = gym.make("isqn/Wordle-v0", render_mode="ansi")
    check_env(env.unwrapped, skip_render_check=True)
    first, _ = env.reset(seed=3)
    assert (first != env.reset(seed=3)[0]).sum() == 0
    env.reset(options={"word": "panic"})
    for letter in "panic":
        assert env.step(ord(letter) - ord("a"))[1:4] == (0, False, False)
    assert env.step(wordle.END_ACTION)[1:] == (0, True, False, {"word": "panic", "solved": True})
    assert env.render().count("\x1b[30;42m") == 5
    for word in ("Crane", "abc", "cranecrane"):
        with pytest.raises(UserError, match=f"The word '{word}' is not possible in Wordle"):
            env.reset(options={"word": word})


# -- words


def test_built_in_words():
    assert (len(set(DAYS)), len(set(COMMON)), len(load_words("common"))) == (40, 200, 240)
    drawn = load_words("common", 20, seed=1)
    assert len(set(drawn)) == 20
    assert drawn == load_words("common", 20, seed=1) != load_words("common", 20, seed=2)


# -- players


@pytest.fixture(scope="module")
def table():
    words = encode(load_words("common"))
    return colour_table(words, words)


def mean_return(player, table, count=2_000) -> float:
    rng = np.random.default_rng(0)
    return play_games(player, table, rng.integers(table.shape[1], size=count), rng).returns.mean()


def test_the_table_has_the_solved_code_on_its_diagonal_only(table):
    assert (np.diag(table) == wordle.SOLVED).all()
    assert (table == wordle.SOLVED).sum() == len(table)


def test_returns_of_scripted_players(table):
    """Each of six random guesses is right with probability 1/240, so that the mean return is nearly -6.

    The informed player has about -1.75 on lists of this length (the specification's 236 words).
    """
    random = mean_return(guess_any, table)
    miss = 239 / 240
    assert random == pytest.approx(-sum(miss**n for n in range(1, 7)), abs=0.05)
    consistent = mean_return(guess_consistent, table)
    informed = mean_return(make_informed(table), table)
    half = mean_return(mix_players(0.5, guess_consistent, guess_any), table)
    assert random < half < consistent < informed
    assert informed == pytest.approx(-1.75, abs=0.08)


def test_redrawing_the_hidden_word_at_each_guess_has_the_same_distribution(table):
    """The code of ILQL redraws the hidden word at each guess, from those that are still possible."""
    rng, count, returns = np.random.default_rng(2), 2_000, np.zeros(2_000)
    possible, playing = np.ones((count, len(table)), bool), np.ones(count, bool)
    for _ in range(wordle.MAX_GUESSES):
        guess, hidden = (guess_consistent(possible, np.empty((count, 0)), rng) for _ in range(2))
        codes = table[guess, hidden]
        possible &= table[guess] == codes[:, None]
        playing &= codes != wordle.SOLVED
        returns -= playing
    assert returns.mean() == pytest.approx(mean_return(guess_consistent, table), abs=0.08)


@pytest.mark.parametrize("action", [-1, 35, 2.5])
def test_an_action_that_is_no_token_is_refused(action):
    env = gym.make("isqn/Wordle-v0").unwrapped
    env.reset(seed=0)
    with pytest.raises(UserError, match=r"is not a token; it must be a whole number from 0 to 34\."):
        env.step(action)


def test_games_of_words_and_of_tokens_have_the_same_returns(table):
    words, rng = encode(load_words("common")), np.random.default_rng(1)
    hidden = rng.integers(len(words), size=50)
    played = play_games(guess_consistent, table, hidden, rng)
    np.testing.assert_array_equal(to_tokens(played, words).rewards.sum(axis=1), played.returns)


def test_guesses_of_any_tokens_are_parsed():
    """Only five letters have an answer, even where an invalid guess contains the tokens of one."""
    games = Games(encode(["crane"]))
    for text in (["s", "l", "a", "t", "e", "</a>"], ["</s>", "l", "</a>"], ["<g>"] * 6, [*"crane", "</a>"]):
        for token in text:
            games.step(np.array([wordle.TOKEN_NAMES.index(token)]))
    assert parse_guesses(games.tokens[0]) == [
        ("slate", "bbgbg"),
        ("</s>l", None),
        ("<g><g><g><g><g><g>", None),
        ("crane", "ggggg"),
    ]

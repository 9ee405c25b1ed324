"""Wordle: colours, tokens and rewards worked out by hand, and players whose returns are known."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from isqn.envs import wordle, wordle_players
from isqn.language.data import to_tokens
from isqn.language.game import Games, colours, decode, encode, guesses_of, table
from isqn.language.words import COMMON, DAYS, find_words
from isqn.types import UserError


def shown(guess: str, word: str, **rule) -> str:
    return decode(colours(encode([guess]), encode([word]), **rule)[0]).replace("<", "").replace(">", "")


@pytest.mark.parametrize(
    ("guess", "word", "simple", "official"),
    [
        ("eerie", "elder", "gyyby", "gyybb"),  # the word has two e: one is green, one is left for the second
        ("crane", "crane", "ggggg", "ggggg"),
        ("llama", "elder", "ygbbb", "bgbbb"),  # its l is where the second one stands
        ("added", "dread", "yyyyg", "yybyg"),
        ("zzzzz", "panic", "bbbbb", "bbbbb"),
    ],
)
def test_colours_by_hand(guess, word, simple, official):
    assert shown(guess, word) == simple
    assert shown(guess, word, official=True) == official


def write(games: Games, *texts: str) -> list[list[float]]:
    """A guess in each game, token by token."""
    tokens = np.array([[wordle.NAMES.index(t) for t in text] for text in map(parts, texts)])
    return np.array([games.step(column) for column in tokens.T]).T.tolist()


def parts(text: str) -> list[str]:
    """`crane` and its end; a star is a token that is no letter."""
    return ["<g>" if letter == "*" else letter for letter in text] + ["</a>"] * (6 - len(text))


def test_a_game_by_hand():
    games = Games(encode(["elder", "panic"]))
    assert write(games, "eerie", "panic") == [[0, 0, 0, 0, 0, -1], [0, 0, 0, 0, 0, 0]]
    assert games.over.tolist() == [False, True]
    assert decode(games.tokens[1, :14]) == "<a>panic</a><g><g><g><g><g></s></eod>"
    assert games.lengths.tolist() == [13, 14]
    for guess in ("solar", "point", "crimp", "shard"):
        write(games, guess, "aaaaa")  # who is over writes no more
    assert write(games, "elder", "aaaaa")[0] == [0] * 6
    assert games.solved.tolist() == [True, True]
    assert games.returns.tolist() == [-5, 0]
    assert games.lengths.tolist() == [74, 14]  # 12 n + 2
    assert guesses_of(games.tokens[0])[0] == ("eerie", "gyyby")
    assert guesses_of(games.tokens[0])[-1] == ("elder", "ggggg")


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("ab</a>", "<a>ab</a>"),
        ("</a>", "<a></a>"),
        ("abcdef", "<a>abcdef</a>"),  # six letters: the end is written for it
        ("ab<y>de</a>", "<a>ab<y>de</a>"),
    ],
)
def test_what_is_no_guess_costs_a_try_and_says_nothing(tokens, text):
    games = Games(encode(["panic"]))
    names = tokens.replace("<", " <").replace(">", "> ").split()
    rewards = [games.step(np.array([wordle.NAMES.index(t)]))[0] for n in names for t in ([n] if "<" in n else n)]
    assert rewards == [0] * (len(rewards) - 1) + [-1]
    assert decode(games.tokens[0, : games.lengths[0]]) == text
    assert (games.tries[0], games.over[0]) == (1, False)
    assert guesses_of(games.tokens[0])[0][1] is None


def test_six_wrong_guesses_end_a_game():
    games = Games(encode(["panic"]))
    for _ in range(5):
        games.step(np.array([wordle.END_ACTION]))
    assert not games.over[0]
    write(games, "solar")
    assert (games.over[0], games.solved[0], games.returns[0]) == (True, False, -6)
    assert decode(games.tokens[0, games.lengths[0] - 1 : games.lengths[0]]) == "</eod>"


def test_the_environment_is_one_of_gymnasium():
    wordle.register()
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
        with pytest.raises(UserError, match=f"The word '{word}' cannot be looked for"):
            env.reset(options={"word": word})


# -- words


def test_the_words_that_are_written_here():
    assert (len(set(DAYS)), len(set(COMMON)), len(find_words("common"))) == (40, 200, 240)
    drawn = find_words("common", 20, seed=1)
    assert len(set(drawn)) == 20
    assert drawn == find_words("common", 20, seed=1) != find_words("common", 20, seed=2)


# -- players


@pytest.fixture(scope="module")
def patterns():
    words = encode(find_words("common"))
    return table(words, words)


def mean_return(player, patterns, count=2_000) -> float:
    rng = np.random.default_rng(0)
    return wordle_players.play(player, patterns, rng.integers(patterns.shape[1], size=count), rng).returns.mean()


def test_a_table_says_when_a_word_is_found(patterns):
    assert (np.diag(patterns) == wordle.SOLVED).all()
    assert (patterns == wordle.SOLVED).sum() == len(patterns)


def test_players_are_as_good_as_they_are_known_to_be(patterns):
    """Uniform guesses: each of six is right with probability 1/240, so that the mean return is nearly -6. Who chooses
    what tells most has about -1.75 on lists of this length (the specification's 236 words)."""
    random = mean_return(wordle_players.at_random, patterns)
    miss = 239 / 240
    assert random == pytest.approx(-sum(miss**n for n in range(1, 7)), abs=0.05)
    consistent = mean_return(wordle_players.consistent, patterns)
    informed = mean_return(wordle_players.informed(patterns), patterns)
    half = mean_return(wordle_players.mixture(0.5, wordle_players.consistent, wordle_players.at_random), patterns)
    assert random < half < consistent < informed
    assert informed == pytest.approx(-1.75, abs=0.08)


def test_a_word_that_is_drawn_anew_at_each_guess_is_the_same_in_law(patterns):
    """The code of ILQL draws a hidden word from those that are still possible whenever a guess is made."""
    rng, count, returns = np.random.default_rng(2), 2_000, np.zeros(2_000)
    possible, going = np.ones((count, len(patterns)), bool), np.ones(count, bool)
    for _ in range(wordle.TRIES):
        guess, hidden = (wordle_players.consistent(possible, np.empty((count, 0)), rng) for _ in range(2))
        told = patterns[guess, hidden]
        possible &= patterns[guess] == told[:, None]
        going &= told != wordle.SOLVED
        returns -= going
    assert returns.mean() == pytest.approx(mean_return(wordle_players.consistent, patterns), abs=0.08)


@pytest.mark.parametrize("action", [-1, 35, 2.5])
def test_what_is_no_token_is_refused(action):
    env = gym.make("isqn/Wordle-v0").unwrapped
    env.reset(seed=0)
    with pytest.raises(UserError, match=r"is no token; it must be a whole number from 0 to 34\."):
        env.step(action)


def test_both_players_of_a_game_tell_the_same(patterns):
    """Games of words and games of tokens: the same rewards for the same guesses."""
    words, rng = encode(find_words("common")), np.random.default_rng(1)
    hidden = rng.integers(len(words), size=50)
    played = wordle_players.play(wordle_players.consistent, patterns, hidden, rng)
    np.testing.assert_array_equal(to_tokens(played, words).rewards.sum(axis=1), played.returns)


def test_guesses_of_a_game_in_which_anything_was_written():
    """Also what looks like the end of an answer: only five letters have one."""
    games = Games(encode(["crane"]))
    for text in (["s", "l", "a", "t", "e", "</a>"], ["</s>", "l", "</a>"], ["<g>"] * 6, [*"crane", "</a>"]):
        for token in text:
            games.step(np.array([wordle.NAMES.index(token)]))
    assert guesses_of(games.tokens[0]) == [
        ("slate", "bbgbg"),
        ("</s>l", None),
        ("<g><g><g><g><g><g>", None),
        ("crane", "ggggg"),
    ]

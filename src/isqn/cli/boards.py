"""`isqn eval RUN_DIR` for a language agent: print the boards of its Wordle games."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from isqn.train.progress import format_count
from isqn.types import UserError

MANY_WORDS = 2_500  # for longer lists, the scripted players take minutes


def evaluate(options: Any) -> int:
    """Evaluate a language agent and print its Wordle boards."""
    from isqn.data.files import replace_text
    from isqn.language import play, training
    from isqn.language.boards import render_page
    from isqn.language.game import decode, format_board, parse_guesses
    from isqn.train import record

    for name, given, instead in (
        ("--epsilon", options.epsilon is not None, "--acting-rule sample varies what is written"),
        ("--capture-video", options.capture_video, "--html keeps the boards"),
    ):
        if given:
            raise UserError(f"{name} is not for runs of `isqn train ilql`; {instead}.")
    if options.html and options.html.is_dir():
        raise UserError(f"--html {options.html} is a folder; give a file, such as {options.html / 'boards.html'}.")
    decoding = options.acting_rule, options.beta
    config, state, step = training.load_language_agent(options.run_dir, options.which, *decoding)
    words = play.load_word_list(config)
    hidden = play.draw_hidden_words(words, options.episodes, options.seed)
    games = play.compile_decoder(config).play(state, hidden, options.seed)
    returns, statistics = games.returns, play.guess_statistics(games, words)
    learned_from = record.read_summary(options.run_dir, strict=True).get("learned_from")
    scripted = {}
    if len(words) <= MANY_WORDS:
        scripted = play.baseline_returns(words, hidden, options.seed, official=config.official_colours)
    boards = [(decode(word), parse_guesses(tokens)) for word, tokens in zip(hidden, games.tokens, strict=True)]
    summary = {
        "env_id": config.env_id,
        "label": config.label,
        "step": step,
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std()),
        "win_rate": float(games.solved.mean()),
        **statistics,
        "players": scripted,
        "learned_from": learned_from,
        "inverse_temperature": config.inverse_temperature,
        "acting_rule": config.acting_rule,
        "episodes": [
            {"word": word, "return": float(total), "guesses": [guess for guess, _ in guesses]}
            for (word, guesses), total in zip(boards, returns, strict=True)
        ],
    }
    over = format_count(len(returns), "game")
    mean = f"{returns.mean():.2f} ± {returns.std():.2f} (standard deviation) over {over}"
    line = f"{config.label} on {config.env_id} at step {step:,}, beta {config.inverse_temperature:g}: {mean}"
    shares = (
        f"words found: {games.solved.mean():.0%}; guesses of five letters: {statistics['valid_share']:.0%}, "
        f"in the word list: {statistics['dictionary_share']:.0%}, "
        f"consistent with all clues: {statistics['consistent_share']:.0%}"
    )
    lines = [shares, *([f"learned from {learned_from['games']}"] if learned_from else [])]
    if scripted:
        lines.append(
            f"mean return of scripted players on the same words: a random word {scripted['random']:.2f}, "
            f"a random consistent word {scripted['consistent']:.2f}, "
            f"the most informative consistent word {scripted['informed']:.2f}"
        )
    if options.html:
        options.html.parent.mkdir(parents=True, exist_ok=True)
        replace_text(options.html, render_page(line, lines, boards))
    if options.json:
        print(json.dumps(summary))
        return 0
    for (word, guesses), total in zip(boards, returns, strict=True):
        print(f"{word}, return {total:.0f}", format_board(guesses, colour=use_colour()), "", sep="\n")
    print(line, *lines, sep="\n")
    if options.html:
        print(options.html)
    return 0


def use_colour() -> bool:
    """Return whether the output is a terminal and NO_COLOR is not set (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")

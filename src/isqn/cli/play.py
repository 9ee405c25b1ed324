"""`isqn play RUN_DIR WORD`: show the guesses of a trained Wordle agent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from isqn.cli.boards import use_colour
from isqn.cli.parse import arg, parse, require_at_least_one, require_beta, require_seed
from isqn.cli.tables import table
from isqn.train.progress import format_count


@dataclass(frozen=True)
class Play:
    """Show the guesses of a trained Wordle agent, with its top alternatives and their values."""

    run_dir: Annotated[tyro.conf.Positional[Path], arg("RUN_DIR")]
    """Run folder of `isqn train ilql`."""
    word: Annotated[tyro.conf.Positional[str], arg("WORD")]
    """Hidden word of five letters."""
    top: int = 5
    """Number of alternatives shown at each turn."""
    beta: Annotated[float | None, arg("FLOAT", "as in training")] = None
    """Inverse temperature of the values; 0 decodes by the policy alone."""
    acting_rule: Literal["auto", "greedy", "sample"] = "auto"
    """Decoding. auto: as in training."""
    which: Literal["last", "best"] = "last"
    """Checkpoint: the newest, or the one after the best epoch."""
    seed: int = 100
    """Seed of the sampled tokens."""
    json: bool = False
    """Print one JSON object."""


def run(args: Sequence[str]) -> int:
    options = parse(Play, args, "isqn play")
    from isqn.language import play, training
    from isqn.language.game import format_guess, require_word

    word = require_word(options.word.lower())
    require_at_least_one("top", options.top)
    require_seed(options.seed)
    require_beta(options.beta)
    decoding = options.acting_rule, options.beta
    config, state, step = training.load_language_agent(options.run_dir, options.which, *decoding)
    words = play.load_word_list(config)
    games, turns = play.trace_game(config, state, word, options.top, options.seed)
    if options.json:
        print(
            json.dumps(
                {
                    "label": config.label,
                    "step": step,
                    "inverse_temperature": config.inverse_temperature,
                    "acting_rule": config.acting_rule,
                    "word": word,
                    "listed": word in words,
                    "solved": bool(games.solved[0]),
                    "turns": [turn.as_json() for turn in turns],
                }
            )
        )
        return 0
    some = ", ".join(words[:: -(-len(words) // 4)])
    known = "" if word in words else f"; {word} is not among the {len(words)} words it knows, such as {some}"
    print(f"{config.label} at step {step:,}, beta {config.inverse_temperature:g}{known}")
    for number, turn in enumerate(turns, start=1):
        print(f"\n{number}. {format_guess(turn.guess, turn.colours, colour=use_colour())}   V {turn.value:.2f}")
        shown: list[tuple[str, ...]] = [
            (c.word, f"{100 * c.probability:.2g} %", f"{100 * c.policy_probability:.2g} %", f"{c.value:.2f}")
            for c in turn.candidates
        ]
        print(*(f"   {line}" for line in table(("word", "agent", "policy alone", "Q"), shown)), sep="\n")
    solved = f"solved in {format_count(len(turns), 'guess', 'guesses')}" if games.solved[0] else "not solved"
    print(f"\n{word}: {solved}")
    return 0

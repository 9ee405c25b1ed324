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
    from isqn.language.game import require_word, row

    word = require_word(options.word.lower())
    require_at_least_one("top", options.top)
    require_seed(options.seed)
    require_beta(options.beta)
    config, state, step = training.load_writer(options.run_dir, options.which, options.acting_rule, options.beta)
    words = play.words_of(config)
    games, turns = play.explain(config, state, word, options.top, options.seed)
    if options.json:
        rows = [{**turn._asdict(), "thoughts": [thought._asdict() for thought in turn.thoughts]} for turn in turns]
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
                    "turns": rows,
                }
            )
        )
        return 0
    some = ", ".join(words[:: -(-len(words) // 4)])
    known = "" if word in words else f"; {word} is not among the {len(words)} words it knows, such as {some}"
    print(f"{config.label} at step {step:,}, beta {config.inverse_temperature:g}{known}")
    for number, turn in enumerate(turns, start=1):
        print(f"\n{number}. {row(turn.guess, turn.told, colour=use_colour())}   V {turn.value:.2f}")
        shown: list[tuple[str, ...]] = [
            (t.word, f"{100 * t.chosen:.2g} %", f"{100 * t.cloned:.2g} %", f"{t.value:.2f}") for t in turn.thoughts
        ]
        print(*(f"   {line}" for line in table(("word", "chosen", "policy", "Q"), shown)), sep="\n")
    print(f"\n{word}: found with guess {len(turns)}" if games.solved[0] else f"\n{word}: not found")
    return 0

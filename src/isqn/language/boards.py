"""Wordle boards as an HTML page: rows of coloured squares."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from isqn.language.game import Guess
from isqn.train.progress import format_count

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 68rem; padding: 0 1rem; color: #1a1a1b;
       background: #fff; }
h1 { font-size: 1.3rem; margin-bottom: 0; } p { margin: .2rem 0 1.2rem; color: #555; }
main { display: flex; flex-wrap: wrap; gap: 1.6rem 2rem; }
figure { margin: 0; } figcaption { font-size: .85rem; color: #555; margin-top: .2rem; }
.row { display: flex; gap: 4px; margin-bottom: 4px; }
.row span { width: 2.1rem; height: 2.1rem; display: flex; align-items: center; justify-content: center; color: #fff;
            font-weight: 700; text-transform: uppercase; border-radius: 3px; }
.g { background: #4c8c4a; } .y { background: #b59f3b; } .b { background: #787c7e; }
.row.none { font-family: monospace; font-size: .8rem; color: #a33; height: 2.1rem; align-items: center; }
@media (prefers-color-scheme: dark) {
  body { background: #121213; color: #eee; } p, figcaption { color: #aaa; } .b { background: #3a3a3c; } }
"""
TITLES = {"g": "right", "y": "elsewhere", "b": "not in the word"}


def render_page(title: str, lines: list[str], games: Iterable[tuple[str, list[Guess]]]) -> str:
    """Return a page with lines about all games, and for each game its hidden word and its board."""
    figures = "\n".join(_render_board(word, guesses) for word, guesses in games)
    head = f"<title>{escape(title)}</title><style>{STYLE}</style>"
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    about = "<br>".join(map(escape, lines))
    body = f"<h1>{escape(title)}</h1><p>{about}</p><main>\n{figures}\n</main>"
    return f'<!doctype html><html lang="en"><head>{meta}{head}</head><body>{body}</body></html>\n'


def _render_board(word: str, guesses: list[Guess]) -> str:
    rows = "".join(_render_guess(guess, row) for guess, row in guesses)
    is_solved = bool(guesses) and guesses[-1][0] == word
    result = f"solved in {format_count(len(guesses), 'guess', 'guesses')}" if is_solved else "not solved"
    return f"<figure>{rows}<figcaption>{escape(word)}: {result}</figcaption></figure>"


def _render_guess(guess: str, row: str | None) -> str:
    if row is None:
        return f'<div class="row none">{escape(guess) or "(empty)"}: not a word of five letters</div>'
    squares = "".join(
        f'<span class="{colour}" title="{escape(letter)}: {TITLES[colour]}">{escape(letter)}</span>'
        for letter, colour in zip(guess, row, strict=True)
    )
    return f'<div class="row">{squares}</div>'

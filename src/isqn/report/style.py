"""One style for the figures of a paper and for the page: plain colours, dashes, and matplotlib's settings.

A scheme keeps its colour wherever it is shown. The colours are told apart by colour-blind readers: those of
the schemes are of Okabe & Ito 2008, "Color Universal Design", most others of Tol 2021, "Colour Schemes" (muted).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import log
from typing import Any, NamedTuple

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    *("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"),
)
REST = ("#882255", "#332288", "#5C3A00", "#999933", "#888888")  # for what is no scheme of the paper
BY_K = {1: SKY, 3: BLUE, 9: GREEN, 49: PURPLE, 499: "#5B1A4A"}  # iterated shared; other K lie between
ORDERED = ("#440154", "#414487", "#2A788E", "#22A884", "#7AD151")  # viridis, without its yellow end
WHITE, REFERENCE, GRID, INK = "#FFFFFF", "#777777", "#E6E6E6", "#222222"

# Only the fonts that come with matplotlib: the same numbers give the same file on every machine.
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 8,
    "axes.titlepad": 4,
    "axes.labelpad": 3,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.major.pad": 2.5,
    "ytick.major.pad": 2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "hatch.linewidth": 0.8,
    "hatch.color": "white",
    "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.05,
    "figure.constrained_layout.w_pad": 0.06,
    "axes.formatter.useoffset": False,
    "svg.hashsalt": "isqn",  # names inside the file are random otherwise
    "pdf.fonttype": 42,  # conferences refuse Type 3
}


class Dash(NamedTuple):
    """How a line is broken, as matplotlib and as plotly call it; and the pattern of a bar, which both call the same."""

    matplotlib: str | tuple[float, tuple[float, ...]]
    plotly: str
    hatch: str


Looks = Mapping[str, tuple[str, Dash]]
DASHES = (
    Dash("solid", "solid", ""),
    Dash((0, (4, 1.6)), "dash", "/"),
    Dash((0, (1, 1.4)), "dot", "."),
    Dash((0, (4, 1.4, 1, 1.4)), "dashdot", "\\"),
)


def colours(labels: Iterable[str]) -> dict[str, str]:
    """Label -> hex. What follows a comma, as in "TB-DQN, bfloat16", is told by the dash; of many, by the shade too.

    Numbered labels such as "pair 1" to "pair 9" are a sequence from dark to light; others take what is left.
    """
    labels = list(labels)
    names = dict.fromkeys(map(_name, labels))
    found = {name: colour for name in names if (colour := _of_scheme(name))}
    families: dict[str, list[str]] = {}
    for name in names:
        if name not in found and (numbered := re.fullmatch(r"([^-]*?)\d+", name)):
            families.setdefault(numbered[1], []).append(name)
    for stem, members in families.items():
        if len(members) > 1:
            members.sort(key=lambda name: int(name[len(stem) :]))
            found |= zip(members, _ordered(len(members)), strict=True)
    others = [name for name in names if name not in found]
    left = [*REST, *(c for c in (VERMILION, *BY_K.values(), ORANGE, BLACK) if c not in found.values())]
    found |= zip(others, left if len(others) <= len(left) else _ordered(len(others)), strict=False)
    chosen = {label: found[_name(label)] for label in labels}
    sweeps: dict[tuple[str, str], dict[str, list[float]]] = {}
    for label in chosen:
        words, numbers = _setting(label)
        sweeps.setdefault((_name(label), words), {})[label] = numbers
    for (name, _), swept in sweeps.items():
        if len(swept) > 2:  # as of T: too many for dashes alone
            chosen |= zip(sorted(swept, key=swept.__getitem__), _shades(found[name], len(swept)), strict=True)
    return chosen


def looks(labels: Iterable[str]) -> Looks:
    """Label -> colour and dash: the same dash for the same suffix where possible, never twice with one colour."""
    chosen = colours(labels := list(labels))
    suffixes = sorted(dict.fromkeys(map(_suffix, labels)), key=bool)  # what has none comes first: solid
    taken: dict[tuple[str, int], str] = {}
    for label in chosen:
        number = suffixes.index(_suffix(label))
        while (chosen[label], number) in taken:
            number += 1
        taken[chosen[label], number] = label
    return {label: (colour, _dash(number)) for (colour, number), label in taken.items()}


def _name(label: str) -> str:
    return label.partition(", ")[0]


def _suffix(label: str) -> str:
    return label.partition(", ")[2]


def _setting(label: str) -> tuple[str, list[float]]:
    """What a suffix sets, and to which numbers: ", T=200, LN" is "T=, LN" and 200. The 16 of bfloat16 is no number."""
    number = r"(?<=[= x])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?=,|$)"
    return re.sub(number, "", _suffix(label)), [float(found) for found in re.findall(number, _suffix(label))]


def _of_scheme(name: str) -> str | None:
    prefix = re.match(r"(TB|TF|iS|ES)\b", name)
    if not prefix:
        return None
    if prefix[1] == "iS":
        size = re.search(r"\bK=(\d+)", name)
        return _by_k(int(size[1])) if size else BLUE
    return {"TB": BLACK, "TF": ORANGE, "ES": VERMILION}[prefix[1]]


def _by_k(k: int) -> str:
    below = max((known for known in BY_K if known <= k), default=1)
    above = min((known for known in BY_K if known > k), default=below)
    return BY_K[below] if above == below else _between(BY_K[below], BY_K[above], log(k / below) / log(above / below))


def _ordered(count: int, along: tuple[str, ...] = ORDERED) -> list[str]:
    places = [(len(along) - 1) * i / max(1, count - 1) for i in range(count)]
    return [_between(along[int(p)], along[min(int(p) + 1, len(along) - 1)], p % 1) for p in places]


def _shades(colour: str, count: int) -> list[str]:
    """From dark to light: one colour stays one, and a sweep is read as a sequence."""
    return _ordered(count, (_between(colour, BLACK, 0.45), _between(colour, WHITE, 0.5)))


def _between(first: str, second: str, share: float) -> str:
    pairs = [(int(first[i : i + 2], 16), int(second[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + share * (b - a)):02X}" for a, b in pairs)


def _dash(number: int) -> Dash:
    """The first few have names; the others are dashes with more and more dots between them."""
    if number < len(DASHES):
        return DASHES[number]
    lengths = (6.0, 2.0, *(1.0, 2.0) * (number - len(DASHES) + 2))
    plotly = ",".join(f"{length:g}px" for length in lengths)
    return Dash((0, lengths), plotly, "x-|+"[(number - len(DASHES)) % 4])

"""Colours, dashes and matplotlib settings that the figure files and the page share.

A scheme has the same colour everywhere. Colour-blind readers can distinguish the colours: those of the schemes are from
Okabe & Ito 2008, "Color Universal Design", most others from Tol 2021, "Colour Schemes" (muted).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import log
from typing import Any, NamedTuple

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    *("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"),
)
OTHER_COLOURS = ("#882255", "#332288", "#5C3A00", "#999933", "#888888")  # labels that are not a scheme of the paper
BY_K = {1: SKY, 3: BLUE, 9: GREEN, 49: PURPLE, 499: "#5B1A4A"}  # iterated shared; other K are interpolated
SEQUENTIAL = ("#440154", "#414487", "#2A788E", "#22A884", "#7AD151")  # viridis, without its yellow end
WHITE, REFERENCE, GRID, INK = "#FFFFFF", "#777777", "#E6E6E6", "#222222"

# Only fonts that come with matplotlib, so that the same numbers give the same file on every machine.
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "text.parse_math": False,  # show a dollar sign in a name literally
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
    "svg.hashsalt": "isqn",  # else the ids inside the file are random
    "pdf.fonttype": 42,  # conferences reject Type 3 fonts
}


class Dash(NamedTuple):
    """Dash pattern of a line in the notation of matplotlib and of plotly, and the hatch of a bar (the same in both)."""

    matplotlib: str | tuple[float, tuple[float, ...]]
    plotly: str
    hatch: str


Styles = Mapping[str, tuple[str, Dash]]  # label -> colour and dash
DASHES = (
    Dash("solid", "solid", ""),
    Dash((0, (4, 1.6)), "dash", "/"),
    Dash((0, (1, 1.4)), "dot", "."),
    Dash((0, (4, 1.4, 1, 1.4)), "dashdot", "\\"),
)


def assign_colours(labels: Iterable[str]) -> dict[str, str]:
    """Map each label to a hexadecimal colour.

    The part before the first comma determines the colour: "TB-DQN, bfloat16" has that of "TB-DQN" and another dash.
    With more than two values of a setting after the comma, they have different shades too. Numbered labels such as
    "pair 1" to "pair 9" form a sequence from dark to light. All others get the remaining colours.
    """
    labels = list(labels)
    names = dict.fromkeys(map(_name, labels))
    by_name = {name: colour for name in names if (colour := _scheme_colour(name))}
    families: dict[str, list[str]] = {}
    for name in names:
        if name not in by_name and (numbered := re.fullmatch(r"([^-]*?)\d+", name)):
            families.setdefault(numbered[1], []).append(name)
    for stem, members in families.items():
        if len(members) > 1:
            members.sort(key=lambda name: int(name[len(stem) :]))
            by_name |= zip(members, _sequence(len(members)), strict=True)
    uncoloured = [name for name in names if name not in by_name]
    unused = [c for c in (VERMILION, *BY_K.values(), ORANGE, BLACK) if c not in by_name.values()]
    free = [*OTHER_COLOURS, *unused]
    by_name |= zip(uncoloured, free if len(uncoloured) <= len(free) else _sequence(len(uncoloured)), strict=False)
    by_label = {label: by_name[_name(label)] for label in labels}
    sweeps: dict[tuple[str, str], dict[str, list[float]]] = {}
    for label in by_label:
        setting, numbers = _split_setting(label)
        sweeps.setdefault((_name(label), setting), {})[label] = numbers
    for (name, _), sweep in sweeps.items():
        if len(sweep) > 2:  # too many to distinguish by dashes alone, as in a sweep of T
            by_label |= zip(sorted(sweep, key=sweep.__getitem__), _shades(by_name[name], len(sweep)), strict=True)
    return by_label


def assign_styles(labels: Iterable[str]) -> Styles:
    """Map each label to a colour and a dash. No two labels share both.

    Labels with the same suffix have the same dash where possible.
    """
    chosen = assign_colours(labels := list(labels))
    suffixes = sorted(dict.fromkeys(map(_suffix, labels)), key=bool)  # the empty suffix comes first: a solid line
    taken: dict[tuple[str, int], str] = {}
    for label in chosen:
        number = suffixes.index(_suffix(label))
        while (chosen[label], number) in taken:
            number += 1
        taken[chosen[label], number] = label
    return {label: (colour, _make_dash(number)) for (colour, number), label in taken.items()}


def _name(label: str) -> str:
    return label.partition(", ")[0]


def _suffix(label: str) -> str:
    return label.partition(", ")[2]


def _split_setting(label: str) -> tuple[str, list[float]]:
    """Split a suffix into its text and its numbers: "T=200, LN" -> "T=, LN", [200]. The 16 of bfloat16 is text."""
    number = r"(?<=[= x])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?=,|$)"
    return re.sub(number, "", _suffix(label)), [float(match) for match in re.findall(number, _suffix(label))]


def _scheme_colour(name: str) -> str | None:
    """Return the colour of a target scheme of the paper, or None for any other name."""
    prefix = re.match(r"(TB|TF|iS|ES)\b", name)
    if not prefix:
        return None
    if prefix[1] == "iS":
        k = re.search(r"\bK=(\d+)", name)
        return _interpolate_k(int(k[1])) if k else BLUE
    return {"TB": BLACK, "TF": ORANGE, "ES": VERMILION}[prefix[1]]


def _interpolate_k(k: int) -> str:
    """Return the colour of iterated shared learning with K Bellman iterations, interpolated in log K."""
    below = max((known for known in BY_K if known <= k), default=1)
    above = min((known for known in BY_K if known > k), default=below)
    return BY_K[below] if above == below else _blend(BY_K[below], BY_K[above], log(k / below) / log(above / below))


def _sequence(count: int, anchors: tuple[str, ...] = SEQUENTIAL) -> list[str]:
    """Return evenly spaced colours between the anchors."""
    positions = [(len(anchors) - 1) * i / max(1, count - 1) for i in range(count)]
    return [_blend(anchors[int(p)], anchors[min(int(p) + 1, len(anchors) - 1)], p % 1) for p in positions]


def _shades(colour: str, count: int) -> list[str]:
    """Return shades of one colour, from dark to light."""
    return _sequence(count, (_blend(colour, BLACK, 0.45), _blend(colour, WHITE, 0.5)))


def _blend(first: str, second: str, share: float) -> str:
    """Return the colour at a share, in [0, 1], of the way from the first to the second in RGB."""
    pairs = [(int(first[i : i + 2], 16), int(second[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + share * (b - a)):02X}" for a, b in pairs)


def _make_dash(number: int) -> Dash:
    """Return the dash pattern of an index. Beyond the named ones, patterns have a growing number of dots."""
    if number < len(DASHES):
        return DASHES[number]
    lengths = (6.0, 2.0, *(1.0, 2.0) * (number - len(DASHES) + 2))
    plotly = ",".join(f"{length:g}px" for length in lengths)
    return Dash((0, lengths), plotly, "x-|+"[(number - len(DASHES)) % 4])

"""Figures as pure functions of arrays. Colours are told apart by colour-blind readers (Okabe & Ito 2008)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isqn.types import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLACK, ORANGE, BLUE, GREEN, VERMILION, PURPLE, SKY = (
    *("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"),
)
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "isqn",  # the same numbers give the same file
}


def colour(label: str) -> str:
    """Target-based is black, target-free orange, iterated shared darkens with K."""
    if label.startswith("TB-"):
        return BLACK
    if label.startswith("TF-"):
        return ORANGE
    known = {"K=1": SKY, "K=3": BLUE, "K=9": GREEN, "K=49": PURPLE}
    return next((known[word] for word in label.split() if word in known), VERMILION)


def learning_curves(
    panels: Mapping[str, Mapping[str, np.ndarray]],
    steps: Mapping[str, np.ndarray],
    *,
    xlabel: str = "agent steps",
    ylabel: str = "mean training return of an epoch",
) -> Figure:
    """One panel for each problem; in it, for each label, the mean over seeds and every seed behind it, thin.

    `panels[problem][label]` has the shape (seeds, epochs), `steps[problem]` the shape (epochs,).
    """
    plt = _pyplot()
    with plt.rc_context(STYLE):
        size = (max(5.2, 0.6 + 3.6 * len(panels)), 3.3)
        figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
        for axis, (problem, curves) in zip(axes[0], panels.items(), strict=True):
            for label, returns in curves.items():
                axis.plot(steps[problem], returns.T, color=colour(label), linewidth=0.6, alpha=0.3)
                axis.plot(steps[problem], returns.mean(axis=0), color=colour(label), linewidth=1.8, label=label)
            axis.set_title(problem, fontsize=9)
            axis.set_xlabel(xlabel)
            axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x else "0")
        axes[0][0].set_ylabel(ylabel)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), round(size[0])))
        return figure


def save(figure: Figure, path: Path) -> None:
    """As the suffix says: SVG, PDF or PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError('Figures need matplotlib: pip install "isqn[report]".') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot

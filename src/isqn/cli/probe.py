"""`isqn probe RUN_DIR`: the paper's analysis of a trained network."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from isqn.cli.parse import arg, parse, require_at_least_one, require_seed
from isqn.cli.tables import table

MEANINGS = {
    "step": "training step of the checkpoint",
    "effective_rank": "effective rank of the features",
    "dormant_share": "share of dormant units, in [0, 1]",
    "target_churn_train": "mean change of the targets in an update, on the batch",
    "target_churn_held_out": "mean change of the targets in an update, on held-out states",
    "gradient_cosine_own_tb": "cosine of the agent's gradient with the target-based one",
    "gradient_cosine_tf_tb": "cosine of the target-free gradient with the target-based one",
    "head_cosine": "mean cosine of neighbouring heads",
    "batch_norm_deviation": "standard deviation of the inputs of BatchNorm",
}

Metric = Literal["effective-rank", "dormant", "target-churn", "gradient-cosine", "head-cosine", "batch-norm"]


@dataclass(frozen=True)
class Probe:
    """Measure the paper's probes of a trained network: feature rank, dormant units, target churn, gradient cosines."""

    run_dir: Annotated[tyro.conf.Positional[Path], arg("RUN_DIR")]
    """Run folder."""
    metric: Annotated[tuple[Metric, ...], arg("METRIC ...", "all that the agent has")] = ()
    """Metrics: effective-rank, dormant, target-churn, gradient-cosine, head-cosine, batch-norm."""
    which: Literal["last", "best"] = "last"
    """Checkpoint: the newest, or the one after the best epoch."""
    samples: int = 2048
    """Number of states, from new episodes of the agent."""
    updates: int = 100
    """Number of gradient steps over which churn and cosines are averaged; the trained agent is not changed."""
    seed: int = 100
    """Seed of these episodes."""
    json: bool = False
    """Print one JSON object."""


def run(args: Sequence[str]) -> int:
    options = parse(Probe, args, "isqn probe")
    for name in ("samples", "updates"):
        require_at_least_one(name, getattr(options, name))
    require_seed(options.seed)
    from isqn.analysis.probe import probe_run

    with redirect_stdout(sys.stderr):
        values = probe_run(
            options.run_dir, options.metric, options.which, options.samples, options.updates, options.seed
        )
    if options.json:
        print(json.dumps(values))
    else:
        rows = [(name, f"{value:.6g}" if isinstance(value, float) else str(value)) for name, value in values.items()]
        print(*table((), [(name, value, MEANINGS.get(name, "")) for name, value in rows]), sep="\n")
    return 0

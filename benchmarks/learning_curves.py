"""Learning curves of TB, TF and iS K = 1, 3, 9, without and with LayerNorm, three seeds in one program each.

    python benchmarks/learning_curves.py acrobot --out runs/curves
    python benchmarks/learning_curves.py breakout --out runs/curves

Finished runs are kept and unfinished ones go on, so it can be stopped and started at will. When all
are there, it writes results/learning_curves_PROBLEM.csv and .png.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np

from isqn.experiments.config import Config
from isqn.experiments.presets import preset_config
from isqn.report.figures import learning_curves, save
from isqn.train import record, run

SCHEMES = [("target-based", 1), ("target-free", 1), *(("iterated-shared", k) for k in (1, 3, 9))]
SEEDS = 3
PROBLEMS = {
    # Acrobot: MLP 2 x 128, T = 200.
    "acrobot": preset_config("classic").replace(env_id="Acrobot-v1", total_timesteps=200_000),
    "breakout": preset_config("minatar").replace(env_id="MinAtar/Breakout-v1", total_timesteps=300_000),
}


def configs(problem: str) -> list[Config]:
    return [
        PROBLEMS[problem].replace(scheme=scheme, num_bellman_iterations=k, layer_norm=norm, num_seeds=SEEDS)
        for norm in (False, True)
        for scheme, k in SCHEMES
    ]


def folder_of(out: Path, problem: str, config: Config) -> Path:
    return out / problem / ("with-layer-norm" if config.layer_norm else "plain") / config.label.replace(" ", "-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", choices=PROBLEMS)
    parser.add_argument("--out", type=Path, default=Path("runs/curves"))
    parser.add_argument("--part", default="1/1", help="train only every n-th run, as in 1/2 and 2/2 for two processes")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    for index, config in enumerate(configs(args.problem)):
        folder = folder_of(args.out, args.problem, config)
        if index % parts != part - 1 or record.run_state(folder / "seed-0") == "finished":
            continue
        if record.run_state(folder / "seed-0") == "unfinished":
            run.resume(folder / "seed-0")
        else:
            run.start(config, folder)
    collect(args.problem, args.out)


def collect(problem: str, out: Path) -> None:
    panels: dict[str, dict[str, np.ndarray]] = {}
    rows = []
    for config in configs(problem):
        folder = folder_of(out, problem, config)
        seeds = [folder / f"seed-{seed}" for seed in range(SEEDS)]
        if any(record.run_state(seed) != "finished" for seed in seeds):
            print(f"{folder} is not finished; no result written.", file=sys.stderr)
            return
        returns = np.array([record.read_summary(seed)["epoch_returns"] for seed in seeds])
        title = f"{config.env_id}, {'with LayerNorm' if config.layer_norm else 'no normalisation'}"
        panels.setdefault(title, {})[config.label] = returns
        for seed, curve in enumerate(returns):
            for epoch, value in enumerate(curve):
                step = (epoch + 1) * config.epoch_steps
                rows.append((config.env_id, config.layer_norm, config.label, seed, step, f"{value:.4f}"))
    steps = (np.arange(returns.shape[1]) + 1) * PROBLEMS[problem].epoch_steps
    path = Path("results") / f"learning_curves_{problem}.csv"
    with path.open("w", newline="") as file:
        file.write(f"# python benchmarks/learning_curves.py {problem}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("env_id", "layer_norm", "label", "seed", "step", "mean_return"))
        writer.writerows(rows)
    save(learning_curves(panels, dict.fromkeys(panels, steps)), path.with_suffix(".png"))
    for title, curves in panels.items():
        print(title)
        for label, values in curves.items():
            last = values[:, -3:].mean(axis=1)
            per_seed = ", ".join(f"{v:.1f}" for v in values.mean(axis=1))
            print(f"  {label:12s} mean over training {values.mean():8.2f}, of its last three epochs {last.mean():8.2f}")
            print(f"  {'':12s} seeds {per_seed}")


if __name__ == "__main__":
    main()

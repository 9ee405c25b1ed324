"""Target-based, target-free and iterated shared Q-learning side by side, in minutes on two cores.

Acrobot with a plain MLP: small, but hard enough that learning without a target costs something, and that a
copy of the last layer (iS, K = 1) and more heads of it (K = 3) win it back.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from isqn.experiments.presets import preset_config
from isqn.report.figures import learning_curves, save
from isqn.train import record, run
from isqn.train.evaluate import load_agent_state
from isqn.train.progress import duration

OUT = Path("quickstart")
SCHEMES = [("target-based", 1), ("target-free", 1), ("iterated-shared", 1), ("iterated-shared", 3)]
SEEDS = 3
BASE = preset_config("classic").replace(
    env_id="Acrobot-v1", total_timesteps=100_000, epoch_steps=5_000, num_seeds=SEEDS
)


def main() -> None:
    begin = time.monotonic()
    curves, rows = {}, []
    for scheme, k in SCHEMES:
        config = BASE.replace(scheme=scheme, num_bellman_iterations=k)
        folders = run.start(config, OUT / "runs" / config.label.replace(" ", "-"), overwrite=True)
        returns = np.array([record.read_summary(folder)["epoch_returns"] for folder in folders])
        curves[config.label] = returns
        state, _ = load_agent_state(folders[0], run.make_agent(config, run.specification(config)))
        parameters = sum(int(np.size(leaf)) for leaf in _leaves((state.params, state.copies)))
        rows.append((config.label, parameters, returns.mean(axis=1), returns[:, -5:].mean()))
    print(f"\n{BASE.env_id}: mean training return, {SEEDS} seeds, {BASE.total_timesteps:,} steps (higher is better)\n")
    print(f"{'':12s} {'parameters kept':>16s} {'whole training':>16s} {'last quarter':>12s}   seeds")
    for label, parameters, per_seed, last in rows:
        seeds = " ".join(f"{value:.0f}" for value in per_seed)
        print(f"{label:12s} {parameters:16,} {per_seed.mean():16.1f} {last:12.1f}   {seeds}")
    steps = (np.arange(returns.shape[1]) + 1) * BASE.epoch_steps
    save(learning_curves({BASE.env_id: curves}, {BASE.env_id: steps}), OUT / "learning-curves.png")
    print(f"\n{OUT / 'learning-curves.png'} shows the curves; {OUT / 'runs'} holds the runs.")
    print(
        f"{duration(time.monotonic() - begin)}. Next: .venv/bin/isqn train dqn --env-id MinAtar/Breakout --num-seeds 3"
    )


def _leaves(tree: object) -> list[object]:
    import jax

    return jax.tree.leaves(tree)


if __name__ == "__main__":
    main()

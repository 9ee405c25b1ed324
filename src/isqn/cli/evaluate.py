"""`isqn eval RUN_DIR`: evaluate a trained agent, and print its returns."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from isqn.agents.registry import find_agent
from isqn.cli.parse import arg, parse, require_at_least_one, require_beta, require_probability, require_seed
from isqn.train.progress import format_count
from isqn.types import UserError


@dataclass(frozen=True)
class Eval:
    """Evaluate a trained agent, and print its returns."""

    run_dir: Annotated[tyro.conf.Positional[Path], arg("RUN_DIR")]
    """Run folder."""
    episodes: int = 10
    """Number of episodes; on Atari, whole games over all lives."""
    seed: int = 100
    """Seed of the environment and of the agent."""
    epsilon: Annotated[float | None, arg("FLOAT", "0.001, or 0 for sac")] = None
    """Probability of a random action. Not for ilql."""
    acting_rule: Annotated[str, arg("RULE")] = "auto"
    """Acting head, or action of the policy (--acting-rule of `isqn train`). auto: as in training; sac: mean."""
    which: Literal["last", "best"] = "last"
    """Checkpoint: the newest, or the one after the best epoch."""
    beta: Annotated[float | None, arg("FLOAT", "as in training")] = None
    """For ilql: inverse temperature of the values; 0 decodes by the policy alone."""
    html: Annotated[Path | None, arg("PATH")] = None
    """For ilql: also write the boards of all games to this HTML file."""
    capture_video: bool = False
    """Record the first episode to RUN_DIR/videos."""
    json: bool = False
    """Print one JSON object."""


def run(args: Sequence[str]) -> int:
    options = parse(Eval, args, "isqn eval")
    require_at_least_one("episodes", options.episodes)
    require_probability("--epsilon", options.epsilon)
    require_seed(options.seed)
    require_beta(options.beta)
    from isqn.train.record import read_config

    if find_agent(read_config(options.run_dir).agent).actions == "tokens":
        from isqn.cli import boards

        return boards.evaluate(options)
    for name, given in (("--beta", options.beta), ("--html", options.html)):
        if given is not None:
            raise UserError(f"{name} is for runs of `isqn train ilql`, and {options.run_dir} is not one.")
    return _evaluate(options)


def _evaluate(options: Eval) -> int:
    import numpy as np

    from isqn.train.evaluate import evaluate
    from isqn.train.player import load_player
    from isqn.train.progress import say

    config, env, agent, state, step, epsilon = load_player(
        options.run_dir,
        options.which,
        options.acting_rule,
        options.epsilon,
        command="`isqn eval`",
        for_evaluation=True,
        render=options.capture_video,
    )
    video = options.run_dir / "videos" / f"step-{step}-seed-{options.seed}.mp4" if options.capture_video else None
    if options.seed == config.seed and not config.is_offline:
        say(f"note: the run has --seed {config.seed} too, so these are episodes that it was trained on")
    with redirect_stdout(sys.stderr), env:
        results = evaluate(
            agent,
            state,
            env,
            episodes=options.episodes,
            seed=options.seed,
            epsilon=epsilon,
            max_episode_steps=config.max_episode_steps,
            video=video,
        )
    returns = np.array([episode.episodic_return for episode in results])
    if options.json:
        summary = {
            "env_id": env.spec.id,
            "protocol": env.spec.protocol,
            "label": config.label,
            "step": step,
            "mean_return": float(returns.mean()),
            "std_return": float(returns.std()),
            "epsilon": epsilon,
            "acting_rule": config.acting_rule,
            "episodes": [{"seed": e.seed, "return": e.episodic_return, "length": e.length} for e in results],
            "video": str(video) if video else None,
        }
        print(json.dumps(summary))
        return 0
    for episode in results:
        print(f"return {episode.episodic_return:10.2f}   length {episode.length:6d}   seed {episode.seed}")
    over = format_count(len(results), "episode")
    mean = f"{returns.mean():.2f} ± {returns.std():.2f} (standard deviation) over {over}"
    print(f"{config.label} on {env.spec.id} at step {step:,}: {mean}")
    if video:
        print(video)
    return 0

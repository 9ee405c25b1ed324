"""Diagnosis of an installation: versions, devices, optional packages, and the time of each part of a step."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import psutil

from isqn.envs import dmc
from isqn.envs.adapter import make_run_environment
from isqn.train import online, record, timing
from isqn.train.functions import make_run_agent
from isqn.train.player import require_environment_agent
from isqn.types import UserError

EXTRAS = {
    "atari": ("ale_py", "cv2"),
    "minatar": ("pgx", "minatar"),
    "dmc": ("dm_control", "mujoco"),
    "offline": ("minari", "pyarrow", "google_crc32c", "PIL"),
    "language": ("wordle",),
    "report": ("matplotlib", "plotly"),
    "ray": ("ray",),
    "slurm": ("submitit",),
    "video": ("imageio", "imageio_ffmpeg"),
    "track": ("tensorboardX", "wandb", "trackio"),
}


def examine(config: Any) -> dict[str, Any]:
    """Return facts for a bug report. A missing optional package is reported, not refused."""
    report: dict[str, Any] = {
        **record.provenance(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "extras": {name: _describe_extra(name, modules) for name, modules in EXTRAS.items()},
        "problem": None,
    }
    try:
        require_environment_agent(config, "`isqn doctor`")
        env = make_run_environment(config)
    except UserError as error:
        return report | {"problem": str(error)}
    with env:
        agent = make_run_agent(config, env.spec)
        times = timing.measure(config, agent, env, online.make_replay_factory(config, env.spec, rows=timing.ROWS)())
    part, share = times.bottleneck(config)
    rate = 1 / times.seconds_per_step(config)
    return report | {
        "milliseconds": {name: [1e3 * seconds for seconds in call] for name, call in times._asdict().items()},
        "bottleneck": part,
        "steps_per_second": rate,
        "verdict": f"about {rate:,.0f} steps/s while learning in the host loop; the {part} takes {share:.0%} of a step "
        f"({_updates(config)}).",
    }


def _updates(config: Any) -> str:
    if config.updates_per_step > 1:
        return f"{config.updates_per_step} updates after every step"
    every = "step" if config.update_period == 1 else f"{config.update_period} steps"
    return f"an update every {every}"


def _describe_extra(name: str, modules: tuple[str, ...]) -> str:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        return f'without {", ".join(missing)}: pip install "isqn[{name}]"'
    return (dmc.find_version_conflict() if name == "dmc" else None) or "installed"

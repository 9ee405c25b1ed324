"""Trackers of metrics: TensorBoard, wandb and trackio."""

from __future__ import annotations

import importlib
import warnings
from contextvars import Context
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from isqn.config.run import Run
from isqn.types import UserError


class Tracker:
    """Tracker of metrics in TensorBoard, wandb or trackio, under CleanRL's names. If it fails, the run continues."""

    NAMES: ClassVar = {
        "return": "charts/episodic_return",
        "length": "charts/episodic_length",
        "steps_per_second": "charts/SPS",
        "epsilon": "charts/epsilon",
        "loss": "losses/td_loss",
        "q_value": "losses/q_values",
    }

    def __init__(self, config: Run, run_dir: Path, first_step: int = 0):
        self._log: Any = None
        self._finish: Any = None
        if config.track == "none":
            return
        try:
            self._open(config, run_dir, first_step)
        except Exception as error:
            self._switch_off(config.track, error)

    def _open(self, config: Run, run_dir: Path, first_step: int) -> None:
        if config.track == "tensorboard":
            try:
                from tensorboardX import SummaryWriter
            except ImportError:
                raise UserError('--track tensorboard needs `pip install "isqn[track]"`.') from None
            # TensorBoard hides what a killed run wrote after the checkpoint from which it is resumed
            writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)
            self._log = lambda values, step: [writer.add_scalar(name, value, step) for name, value in values.items()]
            self._finish = writer.close
            return
        try:
            library = importlib.import_module(config.track)
        except ImportError:
            raise UserError(f'--track {config.track} needs `pip install "isqn[track]"`.') from None
        # Each seed of one process is a run: wandb needs `reinit`, and trackio would end the run in the same context.
        settings = {"dir": run_dir, "reinit": "create_new"} if config.track == "wandb" else {}
        name = f"{config.env_id} {config.label} seed {config.seed}"
        run = Context().run(
            library.init,
            project=config.experiment,
            name=name,
            config={"agent": config.agent, **asdict(config)},
            **settings,
        )
        self._log = lambda values, step: run.log(values, step=step)
        self._finish = run.finish

    def log(self, values: dict[str, Any], step: int) -> None:
        if self._log is None:
            return
        named = {
            self.NAMES.get(k, f"analysis/{k}"): v for k, v in values.items() if k not in ("step", "frame", "seconds")
        }
        try:
            self._log(named, step)
        except Exception as error:
            self._switch_off("tracker", error)

    def close(self) -> None:
        if self._finish is not None:
            try:
                self._finish()
            except Exception as error:
                self._switch_off("tracker", error)

    def _switch_off(self, name: str, error: Exception) -> None:
        self._log = self._finish = None
        consequence = "is switched off; the run continues and still writes its own files"
        warnings.warn(f"{name} failed and {consequence}: {error}", stacklevel=3)

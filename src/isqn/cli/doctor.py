"""`isqn doctor`: print versions, devices, and the time of each part of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from isqn.cli.parse import parse
from isqn.presets import preset_config


@dataclass(frozen=True)
class Doctor:
    """Print versions, devices, and the time of each part of a step under a preset."""

    preset: str = "atari-cnn-ln"
    """Preset whose training step is timed."""
    json: bool = False
    """Print one JSON object."""


def run(args: Sequence[str]) -> int:
    options = parse(Doctor, args, "isqn doctor")
    from isqn.train.doctor import examine

    report = examine(preset_config(options.preset))
    if options.json:
        print(json.dumps({"preset": options.preset, **report}))
        return 0
    for name in ("python", "platform", "device", "cores", "memory_gb", "xla_flags"):
        print(f"{name:12s} {report[name]}")
    for name, number in report["versions"].items():
        print(f"{name:12s} {number}")
    for name, state in report["extras"].items():
        print(f"{'[' + name + ']':12s} {state}")
    if report["problem"]:
        print(report["problem"])
        return 0
    print(f"\none step of preset {options.preset}, in ms (median and quartiles of the calls):")
    for part, (median, low, high) in report["milliseconds"].items():
        print(f"{part:12s} {median:9.3f}   {low:.3f} and {high:.3f}")
    print(report["verdict"])
    return 0

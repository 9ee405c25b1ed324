"""The `isqn` command: one file per command, which parses, calls and prints."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from isqn import __version__
from isqn.cli.parse import HELP_ENDING, UsageError, parse_global_flags
from isqn.config.fields import nearest
from isqn.exits import FAILED, INTERRUPTED, KEYBOARD, USAGE
from isqn.imports import import_all
from isqn.types import Interrupted, UserError
from isqn.usercode import UserCodeError

WELCOME = f"""\
isqn {__version__}: deep Q-learning without a target network.
  isqn train dqn --env-id isqn/Chain-v0     train on a toy problem with known values, in seconds
  isqn study online-plain --dry-run         plan a study of the paper, scaled down to two cores
  isqn COMMAND --help                       train, resume, study, report, eval, play, data, probe, cost, list, doctor
The method is in the modules isqn.schemes and isqn.losses."""

HELP = f"""\
usage: isqn COMMAND [flags]

  train AGENT  Train an agent (dqn, stream-q, sac, cql or ilql), and print the run folder.
  resume       Continue a run that was stopped or killed.
  study        Train the missing runs of a study, such as a figure of the paper, and write its report.
  report       Write statistics, figures and one HTML page about runs.
  eval         Evaluate a trained agent, and print its returns.
  play         Show the guesses of a trained Wordle agent.
  data         Collect, convert and inspect datasets for offline learning.
  probe        Measure feature rank, dormant units, target churn and gradient cosines of a trained network.
  cost         Print parameters, FLOPs and memory of every target scheme, without training.
  list         List environments, presets, studies, schemes, losses or agents.
  doctor       Print versions, devices, and the time of each part of a training step.

`isqn COMMAND --help` lists the flags of a command. `isqn --version` prints the version.
{HELP_ENDING}"""


DEBUG_HINT = " (add --debug for the traceback)"

COMMANDS = {  # name -> the module of this package that runs it, imported when it is called, so that others are fast
    "train": "train",
    "resume": "resume",
    "study": "study",
    "report": "report",
    "eval": "evaluate",
    "play": "play",
    "data": "data",
    "probe": "probe",
    "cost": "cost",
    "list": "listing",
    "doctor": "doctor",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command line; return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv:
        print(WELCOME)
        return 0
    if argv[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if argv[0] == "--version":
        print(__version__)
        return 0
    debug = "--debug" in argv  # read here, because parsing may fail
    try:
        global_flags, words = parse_global_flags(argv)
        command, *rest = words or [""]
        if not command:
            raise UsageError(f"The command is empty; choose one of {', '.join(COMMANDS)}.")
        if command not in COMMANDS:
            raise UsageError(f"`isqn {command}` is not known; {nearest(command, COMMANDS)}")
        if "" in global_flags.imports:
            raise UsageError("--import is empty; give it a value, or leave it out.")
        import_all(global_flags.imports)
        with _plain_warnings():
            code = import_module(f"isqn.cli.{COMMANDS[command]}").run(rest)
        sys.stdout.flush()
        return code
    except UserError as error:
        if debug:
            raise
        _say(f"isqn: {error}{DEBUG_HINT if isinstance(error, UserCodeError) else ''}")
        return USAGE if isinstance(error, UsageError) else FAILED
    except KeyboardInterrupt as stop:
        sys.stdout.flush()
        _say(f"isqn: {str(stop) or 'stopped'}")
        os._exit(KEYBOARD)  # a normal exit is a segmentation fault if the compiler still works in a thread
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Interrupted as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is saved; another Ctrl-C must not print a traceback
        _say(f"isqn: {stop}")
        return INTERRUPTED
    except Exception as error:
        if debug:
            raise
        message = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if isinstance(error, OSError) and error.filename:
            message = f"{error.filename2 or error.filename} cannot be read or written ({error.strerror})"
        _say(f"isqn: {message}{DEBUG_HINT}")
        return FAILED


def _say(sentence: str) -> None:
    from isqn.train.progress import say

    say(sentence)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show the warnings of the package without file and line."""
    package, default_format = str(Path(__file__).parents[1]), warnings.formatwarning

    def format_plainly(message: Any, category: type[Warning], filename: str, *rest: Any, **more: Any) -> str:
        if category is UserWarning and filename.startswith(package):
            return f"isqn: warning: {message}\n"
        return default_format(message, category, filename, *rest, **more)

    warnings.formatwarning = format_plainly
    try:
        yield
    finally:
        warnings.formatwarning = default_format

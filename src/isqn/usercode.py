"""Errors in the user's own code: they name the registered component, and the file and line of that code."""

from __future__ import annotations

import inspect
import os
import site
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from isqn.types import UserError

_LIBRARIES = (
    str(Path(__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
)


class UserCodeError(UserError):
    """Error that was raised in the user's own code; its cause is the original error."""


def find_user_line(error: BaseException) -> str:
    """Return the innermost line outside of all libraries, as "mine.py, line 3"; "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{_short_path(error.filename)}, line {error.lineno}"
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(("<", *(f"{folder}{os.sep}" for folder in _LIBRARIES)))
    ]
    return f"{_short_path(lines[-1][0])}, line {lines[-1][1]}" if lines else ""


def find_definition(thing: Any) -> str:
    """Return the name of a function or a class with its file and line: "huber (mine.py, line 3)"."""
    try:
        file, line = inspect.getsourcefile(thing) or "", inspect.getsourcelines(thing)[1]
    except (OSError, TypeError):  # made in a prompt, or not in Python
        return getattr(thing, "__qualname__", repr(thing))
    return f"{thing.__qualname__} ({_short_path(file)}, line {line})"


def _short_path(path: str) -> str:
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path


def describe_error(error: BaseException) -> str:
    """Return the type and the first line of the message of an error."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)  # its line is named already
    message = text.strip().partition("\n")[0].rstrip(".")
    if type(error).__name__ == "TracerBoolConversionError":
        message = "`if`, `and`, `or` and `not` do not work on values that JAX traces; use jnp.where"
    return f"{type(error).__name__}: {message}." if message else f"{type(error).__name__}."


@contextmanager
def name_user_code(component: str) -> Iterator[None]:
    """Turn an error that was raised in the user's own code into one that names the component, the file and the line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        line = find_user_line(error)
        if not line:
            raise
        raise UserCodeError(f"{component} failed ({line}): {describe_error(error)}") from error


def named(component: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose errors name the component."""

    @wraps(function, updated=())  # a class has more in its dictionary than a function may have
    def call(*args: Any, **settings: Any) -> Any:
        with name_user_code(component):
            return function(*args, **settings)

    return call

"""Import of the user's own code, in Python files and modules that the user has named.

They are named by `--import FILE` on the command line or by `imports` in a study file, and a study passes them on to its
workers. Reading a run folder, a model or a dataset never imports anything.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from isqn.types import UserError
from isqn.usercode import UserCodeError, describe_error, find_user_line

_IMPORTED_FILES: set[str] = set()  # texts of the files, so that a copy of a file is not imported again
IMPORTED: list[str] = []  # names of the imported files and modules, in order; a run records them


def import_all(names: Iterable[str], given_by: str = "--import") -> None:
    """Import files and modules, each once, because what they register may not be registered twice."""
    for name in names:
        try:
            if not name.endswith(".py"):
                _import_module(name)
            elif (text := Path(name).read_text()) not in _IMPORTED_FILES:
                _import_file(Path(name))
                _IMPORTED_FILES.add(text)
        except (Exception, SystemExit) as error:  # whatever is wrong in a file of the user's
            line = find_user_line(error)
            if isinstance(error, UserError) or not line:
                raise UserError(f"{given_by}: {name!r} cannot be imported: {_reason(error, name)}") from error
            raise UserCodeError(f"{given_by}: {name!r} cannot be imported ({line}): {describe_error(error)}") from error
        if name not in IMPORTED:
            IMPORTED.append(name)


def import_module_of(env_id: str, given_by: str) -> None:
    """Import the module in an environment id, if there is one."""
    if module := module_of(env_id):
        import_all([module], given_by)


def _reason(error: BaseException, name: str) -> str:
    if isinstance(error, FileNotFoundError) and error.filename == name:
        return "there is no such file."
    if not name.endswith(".py") and Path(name).is_file():
        return "the name of a Python file must end in .py."
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        return f"it is neither in {os.getcwd()} nor installed."
    return str(error) if isinstance(error, UserError) else describe_error(error)


def _import_file(path: Path) -> None:
    """Import a file as a module; it stays in `sys.modules`, where `--help` finds the source of its settings."""
    name = f"isqn_import_{len(_IMPORTED_FILES)}_{path.stem}"  # never the name of an installed module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _import_module(name: str) -> None:
    """Import a module, also from the current folder, which is not on the path of a console script."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    module = importlib.import_module(name)
    if module.__spec__ is not None and module.__spec__.origin is None:
        raise ImportError("it is a folder without an __init__.py; name a module in it")


def module_of(env_id: str) -> str:
    """Return the module in an environment id of the form `module:Env-v0`; "" if there is none."""
    return env_id.partition(":")[0] if ":" in env_id else ""

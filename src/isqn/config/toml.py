"""Configs and other settings as TOML files."""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

from isqn.config.fields import nearest_path, read_docs
from isqn.data.text import DamagedText, read_text
from isqn.types import UserError

DEEP_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){50}""")
START, END = "# All settings of a run, down to the last line of this file.", "# End of the settings."


def to_toml(config: Any) -> str:
    """Return a config as TOML, with the docstring of each setting as a comment."""
    kind: type = type(config)
    lines = [START, "# Agent: the first word of `isqn train`.", f"agent = {toml_value(config.agent)}"]
    for name, doc in read_docs(kind).items():
        value = getattr(config, name)
        lines += [f"# {line}".rstrip() for line in doc.splitlines()]
        lines.append(f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}")
    return "\n".join([*lines, END]) + "\n"


def toml_value(value: Any) -> str:
    """Return a value as TOML, which has the same strings, booleans, lists and finite numbers as JSON."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_value, value))}]"
    return "inf" if value == math.inf else json.dumps(value, ensure_ascii=False)


def load_toml(path: Path, instead: str) -> dict[str, Any]:
    """Read a TOML file; `instead` is the advice in the error message if it cannot be read."""
    try:
        text = read_text(path)
        if text.startswith(START) and END not in text:  # what is missing must not be taken for defaults
            raise DamagedText.at(path, len(text.splitlines()), f"it ends here, before {END!r}")
        if chain := DEEP_KEY.search(text):  # the parser would need memory that grows with the square of its length
            raise DamagedText.at(path, text.count("\n", 0, chain.start()) + 1, "a key has too many parts")
        return tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist{nearest_path(path) or f'; {instead}'}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {instead}") from None
    except (ValueError, RecursionError) as error:  # not TOML, or nested too deeply for Python's parser
        last = f"at line {len(text.splitlines())}, the last"
        raise DamagedText(f"{path} is not valid TOML: {error}.".replace("at end of document", last)) from None

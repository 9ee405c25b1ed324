"""What the documentation says is so: commands can be read, links lead somewhere, tables name what there is."""

from __future__ import annotations

import importlib
import pkgutil
import re
import runpy
import shlex
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import gymnasium
import pytest

import isqn
from helpers import SMALL, TINY_WRITER
from isqn import cli
from isqn.analysis.probes import probe_columns
from isqn.envs import wordle
from isqn.envs.adapter import make_environment
from isqn.experiments.config import AGENTS, Config, begin, to_toml
from isqn.presets import PRESETS
from isqn.study.grid import read_study
from isqn.losses import LOSSES
from isqn.networks.torsos import TORSOS
from isqn.schemes import SCHEMES
from isqn.train import record, run
from isqn.train.loop import empty_totals, metrics_columns
from isqn.types import EnvSpec

ROOT = Path(__file__).parents[1]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """`isqn ...` and `python examples/....py ...`, in blocks and in running text."""
    found = []
    for text in PAGES.values():
        lines = [line for block in FENCED.findall(text) for line in block.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", FENCED.sub("", text))
        found += [line.removeprefix(".venv/bin/") for line in lines]
    return sorted({line for line in found if re.match(r"isqn [a-z]|python examples/\S+ [a-z]", line)})


STUDIES = re.findall(r"```toml\n(.*?)```", PAGES["docs/studies.md"], re.DOTALL)


@pytest.mark.parametrize("text", STUDIES)
def test_the_example_of_a_study_is_one(text, tmp_path):
    (tmp_path / "mine.toml").write_text(text)
    assert read_study(tmp_path / "mine.toml").cells


# what is imported while its parts are replaced would keep the replacements
for module in pkgutil.walk_packages(isqn.__path__, "isqn."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)


class ReachedError(Exception):
    """The command line was read, and the work would begin."""


def stop(*args, **kwargs):
    raise ReachedError


def start(config, *args, **kwargs):
    make_environment(config.env_id, protocol=config.protocol).close()
    raise ReachedError


def test_commands_are_found():
    assert len(commands()) > 15


@pytest.mark.parametrize("line", commands())
def test_every_command_can_be_read(line, monkeypatch, tmp_path):
    """Up to where something would be trained, loaded or measured."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text(to_toml(Config()))
    Path("returns.toml").write_text(STUDIES[0])
    monkeypatch.setattr("isqn.train.run.start", start)
    for work in (
        "experiments.drive.train",
        "experiments.drive.estimate",
        "experiments.engines.make",
        "report.write.write",
    ):
        monkeypatch.setattr(f"isqn.{work}", stop)
    for work in ("data.dataset.read_index", "data.dataset.Dataset.open", "train.source.find_source"):
        monkeypatch.setattr(f"isqn.{work}", stop)
    for work in ("run.resume", "run.read_config", "run.specification", "probe.probe_run", "doctor.examine"):
        monkeypatch.setattr(f"isqn.train.{work}", stop)
    with ExitStack() as stack:
        for registry in (LOSSES, SCHEMES, TORSOS, gymnasium.registry):
            stack.enter_context(patch.dict(registry))
        program, *words = shlex.split(line)
        if program == "python":
            script, *words = words
            runpy.run_path(str(ROOT / script))
        command, *rest = words
        if command == "play" and not rest:
            rest = ["RUN_DIR", "crane"]
        if command in ("resume", "eval", "probe") and not any(not word.startswith("-") for word in rest):
            rest.append("RUN_DIR")  # the text speaks of a flag alone
        if command == "data" and rest:  # so does it of these, and of folders that are not there
            if not any(not word.startswith("-") for word in rest[1:]):
                rest.insert(1, ".")
            if "-o" not in rest and rest[0] != "inspect":
                rest += ["-o", "OUT"]
            Path(rest[1]).mkdir(parents=True, exist_ok=True)
        if command == "list" or {"--show", "--show-diff"} & set(rest) or (command == "data" and not rest):
            assert cli.COMMANDS[command](rest) == 0
        elif "--help" in rest:
            with pytest.raises(SystemExit, match="0"):
                cli.COMMANDS[command](rest)
        else:
            with pytest.raises(ReachedError):
                cli.COMMANDS[command](rest)


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page):
    text = FENCED.sub("", PAGES[page])
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert (ROOT / page).parent.joinpath(target.partition("#")[0]).exists(), target


def section(page: str, heading: str) -> str:
    return PAGES[page].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Cells of the body rows of all tables in a text."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "`" in line]


def names(text: str) -> list[str]:
    """What stands in backticks in the first column."""
    return [name for row in rows(text) for name in re.findall(r"`([^`]+)`", row[0])]


def test_columns_of_episodes():
    text = section("docs/files.md", "episodes.csv")
    assert FENCED.findall(text) == [",".join(record.EPISODE_COLUMNS) + "\n"]
    assert names(text) == list(record.EPISODE_COLUMNS)


def test_columns_of_metrics():
    def header(agent: str = "dqn", spec: EnvSpec = SMALL, **fields) -> list[str]:
        sizes = {} if agent == "ilql" else {"hidden_sizes": (4,)}
        config = begin(agent).replace(**sizes, **fields)
        totals = empty_totals(run.make_agent(config, spec), config, spec)
        return list(metrics_columns(totals, probe_columns(config)))

    text = section("docs/files.md", "metrics.csv")
    normal, analysis = header(), header(analysis=True)
    continuous = replace(SMALL, action_low=(-1.0,) * 4, action_high=(1.0,) * 4)
    control, probed = header("sac", continuous), header("sac", continuous, analysis=True)
    offline = [*header("cql"), "waiting_share"]
    writing = [*header("ilql", wordle.SPEC, **TINY_WRITER), "waiting_share"]
    headers = (normal, analysis, control, offline, writing)
    assert FENCED.findall(text) == [",".join(columns) + "\n" for columns in headers]
    assert set(header(analysis=True, scheme="target-free")) == set(analysis) - {"head_cosine"}
    added = ["effective_rank", "dormant_share", "head_cosine", "batch_norm_deviation"]
    assert [name for name in probed if name not in control] == added
    assert "batch_norm_deviation" in header(analysis=True, batch_norm=True)
    meta = set(header(meta_gradient="adam", num_bellman_iterations=2)) - set(normal)
    assert meta == {"pair_weight_1", "pair_weight_2"}
    assert sorted(names(text)) == sorted({*normal, *analysis, *probed, *offline, *writing, "pair_weight_k"})


def test_fields_of_the_summary(tmp_path):
    assert set(record.provenance()) <= set(names(section("docs/files.md", "summary.json")))
    Path(tmp_path / "episodes.csv").write_text(",".join(record.EPISODE_COLUMNS) + "\n")
    assert set(record.results(tmp_path)) <= set(names(section("docs/files.md", "summary.json")))


def test_exit_codes():
    text = section("docs/files.md", "Exit codes")
    assert re.findall(r"^\| (\d+) \|", text, re.MULTILINE) == ["0", "1", "2", str(cli.INTERRUPTED), "130"]


def test_tables_of_the_readme():
    use, there_is = section("README.md", "Use"), section("README.md", "What there is")
    assert list(dict.fromkeys(name.split()[0] for name in names(use))) == list(cli.COMMANDS)
    agents = [name.split()[1] for name in names(use) if name.startswith("train ")]
    assert agents == list(AGENTS)
    schemes, losses = there_is.split("| `--loss`")
    _, *schemes = rows(schemes)
    assert [row[0].strip("`") for row in schemes] == list(SCHEMES)
    k = 3
    for name, label, heads, copies, _ in schemes:
        scheme = SCHEMES[name.strip("`")](k)
        assert scheme.label("DQN") == label.replace("=k", f"={k}")
        assert scheme.num_heads == {"1": 1, "k": k, "k + 1": k + 1, "2k": 2 * k}[heads]
        assert scheme.num_copies == int(copies.split()[0])
    assert sorted(names(losses)) == sorted(LOSSES)
    mentioned = re.findall(r"`(atari-[a-z-]+|minatar|classic|toy)`", use)
    assert mentioned
    assert set(mentioned) <= set(PRESETS)


def test_deviations_name_fields_that_exist():
    """A word in backticks in the last column that looks like a field is one."""
    fields = set(Config.__dataclass_fields__)
    tables = [line for line in PAGES["docs/deviations.md"].splitlines() if line.startswith("|")]
    for line in tables:
        for word in re.findall(r"`([a-z_]+)(?:=\w+)?`", line.split("|")[-2]):
            assert word in fields or word in PRESETS or word in LOSSES, line


@pytest.mark.filterwarnings("ignore:Implicitly cleaning up")  # the temporary run of the first model
def test_python_of_the_readme(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL)
    short = (
        code.replace("50_000", "300")
        .replace("episodes=10", "episodes=1")
        .replace("iterated_shared(9)", "target_free()")
    )
    assert short.count("300") == 1
    (tmp_path / "readme.py").write_text(short)
    there = runpy.run_path("readme.py")
    assert there["action"] in (0, 1)
    assert there["model"].num_timesteps >= 300

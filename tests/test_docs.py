"""The documentation agrees with the code: commands parse, links resolve, and tables match the registries and files."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import runpy
import shlex
import signal
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

import isqn
from helpers import SMALL, TINY_WRITER, registries_restored
from isqn import cli
from isqn.agents.dqn import DqnConfig
from isqn.agents.registry import agent_names, make_config
from isqn.cli.parse import parse_global_flags
from isqn.config.fields import field_names
from isqn.config.toml import to_toml
from isqn.envs.adapter import make_environment
from isqn.exits import INTERRUPTED
from isqn.language import game
from isqn.losses import LOSSES
from isqn.presets import all_presets
from isqn.schemes import SCHEMES
from isqn.study.grid import read_study
from isqn.train import record, run, tables
from isqn.train.functions import make_run_agent, zero_totals
from isqn.train.probes import probe_columns
from isqn.train.session import metrics_columns
from isqn.types import EnvSpec

ROOT = Path(__file__).parents[1]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))}
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Return every `isqn ...`, from code blocks and from running text."""
    found = []
    for text in PAGES.values():
        lines = [line for block in FENCED.findall(text) for line in block.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", FENCED.sub("", text))
        found += [line.removeprefix("$ ").removeprefix(".venv/bin/").replace("AGENT", "dqn") for line in lines]
    return sorted({line for line in found if re.match(r"isqn [a-z]", line) and " is " not in line})


STUDIES = re.findall(r"```toml\n(.*?)```", PAGES["docs/studies.md"], re.DOTALL)


@pytest.mark.parametrize("text", STUDIES)
def test_study_examples_are_valid_studies(text, tmp_path):
    (tmp_path / "mine.toml").write_text(text)
    assert read_study(tmp_path / "mine.toml").cells


# import everything first: a module imported while its parts are patched would keep the patches
for module in pkgutil.walk_packages(isqn.__path__, "isqn."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)


class ReachedError(Exception):
    """Raised after the command line was parsed, where the work would start."""


def stop(*args, **kwargs):
    raise ReachedError


def start(config, *args, **kwargs):
    make_environment(config.env_id, protocol=getattr(config, "protocol", "auto")).close()
    raise ReachedError


def test_commands_are_found():
    assert len(commands()) > 15


@pytest.mark.parametrize("line", commands())
def test_every_command_parses(line, monkeypatch, tmp_path):
    """Every command runs up to the point where it would train, load or measure something."""
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    Path("FILE").write_text(to_toml(DqnConfig()))
    Path("returns.toml").write_text(STUDIES[0])
    monkeypatch.setattr("isqn.train.run.start", start)
    for work in ("study.drive.train", "study.drive.estimate", "study.engines.make", "report.write.write"):
        monkeypatch.setattr(f"isqn.{work}", stop)
    for work in ("index.read_index", "dataset.read_index", "dataset.Dataset.open"):
        monkeypatch.setattr(f"isqn.data.{work}", stop)
    monkeypatch.setattr("isqn.train.source.find_source", stop)
    for work in ("run.resume", "run.read_config", "run.specification", "record.read_config", "doctor.examine"):
        monkeypatch.setattr(f"isqn.train.{work}", stop)
    for work in ("train.player.read_config", "language.training.read_config", "cli.cost._rows"):
        monkeypatch.setattr(f"isqn.{work}", stop)
    monkeypatch.setattr("isqn.analysis.probe.probe_run", stop)
    monkeypatch.setattr("isqn.data.minari.local_folder", stop)
    _, *words = shlex.split(line)
    with registries_restored():
        everywhere, (command, *rest) = parse_global_flags(words)
        if command == "train" and not rest:
            rest = ["dqn"]
        if command == "play" and not rest:
            rest = ["RUN_DIR", "crane"]
        if command in ("resume", "eval", "probe") and not any(not word.startswith("-") for word in rest):
            rest.append("RUN_DIR")  # the text mentions only a flag
        if command == "data" and rest:  # these too are mentioned alone, and with folders that do not exist
            if not any(not word.startswith("-") for word in rest[1:]):
                rest.insert(1, ".")
            if "-o" not in rest and rest[0] != "inspect":
                rest += ["-o", "OUT"]
            Path(rest[1]).mkdir(parents=True, exist_ok=True)
        words = [command, *rest, *(word for name in everywhere.imports for word in ("--import", name)), "--debug"]
        prints_a_list = command == "list" or [command, *rest] in (["train", "--help"], ["data"])
        if prints_a_list or {"--show", "--show-diff"} & set(rest):
            assert cli.main(words) == 0
        elif "--help" in rest:
            with pytest.raises(SystemExit, match="0"):
                cli.main(words)
        else:
            with pytest.raises(ReachedError):
                cli.main(words)


def test_commands_with_different_settings_train_in_different_folders(monkeypatch, tmp_path):
    """A reader can run the commands of all pages one after the other."""
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    configs: dict[Path, set[str]] = {}

    def remember(config, run_dir, **flags):
        for index, folder in enumerate(run.run_dirs(config, run_dir)):
            configs.setdefault(folder, set()).add(to_toml(config.with_seed_index(index)))
        raise ReachedError

    monkeypatch.setattr(run, "start", remember)
    blocks = "\n".join(block for text in PAGES.values() for block in FENCED.findall(text))
    lines = re.findall(r"^(?:\$ )?isqn (train .*)$", blocks, re.MULTILINE)
    lines += re.findall(r"isqn (train .*?)  ", (ROOT / "Makefile").read_text())
    for line in lines:
        if not re.search("--help|--show-diff|--dataset|--config", line):
            with registries_restored(), pytest.raises(ReachedError):
                cli.main([*shlex.split(line), "--debug"])
    assert len(configs) > 10
    assert [str(folder) for folder, settings in configs.items() if len(settings) > 1] == []


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_resolve(page):
    text = FENCED.sub("", PAGES[page])
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            path, _, anchor = target.partition("#")
            linked = (ROOT / page).parent.joinpath(path)
            assert linked.exists(), target
            if anchor:
                assert anchor in anchors(linked.read_text()), target


def section(page: str, heading: str) -> str:
    return PAGES[page].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of the body rows of all tables in a text."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "`" in line]


def names(text: str) -> list[str]:
    """Return the words in backticks in the first column."""
    return [name for row in rows(text) for name in re.findall(r"`([^`]+)`", row[0])]


def test_columns_of_episodes():
    text = section("docs/files.md", "episodes.csv")
    assert FENCED.findall(text) == [",".join(tables.EPISODE_COLUMNS) + "\n"]
    assert names(text) == list(tables.EPISODE_COLUMNS)


def test_columns_of_metrics():
    def header(agent: str = "dqn", spec: EnvSpec = SMALL, **fields) -> list[str]:
        sizes = {} if agent == "ilql" else {"hidden_sizes": (4,)}
        config = make_config(agent).replace(**sizes, **fields)
        totals = zero_totals(make_run_agent(config, spec), config, spec)
        return list(metrics_columns(totals, probe_columns(config)))

    text = section("docs/files.md", "metrics.csv")
    normal, analysis = header(), header(analysis=True)
    continuous = replace(SMALL, action_low=(-1.0,) * 4, action_high=(1.0,) * 4)
    control, probed = header("sac", continuous), header("sac", continuous, analysis=True)
    offline = [*header("cql"), "waiting_share"]
    writing = [*header("ilql", game.SPEC, **TINY_WRITER), "waiting_share"]
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
    Path(tmp_path / "episodes.csv").write_text(",".join(tables.EPISODE_COLUMNS) + "\n")
    assert set(tables.results(tmp_path)) <= set(names(section("docs/files.md", "summary.json")))


def test_exit_codes():
    text = section("docs/files.md", "Exit codes")
    codes = ["0", "1", "2", str(INTERRUPTED), "130", f"{128 + signal.SIGHUP}, {128 + signal.SIGTERM}"]
    assert re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE) == codes


OVERVIEW = "docs/reference/overview.md"


def test_promises_name_tests_that_exist():
    named = re.findall(r"`(?:(tests/\w+\.py)::)?(test_\w+)`", PAGES["docs/reliability.md"])
    assert len(named) > 20
    texts = {path: (ROOT / path).read_text() for path in {path for path, _ in named if path}}
    for path, name in named:
        assert any(f"def {name}(" in text for where, text in texts.items() if path in ("", where)), name


def test_table_of_commands():
    commands = names(section(OVERVIEW, "Commands"))
    assert list(dict.fromkeys(name.split()[0] for name in commands if "--" not in name)) == list(cli.COMMANDS)
    assert [name.split()[1] for name in commands if name.startswith("train ")] == list(agent_names())


def test_table_of_schemes():
    _, *schemes = rows(section(OVERVIEW, "Schemes"))
    assert [row[0].strip("`") for row in schemes] == list(SCHEMES)
    k = 3
    for name, label, heads, copies, _ in schemes:
        scheme = SCHEMES[name.strip("`")](k)
        assert scheme.label("DQN") == label.replace("=k", f"={k}")
        assert scheme.num_heads == {"1": 1, "k": k, "k + 1": k + 1, "2k": 2 * k}[heads]
        assert scheme.num_copies == int(copies.split()[0])


def test_table_of_losses():
    _, *losses = names(section(OVERVIEW, "Losses"))
    assert sorted(losses) == sorted(LOSSES)


def test_presets_of_the_overview_exist():
    text = section(OVERVIEW, "Presets")
    mentioned = re.findall(r"[` ]((?:atari|dmc|wordle)-?[a-z-]*|minatar|classic|toy|continuous)`", text)
    assert set(mentioned) <= set(all_presets())
    assert {name for name in all_presets() if not name.endswith(("-stream", "-cql"))} <= set(mentioned)


def test_pairs_of_the_method_page():
    text = PAGES["docs/method.md"].partition("### Schemes")[2].partition("###")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    for name, heads, online, target, _ in table[2:]:
        scheme = SCHEMES[name.replace(" ", "-")](3)
        assert scheme.num_heads == int(heads)
        assert list(scheme.online) == [int(head) for head in online.split(",")]
        assert list(scheme.target) == [int(head) for head in target.split(",")]
    assert len(table) - 2 == len(SCHEMES)


def test_readme_is_short():
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 110


def test_readme_names_every_agent():
    listed = names(section("README.md", "What is included"))
    assert [name.removeprefix("isqn train ") for name in listed if name.startswith("isqn train ")] == list(
        agent_names()
    )


def test_readme_repeats_the_results():
    """Each interval of the README is also in the results."""
    for interval in re.findall(r"[\d.]+ \[[\d., ]+\]", PAGES["README.md"]):
        assert interval in PAGES["docs/results.md"]


# -- the site


def load_hook():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "hooks" / "site_pages.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


def test_every_page_is_in_the_navigation():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert sorted(listed) == sorted([*pages, *load_hook().PAGES.values()])


def test_reference_has_every_command():
    listed = load_hook().COMMANDS
    assert list(dict.fromkeys(command.split()[0] for command in listed)) == list(cli.COMMANDS)
    assert [command.split()[1] for command in listed if command.startswith("train ")] == list(agent_names())


def test_reference_has_every_public_name():
    text = load_hook().python_reference()
    assert re.findall(r"^## isqn\.(\w+)$", text, re.MULTILINE) == [name for name in isqn.__all__ if name[0] != "_"]


@pytest.mark.parametrize("command", ["train dqn", "report", "list"])
def test_the_reference_keeps_every_word_of_the_help(command):
    hook = load_hook()
    printed = hook.run_help(command)
    page = re.sub(r"<[^>]+>", "", re.sub(r"^```\w*$", "", hook.format_help(printed), flags=re.MULTILINE))
    assert "--" in printed
    assert not re.search("[\u2500-\u257f]", printed)  # lines of boxes, which `format_help` does not know
    assert "<dt>" in hook.format_help(printed)
    assert re.findall(r"\w+", unescape(page).lower()) == re.findall(r"\w+", printed.lower())


def test_pictures_of_the_schemes():
    """The other versions differ from the SVG file only in colours and positions."""
    hook = load_hook()
    picture = (ROOT / "docs" / hook.PICTURE).read_text()
    texts = re.findall(r">([^<>]+)</text>", picture)
    for version in hook.picture_versions(picture).values():
        assert version != picture
        assert re.findall(r">([^<>]+)</text>", version) == texts
    assert "#ffffff" not in hook.darken(picture)


def test_links_are_adapted_to_the_site():
    adapt = load_hook().adapt_links
    here = ("docs/guides/streaming.md", "guides/streaming.md")
    assert adapt("[a](../results.md#language)", *here) == "[a](../results.md#language)"
    assert adapt("[a](../../src/isqn/losses.py)", *here) == "[a](../source/losses.md)"
    assert adapt("[a](../../LICENSE)", *here) == "a"
    assert adapt("[b](docs/files.md)", "CONTRIBUTING.md", "contributing.md") == "[b](files.md)"
    assert adapt("[c](https://example.org)", *here) == "[c](https://example.org)"


def test_remote_assets_are_found():
    remote = load_hook().remote_assets
    assert remote('<script src="https://example.org/a.js"></script>')
    assert remote('<link rel="stylesheet" href="//example.org/a.css">')
    assert not remote('<a href="https://example.org">a</a><script src="assets/a.js"></script>')


def test_deviations_name_fields_that_exist():
    """Every word in backticks in the last column that looks like a setting is one."""
    fields = {name for agent in agent_names() for name in field_names(type(make_config(agent)))}
    tables = [line for line in PAGES["docs/deviations.md"].splitlines() if line.startswith("|")]
    for line in tables:
        for word in re.findall(r"`([a-z_]+)(?:=\w+)?`", line.split("|")[-2]):
            assert word in fields or word in all_presets() or word in LOSSES, line


@pytest.mark.filterwarnings("ignore:Implicitly cleaning up")  # the temporary run of the first model
@pytest.mark.parametrize("page", ["docs/index.md", "docs/guides/environment.md"])
def test_python_examples_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    short = (
        re.sub(r"total_timesteps=[\d_]+", "total_timesteps=300", code)
        .replace("episodes=10", "episodes=1")
        .replace("iterated_shared(9)", "target_free()")
    )
    assert short.count("300") == 1
    (tmp_path / "example.py").write_text(short)
    result = runpy.run_path("example.py")
    if page == "docs/index.md":
        assert result["action"] in (0, 1)
    else:
        assert isqn.check_environment(result["Corridor"]()) == []
    assert result["model"].num_timesteps >= 300

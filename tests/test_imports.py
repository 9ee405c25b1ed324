"""Import rules, read from the source, and modules that `import isqn` must not load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "isqn"
MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports(module: str) -> set[str]:
    """Full names of everything that a module imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def top(name: str) -> str:
    return name.split(".")[0]


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_the_reader_sees_what_is_there():
    """The checks below are only as good as this: a name inside a function, a submodule, a package's own file."""
    assert "isqn" in MODULES
    assert "isqn.networks" in MODULES
    assert "flax.linen" in imports("isqn.networks.torsos")
    assert "isqn.train.run" in imports("isqn.study.worker")


def package_of(name: str) -> str:
    """Return the first part below isqn: "isqn.train.host" -> "train"; "" for isqn itself."""
    return [*name.split("."), ""][1]


def package_graph() -> dict[str, set[str]]:
    """Return which packages each package imports, `TYPE_CHECKING` imports and those in functions included."""
    packages = {package_of(module) for module in MODULES} - {""}
    graph: dict[str, set[str]] = {package: set() for package in packages}
    for module in MODULES:
        if package_of(module):
            found = {package_of(name) for name in imports(module) if within(name, "isqn")}
            graph[package_of(module)] |= (found & packages) - {package_of(module)}
    return graph


def test_packages_import_upwards_only():
    """Each package has a level above all that it imports: there is no cycle. `pytest -s` prints the levels."""
    graph, levels = package_graph(), list[list[str]]()
    while left := set(graph) - {package for level in levels for package in level}:
        free = sorted(package for package in left if not graph[package] & left)
        assert free, f"a cycle among {sorted(left)}"
        levels.append(free)
    for number, level in enumerate(levels):
        print(f"level {number}: {', '.join(level)}")
    order = [package for level in levels for package in level]
    expected = ["types", "schemes", "config", "agents", "train", "language", "presets", "study", "report", "cli"]
    assert sorted(expected, key=order.index) == expected


@pytest.mark.parametrize("module", ["isqn.schemes", "isqn.losses", "isqn.types"])
def test_the_method_needs_only_jax_and_numpy(module):
    allowed = {"jax", "numpy", *sys.stdlib_module_names}
    for name in imports(module):
        own = within(name, "isqn.schemes", "isqn.losses", "isqn.types", "isqn.lazy", "isqn.usercode")
        assert top(name) in allowed or own, name


def test_only_networks_import_flax():
    users = {module for module in MODULES if any(top(name) == "flax" for name in imports(module))}
    assert users
    assert all(within(module, "isqn.networks", "isqn.language.gpt2") for module in users), users


def test_nothing_imports_the_command_line():
    for module in MODULES:
        if module != "isqn.__main__" and not within(module, "isqn.cli"):
            assert not any(within(name, "isqn.cli") for name in imports(module)), module


@pytest.mark.parametrize("package", ["agents", "networks", "data"])
def test_parts_of_an_agent_know_no_environment_and_no_trainer(package):
    assert not package_graph()[package] & {"envs", "train", "study", "report", "language"}


# -- questions about the kind of an agent or environment
#
# An agent says in its config, in its record of functions and in its registration what other modules must know of it, so
# that none asks what kind it is. `ALLOWED` counts the places that ask nevertheless: question -> file -> number. A new
# place fails, and so does a number that is too high: when a place is gone, lower its number or delete its entry.

KIND_NAMES = {"dqn", "stream-q", "sac", "cql", "ilql"}
ALLOWED: dict[str, dict[str, int]] = {
    "name of an agent": {
        # the files of the agents and the registry, which name them; the loss "dqn" has the same name
        "agents/cql.py": 4,
        "agents/dqn.py": 2,
        "agents/registry.py": 6,
        "agents/sac.py": 2,
        "agents/stream_q.py": 3,
        "language/agent.py": 2,
        "config/parts.py": 2,
        "losses.py": 2,
        # defaults and studies
        "cli/train.py": 2,
        "model.py": 1,
        "study/catalogue.py": 4,
        "study/checks.py": 1,
        "study/grid.py": 1,
    },
    "class of a config": {
        "agents/registry.py": 6,
        "language/training.py": 1,
    },
    "field_names()": {
        "agents/registry.py": 5,
        "cli/train.py": 1,
        "model.py": 1,
        "presets/__init__.py": 1,
        "report/tables.py": 1,
        "study/cell.py": 1,
        "study/checks.py": 1,
        "study/drive.py": 1,
        "train/announce.py": 1,
        "train/online.py": 3,
    },
    "is_streaming": {
        "analysis/probe.py": 1,
        "cli/cost.py": 1,
        "torsos.py": 1,
        "train/compiled.py": 2,
        "train/functions.py": 2,
        "train/probes.py": 1,
    },
    "ALE/": {  # in train/
        "train/source.py": 1,
    },
}


def docstrings(tree: ast.Module) -> set[int]:
    """Return the ids of the strings that are statements of their own, which say something and ask nothing."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def questions(file: str, tree: ast.Module) -> list[str]:
    """Return the questions about a kind in a module, one for each place."""
    asked, texts = [], docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            # Also in `in (...)`, in a dictionary or as the value of a constant, with which something is compared.
            if node.value in KIND_NAMES and not file.startswith("presets/"):
                asked.append("name of an agent")
            if "ALE/" in node.value and file.startswith("train/"):
                asked.append("ALE/")
        elif isinstance(node, ast.Call):
            called, first = ast.unparse(node.func), ast.unparse(node.args[0]) if node.args else ""
            if called in ("isinstance", "issubclass") and re.search("(config|kind)$", first):
                asked.append("class of a config")
            if called.split(".")[-1] == "field_names" and not file.startswith("config/"):
                asked.append("field_names()")
        elif isinstance(node, ast.Attribute) and node.attr == "is_streaming" and not file.startswith("networks/"):
            asked.append("is_streaming")
    return asked


def count_questions(trees: dict[str, ast.Module]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for file, tree in trees.items():
        for question in questions(file, tree):
            of_question = counts.setdefault(question, {})
            of_question[file] = of_question.get(file, 0) + 1
    return counts


def test_questions_about_a_kind_are_asked_only_where_they_are_allowed():
    counts = count_questions({str(path.relative_to(SOURCE)): TREES[name] for name, path in MODULES.items()})
    changed = [
        f"{question}: {file} asks {found} times, and ALLOWED says {allowed}"
        for question in sorted({*counts, *ALLOWED})
        for file in sorted({*counts.get(question, {}), *ALLOWED.get(question, {})})
        if (found := counts.get(question, {}).get(file, 0)) != (allowed := ALLOWED.get(question, {}).get(file, 0))
    ]
    assert not changed, "\n".join(changed)


@pytest.mark.parametrize(
    ("question", "line"),
    [
        ("name of an agent", 'config.agent == "dqn"'),
        ("name of an agent", 'config.agent in ("dqn", other)'),
        ("name of an agent", 'LOGGING_AGENT = "dqn"'),
        ("name of an agent", '{"stream-q": 1}[config.agent]'),
        ("class of a config", "isinstance(config, Offline)"),
        ("class of a config", "issubclass(kind.config, Offline)"),
        ("field_names()", '"buffer_size" in fields.field_names(type(config))'),
        ("is_streaming", "agent.is_streaming"),
        ("ALE/", 'config.env_id.startswith("ALE/")'),
        ("ALE/", 'f"ALE/{game}-v5"'),
    ],
)
def test_every_form_of_a_question_is_seen(question, line):
    assert count_questions({"train/new.py": ast.parse(line)}) == {question: {"train/new.py": 1}}


def test_docstrings_ask_nothing():
    assert count_questions({"train/new.py": ast.parse('"ALE/"\nx = 1\n"dqn"')}) == {}


def test_no_module_asks_for_the_name_of_a_torso():
    """A torso's entry in the registry holds what other modules must know of it."""
    from isqn.torsos import TORSOS

    for module, tree in TREES.items():
        for node in ast.walk(tree):
            asks = isinstance(node, ast.Compare) or (
                isinstance(node, ast.Call) and ast.unparse(node.func) in ("needs", "needs_other")
            )
            if asks or (isinstance(node, ast.Subscript) and ast.unparse(node.value) == "TORSOS"):
                named = {text.value for text in ast.walk(node) if isinstance(text, ast.Constant)}
                assert not named & set(TORSOS) or module == "isqn.torsos", f"{module}:{node.lineno}"


@pytest.mark.parametrize("module", MODULES)
def test_no_pickle_no_global_seed_and_no_code_from_strings(module):
    assert not {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"} & set(map(top, imports(module)))
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "compile", "__import__"), f"{module}:{node.lineno}"
            assert called not in ("np.random.seed", "numpy.random.seed", "random.seed"), f"{module}:{node.lineno}"
            assert "allow_pickle" not in {keyword.arg for keyword in node.keywords}, f"{module}:{node.lineno}"


def in_a_fresh_process(statement: str) -> list[str]:
    """The devices that were started, and the modules that must stay out, after a statement."""
    code = f"""
import sys
{statement}
print("jax" in sys.modules and bool(sys.modules["jax"]._src.xla_bridge._backends))
print(*sorted({{"ale_py", "matplotlib", "pgx", "minatar", "cv2", "wandb", "tensorboardX"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("statement", ["import isqn", "from isqn import Model, iterated_shared; iterated_shared(9)"])
def test_importing_starts_no_device_and_no_optional_library(statement):
    assert in_a_fresh_process(statement) == ["False", ""]


@pytest.mark.parametrize(
    "words",
    [[], ["--help"], ["train", "--help"], ["train", "dqn", "--help"], ["resume", "--help"]]
    + [["list", what] for what in ("envs", "presets", "studies", "schemes", "losses", "agents")],
    ids=" ".join,
)
def test_questions_are_answered_without_jax(words):
    code = f"""
import sys, contextlib, io
from isqn.cli import main
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    main({words})
assert out.getvalue()
print([name for name in ("jax", "flax", "optax", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_device_that_is_started_would_be_seen():
    assert in_a_fresh_process("import jax; jax.devices()") == ["True", ""]


def test_every_public_name_is_there():
    import isqn

    assert set(isqn.__all__) == set(dir(isqn))
    for name in isqn.__all__:
        assert getattr(isqn, name) is not None
    with pytest.raises(AttributeError, match="module 'isqn' has no attribute 'Modle'"):
        isqn.Modle  # noqa: B018


def test_no_result_depends_on_the_clock_of_the_system():
    """Times are measured by a clock that cannot be set back; the only dates are those of games."""
    clock = re.compile(r"\btime\.(time|localtime|gmtime|strftime|ctime)\b|\bdatetime\b|\btoday\(")
    found = [path.stem for path in SOURCE.rglob("*.py") if clock.search(path.read_text())]
    assert found == ["data"]

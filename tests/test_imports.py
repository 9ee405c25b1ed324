"""Import rules, read from the source, and modules that `import isqn` must not load."""

from __future__ import annotations

import ast
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


KIND_NAMES = {"dqn", "stream-q", "sac", "cql", "ilql"}


def test_no_module_asks_for_the_name_of_an_agent():
    """The registry holds what other modules must know of an agent, so that none compares its name."""
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith((".agent", "agent.name")):
                compared = {ast.literal_eval(c) for c in node.comparators if isinstance(c, ast.Constant)}
                assert not compared & KIND_NAMES, f"{module}:{node.lineno}"


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

"""Who may import whom, read from the source; and what `import isqn` must not start."""

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


@pytest.mark.parametrize("module", ["isqn.schemes", "isqn.losses", "isqn.types"])
def test_the_paper_needs_only_jax_and_numpy(module):
    allowed = {"jax", "numpy", *sys.stdlib_module_names}
    for name in imports(module):
        assert top(name) in allowed or within(name, "isqn.schemes", "isqn.losses", "isqn.types"), name


def test_only_the_networks_know_flax():
    users = {module for module in MODULES if any(top(name) == "flax" for name in imports(module))}
    assert users
    assert all(within(module, "isqn.networks") for module in users), users


@pytest.mark.parametrize("package", ["isqn.analysis", "isqn.report"])
def test_analysis_and_report_do_not_bring_flax_along(package):
    assert any(within(module, package) for module in MODULES)
    for module in MODULES:
        if within(module, package):
            assert not any(top(name) == "flax" for name in imports(module)), module


def test_nothing_imports_the_command_line():
    for module in MODULES:
        if module != "isqn.__main__":
            assert not any(within(name, "isqn.cli") for name in imports(module)), module


def test_agents_know_no_environment_replay_trainer_or_file():
    """But for types, which are not imported when it runs."""
    for module in MODULES:
        if within(module, "isqn.agents"):
            for name in imports(module):
                assert not within(name, "isqn.envs", "isqn.data", "isqn.train", "isqn.report"), f"{module}: {name}"


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


def test_a_device_that_is_started_would_be_seen():
    assert in_a_fresh_process("import jax; jax.devices()") == ["True", ""]


def test_every_public_name_is_there():
    import isqn

    assert set(isqn.__all__) == set(dir(isqn))
    for name in isqn.__all__:
        assert getattr(isqn, name) is not None
    with pytest.raises(AttributeError, match="module 'isqn' has no attribute 'Modle'"):
        isqn.Modle  # noqa: B018

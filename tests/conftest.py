import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("isqn", deadline=None, derandomize=True)  # no clocks, no luck
settings.load_profile("isqn")

# The parent of the tests may ignore these signals, as nohup does; the tested processes must not inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Workers, child processes and later runs share compiled programs; `make clean` deletes them.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def pytest_configure(config):
    """Make XLA compile in less than half the time, which is most of the time of most tests.

    The programs run more slowly, so slow tests, which train, keep the defaults. Child processes and workers inherit
    the flags; JAX has not started yet.
    """
    if config.option.markexpr == "not slow" and "XLA_FLAGS" not in os.environ:
        flags = ("backend_optimization_level=0", "cpu_use_fusion_emitters=false")
        os.environ["XLA_FLAGS"] = " ".join(f"--xla_{flag}" for flag in flags)


@pytest.fixture(autouse=True)
def forget_imports():
    """Forget after each test which code of a user was imported: a command in a process of its own knows none."""
    from isqn import imports

    names, files = list(imports.IMPORTED), set(imports._IMPORTED_FILES)
    yield
    imports.IMPORTED[:] = names
    imports._IMPORTED_FILES.clear()
    imports._IMPORTED_FILES.update(files)

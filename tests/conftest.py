import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("isqn", deadline=None, derandomize=True)  # no clocks, no luck
settings.load_profile("isqn")

# Whoever started the tests may ignore these, as nohup does; the processes that are tested must not inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Equal programs are compiled once, by whichever worker or child process comes first.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="isqn-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    OWN_CACHE = os.environ["JAX_COMPILATION_CACHE_DIR"]
else:
    OWN_CACHE = None  # a worker's, made by the process that started it


def pytest_configure(config):
    """Most of the time of most tests is compiling: half as long like this, for programs that run once or twice. Slow
    tests train, with programs that should be fast. Child processes and workers inherit it; nothing has computed yet."""
    if config.option.markexpr == "not slow" and "XLA_FLAGS" not in os.environ:
        os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"


def pytest_sessionfinish():
    if OWN_CACHE:
        shutil.rmtree(OWN_CACHE, ignore_errors=True)

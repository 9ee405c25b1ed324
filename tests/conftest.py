import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("isqn", deadline=None, derandomize=True)  # no clocks, no luck
settings.load_profile("isqn")

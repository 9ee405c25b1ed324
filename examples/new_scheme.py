"""A new scheme: two chains of the paper's kind on one torso, so that the agent acts by an ensemble of chains.

python examples/new_scheme.py train dqn --scheme two-chains --k 3 --env-id isqn/Chain-v0
"""

import sys

from isqn.cli import main
from isqn.schemes import SCHEMES, TargetScheme


def two_chains(k: int) -> TargetScheme:
    """Heads 0 to k are the first chain, heads k + 1 to 2k + 1 the second; both have a frozen first head."""
    second = k + 1
    return TargetScheme(
        "two-chains",
        "2iS",
        num_heads=2 * (k + 1),
        online=(*range(1, k + 1), *range(second + 1, second + k + 1)),
        target=(*range(k), *range(second, second + k)),
        size=f"K={k}",
    )


SCHEMES["two-chains"] = two_chains  # the flag; the label of --k 3 is "2iS-DQN K=3"

if __name__ == "__main__":
    sys.exit(main())

"""A new scheme: two chains of the paper's kind on one torso, so that the agent acts by an ensemble of chains.

isqn train dqn --import examples/new_scheme.py --scheme two-chains --k 3 --env-id isqn/Chain-v0
"""

import isqn
from isqn.schemes import TargetScheme


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


isqn.register_scheme("two-chains", two_chains)  # the label of --k 3 is "2iS-DQN K=3"

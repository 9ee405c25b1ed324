"""`jax.jit` with the one option that matters on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax

# jaxlib 0.10 sends convolutions and reductions to YNNPACK, whose weight gradients of convolutions take
# 1.4 to 2.5 times as long as Eigen's; its matrix products are good. An update of the Nature CNN takes 0.57
# of the time with this. It is given here and not in XLA_FLAGS, where an unknown name ends the process.
_CPU_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


@cache
def options() -> dict[str, Any]:
    """Nothing where this jaxlib does not know the option, or there is an accelerator. Starts the device."""
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda x: x, compiler_options=_CPU_OPTIONS).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return _CPU_OPTIONS


def jit(function: Callable[..., Any], **settings: Any) -> Any:
    """For the programs that a trainer calls; a jit inside another one has no options of its own."""
    return jax.jit(function, compiler_options=options(), **settings)

"""`jax.jit` with the one option that matters on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax

# jaxlib 0.10 sends convolutions and reductions to YNNPACK, whose weight gradients of convolutions take
# 1.4 to 2.5 times as long as Eigen's; its matrix products are good. An update of the Nature CNN takes 0.57
# of the time with this. It is given here and not in XLA_FLAGS, where an unknown name ends the process.
_CPU_OPTIONS: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
# To compile the update of a stream takes 20 MB with this, and 200 without; the update itself is 5 % slower.
_FRUGAL_OPTIONS: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False}


@cache
def options(frugal: bool = False) -> dict[str, Any]:
    """Nothing where this jaxlib does not know the option, or there is an accelerator. Starts the device."""
    wanted = _FRUGAL_OPTIONS if frugal else _CPU_OPTIONS
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda x: x, compiler_options=wanted).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return wanted


def jit(function: Callable[..., Any], *, frugal: bool = False, **settings: Any) -> Any:
    """For the programs that a trainer calls; a jit inside another one has no options of its own."""
    return jax.jit(function, compiler_options=options(frugal), **settings)

"""`jax.jit` with XLA options that make training programs faster, or cheaper to compile, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax

# jaxlib 0.10 sends convolutions and reductions to YNNPACK, whose weight gradients of convolutions take 1.4 to 2.5 times
# as long as Eigen's; its matrix products are good. With this option an update of the Nature CNN takes 0.57 of the time.
# It is set here and not in XLA_FLAGS, where an unknown option aborts the process.
_CPU_OPTIONS: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
# Compiling the update of a streaming agent takes 20 MB with this option and 200 MB without; the update is 5 % slower.
_LOW_MEMORY_OPTIONS: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False}


@cache
def options(low_compile_memory: bool = False) -> dict[str, Any]:
    """Return the compiler options for this device; initialises the JAX backend.

    Empty on an accelerator, and if this jaxlib does not know the option. `low_compile_memory` saves memory at compile
    time.
    """
    wanted = _LOW_MEMORY_OPTIONS if low_compile_memory else _CPU_OPTIONS
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda x: x, compiler_options=wanted).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return wanted


def jit(function: Callable[..., Any], *, low_compile_memory: bool = False, **settings: Any) -> Any:
    """Compile a top-level training program with these options; a jit inside another jit cannot have its own."""
    return jax.jit(function, compiler_options=options(low_compile_memory), **settings)

"""Registry of the torsos, the layers below the heads. The modules of the package are in `isqn.networks`.

A torso is one record, so that no other module asks for its name. Nothing here imports JAX or flax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from isqn.lazy import jax
from isqn.types import Array, EnvSpec, Params, UserError, require_new_name
from isqn.usercode import named


@dataclass(frozen=True)
class TorsoSettings:
    """Settings shared by all torsos."""

    layer_norm: bool = False
    batch_norm: bool = False
    width_factor: float = 1.0  # scales the last hidden layer, whose features the heads share (paper, D.3)
    hidden_sizes: tuple[int, ...] = (128, 128)  # of the MLP torso
    dtype: Any = np.float32  # of convolutions and matrix products; parameters are float32
    is_streaming: bool = False  # streaming, Elsayed et al. 2024: LayerNorm without parameters, leaky ReLU
    layer_norm_axes: str = "channels"  # axes of a LayerNorm without parameters: "channels", or "all" axes of a sample
    width: int = 512  # hidden width of SimbaV2
    blocks: int = 2  # residual blocks of SimbaV2
    sparsity: float = 0.0  # share of the incoming weights of a unit that start at zero
    batch_norm_epsilon: float = 1e-5
    batch_norm_kind: str = "plain"  # "plain" or "renorm"
    batch_norm_input: bool = False  # whether vector observations are normalised; images always are

    def features(self, size: int) -> int:
        """Return the width of the last hidden layer, scaled by `width_factor`."""
        return max(1, round(size * self.width_factor))


def xavier_uniform(key: Array, shape: tuple[int, ...]) -> Array:
    return jax.nn.initializers.xavier_uniform()(key, shape)


def lecun_normal(key: Array, shape: tuple[int, ...]) -> Array:
    return jax.nn.initializers.lecun_normal()(key, shape)


class Torso(NamedTuple):
    """Entry of the registry: what the rest of the package must know of a torso, as `register_torso` describes it."""

    make: Callable[[TorsoSettings], Any]
    min_image_side: int
    head_init: Callable[..., Array]
    project: Callable[[Params], Params] | None
    make_policy: Callable[[TorsoSettings, int], Any] | None
    reads: tuple[str, ...]


TORSOS: dict[str, Torso] = {}
_READ_BY_DEFAULT = ("hidden_sizes", "layer_norm")


def register_torso(
    name: str,
    make: Callable[[TorsoSettings], Any],
    *,
    min_image_side: int = 0,
    head_init: Callable[..., Array] = xavier_uniform,
    project: Callable[[Params], Params] | None = None,
    make_policy: Callable[[TorsoSettings, int], Any] | None = None,
    reads: tuple[str, ...] = _READ_BY_DEFAULT,
) -> None:
    """Make a torso known as `--torso NAME`, for the networks of all agents: heads, critics and policies.

    - `make` returns a flax module that maps a batch of observations to a batch of feature vectors.
    - With a `min_image_side`, the torso is for images of at least so many pixels a side.
    - `head_init` is the initialiser of the heads.
    - `project` maps the parameters of a whole network, with any leading axes, to valid ones. Such a torso is only for
      agents that apply it after each gradient step.
    - `make_policy` returns the policy network, given the settings and the number of actions. By default it is the torso
      and two dense layers.
    - `reads` names the settings that the module reads, of hidden_sizes, layer_norm, width and blocks. The flags of the
      others are refused.
    """
    if not callable(make):
        raise UserError(f"register_torso: make is {make!r}; it must be a function TorsoSettings -> flax module.")
    owner = __name__ if name == "auto" else TORSOS[name].make.__module__ if name in TORSOS else None
    require_new_name("register_torso", "a torso", name, owner, make.__module__)
    for setting in reads:
        if setting not in TorsoSettings.__dataclass_fields__:
            raise UserError(
                f"register_torso: the torso {name!r} reads {setting!r}, which is not a field of TorsoSettings."
            )
    TORSOS[name] = Torso(named(f"The torso {name!r}", make), min_image_side, head_init, project, make_policy, reads)


def choose_torso(spec: EnvSpec, settings: TorsoSettings) -> str:
    """Return the name of the torso that "auto" stands for: by a vector, a small image or a large image."""
    side = min(spec.frame_shape[:2])
    if not spec.is_image:
        return "mlp"
    if side < 32:
        return "minatar"
    return "stream" if settings.is_streaming and side >= TORSOS["stream"].min_image_side else "nature"


def is_read_by(setting: str, torso: str) -> bool:
    """Return whether a torso reads a setting; "auto" and torsos that are not known here read the usual ones."""
    return setting in (TORSOS[torso].reads if torso in TORSOS else _READ_BY_DEFAULT)


def _from_networks(module: str, name: str) -> Callable[..., Any]:
    """Return a function of `isqn.networks`, which is imported at the first call: flax takes a second."""
    return lambda *args: getattr(import_module(f"isqn.networks.{module}"), name)(*args)


register_torso("mlp", _from_networks("torsos", "MLP"), head_init=lecun_normal)
register_torso("minatar", _from_networks("torsos", "make_minatar"), min_image_side=3, reads=("layer_norm",))
register_torso("nature", _from_networks("torsos", "make_nature"), min_image_side=1, reads=("layer_norm",))
register_torso("impala", _from_networks("torsos", "Impala"), min_image_side=1, reads=("layer_norm",))
register_torso("stream", _from_networks("torsos", "make_stream"), min_image_side=53, reads=("layer_norm",))
register_torso(
    "simba",
    _from_networks("simba", "Simba"),
    head_init=_from_networks("simba", "orthogonal"),
    project=_from_networks("simba", "normalise_columns"),
    make_policy=_from_networks("simba", "SimbaPolicy"),
    reads=("width", "blocks"),
)

"""Gymnasium spaces of recorded datasets, and conversion between their observations and frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from isqn.types import EnvSpec

if TYPE_CHECKING:
    from gymnasium import Space

Array = NDArray[Any]


def needs_flattening(space: Space[Any]) -> bool:
    """Return whether observations of a space become vectors by Gymnasium's FlattenObservation."""
    from gymnasium import spaces

    return isinstance(space, spaces.Dict | spaces.Tuple | spaces.MultiDiscrete | spaces.MultiBinary)


def action_space(spec: EnvSpec) -> Space[Any]:
    """Return the action space of an environment."""
    from gymnasium import spaces

    if not spec.is_continuous:
        return spaces.Discrete(spec.num_actions, start=spec.first_action)
    dtype: Any = np.dtype(spec.action_type)
    low, high = (np.array(bound, dtype).reshape(spec.action_box) for bound in (spec.action_low, spec.action_high))
    return spaces.Box(low, high, dtype=dtype)


def observation_space(spec: EnvSpec) -> Space[Any]:
    """Return the observation space of an environment that cannot be made, from its specification."""
    from gymnasium import spaces

    if spec.first_state is not None:
        return spaces.Discrete(spec.frame_shape[0], start=spec.first_state)
    dtype: Any = np.dtype(spec.frame_dtype)
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (0, 1) if dtype.kind == "b" else _limits(dtype)
    return spaces.Box(low, high, np.moveaxis(np.empty(spec.frame_shape, "b"), *_axes(spec)).shape, dtype)


def _limits(dtype: Any) -> tuple[int, int]:
    return np.iinfo(dtype).min, np.iinfo(dtype).max


def _axes(spec: EnvSpec) -> tuple[int, int]:
    """Return the axes of the channels in a frame and in an observation."""
    return (-1, 0) if spec.channels_first else (-1, -1)


def leaves(space: Any) -> Iterator[Space[Any]]:
    """Yield the parts of a composite space."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        for part in parts:
            yield from leaves(part)
    else:
        yield space


def fits(space: Space[Any], spec: EnvSpec) -> bool:
    """Return whether `to_frames` makes frames of a specification from observations of a space."""
    from gymnasium import spaces

    if spec.first_state is not None or isinstance(space, spaces.Discrete):
        return space == observation_space(spec)
    shape: Any = getattr(observation_space(spec), "shape", None)
    return space.shape == shape or (shape[-1] == 1 and space.shape == shape[:-1] and spec.is_image)


def to_frames(observations: Any, space: Space[Any], spec: EnvSpec) -> Array:
    """Return the frames of all observations of an episode, as the environment adapter makes them one by one."""
    from gymnasium import spaces

    for values, leaf in _pairs(observations, space):
        _check_values(values, leaf)
    if needs_flattening(space) and space.shape != spec.frame_shape:
        length = len(next(_pairs(observations, space))[0])
        vectors: list[Any] = [spaces.flatten(space, _step(observations, space, i)) for i in range(length)]
        observations = np.stack(vectors)
    values = np.asarray(observations)
    if isinstance(space, spaces.Discrete):
        frames = np.zeros((len(values), int(space.n)), spec.frame_dtype)
        frames[np.arange(len(values)), values - int(space.start)] = 1
        return frames
    first, last = _axes(spec)
    if spec.channels_first:
        values = np.moveaxis(values, last + 1, first)
    return np.ascontiguousarray(values).reshape(-1, *spec.frame_shape).astype(spec.frame_dtype)


def to_observations(frames: Array, space: Space[Any], spec: EnvSpec) -> Array:
    """Return the observations that frames were made from, the inverse of `to_frames`."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return frames.argmax(-1).astype(np.int64) + int(space.start)
    first, last = _axes(spec)
    if spec.channels_first:
        frames = np.moveaxis(frames, first, last + 1)
    shape: Any = space.shape
    return np.ascontiguousarray(frames).reshape(-1, *shape).astype(space.dtype)


def _pairs(observations: Any, space: Any) -> Iterator[tuple[Array, Space[Any]]]:
    """Yield the array of each part of composite observations, and its space."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _pairs(observations[key], part)
    elif isinstance(space, spaces.Tuple):
        for values, part in zip(observations, space.spaces, strict=True):
            yield from _pairs(values, part)
    else:
        yield np.asarray(observations), space


def _step(observations: Any, space: Any, index: int) -> Any:
    """Return one of composite observations."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {key: _step(observations[key], part, index) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_step(values, part, index) for values, part in zip(observations, space.spaces, strict=True))
    return np.asarray(observations)[index]


def _check_values(values: Array, space: Any) -> None:
    """Raise ValueError unless an array holds elements of a space; the bounds of a Box may be exceeded."""
    from gymnasium import spaces

    if values.shape[1:] != space.shape:
        raise ValueError(f"its observations have the shape {values.shape[1:]}, not {space.shape} as {space}")
    if not np.can_cast(values.dtype, space.dtype, "same_kind"):
        raise ValueError(f"its observations are {values.dtype}, not {space.dtype} as {space}")
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and values.size:
        start = np.asarray(space.start)
        size = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        if (values < start).any() or (values >= start + size).any():
            raise ValueError(f"its observations go from {values.min()} to {values.max()}, which is not in {space}")

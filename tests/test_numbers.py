"""One DQN update compared with numpy: losses, gradients, the Adam step and the refreshed parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import make_agent, random_batch
from isqn.agents.base import make_adam
from isqn.agents.registry import make_config
from isqn.types import Params


def forward(params: Params, x: np.ndarray):
    layer = params["torso"]["Dense_0"]
    before = x @ layer["kernel"] + layer["bias"]
    hidden = np.maximum(before, 0)
    heads = params["heads"]
    q = np.stack([hidden @ heads["kernel"][h] + heads["bias"][h] for h in range(len(heads["bias"]))], axis=1)
    return before, hidden, q  # q is (B, H, A)


def loss_and_gradient(params: Params, targets: np.ndarray, online: list[int], batch):
    """Return the loss of each pair and the gradient of their sum; targets[b, p] is the target of sample b, pair p."""
    size = len(batch.action)
    before, hidden, q = forward(params, batch.obs)
    kernel = params["heads"]["kernel"]
    d_kernel, d_bias = np.zeros_like(kernel), np.zeros_like(params["heads"]["bias"])
    d_hidden = np.zeros_like(hidden)
    losses = np.zeros(len(online))
    for b in range(size):
        action = batch.action[b]
        for p, head in enumerate(online):
            error = targets[b, p] - q[b, head, action]
            losses[p] += error**2 / size
            d_q = -2 * error / size
            d_kernel[head, :, action] += d_q * hidden[b]
            d_bias[head, action] += d_q
            d_hidden[b] += d_q * kernel[head, :, action]
    d_before = d_hidden * (before > 0)
    torso = {"Dense_0": {"kernel": batch.obs.T @ d_before, "bias": d_before.sum(0)}}
    return losses, {"torso": torso, "heads": {"kernel": d_kernel, "bias": d_bias}}


def adam(params: Params, gradient: Params, rate: float, eps: float) -> Params:
    """Apply the first Adam step: m = 0.1 g and v = 0.001 g^2, and the bias correction divides by 0.1 and 0.001."""
    return jax.tree.map(lambda p, g: p - rate * g / (np.sqrt(g**2) + eps), params, gradient)


CASES = {
    # scheme: (k, online heads, target heads, (to, from) of the heads copied in a refresh)
    "target-based": (1, [0], [0], []),
    "target-free": (1, [0], [0], []),
    "iterated-shared": (3, [1, 2, 3], [0, 1, 2], [(0, 1), (1, 2), (2, 3)]),
    "ensemble-shared": (2, [1, 3], [0, 2], [(0, 1), (2, 3)]),
}


@pytest.mark.parametrize("name", CASES)
def test_one_update_matches_numpy(name):
    k, online, target, moves = CASES[name]
    _, agent = make_agent(scheme=name, num_bellman_iterations=k, learning_rate=0.01, adam_epsilon=1e-3)
    state = agent.init(7)
    batch = random_batch(seed=1)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), state.params)
    old_params = jax.tree.map(lambda x: 1.5 * x + 0.1, params)  # an older network that differs from the current one
    if name == "target-based":
        state = state._replace(copies=(jax.tree.map(lambda x: x.astype(np.float32), old_params),))
    target_params = old_params if name == "target-based" else params

    _, _, next_q = forward(target_params, batch.next_obs)
    targets = batch.reward[:, None] + batch.discount[:, None] * next_q[:, target].max(-1)
    losses, gradient = loss_and_gradient(params, targets, online, batch)
    expected = adam(params, gradient, 0.01, 1e-3)

    updated, metrics = jax.jit(agent.update)(state, batch)
    np.testing.assert_allclose(metrics["loss"], losses.sum(), rtol=1e-5)
    for actual, wanted in zip(jax.tree.leaves(updated.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)
    # Adam's first moment is a tenth of the gradient, so it reveals the gradients of the real update.
    for actual, wanted in zip(jax.tree.leaves(updated.optimizer[0].mu), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(10 * np.asarray(actual), wanted, rtol=1e-4, atol=1e-6)

    refreshed = jax.jit(agent.refresh)(updated)
    heads = {leaf: np.array(updated.params["heads"][leaf]) for leaf in ("kernel", "bias")}
    old = {leaf: value.copy() for leaf, value in heads.items()}
    for leaf in heads:
        for to, source in moves:
            heads[leaf][to] = old[leaf][source]
        np.testing.assert_array_equal(refreshed.params["heads"][leaf], heads[leaf])
    if name == "target-based":
        jax.tree.map(np.testing.assert_array_equal, refreshed.copies[0], updated.params)
    jax.tree.map(np.testing.assert_array_equal, refreshed.params["torso"], updated.params["torso"])


def test_beta_1_of_adam_weights_the_gradients_of_two_steps():
    """Gradients 1 and -1 with beta 1 = 1/2 average to -1/4, without bias -1/3; their squares to 1: a step of +1/3."""
    config = make_config("dqn", learning_rate=0.03, adam_epsilon=0.0, adam_beta1=0.5)
    optimizer = make_adam(config)
    _, state = optimizer.update(jnp.float32(1), optimizer.init(jnp.float32(0)))
    step, _ = optimizer.update(jnp.float32(-1), state)
    assert step == pytest.approx(0.03 / 3, rel=1e-5)

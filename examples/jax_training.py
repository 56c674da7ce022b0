"""
Training with JAX
=================

JAX arrays go into the same `FactorGraph` as NumPy arrays and torch tensors. A graph is built while
JAX traces: its wiring is static, and its scores are traced. `jit`, `vmap`, `grad` and the other
transformations then work as they do on any function.

This tutorial learns which points belong together. Each instance has six points and a copy of them
that is rotated, disturbed and shuffled; a linear map is learned under which the best matching of
points and copies is the right one.
"""

# %%
# The data
# --------

import sys

try:
    import jax
    import jax.numpy as jnp
    import optax
except ImportError as error:
    print(f'This tutorial needs {error.name}: pip install "factormax[jax]" optax')
    sys.exit()

import matplotlib.pyplot as plt

import factormax as fm


def instances(key, count, points=6, dim=4):
    """Points, their copies in another order, and which belongs to which."""
    place, noise, order = jax.random.split(key, 3)
    rotation = jnp.linalg.qr(jax.random.normal(jax.random.key(7), (dim, dim)))[0]
    first = jax.random.normal(place, (count, points, dim))
    moved = first @ rotation + 0.2 * jax.random.normal(noise, first.shape)
    orders = jax.vmap(lambda k: jax.random.permutation(k, points))(jax.random.split(order, count))
    second = jnp.take_along_axis(moved, orders[..., None], axis=1)
    return first, second, jnp.swapaxes(jax.nn.one_hot(orders, points), 1, 2)


# %%
# The model
# ---------
#
# The model has a score for every point and every copy, and a graph that says what a matching is.
# Nothing here is specific to JAX except the arrays.


def graph_of(params, first, second):
    scores = jnp.einsum("bid,de,bje->bij", first, params["map"], second)
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    return fg, u


# %%
# `fg.loss` compares the solution with a target. It is the Fenchel–Young loss of LP-SparseMAP:
# convex in the scores, 0 where the solution is the target, and its gradient is the difference
# between the two.


def loss(params, first, second, target):
    fg, u = graph_of(params, first, second)
    return jnp.mean(fg.loss({u: target}))


@jax.jit
def share_right(params, first, second, target):
    """How much of the best matchings is right."""
    fg, u = graph_of(params, first, second)
    fg.solve_map()
    return jnp.sum(u.value * target) / jnp.sum(target)


# %%
# Training
# --------
#
# One step is one compiled function. XLA calls the solver without going through Python if factormax
# was built with the headers of jaxlib, and through a callback otherwise.

STEPS = 100
optimizer = optax.adam(3e-2)
params = {"map": jnp.zeros((4, 4))}
state = optimizer.init(params)


@jax.jit
def step(params, state, key):
    value, grads = jax.value_and_grad(loss)(params, *instances(key, 32))
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


held_out = instances(jax.random.key(1), 64)
print(f"before: {share_right(params, *held_out):.0%} of the points matched correctly")
losses = []
for i in range(STEPS):
    params, state, value = step(params, state, jax.random.key(100 + i))
    losses.append(float(value))
print(f"after: {share_right(params, *held_out):.0%} of the points matched correctly")

# %%
# Here are the loss, and the matching of a held-out instance: blue lines are right, orange ones are
# not.

_, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
left.plot(losses, color="#0072B2")
left.set(xlabel="training steps", ylabel="loss", ylim=0)
left.spines[["top", "right"]].set_visible(False)

fg, u = graph_of(params, *held_out[:2])
fg.solve()
fm.plot.matching(u.value[0], right, truth=held_out[2][0])
right.set_title("one held-out instance")

plt.show()

# %%
# What to try next
# ----------------
#
# * `jax.vmap` a function that solves one instance: it becomes a batch, solved in one call.
# * Inside a trace nothing can be raised. Return `solution.status` from the function, and look at it
#   outside.
# * `jax.hessian`, `jax.jvp`, `scan` and `shard_map` work too.

"""Learns which points belong together, with JAX and optax.

Each instance has six points and a copy of them that is turned, disturbed and shuffled. A linear map
of the copies is learned so that the matching of all points to all copies is the right one.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

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


def scores_of(params, first, second):
    return jnp.einsum("bid,de,bje->bij", first, params["map"], second)


def graph_of(scores):
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    return fg, u


def loss(params, first, second, target):
    fg, u = graph_of(scores_of(params, first, second))
    return jnp.mean(fg.loss({u: target}))


@jax.jit
def right(params, first, second, target):
    """How much of the best matchings is right."""
    fg, u = graph_of(scores_of(params, first, second))
    fg.solve_map()
    return jnp.sum(u.value * target) / jnp.sum(target)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    optimizer = optax.adam(3e-2)
    params = {"map": jnp.zeros((4, 4))}
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, key):
        value, grads = jax.value_and_grad(loss)(params, *instances(key, 32))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    held_out = instances(jax.random.key(1), 64)
    print(f"before: {right(params, *held_out):.0%} of the points matched correctly")
    for i in range(steps):
        params, state, value = step(params, state, jax.random.key(100 + i))
        if i % 20 == 0:
            print(f"step {i}: loss {value:.3f}")
    print(f"after: {right(params, *held_out):.0%} of the points matched correctly")


if __name__ == "__main__":
    main()

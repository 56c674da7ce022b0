"""
Projections for optax
=====================

With scores x, LP-SparseMAP maximises x · μ − ½‖μ‖², so its answer is the point closest to x that
satisfies all factors. That makes every graph a projection, and projected gradient descent in optax
is one more line in the loop, compiled with the rest.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import factormax as fm

# %%
# In this portfolio, the weights sum to 1, no asset has more than 0.3, and each of three sectors of
# four assets has at most 0.5. Variables lie in [0, 1], so each is a share of 0.3.


def project(x):
    fg = fm.FactorGraph()
    u = fg.variable_from(x / 0.3)
    fg.add(fm.Linear(u, np.full(12, 0.3), 1.0, 1.0))
    fg.add(fm.Knapsack(u.reshape(3, 4), np.full((3, 4), 0.3), 0.5, axis=1))
    fg.solve(tol=1e-7)
    return 0.3 * u.value


# %%
# Risk minus returns is minimised: a step of the optimizer, then back into the feasible set.

rng = np.random.default_rng(0)
exposure, returns = jnp.asarray(rng.normal(size=(12, 4))), jnp.asarray(rng.normal(size=12))
optimizer = optax.sgd(0.02)


def objective(x):
    return jnp.sum((exposure.T @ x) ** 2) - returns @ x


@jax.jit
def step(x, state):
    updates, state = optimizer.update(jax.grad(objective)(x), state, x)
    return project(optax.apply_updates(x, updates)), state


x = project(jnp.zeros(12))
state = optimizer.init(x)
for _ in range(200):
    x, state = step(x, state)

# %%
# At the optimum, a step and its projection lead back to where they began.

assert abs(project(x - 0.02 * jax.grad(objective)(x)) - x).max() < 1e-4

plt.bar(range(12), x, color=np.repeat(["tab:blue", "tab:orange", "tab:green"], 4))
plt.gca().set(xlabel="asset; the colours are sectors", ylabel="weight")
plt.show()

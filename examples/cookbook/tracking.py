"""
Tracking with births and deaths
===============================

A detector reports points in every frame. Some belong to objects that enter, move and leave; others
are false alarms. Which detections are real, and which one continues which? Each real detection is
entered exactly once, by a birth or by a link from the frame before, and is left exactly once, by a
death or by a link to the next frame. Those are two calls of ``XorOut``.
"""

import matplotlib.pyplot as plt
import numpy as np

import factormax as fm

rng = np.random.default_rng(0)
T, N = 8, 5  # frames, and detections per frame
where = rng.uniform(0, 10, (T, N, 2))  # false alarms, for now
expected = np.arange(T)[:, None] >= [0, 0, 3, T, T]  # real: the third object comes late
s = np.arange(T) / 2
tracks = np.moveaxis([[2 + s, 2 + s], [2 + s, 7 - s], [9 - s, 1 + 0 * s]], -1, 0)
where[expected] = (tracks + rng.normal(0, 0.1, tracks.shape))[expected[:, :3]]

# %%
# A detection is worth 2, a link costs its squared length, and a birth or a death costs 3: so a
# track pays if it is long enough. ``link[t, i, j]`` goes from detection i of frame t to detection j
# of frame t + 1.

fg = fm.FactorGraph()
real = fg.variable_from(np.full((T, N), 2.0), name="real")
distance = np.linalg.norm(where[:-1, :, None] - where[1:, None], axis=3)
link = fg.variable_from(-(distance**2), name="link")
birth = fg.variable_from(np.full((T, N), -3.0), name="birth")
death = fg.variable_from(np.full((T, N), -3.0), name="death")
for t, i in np.ndindex(T, N):
    entered = [birth[t, i]] if t == 0 else [birth[t, i], link[t - 1, :, i]]
    left = [death[t, i]] if t == T - 1 else [death[t, i], link[t, i]]
    fg.add(fm.XorOut([*entered, real[t, i]]))  # the last is on if one of the others is
    fg.add(fm.XorOut([*left, real[t, i]]))
solution = fg.solve_map()

# %%
# The constraints are those of a flow, so the relaxation is tight, and no search is needed:
# ``integral`` says that the answer is a structure, and so the best one.

assert solution.integral
assert (real.value == expected).all()

figure, ax = plt.subplots(figsize=(5, 4))
ax.scatter(*where.reshape(-1, 2).T, c=real.value.ravel(), cmap="Blues", edgecolor="gray")
for t, i, j in np.argwhere(link.value > 0.5):
    ax.plot(*np.stack([where[t, i], where[t + 1, j]], axis=1), color="tab:blue")
ax.set_title("Three tracks among false alarms")
plt.show()

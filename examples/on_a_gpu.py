"""
On a GPU
========

Tensors on a CUDA device are solved there, on the current stream, and so are their gradients.
Nothing else changes: not the graph, not the calls, not the answers. This tutorial runs on the CPU
where there is no GPU, and says so.
"""

# %%
# There is nothing to install except torch with CUDA: the kernels are compiled when they are first
# needed, and kept. `fm.cuda.unavailable()` says why none can run, or returns an empty text.

import time

import matplotlib.pyplot as plt
import torch

import factormax as fm

reason = fm.cuda.unavailable()
device = "cuda" if torch.cuda.is_available() and not reason else "cpu"
print(f"solving on {device}" + (f": {reason}" if reason else ""))

# %%
# A batch of matchings
# --------------------
#
# The scores say where to solve. `u.value` is on the same device, and nothing is copied to the host.


def match(scores):
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    return u, fg.solve()


torch.manual_seed(0)
scores = torch.randn(8, 12, 16, device=device, requires_grad=True)
u, solution = match(scores)
u.value.square().sum().backward()
print("the answer is on", u.value.device, "and the gradient on", scores.grad.device)

# %%
# `solution.engine` says where it was solved. If that is not the device of the scores, because a
# factor of your own has its oracle in Python for example, it also says why; the answer is moved to
# where the scores are.

print("engine:", solution.engine)
ax = fm.plot.marginals(u.value[0])

# %%
# How much is gained
# ------------------
#
# A GPU solves the instances of a batch side by side, so a thousand may take hardly longer than one.
# Here is the time per instance, forward and backward, by the size of the batch. (A call only queues
# work on a GPU: to time it, wait for it.)


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


# sphinx_gallery_thumbnail_number = 2
sizes, times = [1, 4, 16, 64, 256], []
for size in sizes:
    scores = torch.randn(size, 12, 16, device=device, requires_grad=True)
    taken = []
    for _ in range(4):  # the first call compiles
        wait()
        start = time.perf_counter()
        match(scores)[0].value.square().sum().backward()
        wait()
        taken.append(time.perf_counter() - start)
    times.append(1e6 * min(taken[1:]) / size)

_, ax = plt.subplots(figsize=(5, 3), layout="constrained")
ax.loglog(sizes, times, "o-", color="#0072B2")
ax.set_xticks(sizes, map(str, sizes))
ax.minorticks_off()
ax.set(xlabel="instances in the batch", ylabel="µs per instance", title=f"on the {device.upper()}")
ax.spines[["top", "right"]].set_visible(False)

plt.show()

# %%
# What to try next
# ----------------
#
# * `fm.cuda.precompile` compiles the kernels before the first batch arrives.
# * Keep batches large, and let instances have the same graph: that is what runs side by side.
# * Put a `fm.DepTree` or a `fm.Sequence` in place of the matching; both are solved on the device.

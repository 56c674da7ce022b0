"""
Batches and masks
=================

Sentences differ in length, and so do sets of points, graphs and images full of objects. In
factormax, a ragged batch is padding plus a mask: all instances share one graph, are solved in one
call, and what is masked is not there.

This tutorial picks a few words of each of three reviews: those that matter most, preferably side
by side, and no more than a budget that differs from review to review.
"""

# %%
# Scores, padded
# --------------
#
# In a model, the scores would come from a network. Here a small dictionary stands in for it. All
# three reviews are padded to the longest, and the mask says which words are there.

import matplotlib.pyplot as plt
import torch

import factormax as fm

reviews = [
    "the plot is thin but the acting shines".split(),
    "never again".split(),
    "a quiet little gem".split(),
]
matters = {"thin": 1.2, "acting": 0.5, "shines": 1.4, "never": 0.9, "again": 0.8}
matters |= {"quiet": 0.6, "little": 0.3, "gem": 1.5}

longest = max(map(len, reviews))
scores = torch.zeros(len(reviews), longest)
mask = torch.zeros(len(reviews), longest, dtype=torch.bool)
for i, words in enumerate(reviews):
    scores[i, : len(words)] = torch.tensor([matters.get(word, -0.4) for word in words])
    mask[i, : len(words)] = True
scores.requires_grad = True

# %%
# One graph for all
# -----------------
#
# `batch_dims=1` says that the first dimension of all scores counts instances. Nothing else in the
# graph ever mentions it: `u` has the shape `(8,)`, and `u[:-1]` leaves out the last word of every
# review. Parameters and scores of factors may be shared by the batch, like the bonus here, or have
# the batch dimension in front, like the budgets.

bonus = torch.tensor(0.6, requires_grad=True)  # for two neighbours that are both picked

fg = fm.FactorGraph(batch_dims=1)
u = fg.variable_from(scores, mask=mask)
fg.add(fm.Budget(u, budget=torch.tensor([3, 1, 2])))
neighbours = fg.add(fm.Pair(u[:-1], u[1:], bonus))
fg.summary()

# %%
# One call solves all three. Each instance stops when it has converged, and its answer does not
# depend on the rest of the batch.

solution = fg.solve()
print("converged:", solution.converged.tolist())

ax = fm.plot.marginals(u.value, mask=mask, rows=["first", "second", "third"])
ax.figure.set_size_inches(9, 2.8)
ax.set(xticks=[])
for i, words in enumerate(reviews):
    for j, word in enumerate(words):
        colour = "white" if u.value[i, j] > 0.6 else "#555555"
        ax.text(j, i - 0.24, word, ha="center", fontsize=8, color=colour)

# %%
# Grey is padding. "never again" may keep only one word, so its two words share the budget. A mask
# is not a low score: what is masked has the value 0 and the gradient 0, and every factor sees it as
# *off*. So "again" has no neighbour to its right, and its padding earns no bonus.
#
# Gradients
# ---------
#
# They flow to every score that requires them. The bonus is shared, so its gradient is the sum over
# the batch.

picked = (u.value * torch.linspace(1, 2, longest)).sum()  # any function of the answer
picked.backward()
print("gradient is 0 on padding:", bool((scores.grad[~mask] == 0).all()))
print(f"gradient of the shared bonus: {bonus.grad:.2f}")

# %%
# What a mask means for logic
# ---------------------------
#
# Because a masked variable is off, its negation is true. An implication whose premise is masked
# says nothing, and neither does a clause that holds a masked variable's negation. Here "if a then
# b" applies to the first instance only:

logic = fm.FactorGraph(batch_dims=1)
a = logic.variable_from(torch.tensor([[2.0], [2.0]]), mask=torch.tensor([[True], [False]]))
b = logic.variable_from(torch.tensor([[-0.5], [-0.5]]))
logic.add(fm.Imply(a, b))
logic.solve()
print("b:", b.value.flatten().tolist())

plt.show()

# %%
# What to try next
# ----------------
#
# * A score of `-inf` means the same as a mask; you can mix both.
# * Give every review its own bonus, `torch.rand(3, 1)`, and look at `bonus.grad` again.
# * `fm.nn.ContiguousSelection` does much the same as a layer, with `lengths=` in place of the mask.
# * For two leading dimensions, such as reviews and heads, use `batch_dims=2`.

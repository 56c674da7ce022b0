"""
Contiguous selection
====================

Which part of a signal matters? A budget keeps the selection small, and a bonus for neighbours keeps
it in one piece. That is ``ContiguousSelection``, for a rationale, a segment, or an event in a
recording.
"""

import matplotlib.pyplot as plt
import torch

import factormax.nn as fnn

torch.manual_seed(0)
event = (torch.arange(40) >= 14) & (torch.arange(40) < 22)
scores = torch.where(event, 0.5, -0.5) + 0.5 * torch.randn(40)  # a noisy detector

# %%
# Without a bonus the best positions are taken wherever they are. With it, leaving out a position in
# the middle also loses the bonus of two pairs of neighbours.

alone = fnn.ContiguousSelection(8, transition=0.0, learn_transition=False)
joined = fnn.ContiguousSelection(8, transition=1.0, learn_transition=False)
chosen = {"no bonus": alone, "a bonus of 1": joined}
soft = {name: layer(scores) for name, layer in chosen.items()}
hard = {name: layer.predict(scores, kind="perceptron") for name, layer in chosen.items()}


def runs(on):
    return int((on[1:] > on[:-1]).sum() + on[0])


assert runs(hard["no bonus"]) > 2 and runs(hard["a bonus of 1"]) == 1
assert all(on.sum() <= 8 for on in hard.values())
assert (hard["a bonus of 1"].bool() == event).float().mean() > 0.9

# %%
# ``layer(scores)`` returns the marginals, through which a network is trained, and ``predict`` the
# best selection. By default the bonus is a parameter that is learned.

figure, axes = plt.subplots(2, 1, figsize=(8, 3.5), sharex=True, layout="constrained")
for ax, name in zip(axes, chosen, strict=True):
    ax.bar(range(40), soft[name].numpy(), color="tab:blue", label="marginals")
    ax.step(range(40), hard[name].numpy(), where="mid", color="tab:orange", label="best selection")
    ax.plot(scores.numpy(), ".", color="gray", label="scores")
    ax.axvspan(13.5, 21.5, color="tab:green", alpha=0.15)
    ax.set_title(name)
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right")
plt.show()

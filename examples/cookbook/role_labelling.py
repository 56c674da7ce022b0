"""
Role labelling with ragged masks
================================

Who did what to whom? Each span of words gets one role, or none; a core role such as the agent is
taken at most once; and a reference ("who", "which") needs something to refer to. Sentences have
different numbers of spans, and predicates take different roles. All of that raggedness is one mask.
"""

import matplotlib.pyplot as plt
import torch

import factormax as fm

NONE, AGENT, PATIENT, PLACE, REFERENCE = range(5)
lengths = torch.tensor([4, 2, 3])  # spans per sentence, padded to 4
takes_patient = torch.tensor([True, False, True])  # "sleep" takes none
mask = (torch.arange(4) < lengths[:, None])[:, :, None].repeat(1, 1, 5)
mask[:, :, PATIENT] &= takes_patient[:, None]

# %%
# These are scores that a network might give, if it is right more often than not:

gold = torch.zeros(3, 4, 5)
gold[0, range(4), [AGENT, NONE, REFERENCE, PATIENT]] = 1
gold[1, range(2), [AGENT, PLACE]] = gold[2, range(3), [NONE, PATIENT, PLACE]] = 1
torch.manual_seed(2)
scores = (gold + 0.7 * torch.randn(3, 4, 5)).requires_grad_()

# %%
# A factor never sees the batch, nor what is missing. A masked variable is off: a row that is masked
# entirely has no role to get, and ``Or`` with a masked reference holds anyway.

fg = fm.FactorGraph(batch_dims=1)
u = fg.variable_from(scores, mask=mask)
fg.add(fm.Xor(u, axis=1))  # every span: exactly one role, which may be "none"
fg.add(fm.AtMostOne(u[:, [AGENT, PATIENT]], axis=0))  # a core role: at most once
agents = [u[i : i + 1, AGENT] for i in range(4)]
fg.add(fm.Or(~u[:, REFERENCE], *agents))  # every reference: only with an agent

# %%
# For training there is a loss, one number per sentence, with a gradient that needs no
# differentiation through the solver. For prediction, ``decode`` finds the best structure. Every
# span that is there has exactly one role on ("none" counts), so ``decode`` agrees with this loss
# as it is; with ``AtMostOne`` in place of ``Xor``, decode a graph built from ``scores - 0.5``.

fg.loss({u: gold}).mean().backward()
assert (scores.grad[~mask] == 0).all()
assert fg.decode().optimal.all()

# %%
# Here the constraints correct what the scores alone get wrong.

alone = scores.detach().masked_fill(~mask, -9).argmax(dim=2)
there = mask.any(dim=2)
assert (u.value == gold).all() and (alone != gold.argmax(dim=2))[there].any()

figure, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
for ax, roles, n in zip(axes, u.value.detach().numpy(), lengths, strict=True):
    ax.imshow(roles[:n].T, cmap="Blues")
    ax.set_yticks(range(5), ["none", "agent", "patient", "place", "reference"])
plt.show()

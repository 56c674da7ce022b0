"""Three sentences of different lengths in one batch: pick a few words of each, side by side.

Prints how much of each word is picked, how much of each neighbouring pair, and a gradient.
"""

import torch

import factormax as fm

torch.manual_seed(0)
torch.set_printoptions(precision=2, sci_mode=False)

lengths = torch.tensor([6, 3, 4])  # words in each sentence
scores = torch.randn(3, 6, requires_grad=True)  # padded to the longest
mask = torch.arange(6) < lengths[:, None]  # False on padding
bonus = torch.full((5,), 0.5, requires_grad=True)  # for picking two neighbours

fg = fm.FactorGraph(batch_dims=1)  # the first dimension counts instances
u = fg.variable_from(scores, mask=mask)  # so u has shape (6,), and masked words are off
fg.add(fm.Budget(u, budget=torch.tensor([3, 1, 2])))  # the most words of each sentence
neighbours = fg.add(fm.Pair(u[:-1], u[1:], bonus))  # one bonus, shared by all sentences
solution = fg.solve()  # all sentences in one call

print("converged:", solution.converged.tolist(), "after", solution.iterations.tolist(), "passes")
print("words:", u.value, "neighbours:", neighbours.value, sep="\n")

u.value[:, 0].sum().backward()  # how the first words depend on ...
print("gradient by word (0 on padding):", scores.grad, sep="\n")
print("gradient by bonus (summed over sentences):", bonus.grad, sep="\n")

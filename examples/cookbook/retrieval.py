"""
Retrieval of exactly k
======================

A question is answered from exactly two of the documents, and only the answer is ever shown in
training. ``KSubset`` selects: its weights lie between 0 and 1 and sum to k, most of them are
exactly 0, and gradients flow to the scores of the others.
"""

import matplotlib.pyplot as plt
import torch

import factormax.nn as fnn

torch.manual_seed(0)
K, DOCUMENTS, DIM = 2, 12, 16
content = torch.randn(DOCUMENTS, DIM)  # what a document says
topic = torch.nn.functional.normalize(torch.randn(DOCUMENTS, DIM))  # what it is about
relevant = torch.stack([torch.randperm(DOCUMENTS)[:K] for _ in range(64)])
language = torch.linalg.qr(torch.randn(DIM, DIM))[0]  # the retriever must learn it
questions = topic[relevant].sum(dim=1) @ language  # about two topics each
answers = content[relevant].sum(dim=1)

# %%
# The retriever scores all documents, and the reader adds up what it gets.

translate = torch.nn.Linear(DIM, DIM)
select = fnn.KSubset(K, eval_map=True)
optimizer = torch.optim.Adam(translate.parameters(), lr=0.02)
for _ in range(150):
    weights = select(translate(questions) @ topic.T)
    loss = (weights @ content - answers).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %%
# In ``eval()``, ``eval_map=True`` selects the k best documents, and nothing else.

select.eval()
chosen = select(translate(questions) @ topic.T).detach()
assert torch.allclose(weights.sum(dim=1), torch.tensor(2.0)) and (chosen.sum(dim=1) == 2).all()
assert chosen.gather(1, relevant).mean() > 0.95
assert (weights == 0).float().mean() > 0.5

figure, ax = plt.subplots(figsize=(5, 4))
ax.imshow(weights.detach()[:16].numpy(), cmap="Blues")
ax.scatter(relevant[:16], torch.arange(16)[:, None].expand(-1, K), s=6, color="tab:red")
ax.set(xlabel="document", ylabel="question", title="The weights; red: the relevant documents")
plt.show()

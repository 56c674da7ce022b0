"""
Top-k attention in a Hugging Face model
=======================================

Models of the transformers library take their attention by name. A function registered under a new
name gets queries, keys and values, and so ``KSubset`` can replace the softmax: every token attends
to about k others, and the weights of the rest are exactly 0. The model here is tiny and untrained;
with ``from_pretrained(..., attn_implementation="top_k")`` the same name works for a trained one.
"""

import matplotlib.pyplot as plt
import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaModel
from transformers.masking_utils import sdpa_mask

import factormax.nn as fnn

# %%
# The lower the temperature, the closer the selection comes to k ones. Queries and keys of an
# untrained model hardly differ, so the temperature is low here. Count the weights that are not 0 to
# choose yours.

select = fnn.KSubset(4, temperature=0.02)

# %%
# Scores of masked entries are not −1e9 here: the mask goes to the layer. A token that sees fewer
# than k others attends to all of them, so the weights are divided by their sum. A padding token
# sees nothing, and gets zeros.


def top_k_attention(module, query, key, value, attention_mask, scaling, **_):
    groups = query.shape[1] // key.shape[1]  # heads that share keys and values
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.mT * scaling  # (batch, heads, queries, keys)
    weights = select(scores, mask=attention_mask)
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


# %%
# The mask must be registered as well. For a name that it does not know, the library makes no mask
# at all, and every token would see the future without a warning. The mask of "sdpa" is boolean,
# True where a token may look; it is left out (None) where "sdpa" could be told ``is_causal``
# instead. Our function does not know that argument, hence ``allow_is_causal_skip=False``.


def boolean_mask(*args, **options):
    return sdpa_mask(*args, **{**options, "allow_is_causal_skip": False})


AttentionInterface.register("top_k", top_k_attention)
AttentionMaskInterface.register("top_k", boolean_mask)

# %%
# There are two sentences, the second of which is padded on the left. The picture shows the weights
# of one head for each of them: a row per query, a column per key.

torch.manual_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
model = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=2, attn_implementation="top_k"))
tokens = torch.randint(0, 50, (2, 12))
present = torch.arange(12) >= torch.tensor([[0], [3]])
out = model(tokens, attention_mask=present, output_attentions=True)
out.last_hidden_state.square().mean().backward()

weights = out.attentions[0].detach()
assert torch.equal(weights, weights.tril()) and not weights[1, :, :, :3].any()
alone = model(tokens[1:, 3:])  # the padding changes nothing
assert torch.allclose(out.last_hidden_state[1:, 3:], alone.last_hidden_state, atol=1e-4)

plt.imshow(weights[:, 0].transpose(0, 1).flatten(1).numpy(), cmap="Blues")
plt.show()

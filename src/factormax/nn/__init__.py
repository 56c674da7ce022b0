"""Structured layers for torch models: scores in, sparse marginals out, trained like any other.

Every module takes scores `(*batch, ...)`, padded, with `mask=` or `lengths=`, and returns marginals
of the same shape and dtype, which are 0 where masked. `temperature` divides the scores. It can be
learned (`learn_temperature=True`) or given per call, as can counts and budgets. With
`eval_map=True` the layer returns the best structure in `eval()`. `loss` and `predict` ask the same
graph for a loss and for its best structure. To write your own layer, subclass `StructuredLayer` and
define one method.
"""

import factormax._fronts.torch  # noqa: F401  registers the operators that exported layers need
from factormax.nn.base import StructuredLayer
from factormax.nn.contiguous_selection import ContiguousSelection
from factormax.nn.dependency_tree import DependencyTree
from factormax.nn.matching import Matching
from factormax.nn.pairwise_mrf import PairwiseMRF
from factormax.nn.selection import AtMostK, KSubset
from factormax.nn.sequential_alignment import SequentialAlignment

__all__ = [
    "AtMostK",
    "ContiguousSelection",
    "DependencyTree",
    "KSubset",
    "Matching",
    "PairwiseMRF",
    "SequentialAlignment",
    "StructuredLayer",
]

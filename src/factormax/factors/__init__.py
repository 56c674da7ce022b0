"""The factors, one per file."""

from factormax.factors.and_out import AndOut
from factormax.factors.at_least import AtLeast
from factormax.factors.at_most_one import AtMostOne
from factormax.factors.budget import Budget
from factormax.factors.dep_tree import DepTree
from factormax.factors.exactly import Exactly
from factormax.factors.factor import Factor
from factormax.factors.imply import Imply
from factormax.factors.knapsack import Knapsack
from factormax.factors.linear import Linear
from factormax.factors.matching import Matching
from factormax.factors.nand import Nand
from factormax.factors.or_ import Or
from factormax.factors.or_out import OrOut
from factormax.factors.pair import Pair
from factormax.factors.sequence import Sequence
from factormax.factors.sequence_budget import SequenceBudget
from factormax.factors.table import Table
from factormax.factors.xor import Xor
from factormax.factors.xor_out import XorOut

__all__ = [
    "AndOut",
    "AtLeast",
    "AtMostOne",
    "Budget",
    "DepTree",
    "Exactly",
    "Factor",
    "Imply",
    "Knapsack",
    "Linear",
    "Matching",
    "Nand",
    "Or",
    "OrOut",
    "Pair",
    "Sequence",
    "SequenceBudget",
    "Table",
    "Xor",
    "XorOut",
]

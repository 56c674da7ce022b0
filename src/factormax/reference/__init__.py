"""The library in plain NumPy: slow, dense, one instance, and meant to be read.

What defines a solution and its gradient is implemented here a second time, and tests
compare it with the C++ core. What only makes the core fast has no counterpart: L-BFGS,
flows, links, the linear program. The mathematics, and the list of what is not here, are
in `docs/math.md`; its equation numbers are cited where they are used.

| module     | what it shows                                                        |
|------------|----------------------------------------------------------------------|
| `rows`     | a factor graph as linear rows with bounded multipliers               |
| `box_row`  | one row in a box: the local solution of almost every factor          |
| `or_out`   | the local solution of `OrOut`, in three branches                     |
| `compact`  | the dual with one scalar per row, solved to the last digit           |
| `backward` | gradients from one small system                                      |
| `admm`     | the paper's algorithm, corrected, from the local solutions           |

`structures`, `active_set` and `tree_cuts` show one structured factor: all its structures, the
solution made from them, and sets of words that lack a head.
"""

from factormax.reference.admm import AdmmResult, admm
from factormax.reference.backward import Face, Gradients, face, jacobian, vjp
from factormax.reference.box_row import box_band, box_row, box_row_vjp
from factormax.reference.compact import (
    dual_gradient,
    dual_value,
    farkas,
    marginals,
    objective,
    pair_values,
    projected_gradient,
    solve,
)
from factormax.reference.or_out import or_out, or_out_vjp
from factormax.reference.rows import (
    Block,
    Compiled,
    DenseProblem,
    Infeasible,
    Pairs,
    from_compiled,
)

__all__ = [
    "AdmmResult",
    "Block",
    "Compiled",
    "DenseProblem",
    "Face",
    "Gradients",
    "Infeasible",
    "Pairs",
    "admm",
    "box_band",
    "box_row",
    "box_row_vjp",
    "dual_gradient",
    "dual_value",
    "face",
    "farkas",
    "from_compiled",
    "jacobian",
    "marginals",
    "objective",
    "or_out",
    "or_out_vjp",
    "pair_values",
    "projected_gradient",
    "solve",
    "vjp",
]

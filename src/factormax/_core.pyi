"""The native core of factormax."""

from collections.abc import Sequence
import enum
from typing import Annotated, Any, overload

import numpy
from numpy.typing import NDArray


class RowKind(enum.IntEnum):
    absent = 0

    inequality = 1

    equality = 2

class BlockKind(enum.IntEnum):
    row = 0
    """Rows, each for itself."""

    or_out = 1
    """The rows of OrOut, solved together."""

    band = 2
    """Two bounds of one sum."""

class OracleKind(enum.IntEnum):
    tree = 0

    projective_tree = 1

    matching = 2

    sequence = 3

    sequence_budget = 4

    table = 5

    callback = 6

class Status(enum.IntEnum):
    converged = 0

    max_iter = 1

    infeasible = 2

    interrupted = 3

    stalled = 4

    not_proved = 5

class Method(enum.IntEnum):
    compact = 0

    admm = 1

    proximal = 2

    ad3 = 3

class ByRows(enum.IntEnum):
    never = 0

    dense = 1
    """Where it is faster."""

    always = 2
    """Where it can be done."""

    listed = 3
    """The structures are asked for."""

class Side(enum.IntEnum):
    lower = -1

    interior = 0

    upper = 1

    absent = 2

    tied = 3

class CallbackFault(enum.IntEnum):
    none = 0

    raised = 1

    not_binary = 2

    forbidden = 3

    not_finite = 4

class Numbers(enum.Enum):
    """What a list of scores holds besides finite numbers."""

    finite = 0

    minus_infinity = 1

    bad = 2
    """NaN or +inf."""

class Inputs:
    """The numbers of a batch of instances of a model, checked."""

    def __init__(self, model: Model, eta_u: object, eta_v: object, params: Sequence[object], mask: Annotated[NDArray[numpy.bool_], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, held: Annotated[NDArray[numpy.int8], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, shared: object | None = None, runs: Sequence[int] = [], heat: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None) -> None:
        """
        shared: the factor scores that all instances share, (1, S), if eta_v holds only the others.
        runs: how many scores are shared, not shared, shared, and so on.
        heat: what divides the shared scores of each instance, (B, 1); None: nothing does.
        """

    @property
    def batch(self) -> int: ...

    @property
    def mask(self) -> NDArray[numpy.bool_] | None:
        """
        Which variables are neither masked nor of a score of -inf; None if all are.
        """

    @property
    def oracle_params(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None, None), writable=False)]:
        """
        The parameter of each structured factor, (1 | B, S); 0 where it has none.
        """

    @property
    def needs_a_look(self) -> bool:
        """
        Whether a score may have to be refused: NaN, +inf, or -inf of a factor.
        """

    @property
    def scores(self) -> Numbers: ...

    @property
    def factor_scores(self) -> Numbers: ...

    @property
    def rows(self) -> tuple[NDArray[numpy.floating], NDArray[numpy.floating]]:
        """The coefficients and the bounds of the rows, each (1 | B, ...)."""

    def workspace_bytes(self, method: Method) -> int:
        """Bytes of working memory that one thread uses."""

class Settings:
    """How to solve."""

    def __init__(self, *, method: Method = Method.compact, tol: float = 1e-06, max_iter: int = 1000, max_inner_iter: int = 100000, step_size: float = 1.0, by_rows: ByRows = ByRows.dense, seconds: float = float('inf')) -> None: ...

class Structures:
    """The structures of a batch: see FoundStructures of the core."""

    def __init__(self, *, count: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], prob: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], on: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], features: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], dense: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], num_cuts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cuts: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    @property
    def count(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]: ...

    @property
    def prob(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,), writable=False)]: ...

    @property
    def on(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]: ...

    @property
    def features(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]: ...

    @property
    def dense(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,), writable=False)]: ...

    @property
    def num_cuts(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]: ...

    @property
    def cuts(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]: ...

class Solution:
    """The answers of a batch; it owns them."""

    @overload
    def __init__(self, *, batch: int, variables: int, scores: int, dual: int, wide: bool) -> None: ...

    @overload
    def __init__(self, inputs: Inputs) -> None:
        """With room for the answers to these inputs."""

    @property
    def mu(self) -> NDArray[numpy.floating]: ...

    @property
    def mu_v(self) -> NDArray[numpy.floating]: ...

    @property
    def tau(self) -> NDArray[numpy.floating]: ...

    @property
    def var_side(self) -> Annotated[NDArray[numpy.int8], dict(shape=(None, None))]: ...

    @property
    def row_side(self) -> Annotated[NDArray[numpy.int8], dict(shape=(None, None))]: ...

    @property
    def objective(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]: ...

    @property
    def primal_residual(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]: ...

    @property
    def dual_residual(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]: ...

    @property
    def upper_bound(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]: ...

    @property
    def iterations(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...

    @property
    def status(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...

    @property
    def all_converged(self) -> bool: ...

    def report(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None, None))]:
        """
        The residuals, the iterations, the status and the oracle calls, (5, B).
        """

    def sides(self) -> Annotated[NDArray[numpy.int8], dict(shape=(None, None))]:
        """The sides of variables and of rows, and the status, (B, n + dual + 1)."""

    def take_sides(self, sides: Annotated[NDArray[numpy.int8], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None:
        """Takes what `sides` gave."""

    @property
    def oracle_calls(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...

    @property
    def integral(self) -> Annotated[NDArray[numpy.bool_], dict(shape=(None,))]: ...

    @property
    def structures(self) -> Structures: ...

    @structures.setter
    def structures(self, arg: Structures, /) -> None: ...

def solve(inputs: Inputs, settings: Settings, warm: object | None, oracles: object | None, out: Solution) -> tuple[int, int]:
    """
    Solves a batch of instances. `oracles`: None, or for each structured factor None, a
    function, or the address of a C function and its data. Returns the structured factor whose
    oracle was wrong, and how (`CallbackFault`).
    """

def vjp(inputs: Inputs, solution: Solution, grad_mu: object | None, grad_mu_v: object | None, grad_prob: object | None, summed: bool = False) -> tuple[NDArray[numpy.floating], Any, NDArray[numpy.float64], float]:
    """
    The gradients of eta_u and eta_v; the residual of each instance, and the worst.
    summed: instead of that of eta_v, return two: of the factor scores that the instances share,
    summed over them, (1, S), and of the others, (B, ...).
    """

class Row:
    """One row of a factor over literals l: s . l <= b, or s . l = b."""

    def __init__(self, coefs: Sequence[float], bound: float, *, equality: bool = False, literals: Sequence[int] | None = None, coef_param: int = -1, bound_param: int = -1) -> None:
        """
        `literals`: which ones the row is about, by default all. `coef_param`: the number of a
        parameter per literal, which multiplies the coefficients one by one. `bound_param`: the
        number of a parameter per factor, which multiplies the bound.
        """

class Rule:
    """How a kind of factor becomes rows."""

    def __init__(self, name: str, block: BlockKind, size: int, per_literal: Sequence[int], rows: Sequence[Row], param_names: Sequence[str]) -> None: ...

class Part:
    """Literals of k factors: a strided view of the variables, or a list."""

    def __init__(self, negated: bool, offset: int, outer: Sequence[int], outer_strides: Sequence[int], inner: Sequence[int], inner_strides: Sequence[int]) -> None: ...

    @staticmethod
    def listed(literals: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> Part:
        """The literals themselves, (k, d): 2 * variable, and 1 more if negated."""

class Group:
    """Factors of one kind."""

    @staticmethod
    def rows(rule: Rule, parts: Sequence[Part]) -> Group: ...

    @staticmethod
    def pairs(parts: Sequence[Part]) -> Group: ...

    @staticmethod
    def structured(name: str, oracle: OracleKind, shape: Sequence[int], num_scores: int, slots: int, link: int, has_param: bool, parts: Sequence[Part]) -> Group: ...

class Structured:
    """A structured factor of a model."""

    @property
    def name(self) -> str: ...

    @property
    def factor(self) -> int:
        """Its number among the factors of the graph."""

    @property
    def number(self) -> int:
        """Which of the factors of one call it is."""

    @property
    def kind(self) -> OracleKind: ...

    @property
    def linked(self) -> bool:
        """Whether it shares variables with an earlier one."""

    @property
    def shape(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]: ...

    @property
    def variables(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]: ...

    @property
    def score_begin(self) -> int:
        """Where its scores begin in eta_v."""

    @property
    def num_scores(self) -> int: ...

    @property
    def slots(self) -> int:
        """How long a list of the variables that are on is."""

class Model:
    """A factor graph without its numbers, compiled and checked."""

    def __init__(self, num_variables: int, groups: Sequence[Group]) -> None: ...

    @property
    def num_variables(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def num_entries(self) -> int: ...

    @property
    def num_pairs(self) -> int: ...

    @property
    def num_scores(self) -> int: ...

    @property
    def num_dual(self) -> int: ...

    @property
    def num_structured(self) -> int: ...

    @property
    def has_coef_params(self) -> bool:
        """Whether coefficients of rows depend on parameters."""

    @property
    def bounded(self) -> Model:
        """The same with a row for each variable that a solve may hold at 0 or 1."""

    @property
    def row_ptr(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]: ...

    @property
    def col(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]: ...

    @property
    def row_kind(self) -> Annotated[NDArray[numpy.int8], dict(shape=(None,), writable=False)]: ...

    @property
    def block_ptr(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]: ...

    @property
    def block_kind(self) -> Annotated[NDArray[numpy.int8], dict(shape=(None,), writable=False)]: ...

    @property
    def pairs(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None, None), writable=False)]: ...

    @property
    def pair_negated(self) -> Annotated[NDArray[numpy.bool_], dict(shape=(None, None), writable=False)]: ...

    @property
    def structured(self) -> list[Structured]: ...

    def place_of_block(self, block: int) -> tuple[int, int]:
        """The factor of the graph that a block of rows is, and which of its k."""

class LocalSearch:
    """A local search over units with states."""

    def __init__(self, state_ptr: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], score: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], allowed: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], scope_ptr: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], scope: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], table_ptr: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], table: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], row_ptr: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], row_state: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], coef: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], rhs: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], equal: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def run(self, x: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], movable: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], work: int, seed: int) -> bool:
        """Improve the states x in place; returns whether all rows hold."""

    def conditional(self, x: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """The score of each state given the states x of all other units."""

def best_structures(kind: OracleKind, shape: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], eta_u: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)], eta_v: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)], param: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.uint8], dict(shape=(None,))]]:
    """The MAP oracle of a structured factor, for each row of scores."""

class NativePlan:
    """
    A graph of rows and pairs that is solved from flat arrays. The functions take those of a
    primitive of JAX and those to write into; False if Python must answer.
    """

    def __init__(self, model: Model, settings: Settings, params: Sequence[object], masked: bool, runs: Sequence[int] = [], heated: bool = False) -> None:
        """
        runs: how many factor scores are shared, not shared, and so on; if there are any, the shared
        ones are an array of their own, after the mask, and what divides them, if `heated`, is another.
        """

    def solve(self, given: list[object], wanted: list[object]) -> bool: ...

    def apply_jacobian(self, given: list[object], wanted: list[object]) -> bool: ...

def ffi_version() -> str:
    """
    The jaxlib whose headers the handlers were compiled with; empty: there are none.
    """

def ffi_handlers() -> dict[str, object]:
    """What XLA calls for each primitive, as capsules."""

def ffi_set_python(function: object) -> None:
    """
    What is called for graphs that are not kept: with the name of the primitive, the text, the arrays
    and those to write into.
    """

def ffi_keep(text: str, plan: NativePlan) -> None:
    """Solves the graph that has this text without Python from now on."""

def set_num_threads(threads: int) -> None: ...

def get_num_threads() -> int: ...

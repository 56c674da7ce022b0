"""Structured factors among others: against an exact QP over all structures, and each other."""

from dataclasses import dataclass, field

import numpy as np
import oracle
import pytest
from factors.test_dep_tree import tree
from factors.test_factor import Listed
from factors.test_matching import matching
from factors.test_sequence import sequence
from factors.test_sequence_budget import budgeted
from factors.test_table import table
from graphs import make_factor
from oracle import Problem, Structured, Term
from structured_contract import SAME, Case

import factormax as fm
from factormax._core import ByRows
from factormax._engines import cpu

TIGHT = {"tol": 1e-12, "max_iter": 5000}
EXACT = 1e-9


@dataclass(eq=False)
class Mixture:
    """Structured factors and others over n variables, with random scores."""

    n: int
    structured: list[tuple[Case, np.ndarray]]  # each over these variables
    terms: tuple[Term, ...] = ()
    eta: np.ndarray = field(default_factory=lambda: np.zeros(0))
    own: list[dict] = field(default_factory=list)

    def drawn(self, rng, scale=1.0) -> "Mixture":
        own = [case.draw(rng, scale)[1] for case, _ in self.structured]
        terms = tuple(
            Term(t.kind, t.vars, t.neg, t.params, scale * rng.normal()) if t.kind == "Pair" else t
            for t in self.terms
        )
        return Mixture(self.n, self.structured, terms, scale * rng.normal(size=self.n), own)

    def moved(self, direction: "Mixture", t: float) -> "Mixture":
        own = [
            {k: a[k] + t * b[k] for k in a} for a, b in zip(self.own, direction.own, strict=True)
        ]
        terms = tuple(
            Term(a.kind, a.vars, a.neg, a.params, a.scores + t * b.scores)
            for a, b in zip(self.terms, direction.terms, strict=True)
        )
        return Mixture(self.n, self.structured, terms, self.eta + t * direction.eta, own)

    def problem(self) -> Problem:
        """As the oracle sees it."""
        structured = [
            Structured(index.reshape(-1), case.M, case.N, case.flat(own))
            for (case, index), own in zip(self.structured, self.own, strict=True)
        ]
        return Problem(self.eta, (*self.terms, *structured))

    def solved(self, **options) -> "Answer":
        return self.built().solve(**options)

    def built(self, eta=None, own=None, batch_dims=0) -> "Answer":
        fg = fm.FactorGraph(batch_dims=batch_dims)
        u = fg.variable_from(self.eta if eta is None else eta)
        own = self.own if own is None else own
        structured = [
            fg.add(case.make(u[index], **scores))
            for (case, index), scores in zip(self.structured, own, strict=True)
        ]
        others = [fg.add(make_factor(t, u)) for t in self.terms]
        pairs = [f for f, t in zip(others, self.terms, strict=True) if t.kind == "Pair"]
        return Answer(self, fg, u, structured, pairs)


@dataclass(eq=False)
class Answer:
    mixture: Mixture
    fg: fm.FactorGraph
    u: object
    structured: list
    pairs: list
    solution: fm.Solution | None = None

    def solve(self, **options) -> "Answer":
        self.solution = self.fg.solve(**options)
        return self

    def values(self) -> np.ndarray:
        """The marginals of everything that has scores (of a structured factor the first), flat."""
        factors = [f for f in [*self.structured, *self.pairs] if f._score_parts]
        return np.concatenate([self.u.value, *(np.ravel(f.value) for f in factors)])

    def slope(self, grad: np.ndarray, direction: Mixture) -> float:
        """Of `grad · values()` along a direction, by `vjp`."""
        grads, start = {self.u: grad[: self.mixture.n]}, self.mixture.n
        for f in [f for f in [*self.structured, *self.pairs] if f._score_parts]:
            shape = np.shape(f.value)
            stop = start + int(np.prod(shape))
            grads[f] = grad[start:stop].reshape(shape)
            start = stop
        out = self.solution.vjp(grads)
        total = np.sum(out[self.u] * direction.eta)
        scores = [t.scores for t in direction.terms if t.kind == "Pair"]
        total += sum(out[f] * s for f, s in zip(self.pairs, scores, strict=True))
        for f, own in zip(self.structured, direction.own, strict=True):
            for i, (name, scores) in enumerate(own.items()):
                total += np.sum(out[f if i == 0 else (f, name)] * scores)
        return float(total)


def exact_values(mixture: Mixture) -> np.ndarray:
    """`Answer.values` by the oracle."""
    exact = oracle.solve(mixture.problem())
    parts = [exact.mu]
    for (case, _), mu_v in zip(mixture.structured, exact.mu_v, strict=True):
        if case.scores:
            parts.append(mu_v[: int(np.prod(next(iter(case.scores.values()))))])
    return np.concatenate([*parts, exact.mu_pair])


def cells(*shape) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape)


def tree_and_budgets():
    arcs = cells(4, 4)
    heads = [Term("Budget", arcs[:, h], params={"budget": 1}) for h in range(4)]
    return Mixture(16, [(tree(4), arcs)], tuple(heads))


def tree_budgets_and_logic():
    arcs = cells(3, 3)
    terms = (
        Term("Budget", arcs[:, 1], params={"budget": 1}),
        Term("Imply", (arcs[0, 1], arcs[2, 1])),
        Term("OrOut", (arcs[1, 0], arcs[2, 0], 9)),
        Term("Nand", (arcs[0, 0], 9, 10)),
        Term("AtMostOne", (10, 11), (True, False)),
        Term("Knapsack", (9, 10, 11, arcs[1, 1]), params={"costs": [1, 2, 1, 1.5], "budget": 2.0}),
    )
    return Mixture(12, [(tree(3, single_root=True), arcs)], terms)


def sequence_and_at_most_one():
    steps = cells(4, 3)
    terms = tuple(Term("AtMostOne", steps[:, s]) for s in (1, 2))
    return Mixture(12, [(sequence(4, 3, False, True, True), steps)], terms)


def matching_and_budget():
    pairs = cells(3, 4)
    terms = (
        Term("Budget", np.diag(pairs), params={"budget": 1}),
        Term("Exactly", (pairs[0, 0], pairs[1, 1], pairs[2, 3]), params={"count": 1}),
    )
    return Mixture(12, [(matching(3, 4), pairs)], terms)


def structured_and_pairs():
    steps = cells(3, 2)
    terms = (
        Term("Pair", (steps[0, 0], steps[2, 1]), scores=1.0),
        Term("Pair", (steps[1, 0], 6), scores=1.0),
        Term("Pair", (6, 7), scores=1.0),
    )
    return Mixture(8, [(sequence(3, 2, True), steps)], terms)


def selection_and_logic():
    return Mixture(
        7,
        [(budgeted(6, 3), cells(6))],
        (
            Term("Or", (0, 1, 6)),
            Term("XorOut", (2, 3, 6)),
            Term("AtLeast", (4, 5), params={"count": 1}),
        ),
    )


def grid_of_chains():
    """Two structured factors on every variable: the second is linked."""
    grid = cells(3, 3, 2)
    rows = [(sequence(3, 2), grid[i]) for i in range(3)]
    return Mixture(18, rows + [(sequence(3, 2, True), grid[:, j]) for j in range(3)])


def three_on_a_variable():
    square = cells(3, 3)
    return Mixture(
        10,
        [
            (tree(3), square),
            (matching(3, 3), square),
            (budgeted(3, 2), np.diag(square)),
            (table(3, 2), np.array([*square[0], 1 + 3, 9])),
        ],
        (Term("Budget", square[:, 0], params={"budget": 2}),),
    )


def listed(case: Case) -> Case:
    """The same structures, by an oracle of one's own."""
    return Case(
        case.shape,
        lambda u, **own: Listed(u, next(iter(own.values()), None), M=case.M, N=case.N),
        case.M,
        case.N,
        case.scores,
        f"Listed {case.name}",
    )


def custom_and_builtin():
    """The oracle in Python is a hub; then a link over a tree."""
    arcs = cells(3, 3)
    return Mixture(
        9 + 4,
        [
            (listed(table(2, 2)), np.arange(9, 13)),
            (tree(3), arcs),
            (listed(budgeted(3, 2)), arcs[:, 0]),
        ],
        (Term("Budget", arcs[:, 1], params={"budget": 1}), Term("Imply", (arcs[0, 1], 9))),
    )


MIXTURES = {
    f.__name__: f()
    for f in (
        tree_and_budgets,
        tree_budgets_and_logic,
        sequence_and_at_most_one,
        matching_and_budget,
        structured_and_pairs,
        selection_and_logic,
        grid_of_chains,
        three_on_a_variable,
        custom_and_builtin,
    )
}
LINKED = ("grid_of_chains", "three_on_a_variable", "custom_and_builtin")


# Exact --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("name", MIXTURES)
def test_values(name, scale):
    rng = np.random.default_rng(0)
    for _ in range(3):
        mixture = MIXTURES[name].drawn(rng, scale)
        exact = oracle.solve(mixture.problem())
        tight = mixture.solved(**TIGHT)
        assert tight.solution.converged, tight.solution
        np.testing.assert_allclose(tight.u.value, exact.mu, rtol=0, atol=EXACT)
        np.testing.assert_allclose(tight.values(), exact_values(mixture), rtol=0, atol=10 * EXACT)
        assert abs(tight.solution.objective - exact.objective) <= 10 * EXACT * max(1, scale)
        plain = mixture.solved()
        assert plain.solution.converged
        np.testing.assert_allclose(plain.u.value, exact.mu, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MIXTURES)
def test_ties(name):
    """The marginals of the variables are unique, whatever else is not."""
    rng = np.random.default_rng(1)
    for values in ([0.0], [1.0], [-1.0, 0.0, 1.0]):
        mixture = MIXTURES[name].drawn(rng)
        mixture.eta = rng.choice(values, mixture.n)
        mixture.own = [
            {k: rng.choice(values, np.shape(v)) for k, v in o.items()} for o in mixture.own
        ]
        exact = oracle.solve(mixture.problem())
        tight = mixture.solved(**TIGHT)
        np.testing.assert_allclose(tight.u.value, exact.mu, rtol=0, atol=1e-8)
        assert abs(tight.solution.objective - exact.objective) <= 1e-8


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("name", MIXTURES)
def test_gradients(name, scale):
    """Of all kinds of values, in all kinds of scores, against differences of the exact ones."""
    rng = np.random.default_rng(2)
    compared = 0
    for _ in range(5):
        mixture, direction = (MIXTURES[name].drawn(rng, s) for s in (scale, 1.0))
        answer = mixture.solved(**TIGHT)
        grad = rng.normal(size=answer.values().shape)
        slopes = [
            np.subtract(*(grad @ exact_values(mixture.moved(direction, t)) for t in (h, -h)))
            / (2 * h)
            for h in (1e-4, 1e-5)
        ]
        if abs(slopes[0] - slopes[1]) > SAME * max(1, abs(slopes[0])):
            continue
        compared += 1
        ours = answer.slope(grad, direction)
        assert abs(ours - slopes[1]) <= 1e-6 * max(1, abs(slopes[1]))
    assert compared >= 2


@pytest.mark.parametrize("name", MIXTURES)
def test_admm_agrees(name):
    rng = np.random.default_rng(3)
    for scale in (0.3, 1.0):
        mixture = MIXTURES[name].drawn(rng, scale)
        auto = mixture.solved(**TIGHT)
        admm = mixture.solved(method="admm", tol=1e-10, max_iter=200_000, step_size=2.0)
        assert admm.solution.converged
        np.testing.assert_allclose(admm.u.value, auto.u.value, rtol=0, atol=1e-7)
        np.testing.assert_allclose(admm.values(), auto.values(), rtol=0, atol=1e-6)
        grad, direction = rng.normal(size=auto.values().shape), MIXTURES[name].drawn(rng)
        assert abs(admm.slope(grad, direction) - auto.slope(grad, direction)) <= 1e-5


@pytest.mark.parametrize("name", MIXTURES)
def test_a_batch_is_a_loop(name):
    """To the last bit, whatever the number of threads."""
    rng = np.random.default_rng(4)
    many = [MIXTURES[name].drawn(rng) for _ in range(7)]
    eta = np.stack([m.eta for m in many])
    own = [{k: np.stack([m.own[f][k] for m in many]) for k in o} for f, o in enumerate(many[0].own)]
    for m in many[1:]:
        m.terms = many[0].terms
    grad = rng.normal(size=eta.shape)
    before, found = fm.get_num_threads(), []
    for threads in (1, 2):
        fm.set_num_threads(threads)
        try:
            batch = many[0].built(eta, own, batch_dims=1).solve()
            found.append((batch.u.value, batch.solution.vjp({batch.u: grad})[batch.u]))
        finally:
            fm.set_num_threads(before)
        np.testing.assert_array_equal(found[0], found[-1])
    for row, m in enumerate(many):
        alone = m.solved()
        np.testing.assert_array_equal(batch.u.value[row], alone.u.value)
        assert batch.solution.objective[row] == alone.solution.objective
        expected = alone.solution.vjp({alone.u: grad[row]})[alone.u]
        np.testing.assert_array_equal(found[0][1][row], expected)
        for together, single in zip(batch.structured, alone.structured, strict=True):
            k = single.num_structures
            assert together.num_structures[row] == k
            np.testing.assert_array_equal(together.probs[row, :k], single.probs)


@pytest.mark.parametrize("name", MIXTURES)
def test_warm_started(name):
    """From the solution of nearby scores, and of the same."""
    rng = np.random.default_rng(5)
    mixture = MIXTURES[name].drawn(rng)
    near = mixture.moved(MIXTURES[name].drawn(rng), 0.01)
    cold = mixture.solved(**TIGHT)
    for start in (near, mixture):
        before = start.solved(**TIGHT).solution
        warm = mixture.solved(**TIGHT, warm_start=before)
        assert warm.solution.converged
        np.testing.assert_allclose(warm.u.value, cold.u.value, rtol=0, atol=1e-9)
        grad, direction = rng.normal(size=cold.values().shape), MIXTURES[name].drawn(rng)
        assert abs(warm.slope(grad, direction) - cold.slope(grad, direction)) <= 1e-6


@pytest.mark.parametrize("name", MIXTURES)
def test_float32(name):
    mixture = MIXTURES[name].drawn(np.random.default_rng(6))
    exact = oracle.solve(mixture.problem())
    own = [{k: np.asarray(v, np.float32) for k, v in o.items()} for o in mixture.own]
    answer = mixture.built(mixture.eta.astype(np.float32), own).solve()
    assert answer.solution.converged and answer.u.value.dtype == np.float32
    np.testing.assert_allclose(answer.u.value, exact.mu, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", MIXTURES)
def test_forbidden_variables(name):
    """−inf in the scores, where something remains possible."""
    rng = np.random.default_rng(7)
    found = 0
    for _ in range(24):
        mixture = MIXTURES[name].drawn(rng)
        mixture.eta[rng.random(mixture.n) < 0.1] = -np.inf
        if not np.isneginf(mixture.eta).any():
            continue
        gone = np.isneginf(mixture.eta)
        if any(
            gone[row].all()
            for _, index in mixture.structured
            for row in index.reshape(-1, index.shape[-1])
        ):
            continue  # an absent row is another matter
        if any(
            c.name.startswith(("Table", "Listed")) and gone[i].any() for c, i in mixture.structured
        ):
            continue
        answer = mixture.solved(**TIGHT, on_failure="ignore")
        try:
            exact = oracle.solve(mixture.problem())
        except oracle.Infeasible:
            assert answer.solution.status is fm.Status.INFEASIBLE
            continue
        found += 1
        assert answer.solution.converged
        np.testing.assert_allclose(answer.u.value, exact.mu, rtol=0, atol=EXACT)
    assert found >= 3


def test_structures_of_several_factors():
    """Each factor has its own; together they agree with the variables."""
    rng = np.random.default_rng(8)
    for name in LINKED:
        answer = MIXTURES[name].drawn(rng).solved(**TIGHT)
        for factor, (case, index) in zip(answer.structured, answer.mixture.structured, strict=True):
            probs = factor.probs
            assert abs(probs.sum() - 1) <= 1e-12 and (np.diff(probs) <= 0).all()
            mean = np.tensordot(probs, factor.structures, 1)
            np.testing.assert_allclose(
                mean.reshape(-1), answer.u.value[index.reshape(-1)], rtol=0, atol=1e-8
            )
            case.columns(factor.structures)


@pytest.mark.parametrize("name", MIXTURES)
def test_gradient_of_the_probs(name):
    """Where the supports stand still."""
    rng = np.random.default_rng(9)
    compared = 0
    for _ in range(16):
        mixture, direction = MIXTURES[name].drawn(rng), MIXTURES[name].drawn(rng)
        case = mixture.structured[0][0]
        weight = rng.normal(size=case.M.shape[1])
        answer = mixture.solved(**TIGHT)
        factor = answer.structured[0]
        columns = case.columns(factor.structures)
        slopes, same = [], True
        for h in (1e-4, 1e-5):
            ends = []
            for t in (h, -h):
                there = mixture.moved(direction, t).solved(**TIGHT).structured[0]
                found = case.columns(there.structures)
                same &= set(found) == set(columns)
                ends.append(there.probs @ weight[found])
            slopes.append((ends[0] - ends[1]) / (2 * h))
        if not same or abs(slopes[0] - slopes[1]) > SAME:
            continue
        compared += 1
        out = answer.solution.vjp(probs={factor: weight[columns]})
        ours = np.sum(out[answer.u] * direction.eta)
        scores = [t.scores for t in direction.terms if t.kind == "Pair"]
        ours += sum(out[f] * s for f, s in zip(answer.pairs, scores, strict=True))
        for f, own in zip(answer.structured, direction.own, strict=True):
            for i, (name_of, value) in enumerate(own.items()):
                ours += np.sum(out[f if i == 0 else (f, name_of)] * value)
        assert abs(ours - slopes[1]) <= 1e-6
    assert compared >= 1


# Infeasible ---------------------------------------------------------------------------------------


def test_infeasible_together():
    """A tree where no word may have a dependent, nor hang from the root, but for one."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.random.default_rng(10).normal(size=(2, 4, 4)))
    fg.add(fm.DepTree(u))
    fg.add(fm.Budget(u, np.array([16, 3])))  # four arcs are needed
    solution = fg.solve(on_failure="ignore")
    assert list(solution.status) == [fm.Status.CONVERGED, fm.Status.INFEASIBLE]
    assert np.isnan(u.value[1]).all() and np.isfinite(u.value[0]).all()


def test_infeasible_chains():
    """Two factors over the same variables that have no structure in common."""
    far = -np.inf
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros((3, 2)))
    fg.add(fm.Sequence(u, np.array([[0, far], [far, 0.0]])))  # never changes
    fg.add(fm.Sequence(u, np.array([[far, 0], [0.0, far]])))  # always does
    solution = fg.solve(on_failure="ignore")
    # The relaxation has both: half and half.
    assert solution.status is fm.Status.CONVERGED
    np.testing.assert_allclose(u.value, 0.5, atol=1e-6)
    fg.add(fm.Sequence(u, np.zeros((2, 2)), initial=np.array([0, far])))  # and begins in state 0
    assert fg.solve(on_failure="ignore").status is fm.Status.INFEASIBLE


# The same in other words --------------------------------------------------------------------------


def values_and_gradient(scores, grad, *factors, **options):
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    for factor in factors:
        for one in np.atleast_1d(np.array(factor(u), dtype=object)):
            fg.add(one)
    solution = fg.solve(**(options or TIGHT))
    return u.value, solution.vjp({u: grad})[u]


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_a_sequence_is_a_chain_of_tables(scale):
    rng = np.random.default_rng(11)
    scores, transitions = scale * rng.normal(size=(6, 4)), scale * rng.normal(size=(5, 4, 4))
    grad = rng.normal(size=scores.shape)
    whole = values_and_gradient(scores, grad, lambda u: fm.Sequence(u, transitions))
    chain = values_and_gradient(
        scores, grad, lambda u: [fm.Table(u[t : t + 2], transitions[t]) for t in range(5)]
    )
    np.testing.assert_allclose(chain[0], whole[0], rtol=0, atol=1e-8)
    np.testing.assert_allclose(chain[1], whole[1], rtol=0, atol=1e-6)


def test_the_values_of_a_chain_of_tables_are_the_transitions():
    rng = np.random.default_rng(12)
    scores, transitions = rng.normal(size=(5, 3)), rng.normal(size=(4, 3, 3))
    fg = fm.FactorGraph()
    u, v = fg.variable_from(scores), fg.variable_from(scores)
    whole = fg.add(fm.Sequence(u, transitions))
    chain = [fg.add(fm.Table(v[t : t + 2], transitions[t])) for t in range(4)]
    fg.solve(**TIGHT)
    np.testing.assert_allclose([f.value for f in chain], whole.value, rtol=0, atol=1e-8)


@pytest.mark.parametrize("n", [5, 10, 20])
@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_budgets_that_cannot_bind(n, scale):
    rng = np.random.default_rng(13)
    scores, grad = scale * rng.normal(size=(n, n)), rng.normal(size=(n, n))
    for projective in (False, True):
        alone = values_and_gradient(scores, grad, lambda u, p=projective: fm.DepTree(u, p))
        both = values_and_gradient(
            scores,
            grad,
            lambda u, p=projective: fm.DepTree(u, p),
            lambda u: fm.Budget(u, n, axis=0),
            lambda u: fm.Or(u, axis=1),
        )
        np.testing.assert_allclose(both[0], alone[0], rtol=0, atol=1e-8)
        np.testing.assert_allclose(both[1], alone[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_the_same_factor_twice_changes_nothing(scale):
    """The second is linked: the best test of its weights."""
    rng = np.random.default_rng(14)
    scores, grad = scale * rng.normal(size=(5, 5)), rng.normal(size=(5, 5))
    for make in (fm.DepTree, fm.Matching, lambda u: fm.Sequence(u, np.zeros((5, 5)))):
        once = values_and_gradient(scores, grad, make)
        for times in (2, 3):
            more = values_and_gradient(scores, grad, *[make] * times)
            np.testing.assert_allclose(more[0], once[0], rtol=0, atol=1e-8)
            np.testing.assert_allclose(more[1], once[1], rtol=0, atol=1e-6)


def test_scores_of_the_same_factor_twice_add_up():
    rng = np.random.default_rng(15)
    scores, first, second = rng.normal(size=(4, 3)), *rng.normal(size=(2, 3, 3))
    both = values_and_gradient(
        scores, scores, lambda u: fm.Sequence(u, first), lambda u: fm.Sequence(u, second)
    )
    total = values_and_gradient(scores, scores, lambda u: fm.Sequence(u, first + second))
    # The two need not agree on the transitions, so this is a relaxation: no worse, and the same
    # where a second one adds no score.
    same = values_and_gradient(
        scores, scores, lambda u: fm.Sequence(u, first), lambda u: fm.Sequence(u, 0 * second)
    )
    alone = values_and_gradient(scores, scores, lambda u: fm.Sequence(u, first))
    np.testing.assert_allclose(same[0], alone[0], rtol=0, atol=1e-8)
    assert both[0].shape == total[0].shape


def test_the_order_of_the_factors_does_not_matter():
    """Which one is the hub, and which is linked."""
    rng = np.random.default_rng(16)
    scores, grad = rng.normal(size=(4, 4)), rng.normal(size=(4, 4))
    factors = [
        fm.DepTree,
        fm.Matching,
        lambda u: fm.SequenceBudget(u[:, 0], 0.5, 2),
        lambda u: fm.Budget(u[:, 1], 1),
    ]
    first = values_and_gradient(scores, grad, *factors)
    for _ in range(3):
        rng.shuffle(factors)
        other = values_and_gradient(scores, grad, *factors)
        np.testing.assert_allclose(other[0], first[0], rtol=0, atol=1e-8)
        np.testing.assert_allclose(other[1], first[1], rtol=0, atol=1e-6)


def test_disjoint_structured_factors_do_not_meet():
    rng = np.random.default_rng(17)
    a, b = rng.normal(size=(2, 4, 4))
    fg = fm.FactorGraph()
    u, v = fg.variable_from(a), fg.variable_from(b)
    fg.add(fm.DepTree(u))
    fg.add(fm.Matching(v))
    fg.solve()
    alone = values_and_gradient(a, a, fm.DepTree)[0], values_and_gradient(b, b, fm.Matching)[0]
    np.testing.assert_allclose(u.value, alone[0], rtol=0, atol=1e-9)
    np.testing.assert_allclose(v.value, alone[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_a_factor_of_ones_own_wraps_a_builtin(scale):
    """A tree whose oracle is the built-in one, alone and among others."""

    class ByTree(fm.Factor):
        def map(self, eta_u, eta_v):
            fg = fm.FactorGraph()
            u = fg.variable_from(1e9 * eta_u)
            inner = fg.add(fm.DepTree(u))
            fg.solve()
            return inner.structures[0], []

    rng = np.random.default_rng(18)
    scores, grad = scale * rng.normal(size=(5, 5)), rng.normal(size=(5, 5))
    for others in ([], [lambda u: fm.Budget(u, 2, axis=0)]):
        ours = values_and_gradient(scores, grad, ByTree, *others)
        theirs = values_and_gradient(scores, grad, fm.DepTree, *others)
        np.testing.assert_allclose(ours[0], theirs[0], rtol=0, atol=1e-8)
        np.testing.assert_allclose(ours[1], theirs[1], rtol=0, atol=1e-6)


def test_constant_scores_of_its_own_move_nothing():
    """Every sequence has as many transitions: the same added to all changes the objective alone."""
    rng = np.random.default_rng(19)
    scores, transitions = rng.normal(size=(5, 3)), rng.normal(size=(3, 3))
    found = []
    for shift in (0.0, 2.0):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        fg.add(fm.Sequence(u, transitions + shift))
        fg.add(fm.AtMostOne(u[:, 1]))
        found.append((fg.solve(**TIGHT).objective, u.value))
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=0, atol=1e-9)
    assert abs(found[1][0] - found[0][0] - 8) <= 1e-8


# Convergence --------------------------------------------------------------------------------------


def tree_with_budgets(n, scale, rng):
    fg = fm.FactorGraph()
    u = fg.variable_from(scale * rng.normal(size=(n, n)))
    fg.add(fm.DepTree(u))
    fg.add(fm.Budget(u, 5, axis=0))
    return fg, u


def projective_tree_with_budgets(n, scale, rng):
    fg = fm.FactorGraph()
    u = fg.variable_from(scale * rng.normal(size=(n, n)))
    fg.add(fm.DepTree(u, projective=True, single_root=True))
    fg.add(fm.Budget(u, 3, axis=0))
    return fg, u


def sequence_with_at_most_one(length, states, scale, rng):
    fg = fm.FactorGraph()
    u = fg.variable_from(scale * rng.normal(size=(length, states)))
    fg.add(fm.Sequence(u, scale * rng.normal(size=(states, states))))
    fg.add(fm.AtMostOne(u, axis=0))
    return fg, u


def matching_with_budget(n, scale, rng):
    fg = fm.FactorGraph()
    u = fg.variable_from(scale * rng.normal(size=(n, n)))
    fg.add(fm.Matching(u))
    fg.add(fm.Budget(u[: n // 2, : n // 2], n // 8))
    return fg, u


def chains_on_a_grid(n, scale, rng):
    fg = fm.FactorGraph()
    u = fg.variable_from(scale * rng.normal(size=(n, n, 3)))
    for i in range(n):
        fg.add(fm.Sequence(u[i], scale * rng.normal(size=(3, 3))))
        fg.add(fm.Sequence(u[:, i], scale * rng.normal(size=(3, 3))))
    return fg, u


def slow(*arguments):
    return pytest.param(*arguments, marks=pytest.mark.slow)


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
@pytest.mark.parametrize(
    ("make", "size"),
    [
        (tree_with_budgets, (10,)),
        (tree_with_budgets, (25,)),
        (tree_with_budgets, (50,)),
        slow(tree_with_budgets, (100,)),
        (projective_tree_with_budgets, (25,)),
        (sequence_with_at_most_one, (10, 20)),
        (sequence_with_at_most_one, (20, 25)),
        slow(sequence_with_at_most_one, (20, 50)),
        (matching_with_budget, (20,)),
        (chains_on_a_grid, (6,)),
    ],
    ids=lambda value: getattr(value, "__name__", None) or "x".join(map(str, value)),
)
def test_default_options_converge(make, size, scale):
    """Without a warning, to the tolerance, near the exact solution, with exact gradients."""
    rng = np.random.default_rng([20, *size])
    repeat = 3 if size[0] <= 25 else 1
    for _ in range(repeat):
        fg, u = make(*size, scale, rng)
        solution = fg.solve()
        value, grad = u.value, rng.normal(size=u.value.shape)
        ours = solution.vjp({u: grad})[u]
        assert solution.status is fm.Status.CONVERGED
        assert max(solution.primal_residual, solution.dual_residual) <= 1e-6
        tight = fg.solve(tol=1e-10, max_iter=10_000)
        np.testing.assert_allclose(value, u.value, rtol=0, atol=1e-5)
        np.testing.assert_allclose(ours, tight.vjp({u: grad})[u], rtol=0, atol=1e-5)


def test_passes_are_counted():
    fg, _ = tree_with_budgets(10, 1.0, np.random.default_rng(21))
    solution = fg.solve()
    assert 1 <= solution.iterations <= 30
    assert solution.oracle_calls >= solution.iterations


def test_a_limit_of_oracle_calls_is_kept():
    fg, _ = tree_with_budgets(10, 0.3, np.random.default_rng(22))
    with pytest.warns(fm.NotConvergedWarning):
        solution = fg.solve(max_inner_iter=2)
    assert not solution.converged


@pytest.mark.parametrize(("dtype", "cost"), [(np.float32, 5e-4), (np.float64, 5e-7)])
def test_a_row_that_moves_only_by_a_small_coefficient(dtype: type, cost: float) -> None:
    # The knapsack holds b[0] at 0.6 beside a chain that does not move.
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([[0.3 / cost, 0], [0, 0.3 / cost]], dtype))
    b = fg.variable_from(np.array([0.7, 0.8, 0.9], dtype))
    fg.add(fm.Sequence(u, np.zeros((2, 2), dtype)))
    fg.add(fm.Knapsack([u[0, :1], b[:1]], [1, cost], 1 + 0.6 * cost))
    fg.add(fm.AtMostOne(b[1:]))
    solution = fg.solve(tol=1e-12, on_failure="ignore")
    tol = 1e-3 if dtype == np.float32 else 1e-6  # what the precision leaves of so small a row
    np.testing.assert_allclose(b.value[0], 0.6, atol=tol)
    grad = solution.vjp({b: np.array([1, 0, 0], dtype)})[b]
    np.testing.assert_allclose(grad, [0, 0, 0], atol=tol)


def test_multipliers_that_run_off_hide_nothing():
    """Rows that keep variables of a hub at their bounds: their multipliers may grow without end.

    Beside one of 1e13 nothing else is resolved, and a wrong answer looked like the solution.
    """
    eta = np.array(
        [
            -48,
            -1,
            -32,
            -36,
            -28,
            -48,
            -17,
            -50,
            22,
            -28,
            -20,
            -25,
            -32,
            -38,
            12,
            -13,
            -42,
            -32,
            -48,
            -5,
            -23,
        ]
    )
    first = [13, 20, 14, 18, 6, 5, 11, 12, 7, 18, 0, 13, 17, 7, 16, 1, 15, 5, 9, 2, 10, 6, 9]
    second = [16, 8, 1, 15, 4, 0, 9, 3, 11, 2, 8, 15, 20, 5, 20, 9, 11, 13, 13, 9, 17, 0, 14]
    scores = np.array(
        [
            -27,
            -30,
            -48,
            -33,
            -21,
            7,
            -35,
            -30,
            -29,
            -9,
            -7,
            -36,
            0,
            2,
            -27,
            -19,
            -28,
            -29,
            -13,
            -1,
            8,
            -11,
            -8,
        ]
    )
    transitions = np.array(
        [[-38, -18, -23, -23], [-41, -34, 5, -21], [-40, -45, 4, -10], [-34, -23, -36, -15]]
    )
    steps = np.array([[5, 14], [12, 18], [19, 9], [2, 0], [6, 15]])
    rng = np.random.default_rng(0)
    values = []
    for trial in range(150):
        noise = 1e-13 * rng.normal(size=21) if trial else 0
        fg = fm.FactorGraph()
        u = fg.variable_from(1e-3 * eta * (1 + noise))
        fg.add(fm.Pair(u[first], u[second], 1e-3 * scores))
        fg.add(fm.Budget(u[[14, 8]], 1))
        fg.add(fm.Knapsack(u[[0]], [0.727], 0.05))
        sequence = 1e-3 * transitions.reshape(4, 2, 2)
        fg.add(fm.Sequence(u[steps], sequence, initial=np.array([-0.032, -0.038])))
        fg.add(fm.Exactly(~u[[12]], 0))
        fg.add(fm.Nand([u[19], ~u[0], u[3], u[12], u[9]]))
        fg.add(fm.Table([u[[7, 17, 11]]], np.array([-0.03, -0.013, -0.007])))
        fg.add(fm.AtMostOne(u[np.array([[17, 1, 14], [10, 13, 5]])], axis=1))
        fg.add(fm.Table([u[[20, 3, 13, 4]]], np.array([-0.049, 0.021, -0.024, -0.006])))
        fg.add(fm.OrOut([u[18], u[12], ~u[19]]))
        assert fg.solve().converged
        values.append(u.value)
    assert values[0][0] == pytest.approx(0.05 / 0.727)
    np.testing.assert_allclose(values, values[:1] * len(values), atol=1e-8)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda u: [fm.SequenceBudget(u, 0.3, 2), fm.Exactly(u, 2)], (6,)),
        (lambda u: [fm.SequenceBudget(u, 0.3, 2), fm.Budget(u, 2)], (6,)),
        (lambda u: [fm.DepTree(u), fm.Xor(u, axis=1)], (4, 4)),
        (lambda u: [fm.Sequence(u, np.zeros((3, 3))), fm.Xor(u, axis=1)], (4, 3)),
        (lambda u: [fm.Matching(u), fm.AtMostOne(u, axis=0)], (4, 5)),
    ],
)
def test_float32_gradients_beside_rows_that_always_hold(make, shape):
    """No structure tells such a row apart: what rounding leaves of it must not count."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        eta, grad = rng.normal(size=(2, *shape))
        found = []
        for dtype in (np.float32, np.float64):
            fg = fm.FactorGraph()
            u = fg.variable_from(eta.astype(dtype))
            for factor in make(u):
                fg.add(factor)
            found.append(fg.solve().vjp({u: grad.astype(dtype)})[u])
        np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-4)


# Ties beside tight rows ---------------------------------------------------------------------------


def tied_table():
    """The row holds the fourth state; at the edge of its multipliers two others tie with it."""
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([0.01, -0.005, 0.015, 0.005]))
    fg.add(fm.AtLeast([u[3]], 1))
    fg.add(fm.Table([u[[0, 3, 1, 2]]], np.array([0.005, 0.005, 0.01, 0.0])))
    return fg, u, np.zeros((4, 4))


def tied_sequence():
    """The row holds the first state of the first step, and forbids the second of the second."""
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros(6))
    fg.add(fm.Exactly([~u[1], u[3]], 2))
    transitions = np.array([[[0.0002, 0.0001, 0.0], [0.0, 0.0, 0.0], [0.0, -0.0001, 0.0]]])
    fg.add(fm.Sequence(u[np.array([[3, 5, 4], [2, 1, 0]])], transitions))
    jacobian = np.zeros((6, 6))
    jacobian[np.ix_([2, 0], [2, 0])] = [[0.5, -0.5], [-0.5, 0.5]]
    return fg, u, jacobian


@pytest.mark.parametrize("by_flows", [False, True])
@pytest.mark.parametrize("tied", [tied_table, tied_sequence])
def test_variables_that_are_0_stay_so_in_the_derivative(tied, by_flows, monkeypatch):
    if by_flows:
        monkeypatch.setattr(cpu, "BY_ROWS", ByRows.always)
    fg, u, jacobian = tied()
    solution = fg.solve(tol=1e-12, on_failure="raise")
    ours = [solution.vjp({u: d})[u] for d in np.eye(len(jacobian))]
    np.testing.assert_allclose(ours, jacobian, atol=1e-12)

from functools import cache

import numpy as np
import pytest
from contract import values_of
from structured_contract import ALONE, Case, Padded, StructuredContract, solved

import factormax as fm
from factormax.reference.structures import budget_sequences


@cache
def budgeted(length, budget, per_step=True) -> Case:
    scores = {"transitions": (length - 1,) if per_step else ()}
    return Case(
        (length,),
        lambda u, transitions: fm.SequenceBudget(u, transitions, budget),
        *budget_sequences(length, per_step, budget),
        scores,
        f"SequenceBudget({length}, {budget=}, {per_step=})",
    )


class TestSequenceBudget(StructuredContract):
    kind = "SequenceBudget"

    def cases(self):
        sizes = [(1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (4, 0), (5, 1), (5, 3), (5, 9), (6, 4)]
        return [budgeted(*size, per_step) for size in sizes for per_step in (False, True)]

    def whole(self, case, mask):
        return mask.all(axis=-1)  # a masked variable is absent, wherever it is

    def padded(self):
        for length, present, budget in [(5, 3, 2), (4, 1, 1), (6, 5, 3), (6, 4, 9)]:
            for per_step in (False, True):
                own = {"transitions": slice(0, present - 1) if per_step else ()}
                yield Padded(
                    budgeted(length, budget, per_step),
                    budgeted(present, budget, per_step),
                    slice(0, present),
                    own,
                )

    def test_single_entries_are_forbidden(self):
        """A masked variable is absent: in the middle, it is no neighbour, so both ends are free."""
        rng = np.random.default_rng(0)
        for case in self.cases():
            length = case.shape[0]
            eta, own = rng.normal(size=(6, length)) + 0.5, case.draw(rng)[1]
            mask = rng.random(eta.shape) < 0.7
            built, solution = solved(case, eta, own, mask, batch_dims=1)
            assert solution.converged.all()
            grad = rng.normal(size=eta.shape)
            out = solution.vjp({built.u: grad})[built.u]
            minus_inf, other = solved(case, np.where(mask, eta, -np.inf), own, batch_dims=1)
            np.testing.assert_array_equal(minus_inf.u.value, built.u.value)
            np.testing.assert_array_equal(minus_inf.factor.probs, built.factor.probs)
            np.testing.assert_array_equal(other.vjp({minus_inf.u: grad})[minus_inf.u], out)
            for row in range(6):
                mu, _, _ = case.exact(np.where(mask[row], eta[row], -np.inf), own)
                np.testing.assert_allclose(built.u.value[row], mu, rtol=0, atol=ALONE)
                assert not out[row][~mask[row]].any()

    @pytest.mark.parametrize("per_step", [False, True])
    def test_budget_per_instance(self, per_step):
        rng = np.random.default_rng(1)
        budgets = np.array([0, 1, 2, 3, 5, 100])
        eta = rng.normal(size=(6, 5)) + 0.5
        transitions = rng.normal(size=(6, 4) if per_step else (6,))
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta)
        factor = fg.add(fm.SequenceBudget(u, transitions, budgets))
        solution = fg.solve()
        grad = rng.normal(size=eta.shape)
        out = solution.vjp({u: grad})
        assert factor.value.shape == transitions.shape == out[factor].shape
        for row, budget in enumerate(budgets):
            case = budgeted(5, int(budget), per_step)
            alone, single = solved(case, eta[row], {"transitions": transitions[row]})
            mu, mu_v, _ = case.exact(eta[row], {"transitions": transitions[row]})
            np.testing.assert_array_equal(u.value[row], alone.u.value)
            np.testing.assert_allclose(u.value[row], mu, rtol=0, atol=ALONE)
            np.testing.assert_allclose(factor.value[row].reshape(-1), mu_v, rtol=0, atol=ALONE)
            expected = single.vjp({alone.u: grad[row]})
            np.testing.assert_array_equal(out[u][row], expected[alone.u])
            np.testing.assert_array_equal(out[factor][row], expected[alone.factor])

    @pytest.mark.parametrize("budget", [0, 1, 3, 7, 20])
    def test_without_transitions_it_is_a_budget(self, budget):
        scores = np.random.default_rng(2).normal(size=12) + 0.5
        ours = values_of(scores, lambda u: fm.SequenceBudget(u, 0.0, budget))
        plain = values_of(scores, lambda u: fm.Budget(u, budget))
        np.testing.assert_allclose(ours, plain, rtol=0, atol=ALONE)

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_a_budget_that_never_binds_is_a_chain_of_pairs(self, sign):
        rng = np.random.default_rng(3)
        scores, coupling = rng.normal(size=9), sign * np.abs(rng.normal(size=8))
        fg = fm.FactorGraph()
        u, v = fg.variable_from(scores), fg.variable_from(scores)
        ours = fg.add(fm.SequenceBudget(u, coupling, 9))
        pairs = fg.add(fm.Pair(v[:-1], v[1:], coupling))
        fg.solve(tol=1e-12)
        np.testing.assert_allclose(u.value, v.value, rtol=0, atol=1e-8)
        np.testing.assert_allclose(ours.value, pairs.value, rtol=0, atol=1e-8)

    def test_one_for_each_instance_among_the_neighbours(self):
        """`(*batch, 1)` says which is meant where sizes do not."""
        rng = np.random.default_rng(4)
        eta, transitions = rng.normal(size=(3, 4)), rng.normal(size=3)
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta)
        with pytest.raises(fm.ShapeError, match=r"SequenceBudget over u.*or one per instance"):
            fm.SequenceBudget(u, transitions, 2)
        factor = fg.add(fm.SequenceBudget(u, transitions[:, None], 2))
        fg.solve()
        assert factor.value.shape == (3, 1)
        for row in range(3):
            mu, _, _ = budgeted(4, 2, False).exact(eta[row], {"transitions": transitions[row]})
            np.testing.assert_allclose(u.value[row], mu, rtol=0, atol=ALONE)

    @pytest.mark.parametrize(
        ("bad", "message"), [(-1, "at least 0, got -1"), (1.5, "whole number, got 1.5")]
    )
    def test_bad_budget(self, bad, message):
        u = fm.FactorGraph(batch_dims=1).variable_from(np.zeros((2, 4)))
        for budget, instance in ((bad, ""), (np.array([1, bad]), r", instance \(1,\)")):
            name = rf"SequenceBudget over u\[1:\]{instance}"
            with pytest.raises(fm.GraphError, match=rf"{name}: budget must be.*{message}"):
                fm.SequenceBudget(u[1:], 0.0, budget)

    @pytest.mark.parametrize("bad", [np.zeros(4), np.zeros((3, 3)), np.zeros((2, 1, 1))])
    def test_shapes(self, bad):
        u = fm.FactorGraph().variable(4)
        with pytest.raises(fm.ShapeError, match=r"SequenceBudget over u: transitions.*\(3,\)"):
            fm.SequenceBudget(u, bad, 2)

    def test_u_has_one_axis(self):
        u = fm.FactorGraph().variable((2, 2))
        with pytest.raises(fm.ShapeError, match=r"SequenceBudget over u: u must.*\(length,\)"):
            fm.SequenceBudget(u, 0.0, 1)

    def test_no_minus_infinity(self):
        """Two neighbours that must not both be on: say it with a Nand, or with a large score."""
        fg = fm.FactorGraph()
        fg.add(fm.SequenceBudget(fg.variable(3), np.array([0.0, -np.inf]), 1))
        with pytest.raises(ValueError, match=r"SequenceBudget over u: transitions.*got -inf.*1"):
            fg.solve()

    def test_a_long_one_is_small(self):
        """The size of the budget, not of the sequence, is what the oracle needs memory for."""
        rng = np.random.default_rng(5)
        scores = rng.normal(size=2000)
        value = values_of(scores, lambda u: fm.SequenceBudget(u, 0.5, 3))
        assert abs(value.sum() - 3) <= 1e-9

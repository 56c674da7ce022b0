from functools import cache

import numpy as np
import pytest
from structured_contract import ALONE, Case, Padded, StructuredContract, solved

import factormax as fm
from factormax.reference.structures import sequences


@cache
def sequence(length, states, per_step=False, initial=False, final=False) -> Case:
    square = (states, states)
    scores = {"transitions": (length - 1, *square) if per_step else square}
    scores |= {"initial": (states,)} if initial else {}
    scores |= {"final": (states,)} if final else {}
    name = f"Sequence({length}, {states}, {per_step=}, {initial=}, {final=})"
    M, N = sequences(length, states, per_step, initial, final)
    return Case((length, states), fm.Sequence, M, N, scores, name)


class TestSequence(StructuredContract):
    kind = "Sequence"

    def cases(self):
        return [
            sequence(1, 3),
            sequence(1, 2, True, True, True),
            sequence(3, 1),
            sequence(2, 2),
            sequence(3, 3),
            sequence(2, 3, initial=True),
            sequence(3, 2, final=True),
            sequence(4, 3, True),
            sequence(3, 3, True, True, True),
            sequence(4, 2, False, True, True),
        ]

    def padded(self):
        for ends in [(False, False), (True, True), (False, True)]:
            everywhere = {"initial": slice(None)} if ends[0] else {}
            everywhere |= {"final": slice(None)} if ends[1] else {}
            for length, present, states in [(5, 3, 2), (4, 1, 3), (3, 2, 3)]:
                steps = slice(0, present)
                for per_step in (False, True):
                    where = slice(0, present - 1) if per_step else slice(None)
                    yield Padded(
                        sequence(length, states, per_step, *ends),
                        sequence(present, states, per_step, *ends),
                        steps,
                        {"transitions": where, **everywhere},
                    )
        # A state that is never allowed.
        keep = np.ix_(range(3), (0, 2))
        own = {"transitions": np.ix_((0, 2), (0, 2)), "initial": [0, 2], "final": [0, 2]}
        yield Padded(
            sequence(3, 3, False, True, True), sequence(3, 2, False, True, True), keep, own
        )
        own = {"transitions": np.ix_((0, 1), (0, 2), (0, 2))}
        yield Padded(sequence(3, 3, True), sequence(3, 2, True), keep, own)

    def test_forbidden_transitions(self):
        """−inf in the transitions, the initial or the final scores."""
        rng = np.random.default_rng(0)
        for case in [c for c in self.cases() if c.shape[1] > 1]:
            for name, shape in case.scores.items():
                if 0 in shape:
                    continue
                eta, own = case.draw(rng)
                own[name].flat[1] = -np.inf
                built, solution = solved(case, eta, own)
                mu, mu_v, _ = case.exact(eta, own)
                np.testing.assert_allclose(built.u.value, mu, rtol=0, atol=ALONE)
                value = built.factor.value
                np.testing.assert_allclose(value.reshape(-1), mu_v[: value.size], atol=ALONE)
                out = solution.vjp({built.u: rng.normal(size=case.shape)})
                key = built.factor if name == "transitions" else (built.factor, name)
                assert out[key].flat[1] == 0 and np.isfinite(out[key]).all()

    def test_no_sequence_is_allowed(self):
        """Every transition between the states that remain is forbidden."""
        transitions = np.array([[0.0, -np.inf], [-np.inf, 0.0]])
        mask = np.array([[True, False], [False, True], [True, True]])
        for own in (
            {"transitions": transitions},
            {"transitions": np.stack([transitions] * 2)},
        ):
            fg = fm.FactorGraph(batch_dims=1)
            u = fg.variable_from(np.zeros((3, 3, 2)), mask=np.stack([mask, mask | True, mask]))
            fg.add(fm.Sequence(u, **own))
            solution = fg.solve(on_failure="ignore")
            states = [fm.Status.INFEASIBLE, fm.Status.CONVERGED, fm.Status.INFEASIBLE]
            assert list(solution.status) == states
            assert np.isnan(u.value[0][mask]).all() and np.isfinite(u.value[1]).all()
        for end in ("initial", "final"):
            fg = fm.FactorGraph()
            u = fg.variable_from(np.zeros((3, 2)))
            fg.add(fm.Sequence(u, np.zeros((2, 2)), **{end: np.full(2, -np.inf)}))
            assert fg.solve(on_failure="ignore").status is fm.Status.INFEASIBLE

    def test_final_is_of_the_last_step_that_is_there(self):
        fg = fm.FactorGraph(batch_dims=1)
        mask = np.array([[True] * 3, [True, True, False], [True, False, False]])[..., None]
        u = fg.variable_from(np.zeros((3, 3, 2)), mask=mask)
        fg.add(fm.Sequence(u, np.zeros((2, 2)), final=np.array([0.0, 9.0])))
        fg.solve()
        for row, last in enumerate((2, 1, 0)):
            np.testing.assert_array_equal(u.value[row, last], [0, 1])
            np.testing.assert_allclose(u.value[row, :last], 0.5, atol=1e-12)

    def test_a_gap_is_an_error(self):
        mask = np.ones((2, 3, 2), dtype=bool)
        mask[1, 1] = False
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(np.zeros((2, 3, 2)), mask=mask)
        fg.add(fm.Sequence(u, np.zeros((2, 2))))
        with pytest.raises(fm.GraphError, match=r"Sequence.*absent steps.*come last.*instance 1"):
            fg.solve()

    @pytest.mark.parametrize("per_step", [False, True])
    def test_transitions_per_instance(self, per_step):
        rng = np.random.default_rng(1)
        case = sequence(4, 2, per_step)
        eta = rng.normal(size=(5, 4, 2))
        transitions = rng.normal(size=(5, *case.scores["transitions"]))
        built, _ = solved(case, eta, {"transitions": transitions}, batch_dims=1)
        assert built.factor.value.shape == transitions.shape
        for row in range(5):
            mu, mu_v, _ = case.exact(eta[row], {"transitions": transitions[row]})
            np.testing.assert_allclose(built.u.value[row], mu, rtol=0, atol=ALONE)
            np.testing.assert_allclose(built.factor.value[row].reshape(-1), mu_v, atol=ALONE)

    def test_one_for_each_instance_among_the_steps(self):
        """`(*batch, 1, states, states)` says which is meant where sizes do not."""
        rng = np.random.default_rng(2)
        eta, transitions = rng.normal(size=(2, 3, 2)), rng.normal(size=(2, 2, 2))
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(eta)
        with pytest.raises(fm.ShapeError, match=r"Sequence over u.*one per step or one per inst"):
            fm.Sequence(u, transitions)
        factor = fg.add(fm.Sequence(u, transitions[:, None]))
        fg.solve()
        assert factor.value.shape == (2, 1, 2, 2)
        for row in range(2):
            mu, _, _ = sequence(3, 2).exact(eta[row], {"transitions": transitions[row]})
            np.testing.assert_allclose(u.value[row], mu, rtol=0, atol=ALONE)

    def test_without_transition_scores_it_is_a_sparsemax_a_step(self):
        rng = np.random.default_rng(3)
        scores = rng.normal(size=(6, 5))
        fg = fm.FactorGraph()
        u, v = fg.variable_from(scores), fg.variable_from(scores)
        fg.add(fm.Sequence(u, np.zeros((5, 5))))
        fg.add(fm.Xor(v, axis=1))
        fg.solve()
        np.testing.assert_allclose(u.value, v.value, rtol=0, atol=ALONE)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"transitions": np.zeros((2, 3))},
                r"transitions must have shape \(2, 2\) or \(2, 2, 2",
            ),
            ({"transitions": np.zeros((3, 2, 2))}, r"got \(3, 2, 2\)"),
            ({"transitions": np.zeros((2, 2)), "initial": np.zeros(3)}, r"initial.*got \(3,\)"),
            ({"transitions": np.zeros((2, 2)), "final": np.zeros((3, 2))}, r"final.*got \(3, 2\)"),
        ],
    )
    def test_shapes(self, options, message):
        u = fm.FactorGraph().variable((3, 2))
        with pytest.raises(fm.ShapeError, match=f"Sequence over u.*{message}"):
            fm.Sequence(u, **options)

    def test_u_has_two_axes(self):
        u = fm.FactorGraph().variable(4)
        with pytest.raises(fm.ShapeError, match=r"Sequence over u.*\(length, states\).*got \(4,\)"):
            fm.Sequence(u, np.zeros((2, 2)))

    def test_words_are_no_scores(self):
        u = fm.FactorGraph().variable((2, 2))
        with pytest.raises(
            fm.GraphError, match="Sequence over u: transitions must be real numbers"
        ):
            fm.Sequence(u, np.array([["a", "b"], ["c", "d"]]))

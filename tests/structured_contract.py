"""What every structured factor must do. Its test file brings cases, and adds its own facts.

A `Case` is a factor of a certain size together with all its structures, by `factormax.reference`:
SparseMAP over those is the exact solution.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pytest

import factormax as fm
from factormax.reference.active_set import sparsemap
from factormax.reference.structures import column_scores

SCALES = [0.1, 1.0, 10.0, 100.0, 1e4]
ALONE = 1e-9  # one factor alone is solved at once, not by iteration
BATCH = 7  # no size of a case: what is shared and what is not can't be confused
SAME = 1e-7  # differences by two step sizes that agree so well are no kink


@dataclass(frozen=True, eq=False)
class Case:
    """A factor of a certain size: how to make it of `u`, and its structures, one per column."""

    shape: tuple[int, ...]  # of u
    make: Callable[..., Any]  # (u, **scores of its own)
    M: np.ndarray  # (d, K)
    N: np.ndarray  # (s, K)
    scores: dict[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of its own scores
    name: str = ""

    def draw(self, rng, scale=1.0):
        """Random scores of the variables, and of its own."""
        own = {k: np.array(scale * rng.normal(size=s)) for k, s in self.scores.items()}
        return scale * rng.normal(size=self.shape), own

    def fill(self, number):
        return np.full(self.shape, number), {k: np.full(s, number) for k, s in self.scores.items()}

    def flat(self, own):
        """Scores of its own (or features) as one vector, in the order of the rows of N."""
        parts = [np.reshape(own[name], -1) for name in self.scores]
        return np.concatenate([np.zeros(0), *parts])

    def exact(self, eta, own):
        """(mu, mu_v, objective) by enumeration; mu_v is flat. ValueError: nothing is allowed."""
        x, eta_v = eta.reshape(-1), self.flat(own)
        p, mu, mu_v = sparsemap(self.M, self.N, x, eta_v)
        used = p > 0
        scores = column_scores(self.M[:, used], self.N[:, used], x, eta_v)
        return mu.reshape(self.shape), mu_v, scores @ p[used] - 0.5 * mu @ mu

    def columns(self, structures):
        """Which column of M each structure is, (K,)."""
        flat = structures.reshape(len(structures), -1)
        found = (flat[:, :, None] == self.M[None]).all(axis=1)
        assert (found.sum(axis=1) == 1).all(), "not a structure"
        return found.argmax(axis=1)


class Built(NamedTuple):
    fg: fm.FactorGraph
    u: Any
    factor: Any


def build(case, eta, own, mask=None, batch_dims=0) -> Built:
    fg = fm.FactorGraph(batch_dims=batch_dims)
    u = fg.variable_from(eta, mask=mask)
    return Built(fg, u, fg.add(case.make(u, **own)))


def solved(case, eta, own, mask=None, batch_dims=0, **options):
    built = build(case, eta, own, mask, batch_dims)
    return built, built.fg.solve(**options)


def gradients(case, built, solution, grads, probs=None):
    """(grad_eta, {name: gradient of the scores of its own}) for gradients of u and the factor."""
    given = {built.u: grads[0]}
    if case.scores:
        first = next(iter(case.scores))
        given[built.factor] = grads[1][first]
    out = solution.vjp(given, probs=None if probs is None else {built.factor: probs})
    keys = [built.factor if i == 0 else (built.factor, k) for i, k in enumerate(case.scores)]
    return out[built.u], {name: out[key] for name, key in zip(case.scores, keys, strict=True)}


def slope_of(loss, at=(1e-4, 1e-5)):
    """The derivative of `loss(t)` at 0 by central differences; None at a kink."""
    slopes = [(loss(h) - loss(-h)) / (2 * h) for h in at]
    return slopes[1] if abs(slopes[0] - slopes[1]) <= SAME else None


def moved(eta, own, direction, t):
    return eta + t * direction[0], {k: own[k] + t * direction[1][k] for k in own}


def along(grads, direction):
    """The slope that gradients say there is along a direction."""
    return np.sum(grads[0] * direction[0]) + sum(
        np.sum(g * direction[1][k]) for k, g in grads[1].items()
    )


@dataclass(frozen=True, eq=False)
class Padded:
    """A case of which a part is absent, and the smaller case that remains.

    `keep` is the index of the smaller variables in the larger ones, `own` likewise of each of the
    scores of its own. `mask` is what is present, if that is more than `keep`: what remains may be
    impossible because of what is absent.
    """

    large: Case
    small: Case
    keep: Any
    own: dict[str, Any] = field(default_factory=dict)
    mask: np.ndarray | None = None

    def present(self):
        if self.mask is not None:
            return self.mask
        mask = np.zeros(self.large.shape, dtype=bool)
        mask[self.keep] = True
        return mask


class StructuredContract:
    """`cases` gives small factors of all kinds of sizes, those of size 1 among them."""

    kind: str
    fits_scale = (0.1, 1.0, 10.0)  # scales at which gradients are compared

    def cases(self) -> list[Case]:
        raise NotImplementedError(
            f"{type(self).__name__}: define cases(), factors of several sizes with all structures "
            f"of each, sizes of 1 among them."
        )

    def padded(self) -> list[Padded]:
        raise NotImplementedError(
            f"{type(self).__name__}: define padded(), larger cases of which a part is absent, with "
            f"the smaller case that remains of each."
        )

    def draws(self, seed, repeat=3, scale=1.0, cases=None):
        rng = np.random.default_rng(seed)
        for case in cases or self.cases():
            for _ in range(repeat):
                yield case, *case.draw(rng, scale), rng

    # Values -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("scale", SCALES)
    def test_alone_it_is_sparsemap(self, scale):
        for case, eta, own, _ in self.draws(0, scale=scale):
            built, solution = solved(case, eta, own)
            mu, mu_v, objective = case.exact(eta, own)
            assert solution.status is fm.Status.CONVERGED
            np.testing.assert_allclose(built.u.value, mu, rtol=0, atol=ALONE, err_msg=case.name)
            assert abs(solution.objective - objective) <= ALONE * max(1, scale)
            if case.scores:
                first, shape = next(iter(case.scores.items()))
                assert built.factor.value.shape == shape
                np.testing.assert_allclose(
                    built.factor.value.reshape(-1),
                    mu_v[: prod(shape)],
                    rtol=0,
                    atol=ALONE,
                    err_msg=f"{case.name} {first}",
                )

    @pytest.mark.parametrize("values", [[0.0], [1.0], [-2, 0, 1], [0, 0.5, 1], [0, 1e4]])
    def test_ties(self, values):
        """The marginals are unique, whichever structures make them up."""
        rng = np.random.default_rng(1)
        for case in self.cases():
            for _ in range(3):
                eta = rng.choice(values, case.shape).astype(float)
                own = {k: rng.choice(values, s).astype(float) for k, s in case.scores.items()}
                built, solution = solved(case, eta, own)
                mu, _, objective = case.exact(eta, own)
                np.testing.assert_allclose(built.u.value, mu, rtol=0, atol=ALONE, err_msg=case.name)
                assert abs(solution.objective - objective) <= ALONE * max(1, *np.abs(values))
                self.check_structures(case, built)

    def test_large_scores_give_the_best_structure(self):
        for case, eta, own, rng in self.draws(2, scale=1e6):
            built, solution = solved(case, eta, own)
            scores = column_scores(case.M, case.N, eta.reshape(-1), case.flat(own))
            best = case.M[:, scores.argmax()].reshape(case.shape)
            np.testing.assert_array_equal(built.u.value, best)
            np.testing.assert_array_equal(
                built.factor.structures, best.reshape(1, *built.factor.variable_shape)
            )
            np.testing.assert_array_equal(built.factor.probs, [1.0])
            grads, own_grads = gradients(case, built, solution, case.draw(rng))
            assert not grads.any() and not any(g.any() for g in own_grads.values())

    @pytest.mark.parametrize("forbid", [False, True])
    def test_map_is_the_best_structure(self, forbid):
        for case, eta, own, rng in self.draws(16, repeat=10):
            factor = build(case, eta, own).factor
            flat = case.flat(own)
            if forbid:
                eta[rng.random(case.shape) < 0.2] = -np.inf
                if not self.whole(case, np.isfinite(eta)[None])[0]:
                    continue
            scores = column_scores(case.M, case.N, eta.reshape(-1), flat)
            answer = factor.map(eta.reshape(factor.variable_shape), flat)
            if scores.max() == -np.inf:
                assert answer is fm.NO_STRUCTURE
                continue
            m, n = answer
            assert np.shape(m) == factor.variable_shape
            (column,) = case.columns(np.reshape(m, (1, -1)))
            assert scores[column] >= scores.max() - 1e-12
            np.testing.assert_array_equal(np.reshape(n, -1), case.N[:, column])

    def test_nearly_forbidden(self):
        """Scores of −1e9 are as good as −inf, and do not blur the others."""
        for case, eta, own, rng in self.draws(3, repeat=2):
            low = rng.random(case.shape) < 0.2
            try:
                mu, _, _ = case.exact(np.where(low, -np.inf, eta), own)
            except ValueError:
                continue
            built, _ = solved(case, np.where(low, -1e9, eta), own)
            np.testing.assert_allclose(built.u.value, mu, rtol=0, atol=1e-6)

    def test_admm_agrees(self):
        for case, eta, own, _ in self.draws(4, repeat=1):
            built, solution = solved(case, eta, own, method="admm", tol=1e-10, max_iter=100_000)
            assert solution.status is fm.Status.CONVERGED
            mu, _, _ = case.exact(eta, own)
            np.testing.assert_allclose(built.u.value, mu, rtol=0, atol=1e-8, err_msg=case.name)

    @pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
    def test_float32(self, scale):
        for case, eta, own, _ in self.draws(5, repeat=2, scale=scale):
            single = {k: s.astype(np.float32) for k, s in own.items()}
            built, solution = solved(case, eta.astype(np.float32), single)
            assert built.u.value.dtype == built.factor.probs.dtype == np.float32
            assert solution.status is fm.Status.CONVERGED
            mu, _, _ = case.exact(
                eta.astype(np.float32).astype(float),
                {k: s.astype(float) for k, s in single.items()},
            )
            np.testing.assert_allclose(built.u.value, mu, rtol=0, atol=1e-5, err_msg=case.name)
            grad = gradients(case, built, solution, case.fill(1.0))[0]
            assert grad.dtype == np.float32 and np.isfinite(grad).all()

    # The structures ---------------------------------------------------------------------------

    def check_structures(self, case, built):
        structures, probs = built.factor.structures, built.factor.probs
        assert structures.shape == (len(probs), *built.factor.variable_shape)
        assert probs.shape == (built.factor.num_structures,)
        assert (probs > 0).all() and (np.diff(probs) <= 0).all()
        assert abs(probs.sum() - 1) <= 1e-12
        mean = np.tensordot(probs, structures, 1).reshape(case.shape)
        # The value may be that of another way to the same solution, without structures.
        np.testing.assert_allclose(mean, built.u.value, rtol=0, atol=ALONE)
        columns = case.columns(structures)
        assert len(set(columns)) == len(columns)
        used = np.vstack([case.M[:, columns], np.ones(len(columns))])
        assert np.linalg.matrix_rank(used) == len(columns)  # affinely independent
        if case.scores:
            size = prod(next(iter(case.scores.values())))
            features = case.N[:size, columns] @ probs
            np.testing.assert_allclose(built.factor.value.reshape(-1), features, atol=1e-12)

    @pytest.mark.parametrize("scale", SCALES)
    def test_structures(self, scale):
        for case, eta, own, _ in self.draws(6, scale=scale):
            self.check_structures(case, solved(case, eta, own)[0])

    def test_structures_of_a_batch_are_padded(self):
        rng = np.random.default_rng(7)
        for case in self.cases():
            eta, own = case.draw(rng)
            batch = np.stack([[scale * eta for scale in (0.01, 1, 1e6)]] * 2)
            built, _ = solved(case, batch, own, batch_dims=2)
            counts, probs = built.factor.num_structures, built.factor.probs
            most = counts.max()
            assert counts.shape == (2, 3) and probs.shape == (2, 3, most)
            assert built.factor.structures.shape == (2, 3, most, *built.factor.variable_shape)
            for index in np.ndindex(2, 3):
                alone, _ = solved(case, batch[index], own)
                k = alone.factor.num_structures
                assert counts[index] == k and not probs[index][k:].any()
                assert not built.factor.structures[index][k:].any()
                np.testing.assert_array_equal(probs[index][:k], alone.factor.probs)
                np.testing.assert_array_equal(
                    built.factor.structures[index][:k], alone.factor.structures
                )

    # Gradients --------------------------------------------------------------------------------

    @pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
    def test_gradient(self, scale):
        """Of the variables and of the value, against differences of the exact solution."""
        compared = total = 0
        for case, eta, own, rng in self.draws(8, repeat=4, scale=scale):
            built, solution = solved(case, eta, own)
            grads = case.draw(rng)
            first = next(iter(case.scores), None)
            of_value = {k: grads[1][k] * (k == first) for k in own}
            ours = gradients(case, built, solution, grads)
            direction = case.draw(rng)

            def loss(
                t, case=case, eta=eta, own=own, direction=direction, grads=grads, of_value=of_value
            ):
                mu, mu_v, _ = case.exact(*moved(eta, own, direction, t))
                return np.sum(grads[0] * mu) + case.flat(of_value) @ mu_v

            slope = slope_of(loss)
            total += 1
            if slope is not None:
                compared += 1
                assert abs(along(ours, direction) - slope) <= 1e-6, (case.name, eta, own)
        assert compared > total / 2

    def test_gradient_of_the_probs(self):
        """Where the support stands still: of a function of the structures, in expectation."""
        compared = total = 0
        for case, eta, own, rng in self.draws(9, repeat=4):
            weight = rng.normal(size=case.M.shape[1])
            built, solution = solved(case, eta, own)
            columns = case.columns(built.factor.structures)
            zero = case.fill(0.0)
            ours = gradients(case, built, solution, zero, weight[columns])
            direction = case.draw(rng)
            supports = [set(columns)]

            def loss(
                t,
                case=case,
                eta=eta,
                own=own,
                direction=direction,
                weight=weight,
                supports=supports,
            ):
                there, _ = solved(case, *moved(eta, own, direction, t))
                found = case.columns(there.factor.structures)
                supports.append(set(found))
                return there.factor.probs @ weight[found]

            slope = slope_of(loss)
            total += 1
            if slope is not None and all(s == supports[0] for s in supports):
                compared += 1
                assert abs(along(ours, direction) - slope) <= 1e-6, (case.name, eta, own)
        assert compared > total / 4

    def test_gradient_of_the_objective_is_the_value(self):
        for case, eta, own, _ in self.draws(10, repeat=1):
            built, solution = solved(case, eta, own)
            out = solution.vjp(objective=1.0)
            np.testing.assert_allclose(out[built.u], built.u.value, rtol=0, atol=1e-12)
            if case.scores:
                np.testing.assert_allclose(out[built.factor], built.factor.value, atol=1e-12)

    # Batches ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("shared", [False, True])
    def test_a_batch_is_a_loop(self, shared):
        rng = np.random.default_rng(11)
        for case in self.cases():
            eta = rng.normal(size=(2, 3, *case.shape))
            lead = () if shared else (2, 3)
            own = {k: rng.normal(size=(*lead, *s)) for k, s in case.scores.items()}
            grads = (
                rng.normal(size=eta.shape),
                {k: rng.normal(size=(2, 3, *s)) for k, s in case.scores.items()},
            )
            batch, solution = solved(case, eta, own, batch_dims=2)
            out, own_out = gradients(case, batch, solution, grads)
            total = {k: np.zeros(s) for k, s in case.scores.items()}
            for at in np.ndindex(2, 3):
                here = own if shared else {k: v[at] for k, v in own.items()}
                single, alone = solved(case, eta[at], here)
                np.testing.assert_array_equal(batch.u.value[at], single.u.value)
                assert solution.objective[at] == alone.objective
                if case.scores:
                    np.testing.assert_array_equal(batch.factor.value[at], single.factor.value)
                one = grads[0][at], {k: g[at] for k, g in grads[1].items()}
                expected, own_expected = gradients(case, single, alone, one)
                np.testing.assert_array_equal(out[at], expected)
                for name, grad in own_expected.items():
                    total[name] += grad
                    if not shared:
                        np.testing.assert_array_equal(own_out[name][at], grad)
            if shared:  # their gradient is the sum over the instances
                for name, grad in total.items():
                    np.testing.assert_allclose(own_out[name], grad, rtol=0, atol=1e-12)

    # Masks ------------------------------------------------------------------------------------

    def test_single_entries_are_forbidden(self):
        """By a mask or by −inf, which are the same to the last bit."""
        rng = np.random.default_rng(12)
        found = 0
        for case in self.cases():
            eta, own = rng.normal(size=(6, *case.shape)), case.draw(rng)[1]
            mask = rng.random(eta.shape) < 0.8
            flat = mask.reshape(6, -1)
            possible = (case.M[None] <= flat[:, :, None]).all(axis=1).any(axis=1)
            possible &= self.whole(case, mask)
            mask[~possible] = True
            built, solution = solved(case, eta, own, mask, batch_dims=1)
            assert solution.converged.all()
            grad = rng.normal(size=eta.shape)
            out = solution.vjp({built.u: grad})[built.u]
            minus_inf, other = solved(case, np.where(mask, eta, -np.inf), own, batch_dims=1)
            np.testing.assert_array_equal(minus_inf.u.value, built.u.value)
            np.testing.assert_array_equal(minus_inf.factor.probs, built.factor.probs)
            np.testing.assert_array_equal(other.vjp({minus_inf.u: grad})[minus_inf.u], out)
            assert not built.u.value[~mask].any() and not out[~mask].any()
            for row in range(6):
                here = np.where(mask[row], eta[row], -np.inf)
                mu, _, _ = case.exact(here, own)
                np.testing.assert_allclose(built.u.value[row], mu, rtol=0, atol=ALONE)
                direction = case.draw(rng)

                def loss(t, case=case, here=here, own=own, direction=direction, grad=grad[row]):
                    return np.sum(grad * case.exact(here + t * direction[0], own)[0])

                slope = slope_of(loss)
                if slope is not None:
                    found += not mask[row].all()
                    assert abs(np.sum(out[row] * direction[0]) - slope) <= 1e-6
                alone, single = solved(case, eta[row], own, mask[row])
                np.testing.assert_array_equal(alone.u.value, built.u.value[row])
                np.testing.assert_array_equal(single.vjp({alone.u: grad[row]})[alone.u], out[row])
        assert found >= 3

    def whole(self, case, mask):
        """Whether nothing but single entries is masked, (B,): nothing is absent.

        By default that is a row; to be defined anew where something else can be absent.
        """
        return mask.any(axis=-1).reshape(len(mask), -1).all(axis=-1)

    def test_a_padded_instance_is_the_smaller_one(self):
        """Bit for bit in the solution, to rounding in the gradient; whatever the padding holds."""
        rng = np.random.default_rng(13)
        for pad in self.padded():
            present = pad.present()
            small, large = pad.small, pad.large
            for scale in (0.1, 1.0, 10.0):
                eta, own = small.draw(rng, scale)
                wide, wide_own = large.draw(rng, 100.0)
                wide[pad.keep] = eta
                for name, values in own.items():
                    wide_own[name][pad.own[name]] = values
                filled = rng.normal(size=(BATCH, *large.shape))
                mask = np.ones(filled.shape, dtype=bool)
                filled[0], mask[0] = wide, present
                own_of = {
                    k: np.stack([v, *rng.normal(size=(BATCH - 1, *v.shape))])
                    for k, v in wide_own.items()
                }
                batch, solution = solved(large, filled, own_of, mask, batch_dims=1)
                alone, single = solved(small, eta, own)
                self.check_padding(pad, batch, solution, alone, single, rng)

    def check_padding(self, pad, batch, solution, alone, single, rng):
        small, large = pad.small, pad.large
        outside = np.ones(large.shape, dtype=bool)
        outside[pad.keep] = False
        value = batch.u.value[0]
        np.testing.assert_array_equal(value[pad.keep], alone.u.value, err_msg=large.name)
        assert not value[outside].any()
        k = alone.factor.num_structures
        assert batch.factor.num_structures[0] == k
        np.testing.assert_array_equal(batch.factor.probs[0, :k], alone.factor.probs)
        held = batch.factor.structures[0, :k].reshape(k, *large.shape)
        np.testing.assert_array_equal(
            held[(slice(None), *self.as_tuple(pad.keep))],
            alone.factor.structures.reshape(k, *small.shape),
        )
        assert not held[:, outside].any()
        if small.scores:
            first = next(iter(small.scores))
            np.testing.assert_array_equal(batch.factor.value[0][pad.own[first]], alone.factor.value)
            rest = np.ones(large.scores[first], dtype=bool)
            rest[pad.own[first]] = False
            assert not batch.factor.value[0][rest].any()
        # The gradient, of everything at once.
        grads = small.draw(rng)
        prob = rng.normal(size=k)
        wide = np.zeros((BATCH, *large.shape))
        wide[0] = rng.normal(size=large.shape)  # what comes from the padding is lost
        wide[0][pad.keep] = grads[0]
        wide_own = {n: np.zeros((BATCH, *s)) for n, s in large.scores.items()}
        for name in small.scores:
            wide_own[name][(0, *self.as_tuple(pad.own[name]))] = grads[1][name]
        wide_prob = np.zeros(batch.factor.probs.shape)
        wide_prob[0, :k] = prob
        ours, own = gradients(large, batch, solution, (wide, wide_own), wide_prob)
        expected, own_expected = gradients(small, alone, single, grads, prob)
        np.testing.assert_allclose(ours[0][pad.keep], expected, rtol=0, atol=1e-12)
        assert not ours[0][outside].any()
        for name, grad in own_expected.items():
            np.testing.assert_allclose(own[name][0][pad.own[name]], grad, rtol=0, atol=1e-12)
            rest = np.ones(large.scores[name], dtype=bool)
            rest[pad.own[name]] = False
            assert not own[name][0][rest].any() and not own[name][1:].any()

    @staticmethod
    def as_tuple(index):
        return index if isinstance(index, tuple) else (index,)

    def test_nothing_is_there(self):
        """A factor none of whose variables remain is absent; other instances are as before."""
        rng = np.random.default_rng(14)
        for case in self.cases():
            eta, own = rng.normal(size=(BATCH, *case.shape)), case.draw(rng)[1]
            mask = np.ones(eta.shape, dtype=bool)
            mask[0] = False
            built, solution = solved(case, eta, own, mask, batch_dims=1)
            assert solution.converged.all()
            assert not built.u.value[0].any() and solution.objective[0] == 0
            np.testing.assert_array_equal(built.u.value[1], solved(case, eta[1], own)[0].u.value)
            out = solution.vjp({built.u: rng.normal(size=eta.shape)})[built.u]
            assert not out[0].any()

    # Infeasible -------------------------------------------------------------------------------

    def impossible(self) -> list[tuple[Case, np.ndarray]]:
        """Cases with masks that leave rows, but no structure."""
        return []

    def test_infeasible(self):
        rng = np.random.default_rng(15)
        for case, mask in self.impossible():
            assert mask.any()
            eta, own = rng.normal(size=(3, *case.shape)), case.draw(rng)[1]
            masks = np.stack([np.ones_like(mask), mask, np.ones_like(mask)])
            for method in ("auto", "admm"):
                built, solution = solved(
                    case, eta, own, masks, 1, method=method, on_failure="ignore"
                )
                expected = [fm.Status.CONVERGED, fm.Status.INFEASIBLE, fm.Status.CONVERGED]
                assert list(solution.status) == expected, (case.name, method)
                assert np.isnan(built.u.value[1][mask]).all()
                assert solution.objective[1] == -np.inf
                assert built.factor.num_structures[1] == 0
                assert np.isnan(built.factor.probs[1]).all()
                assert np.isfinite(built.u.value[::2]).all()
                out = solution.vjp({built.u: rng.normal(size=eta.shape)})[built.u]
                assert not out[1].any() and np.isfinite(out).all()
            with pytest.warns(fm.NotConvergedWarning, match="No assignment"):
                solved(case, eta, own, masks, 1)
            with pytest.raises(fm.InfeasibleError):
                solved(case, eta[1], own, mask, on_failure="raise")

    # Errors -----------------------------------------------------------------------------------

    def test_before_a_query(self):
        case = self.cases()[-1]
        built = build(case, *case.fill(0.0))
        for name in ("structures", "probs", "num_structures"):
            with pytest.raises(fm.GraphError, match=rf"{self.kind} over u.*call fg.solve\(\)"):
                getattr(built.factor, name)

    def test_negated_variables_are_refused(self):
        case = self.cases()[-1]
        with pytest.raises(fm.GraphError, match=rf"{self.kind} over ~u.*no negated variables"):
            fg = fm.FactorGraph()
            case.make(~fg.variable_from(np.zeros(case.shape)), **case.fill(0.0)[1])

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_scores_that_are_not_numbers(self, bad):
        for case in self.cases():
            for name, shape in case.scores.items():
                if 0 in shape:
                    continue
                eta, own = case.fill(0.0)
                own[name] = np.array(own[name])
                own[name].flat[-1] = bad
                with pytest.raises(ValueError, match=rf"{self.kind} over u.*{name}.*at index"):
                    solved(case, eta, own)

    def test_gradients_of_the_wrong_shape(self):
        case = self.cases()[-1]
        built, solution = solved(case, *case.fill(0.5))
        with pytest.raises(fm.ShapeError, match=f"probs of {self.kind}"):
            solution.vjp(probs={built.factor: np.zeros(99)})

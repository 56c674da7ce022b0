"""Everything bad is refused with a clear message; nothing crashes, nothing is silent."""

import numpy as np
import pytest

import factormax as fm


@pytest.fixture
def fg():
    return fm.FactorGraph()


def test_hierarchy():
    for error in (fm.GraphError, fm.ShapeError, fm.InfeasibleError, fm.NotConvergedError):
        assert issubclass(error, fm.FactormaxError)
    assert issubclass(fm.GraphError, ValueError) and issubclass(fm.ShapeError, ValueError)
    assert issubclass(fm.NotConvergedWarning, Warning)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("batch_dims", [0, 1])
def test_scores_not_finite(bad, batch_dims):
    """The variable and the first index, the batch's included, are named."""
    scores = np.zeros((2, 3))
    scores[1, 0] = scores[1, 2] = bad
    fg = fm.FactorGraph(batch_dims=batch_dims)
    u = fg.variable_from(scores, name="alignment")
    fg.add(fm.Xor(u))
    with pytest.raises(ValueError, match=r"alignment.*1, ?0"):
        fg.solve()


@pytest.mark.parametrize("scores", ["abc", [1j, 0], [None, 1], [[1, 2], [3]], object(), ["a", "b"]])
def test_scores_that_are_no_numbers(fg, scores):
    with pytest.raises((TypeError, ValueError)):
        fg.variable_from(scores)
        fg.solve()


def test_batch_shapes_that_disagree():
    fg = fm.FactorGraph(batch_dims=1)
    fg.variable_from(np.zeros((2, 3)))
    with pytest.raises(fm.ShapeError):
        fg.variable_from(np.zeros((4, 3)))
        fg.solve()


def test_scores_with_fewer_dimensions_than_the_batch():
    fg = fm.FactorGraph(batch_dims=2)
    with pytest.raises(fm.ShapeError, match="batch_dims"):
        fg.variable_from(np.zeros(3))


@pytest.mark.parametrize("batch_dims", [-1, 1.5, "1", None])
def test_bad_batch_dims(batch_dims):
    with pytest.raises((ValueError, TypeError)):
        fm.FactorGraph(batch_dims=batch_dims)


def test_mask_of_another_shape(fg):
    with pytest.raises(fm.ShapeError, match="mask"):
        fg.variable_from(np.zeros(3), mask=np.ones(2, bool))
    with pytest.raises(fm.ShapeError, match="mask"):
        fg.variable_from(np.zeros(3), mask=np.ones((2, 3), bool))


def test_mask_that_is_not_boolean(fg):
    with pytest.raises((fm.GraphError, TypeError), match="mask"):
        fg.variable_from(np.zeros(3), mask=np.array([0.5, 1, 0]))


@pytest.mark.parametrize("shape", [-1, (2, -3), 1.5, "a"])
def test_bad_variable_shape(fg, shape):
    with pytest.raises((ValueError, TypeError)):
        fg.variable(shape)


def test_variables_of_another_graph(fg):
    other = fm.FactorGraph()
    u, v = fg.variable(3), other.variable(3)
    with pytest.raises(fm.GraphError, match="graph"):
        fg.add(fm.Xor(v))
    with pytest.raises(fm.GraphError, match="graph"):
        fg.add(fm.Xor([u, v]))
    with pytest.raises(fm.GraphError, match="graph"):
        fg.add(fm.Pair(u, v, 1.0))


def test_a_factor_added_twice_is_refused_or_counts_twice(fg):
    u = fg.variable_from(np.array([0.3, 0.9]))
    factor = fg.add(fm.Xor(u))
    try:
        fg.add(factor)
    except fm.GraphError:
        return
    fg.solve()
    np.testing.assert_allclose(u.value, [0.2, 0.8])


@pytest.mark.parametrize("what", [None, 3, "Xor", fm.Xor, np.zeros(3)])
def test_adding_what_is_no_factor(fg, what):
    with pytest.raises((TypeError, fm.GraphError)):
        fg.add(what)


@pytest.mark.parametrize("what", [None, 3, np.zeros(3), [], [np.zeros(2)], "u"])
def test_a_factor_over_no_variables(what):
    with pytest.raises((TypeError, fm.GraphError), match="Xor"):
        fm.Xor(what)


@pytest.mark.parametrize("axis", [2, -3, 0.5, "0"])
def test_bad_axis(fg, axis):
    u = fg.variable((2, 3))
    with pytest.raises((ValueError, TypeError, IndexError)):
        fg.add(fm.Xor(u, axis=axis))


@pytest.mark.parametrize(
    "options",
    [
        {"method": "newton"},
        {"tol": 0.0},
        {"tol": -1},
        {"tol": np.nan},
        {"max_iter": 0},
        {"max_iter": -5},
        {"max_iter": 1.5},
        {"on_failure": "panic"},
        {"method": "admm", "step_size": 0.0},
        {"method": "admm", "step_size": np.nan},
        {"warm_start": 3},
        {"no_such_option": 1},
        {"method": ["admm"]},
        {"tol": "x"},
        {"tol": None},
        {"tol": np.array([1e-3, 1e-6])},
        {"max_iter": None},
        {"max_iter": np.inf},
        {"max_iter": 10**400},
        {"max_iter": 2**31},
        {"max_inner_iter": "many"},
        {"step_size": None},
        {"step_size": True},
        {"on_failure": np.array(["warn", "raise"])},
    ],
    ids=str,
)
def test_bad_options(fg, options):
    u = fg.variable_from(np.array([0.3, 0.9]))
    fg.add(fm.Xor(u))
    with pytest.raises((ValueError, TypeError), match=[*options][-1]):
        fg.solve(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_nodes": np.inf},
        {"max_nodes": None},
        {"max_nodes": "x"},
        {"time_limit": "x"},
        {"time_limit": 0},
        {"time_limit": np.nan},
        {"time_limit": [1, 2]},
        {"tol": None},
        {"max_iter": None},
    ],
    ids=str,
)
def test_bad_options_of_decode(fg, options):
    fg.add(fm.Xor(fg.variable_from(np.array([0.3, 0.9]))))
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        fg.decode(**options)


def test_options_of_other_number_types(fg):
    fg.add(fm.Xor(fg.variable_from(np.array([0.3, 0.9]))))
    assert fg.solve(tol=np.float32(1e-3), max_iter=np.int64(50), step_size=1).converged
    assert fg.solve(max_iter=50.0).converged
    assert fg.decode(max_nodes=1e4, time_limit=np.inf).optimal


@pytest.mark.parametrize("word, number", [("budget", 10**400), ("budget", 10**5000)], ids=["", "_"])
def test_numbers_beyond_all_range(fg, word, number):
    u = fg.variable(3)
    with pytest.raises(fm.GraphError, match=f"Budget over u: {word} is beyond the range"):
        fm.Budget(u, number)
    fm.Budget(u, 10**40)


@pytest.mark.parametrize("bad", [None, "x", [[1], [1, 2]], {}, [1, None]], ids=str)
def test_parameters_that_are_no_numbers(fg, bad):
    u = fg.variable(3)
    with pytest.raises(fm.ShapeError, match="Budget over u: budget must be"):
        fm.Budget(u, bad)
    with pytest.raises(fm.ShapeError, match="Knapsack over u: costs must be"):
        fm.Knapsack(u, bad, 1)


@pytest.mark.parametrize("kind", ["x", None, ["hinge"]], ids=str)
def test_bad_kind_of_loss(fg, kind):
    u = fg.variable(2)
    with pytest.raises(ValueError, match="kind must be"):
        fg.loss({u: [1, 0]}, kind)


@pytest.mark.parametrize("cost", ["x", np.nan, {"u": 1}], ids=str)
def test_bad_cost(fg, cost):
    u = fg.variable(2)
    with pytest.raises(ValueError, match="cost"):
        fg.loss({u: [1, 0]}, "hinge", cost=cost)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_multipliers_of_a_warm_start_that_are_not_finite(fg, bad):
    fg.add(fm.Xor(fg.variable_from(np.array([0.3, 0.9]))))
    solution = fg.solve()
    solution.multipliers[0, 0] = bad
    for query in (fg.solve, fg.solve_map):
        with pytest.raises(ValueError, match="warm_start"):
            query(warm_start=solution)


def test_bad_gradients(fg):
    u = fg.variable((2, 3))
    fg.add(fm.Xor(u))
    solution = fg.solve()
    other = fm.FactorGraph().variable((2, 3))
    with pytest.raises(fm.ShapeError, match="u"):
        solution.vjp({u: np.zeros(6)})
    for bad in ({other: np.zeros((2, 3))}, {"u": np.zeros((2, 3))}):
        with pytest.raises((fm.GraphError, TypeError)):
            solution.vjp(bad)
    with pytest.raises((fm.GraphError, TypeError)):
        solution.vjp(np.zeros((2, 3)))
    for bad in ("x", np.zeros(2), {}):
        with pytest.raises(fm.ShapeError, match="objective"):
            solution.vjp(objective=bad)


@pytest.mark.parametrize("count", [0, -1, 1.5, "2"])
def test_bad_number_of_threads(count):
    before = fm.get_num_threads()
    with pytest.raises((ValueError, TypeError)):
        fm.set_num_threads(count)
    assert fm.get_num_threads() == before


def test_a_variable_is_no_array(fg):
    u = fg.variable(3)
    with pytest.raises(TypeError):
        u[0] = 1
    with pytest.raises(TypeError):
        u + 1


def test_torch_pair_scores_over_numpy_variables():
    torch = pytest.importorskip("torch")
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros(3))
    with pytest.raises(fm.GraphError, match="Pair over u"):
        fg.add(fm.Pair(u[:2], u[1:], torch.zeros(2)))


def test_a_factor_is_added_once():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros(2))
    pair = fg.add(fm.Pair(u[0], u[1], 1.0))
    with pytest.raises(fm.GraphError, match=r"Pair over u\[0\], u\[1\] was already added"):
        fg.add(pair)


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (lambda u: fm.Budget(u, [1, -2]), r"Budget over u, instance \(1,\): budget must be at"),
        (lambda u: fm.Exactly(u, [1, 2, 9], axis=1), r"Exactly over u\[2, :\]: count is 9"),
        (
            lambda u: fm.Exactly(u, [[1, 2, 0], [9, 1, 1]], axis=1),
            r"Exactly over u\[0, :\], instance \(1,\): count is 9",
        ),
        (
            lambda u: fm.Knapsack(~u, [[1, 1, 1, 1], [1, 1, 1, 1], [1, -3, 1, 1]], 2, axis=1),
            r"Knapsack over ~u\[2, :\]: costs must be finite and at least 0, got -3",
        ),
        (
            lambda u: fm.Linear(u[0], np.ones(4), [1, 2], [2, 1]),
            r"Linear over u\[0\], instance \(1,\): lower is 2.0, above upper",
        ),
    ],
)
def test_a_bad_parameter_names_its_factor_and_instance(factor, message):
    u = fm.FactorGraph(batch_dims=1).variable_from(np.zeros((2, 3, 4)), name="u")
    with pytest.raises(fm.FactormaxError, match=message) as error:
        factor(u)
    assert error.value.__context__ is None

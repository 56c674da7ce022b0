"""`factormax.plot`: something is drawn, where it belongs, from the arrays of every library."""

import subprocess
import sys

import numpy as np
import pytest

import factormax as fm

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402

WORDS = "she saw the man".split()


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def pixels(ax):
    """The picture, `(height, width, 3)`."""
    ax.figure.canvas.draw()
    return np.asarray(ax.figure.canvas.buffer_rgba())[..., :3]


def inked(ax):
    """How many pixels are not white."""
    return int((pixels(ax) < 250).any(axis=-1).sum())


def coloured(ax, colour):
    """How many pixels are of this colour, up to rounding."""
    rgb = np.array(matplotlib.colors.to_rgb(colour)) * 255
    return int((np.abs(pixels(ax) - rgb).max(axis=-1) < 3).sum())


def texts(ax):
    """What is written, in insets too."""
    found = [t.get_text() for t in ax.texts]
    found += [t.get_text() for t in [*ax.get_xticklabels(), *ax.get_yticklabels()]]
    return found + [t for child in ax.child_axes for t in texts(child)]


def solved_matching():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([[1.0, 0.9, -2.0], [0.8, 0.1, -2.0]]))
    factor = fg.add(fm.Matching(u))
    fg.solve()
    return u, factor


def solved_tree():
    fg = fm.FactorGraph()
    scores = np.full((4, 4), -1.0)
    scores[[0, 1, 2], [1, 1, 3]] = 2.0
    scores[3, [0, 1]] = 0.8, 1.0
    u = fg.variable_from(scores)
    factor = fg.add(fm.DepTree(u))
    fg.solve()
    return u, factor


def test_marginals_of_a_vector():
    ax = fm.plot.marginals(np.array([0.75, 0.25, 0.0]), columns=["a", "b", "c"])
    heights = [bar.get_height() for bar in ax.patches]
    assert heights == [0.75, 0.25, 0.0]
    assert {"a", "b", "c", ".75", ".25"} <= set(texts(ax))
    assert inked(ax) > inked(fm.plot.marginals(np.zeros(3), columns=["a", "b", "c"])) + 1000


def test_marginals_of_a_matrix():
    u, factor = solved_matching()
    ax = fm.plot.marginals(u, rows=["x", "y"], columns=["a", "b", "c"])
    np.testing.assert_array_equal(ax.images[0].get_array(), u.value)
    assert {"x", "y", "a", "b", "c", ".65", ".35"} <= set(texts(ax))
    assert inked(ax) > inked(fm.plot.marginals(np.zeros((2, 3)))) + 1000
    np.testing.assert_array_equal(fm.plot.marginals(factor).images[0].get_array(), u.value)


def test_what_is_masked_is_grey():
    mask = np.array([True, False, True])
    ax = fm.plot.marginals(np.ones((2, 3)), mask=mask)
    assert ax.images[0].get_array().mask[:, 1].all()
    assert coloured(ax, "#F1F1F1") > 1000 > coloured(fm.plot.marginals(np.ones((2, 3))), "#F1F1F1")
    assert len(fm.plot.marginals(np.ones(3), mask=mask).patches) == 4  # three bars and a gap


def masked_strip():
    fg = fm.FactorGraph()
    there = np.array([True, True, True, False])
    u = fg.variable_from(np.array([0.4, 0.5, -0.2, 0.6]), mask=there)
    factor = fg.add(fm.SequenceBudget(u, 0.5, budget=2))
    fg.solve()
    return u, factor, there


def test_the_mask_of_a_variable_is_grey():
    u, factor, there = masked_strip()
    for given, bars in ((u, 5), (factor, 5), (u[2:], 3), (u[:3], 3), (u.value, 4)):
        assert len(fm.plot.marginals(given).patches) == bars  # with a gap if one is masked
    assert len(fm.plot.marginals(u, mask=np.ones(4, bool)).patches) == 4  # its own is in front
    for strip in fm.plot.structures(factor).child_axes:
        np.testing.assert_array_equal(strip.images[0].get_array().mask, [~there])
    fg = fm.FactorGraph(batch_dims=1)  # a batch of vectors is drawn as a matrix
    u = fg.variable_from(np.zeros((2, 3)), mask=np.array([[True] * 3, [True, True, False]]))
    fg.solve()
    drawn = fm.plot.attention(u).images[0].get_array()
    np.testing.assert_array_equal(drawn.mask, [[False] * 3, [False, False, True]])


def test_cells_have_a_frame():
    ax = fm.plot.marginals(np.zeros((2, 3)))
    assert all(spine.get_visible() for spine in ax.spines.values())
    assert not any(s.get_visible() for s in fm.plot.marginals(np.zeros((61, 2))).spines.values())


def test_a_structure_with_nothing_on():
    for found in (np.array([[1, 0], [0, 0]]), np.array([np.eye(2), np.zeros((2, 2))])):
        first, second = fm.plot.structures(found, probs=[0.7, 0.3]).child_axes
        assert "(none)" in texts(second) and "(none)" not in texts(first)


def test_entries_are_numbered():
    for size in (1, 2, 3, 40):
        for ax in (fm.plot.marginals(np.eye(size)), fm.plot.marginals(np.ones(size))):
            ticks = ax.get_xticks()
            assert (ticks == np.round(ticks)).all() and 0 in ticks


def test_large_matrices_have_no_numbers():
    assert not fm.plot.marginals(np.full((40, 40), 0.5)).texts
    assert len(fm.plot.marginals(np.full((17, 2), 0.5), numbers=True).texts) == 34


def test_attention():
    weights = np.array([[0.9, 0.1], [0.8, 0.2]])
    ax = fm.plot.attention(weights, queries=["x", "y"], keys=["a", "b"])
    (sums,) = ax.child_axes
    heights = [bar.get_height() for bar in sums.patches]
    np.testing.assert_allclose(heights, [1, 0.3, 0.7, 0])  # up to 1, and above
    assert coloured(ax, "#D55E00") > 20
    one_to_one = fm.plot.attention(np.eye(2))
    assert coloured(one_to_one, "#D55E00") == 0 and inked(one_to_one) > 1000
    assert not fm.plot.attention(weights, sums=False).child_axes


def test_matching():
    u, factor = solved_matching()
    for given in (u, factor, u.value):
        ax = fm.plot.matching(given, left=["x", "y"], right=["a", "b", "c"])
        assert len(ax.collections[0].get_segments()) == 4
        assert {"x", "y", "a", "b", "c"} <= set(texts(ax))
    assert inked(ax) > 500


def test_matching_of_points():
    first, second = np.array([[0.0, 0.0], [1.0, 1.0]]), np.array([[0.0, 1.0], [1.0, 0.0]])
    truth = np.array([[1, 0], [0, 0]])
    weights = np.array([[0.9, 0.0], [0.0, 0.4]])
    ax = fm.plot.matching(weights, points=(first, second), truth=truth, unmatched=[0.1, 0.6])
    blue, orange = (matplotlib.colors.to_rgb(c) for c in ("#0072B2", "#D55E00"))
    drawn = {tuple(c[:3]) for c in ax.collections[0].get_colors()}
    assert drawn == {blue, orange}
    rings = ax.collections[1]
    assert [tuple(c[:3]) for c in rings.get_edgecolors()] == [orange, blue]
    ends = np.array(ax.collections[0].get_segments())
    assert (ends[:, 0, 0] < ends[:, 1, 0]).all()  # the second set is on the right


def test_tree():
    u, factor = solved_tree()
    for given in (u, factor, u.value):
        ax = fm.plot.tree(given, words=WORDS)
        arcs = [p for p in ax.patches if isinstance(p, matplotlib.patches.Arc)]
        off_diagonal = (u.value > 1e-3) & ~np.eye(4, dtype=bool)
        assert len(arcs) == off_diagonal.sum()
        assert set(WORDS) <= set(texts(ax))
    assert inked(ax) > 500
    uncertain = int(((u.value > 1e-3) & (u.value < 1 - 1e-3)).sum())
    assert uncertain >= 2 and len(ax.texts) == 4 + uncertain
    assert len(fm.plot.tree(u, numbers=False).texts) == 4


def test_structures():
    (_, tree), (_, matching) = solved_tree(), solved_matching()
    ax = fm.plot.structures(tree, words=WORDS)
    assert len(ax.child_axes) == len(tree.probs) > 1
    assert texts(ax).count("she") == len(tree.probs)
    assert f"{tree.probs[0]:.2f}" in texts(ax)
    ax = fm.plot.structures(matching)
    assert [len(c.collections[0].get_segments()) for c in ax.child_axes] == [2, 2]
    assert inked(ax) > 500


def test_structures_of_arrays_and_few_of_them():
    found, probs = np.eye(4), np.array([0.4, 0.3, 0.2, 0.1])
    ax = fm.plot.structures(found, probs=probs, words="abcd", most=2)
    assert len(ax.child_axes) == 2
    assert "2 of 4; the others have 0.30 in total" in texts(ax)
    drawn = []
    fm.plot.structures(found, probs=probs, draw=lambda structure, ax: drawn.append(structure))
    np.testing.assert_array_equal(drawn, found)
    padded = fm.plot.structures(found.reshape(4, 2, 2), probs=np.array([0.6, 0.4, 0, 0]))
    assert len(padded.child_axes) == 2


def logic_graph():
    fg = fm.FactorGraph()
    a = fg.variable_from(np.array([0.2, 0.9, 0.4]), name="a")
    b = fg.variable_from(np.array([0.1, 0.3, 0.8]), name="b")
    fg.add(fm.Imply(a, ~b))
    fg.add(fm.Budget(a, 2))
    fg.add(fm.Pair(a[0], a[2], 0.5))
    return fg


def circles(ax):
    return [p for p in ax.patches if isinstance(p, matplotlib.patches.Circle)]


def edges(ax):
    return [p for p in ax.patches if type(p) is matplotlib.patches.PathPatch]


def test_graph():
    fg = logic_graph()
    ax = fm.plot.graph(fg)
    assert len(circles(ax)) == 6
    assert len(edges(ax)) == 3 * 2 + 3 + 2
    assert texts(ax).count("Imply") == 3 and {"Budget 2", "Pair", "a", "b"} <= set(texts(ax))
    assert len(ax.lines) == 3  # a hollow dot for each negated variable
    assert inked(ax) > 2000
    before = pixels(ax).copy()
    np.testing.assert_array_equal(before, pixels(fm.plot.graph(logic_graph())))  # deterministic
    fg.solve()
    assert (pixels(fm.plot.graph(fg)) != before).any()  # filled by the values


def test_boxes_and_circles_keep_apart():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros((3, 4)))
    v = fg.variable_from(np.zeros(4))
    fg.add(fm.Pair(u[:-1], u[1:], 0.1))
    fg.add(fm.Pair(u[:, :-1], u[:, 1:], 0.1))
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    fg.add(fm.Budget(u, 3))
    fg.add(fm.Imply(u[-1], v))
    i, j = np.triu_indices(4, 1)
    fg.add(fm.Pair(v[i], v[j], 0.1))
    fg.add(fm.Or(u[[0, 2], [1, 2]]))
    ax = fm.plot.graph(fg)
    ax.figure.canvas.draw()
    boxes = [t.get_bbox_patch().get_window_extent() for t in ax.texts if t.get_bbox_patch()]
    discs = [c.get_window_extent() for c in circles(ax)]
    assert len(boxes) == 8 + 9 + 3 + 4 + 1 + 4 + 6 + 1 and len(discs) == 16
    overlaps = [
        (k, m)
        for k, box in enumerate(boxes)
        for m, other in enumerate([*boxes[:k], *discs])
        if min(box.x1, other.x1) - max(box.x0, other.x0) > 3
        and min(box.y1, other.y1) - max(box.y0, other.y0) > 3
    ]
    assert not overlaps


def test_graph_of_a_block_is_an_outline():
    fg = fm.FactorGraph()
    fg.add(fm.DepTree(fg.variable((3, 3))))
    ax = fm.plot.graph(fg)
    assert not edges(ax)
    boxes = [p for p in ax.patches if isinstance(p, matplotlib.patches.FancyBboxPatch)]
    assert len(boxes) == 1 and "DepTree" in texts(ax)


def test_graph_of_a_batch():
    fg = fm.FactorGraph(batch_dims=1)
    mask = np.array([[True, True, True], [True, True, False]])
    u = fg.variable_from(np.array([[0.0, 0.0, 3.0], [3.0, 0.0, 0.0]]), mask=mask)
    fg.add(fm.Xor(u))
    fg.solve()

    def filled(**of):
        return [c.get_facecolor()[:3] for c in circles(fm.plot.graph(fg, **of))]

    white, blue = (1.0, 1.0, 1.0), matplotlib.colors.to_rgb("#0072B2")
    assert filled() == [white, white, white]
    assert filled(instance=0) == [white, white, blue]
    assert filled(instance=1)[0] == blue
    assert circles(fm.plot.graph(fg, instance=1))[2].get_linestyle() != "-"
    with pytest.raises(fm.GraphError, match=r"instance=2 is not in a batch of shape \(2,\)"):
        fm.plot.graph(fg, instance=2)
    with pytest.raises(fm.GraphError, match="not an index into 1 batch dimension"):
        fm.plot.graph(fg, instance=(0, 0))


def test_graph_of_other_shapes():
    fg = fm.FactorGraph()
    fg.variable(())
    w = fg.variable((2, 2, 3))
    fg.add(fm.Xor(w, axis=2))
    fg.add(fm.Budget(w, 3))
    ax = fm.plot.graph(fg)
    assert len(circles(ax)) == 13


def test_graph_refuses_what_is_too_large():
    fg = fm.FactorGraph()
    with pytest.raises(fm.GraphError, match="no variables"):
        fm.plot.graph(fg)
    fg.add(fm.Xor(fg.variable((40, 40)), axis=1))
    with pytest.raises(fm.GraphError, match="1640 variables and factors are too many"):
        fm.plot.graph(fg)


def test_to_dot():
    text = logic_graph().to_dot()
    assert text == fm.plot.to_dot(logic_graph())
    assert text.count("shape=circle") == 6 and text.count("shape=square") == 5
    assert text.count(" -- ") == 11 and text.count("odot") == 3
    assert 'label="a[0]"' in text and 'label="Budget 2"' in text
    fg = fm.FactorGraph()
    fg.variable(1, name='"q"\\')
    assert r'label="\"q\"\\[0]"' in fg.to_dot()


@pytest.mark.parametrize("draw", [fm.plot.marginals, fm.plot.attention, fm.plot.matching])
def test_ax_in_ax_out(draw):
    _, (first, second) = plt.subplots(1, 2)
    assert draw(np.eye(3), second) is second
    assert draw(np.eye(3), ax=first) is first
    assert len(plt.get_fignums()) == 1
    assert draw(np.eye(3)) not in (first, second)
    with pytest.raises(TypeError, match="ax must be a matplotlib Axes, got str"):
        draw(np.eye(3), "ax")


def test_ax_in_ax_out_of_the_others():
    _, axes = plt.subplots(1, 3)
    _, factor = solved_tree()
    assert fm.plot.tree(factor, axes[0]) is axes[0]
    assert fm.plot.structures(factor, axes[1]) is axes[1]
    fg = fm.FactorGraph()
    fg.add(fm.Xor(fg.variable_from(np.zeros(3))))
    assert fm.plot.graph(fg, axes[2]) is axes[2]
    assert len(plt.get_fignums()) == 1


def test_other_libraries():
    torch = pytest.importorskip("torch")
    weights = torch.eye(2, dtype=torch.bfloat16).float().requires_grad_()
    fg = fm.FactorGraph()
    u = fg.variable_from(weights)
    fg.add(fm.Xor(u, axis=1))
    fg.solve()
    assert u.value.requires_grad
    np.testing.assert_array_equal(fm.plot.marginals(u).images[0].get_array(), np.eye(2))
    assert len(fm.plot.matching(weights).collections[0].get_segments()) == 2
    assert len(circles(fm.plot.graph(fg))) == 4


def test_jax_arrays():
    jnp = pytest.importorskip("jax.numpy")
    np.testing.assert_array_equal(fm.plot.marginals(jnp.eye(2)).images[0].get_array(), np.eye(2))
    jax = pytest.importorskip("jax")
    with pytest.raises(fm.GraphError, match="no numbers to draw inside a transform"):
        jax.jit(fm.plot.marginals)(jnp.eye(2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fm.plot.marginals(np.ones((2, 3, 4))), r"must be \(n,\) or \(m, n\), got \(2, 3"),
        (lambda: fm.plot.marginals(np.eye(2), rows="abc"), "rows must have 2 labels, got 3"),
        (lambda: fm.plot.marginals(np.eye(2), columns="a"), "columns must have 2 labels, got 1"),
        (lambda: fm.plot.marginals(np.eye(2), mask=np.ones(3)), r"broadcastable to \(2, 2\)"),
        (lambda: fm.plot.marginals("text"), "an array of numbers, .* got str"),
        (lambda: fm.plot.attention(np.ones(3)), r"must be \(queries, keys\), got \(3,\)"),
        (lambda: fm.plot.matching(np.eye(2), left="abc"), "left must have 2 labels"),
        (lambda: fm.plot.matching(np.eye(2), truth=np.eye(3)), r"truth must have shape \(2, 2\)"),
        (
            lambda: fm.plot.matching(np.eye(2), points=(np.eye(3), np.eye(2))),
            r"points must have shape \(2, 2\), got \(3, 3\)",
        ),
        (lambda: fm.plot.tree(np.ones((2, 3))), r"must be \(n, n\), got \(2, 3\)"),
        (lambda: fm.plot.tree(np.eye(2), highlight=np.eye(3)), "highlight must have shape"),
        (lambda: fm.plot.tree(np.eye(2), words=["one"]), "words must have 2 labels"),
        (lambda: fm.plot.structures(np.eye(2)), r"give probs, \(K,\), too"),
        (lambda: fm.plot.structures(np.eye(2), probs=[1.0]), r"got \(2, 2\) and \(1,\)"),
    ],
)
def test_wrong_shapes(call, message):
    with pytest.raises(fm.ShapeError, match=message):
        call()


def test_other_errors():
    with pytest.raises(fm.GraphError, match=r"from -3 to 2\. Are they scores\?"):
        fm.plot.marginals(np.array([-3.0, 2.0]))
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.zeros((2, 3, 3)))
    tree = fg.add(fm.DepTree(u))
    with pytest.raises(fm.GraphError, match="no value yet"):
        fm.plot.marginals(u)
    fg.solve()
    with pytest.raises(fm.ShapeError, match=r"marginals of u: .*Pick an instance of the batch"):
        fm.plot.marginals(u)
    with pytest.raises(fm.GraphError, match=r"Pick one: structures\(f\.structures\[0\]"):
        fm.plot.structures(tree)
    with pytest.raises(fm.GraphError, match="infeasible"):
        fm.plot.structures(np.eye(2), probs=[np.nan, np.nan])
    with pytest.raises(fm.GraphError, match="most must be at least 1"):
        fm.plot.structures(np.eye(2), probs=[0.5, 0.5], most=0)


# matplotlib is imported when something is drawn, and not before; without it, the message says what
# to do, and the text for Graphviz is still to be had.
WITHOUT = """
import sys
import numpy as np
import factormax as fm

assert "factormax.plot" not in sys.modules
fg = fm.FactorGraph()
u = fg.variable_from(np.zeros(2))
fg.add(fm.Xor(u))
fm.plot.marginals, fg.to_dot(), fg.summary()
assert "matplotlib" not in sys.modules
sys.modules["matplotlib"] = None
try:
    fm.plot.marginals(np.zeros(2))
except ImportError as error:
    print(error)
"""


def test_without_matplotlib():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'factormax.plot needs matplotlib: pip install "factormax[plot]".' in done.stdout


def test_edges_stay_within_the_axes():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.zeros((3, 6)))
    fg.add(fm.Or(u[0, 3:]))
    fg.add(fm.Or([u[0, :2], u[0, 4:]]))
    ax = fm.plot.graph(fg)
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    edges = [p.get_path() for p in ax.patches if isinstance(p, matplotlib.patches.PathPatch)]
    boxes = [path.get_extents() for path in edges]
    assert max(box.ymax for box in boxes) > 0.5  # above the first row
    for box in boxes:
        assert left < box.xmin and box.xmax < right and bottom < box.ymin and box.ymax < top


def test_labels_that_nobody_could_read_are_left_out():
    fg = fm.FactorGraph()
    fg.add(fm.Xor(fg.variable((12, 16)), axis=1))
    assert {"Xor", "3,3", "11,15"} <= set(texts(fm.plot.graph(fg)))
    small = fm.plot.graph(fg, plt.subplots(figsize=(3, 3))[1])
    assert {t.get_text() for t in small.texts} == {"u"} and inked(small) > 1000


def test_outlines_of_rows_are_side_by_side():
    fg = fm.FactorGraph()
    fg.add(fm.Xor(fg.variable((3, 16)), axis=1))
    patches = fm.plot.graph(fg).patches
    outlines = [p for p in patches if isinstance(p, matplotlib.patches.FancyBboxPatch)]
    ends = sorted((p.get_y(), p.get_y() + p.get_height()) for p in outlines)
    assert len(ends) == 3 and ends[0][1] < ends[1][0] and ends[1][1] < ends[2][0]

"""UAI files: what is read is what is written, and the graph means what the tables mean."""

import gzip
import json
import math
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from oracle import MEANING
from uai_files import ARCHIVE, Tables, needs_data, random_tables, unpack

import factormax as fm
from factormax.io import UAIError, UAIModel, read_uai


def graph_score(model: UAIModel, x: np.ndarray) -> float:
    """The objective of the graph at 0/1 values, −inf where a factor forbids them."""
    fg = model.graph
    total = model.offset + float(np.asarray(fg._tensors[0].scores, np.float64) @ x)
    for factor in fg._factors:
        if factor.kind == "Table":
            groups = [g.index for g in factor._given]
            if any(x[g].sum() != 1 for g in groups):
                return -math.inf
            total += float(factor._score_parts[0].given[tuple(int(x[g].argmax()) for g in groups)])
            continue
        literals = x[factor._index]
        if factor._negated is not None:
            literals = np.where(factor._negated, 1 - literals, literals)
        if factor.kind == "Pair":
            total += float(factor.scores @ literals.prod(axis=1))
        elif not all(MEANING[factor.kind](tuple(row), {}) for row in literals.astype(int)):
            return -math.inf
    return total


def check_everywhere(model: UAIModel, tables: Tables, evidence: dict[int, int]) -> float:
    """Every 0/1 point of the graph is worth what the tables say; returns the best value."""
    best, points = -math.inf, 0
    for states in tables.assignments():
        score = tables.score(states)
        assert model.score(states) == pytest.approx(score, abs=1e-9)
        if any(states[v] != s for v, s in evidence.items()):
            with pytest.raises(ValueError, match="can't be in state"):
                model.values(states)
            continue
        best = max(best, score)
        if any(s not in model.domains[v] for v, s in enumerate(states)):
            assert score == -math.inf  # nothing that was possible is lost
            continue
        x = model.values(states)
        points += 1
        assert graph_score(model, x) == pytest.approx(score, abs=1e-9)
        assert model.assignment(x) == list(states)
    if model.variable.size <= 10:  # and no other point is possible
        possible = sum(
            graph_score(model, np.array(x, float)) > -math.inf
            for x in product((0, 1), repeat=model.variable.size)
        )
        assert possible <= points
    return best


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("zeros", [0.0, 0.15, 0.4])
def test_every_assignment_has_its_value(tmp_path, seed, zeros):
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, variables=int(rng.integers(1, 6)), zeros=zeros)
    path = tables.write(tmp_path / "model.uai", kind=rng.choice(["MARKOV", "BAYES"]))
    evidence = {}
    if seed % 3 == 0:
        v = int(rng.integers(len(tables.cardinalities)))
        evidence = {v: int(rng.integers(tables.cardinalities[v]))}
    try:
        model = read_uai(path, evidence)
    except fm.InfeasibleError as error:
        assert str(path) in str(error)
        assert all(
            tables.score(states) == -math.inf
            for states in tables.assignments()
            if all(states[v] == s for v, s in evidence.items())
        )
        return
    check_everywhere(model, tables, evidence)


@pytest.mark.parametrize("seed", range(40))
def test_binary_pairwise_models_need_no_tables(tmp_path, seed):
    rng = np.random.default_rng(seed)
    zeros = [0.0, 0.3][seed % 2]
    tables = random_tables(rng, 6, 9, most_states=2, most_variables=2, zeros=zeros)
    try:
        model = read_uai(tables.write(tmp_path / "model.uai"))
    except fm.InfeasibleError:
        assert all(tables.score(x) == -math.inf for x in tables.assignments())
        return
    assert model.variable.size <= 6
    kinds = {factor.kind for factor in model.graph._factors}
    assert kinds <= {"Pair", "Or", "Imply", "AtMostOne", "Xor"}
    assert zeros or kinds <= {"Pair"}
    check_everywhere(model, tables, {})


@pytest.mark.parametrize(
    "zeros, kinds",
    [
        ([(0, 0)], ["Or"]),
        ([(0, 1)], ["Imply"]),
        ([(1, 0)], ["Imply"]),
        ([(1, 1)], ["AtMostOne"]),
        ([(0, 0), (1, 1)], ["Xor"]),
        ([(0, 1), (1, 0)], ["Xor"]),
        ([(0, 0), (0, 1)], []),  # the first is on: nothing is left to say
        ([(0, 1), (1, 0), (1, 1)], []),
    ],
)
def test_zeros_become_logic(tmp_path, zeros, kinds):
    table = np.array([[0.5, 3.0], [2.0, 0.7]])
    for place in zeros:
        table[place] = 0
    tables = Tables([2, 2], [(0, 1)], [table])
    model = read_uai(tables.write(tmp_path / "model.uai"))
    assert [factor.kind for factor in model.graph._factors] == kinds
    check_everywhere(model, tables, {})


@pytest.mark.parametrize("seed", range(30))
def test_queries_find_the_best_assignment(tmp_path, seed):
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, zeros=0.1)
    path = tables.write(tmp_path / "model.uai")
    best = max(map(tables.score, tables.assignments()))
    if best == -math.inf:
        return
    model = read_uai(path)
    relaxed = model.graph.solve_map(on_failure="raise")
    assert model.offset + relaxed.upper_bound >= best - 1e-6
    if relaxed.integral:
        assert model.score(model.assignment()) == pytest.approx(best, abs=1e-6)
    decoded = model.graph.decode(on_failure="raise")
    assert decoded.optimal
    assert model.offset + decoded.objective == pytest.approx(best, abs=1e-6)
    assert model.score(model.assignment()) == pytest.approx(best, abs=1e-6)


def test_a_tree_is_solved_by_the_relaxation(tmp_path):
    rng = np.random.default_rng(0)
    scopes = [(0, 1), (1, 2), (1, 3), (3, 4), (0,), (4,)]
    cardinalities = [2, 3, 2, 2, 2]
    potentials = [np.exp(rng.standard_normal([cardinalities[v] for v in s])) for s in scopes]
    tables = Tables(cardinalities, scopes, potentials)
    model = read_uai(tables.write(tmp_path / "tree.uai"))
    # 1 has three states; its neighbours are one-hot too; 3 and 4 form a pair.
    assert model.sizes == [2, 3, 2, 2, 1]
    assert sorted(f.kind for f in model.graph._factors) == ["Pair", "Table", "Table", "Table"]
    solution = model.graph.solve_map(on_failure="raise")
    best = max(map(tables.score, tables.assignments()))
    assert solution.integral
    assert model.offset + solution.objective == pytest.approx(best, abs=1e-6)


def test_variables_in_no_table_and_constants(tmp_path):
    path = tmp_path / "model.uai"
    path.write_text("MARKOV 4  2 3 1 2  3  0  1 1  0   1 5.0   3 1 2 4   1 0.5")
    model = read_uai(path)
    assert model.sizes == [1, 3, 0, 1] and model.num_variables == 4
    assert model.offset == pytest.approx(math.log(2.5))
    model.graph.solve(on_failure="raise")
    states = model.assignment()
    assert states[1] == 2 and states[2] == 0
    assert model.score(states) == pytest.approx(math.log(2.5 * 4))
    marginals = model.marginals()
    assert [len(m) for m in marginals] == model.cardinalities
    assert all(m.sum() == pytest.approx(1) for m in marginals)


def test_everything_observed(tmp_path):
    tables = Tables([2, 3], [(1, 0)], [np.arange(1.0, 7).reshape(3, 2)])
    model = read_uai(tables.write(tmp_path / "model.uai"), {0: 1, 1: 2})
    assert model.variable.size == 0
    assert model.offset == pytest.approx(math.log(6))
    assert model.assignment(np.zeros(0)) == [1, 2]


def test_dtype(tmp_path):
    path = random_tables(np.random.default_rng(0), zeros=0).write(tmp_path / "model.uai")
    model = read_uai(path, dtype=np.float32)
    assert model.graph._tensors[0].scores.dtype == np.float32
    model.graph.solve(on_failure="raise")
    assert model.variable.value.dtype == np.float32


def test_tiny_and_huge_potentials_keep_their_logarithm(tmp_path):
    path = tmp_path / "model.uai"
    path.write_text("MARKOV 1 4 1 1 0  4  1e-400 1e-320 0.000 1E+400")
    table = read_uai(path).tables[0]
    np.testing.assert_allclose(
        table, [-400 * math.log(10), -320 * math.log(10), -math.inf, 400 * math.log(10)], rtol=1e-12
    )


# ---- Layout --------------------------------------------------------------------------------------


def test_layout_does_not_matter(tmp_path):
    tables = random_tables(np.random.default_rng(3), zeros=0)
    plain = read_uai(tables.write(tmp_path / "plain.uai"))
    text = tables.text("markov")
    (tmp_path / "one_line.uai").write_text(" ".join(text.split()))
    (tmp_path / "words.uai").write_text("\n\n\t".join(text.split()))
    (tmp_path / "dos.uai").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    commented = text.replace("\n", "  # words, 1 2 3\n// more\n")
    (tmp_path / "commented.uai").write_text("# first\n" + commented)
    (tmp_path / "model.uai.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "hidden.uai").write_bytes(gzip.compress(text.encode()))
    for name in ("one_line", "words", "dos", "commented", "hidden"):
        same_model(plain, read_uai(tmp_path / f"{name}.uai"))
    same_model(plain, read_uai(str(tmp_path / "model.uai.gz")))


def same_model(a: UAIModel, b: UAIModel) -> None:
    assert a.cardinalities == b.cardinalities and a.scopes == b.scopes
    assert all(np.array_equal(s, t) for s, t in zip(a.tables, b.tables, strict=True))
    assert a.offset == b.offset


def test_evidence_files(tmp_path):
    tables = random_tables(np.random.default_rng(5), zeros=0)
    path = tables.write(tmp_path / "model.uai")
    evidence = tmp_path / "model.uai.evid"
    pick = {0: tables.cardinalities[0] - 1, 3: 0}
    pairs = " ".join(f"{v} {s}" for v, s in pick.items())
    for text in (
        f"2 {pairs}",
        f"1\n2 {pairs}",
        f"2\n{pairs}\n\n",
        f"# seen\n1 \n 2 {pairs} // end",
    ):
        evidence.write_text(text)
        model = read_uai(path, evidence)
        assert model.evidence == pick
        check_everywhere(model, tables, pick)
    for text in ("0", "1\n0"):
        evidence.write_text(text)
        assert read_uai(path, evidence).evidence == {}
    evidence.write_bytes(gzip.compress(b"1 0 0"))
    assert read_uai(path, evidence).evidence == {0: 0}


def test_evidence_that_rules_everything_out(tmp_path):
    tables = Tables([2, 2], [(0, 1)], [np.array([[1.0, 2.0], [0.0, 0.0]])])
    path = tables.write(tmp_path / "model.uai")
    with pytest.raises(fm.InfeasibleError, match=r"model\.uai: every assignment has potential"):
        read_uai(path, {0: 1})


# ---- Bad files -----------------------------------------------------------------------------------

GOOD = ["MARKOV", "2", "2 3", "2", "1 0", "2 0 1", "2", "1 2", "6", "1 2 3", "4 5 6"]


def changed(line: int, text: str | None) -> str:
    lines = list(GOOD)
    lines[line - 1] = text
    return "\n".join(t for t in lines if t is not None)


@pytest.mark.parametrize(
    "text, line, message",
    [
        ("", 1, "expected MARKOV or BAYES, but the file ends here"),
        (changed(1, "NETWORK"), 1, "expected MARKOV or BAYES, got 'NETWORK'"),
        (changed(2, "two"), 2, "expected the number of variables, a whole number, got 'two'"),
        (changed(2, "-2"), 2, "expected the number of variables, a whole number, got '-2'"),
        (changed(3, "2 0"), 3, "expected at least one state of variable 1, got 0"),
        (changed(3, "2 2.5"), 3, "expected the number of states of variable 1, a whole"),
        (changed(6, "2 0 2"), 6, "table 1: expected a variable from 0 to 1, got 2"),
        (changed(6, "2 1 1"), 6, "table 1 has variable 1 twice"),
        (
            changed(7, "3"),
            7,
            r"table 0 \(variables 0\): expected its number of entries, 2, got",
        ),
        (changed(8, "1 2 3"), 8, "its number of entries, 6, got 3.*table 0 has more or fewer"),
        (changed(8, "1"), 10, "expected its number of entries, 6, got 1"),
        (changed(10, "1 2 x"), 10, "expected a number, got 'x'"),
        (changed(10, "1 -2 3"), 10, "non-negative number, got '-2'"),
        (changed(10, "1 nan 3"), 10, "non-negative number, got 'nan'"),
        (changed(10, "1 inf 3"), 10, "a finite potential, got 'inf'"),
        (changed(11, "4 5"), 11, "expected 6 entries, but the file ends after 5"),
        (changed(11, None), 10, "expected 6 entries, but the file ends after 3"),
        (changed(11, "4 5 6\n\n7"), 13, "expected the end of the file after the last table, got"),
        ("MARKOV\n3\n2 2", 3, "number of states of variable 2, but the file ends here"),
        ("MARKOV\n1\n2\n\n2\n1 0\n1", 7, "a variable of table 1, but the file ends here"),
        ("MARKOV 99999999999999999999\n2 2", 2, "states of variable 2, but the file ends here"),
        ("\x00\x01\n", 1, "expected MARKOV or BAYES"),
    ],
)
def test_bad_files(tmp_path, text, line, message):
    path = tmp_path / "bad.uai"
    path.write_text(text)
    with pytest.raises(UAIError, match=message) as caught:
        read_uai(path)
    assert caught.value.line == line
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, fm.FactormaxError)


@pytest.mark.parametrize(
    "text, line, message",
    [
        ("", 1, "expected the number of observed variables, but the file ends"),
        ("one", 1, "expected the number of observed variables, a whole number, got 'one'"),
        ("1\n2 0", 2, "variable from 0 to 1, got 2"),
        ("1\n1\n0 2", 3, "expected a state of variable 0, from 0 to 1, got 2"),
        ("2\n0 1\n0 0", 3, "variable 0 is observed twice, in the states 1 and 0"),
        ("2\n0 1\n1", 3, "the state of variable 1, but the file ends here"),
        ("2\n1 0 1\n1 0 0\n", 1, "expected one sample of evidence, got 2"),
        ("1 0 1 1 1", 1, "expected the end of the file after 1 observations, got '1'"),
    ],
)
def test_bad_evidence(tmp_path, text, line, message):
    path = tmp_path / "model.uai"
    path.write_text("\n".join(GOOD))
    evidence = tmp_path / "bad.evid"
    evidence.write_text(text)
    with pytest.raises(UAIError, match=message) as caught:
        read_uai(path, evidence)
    assert caught.value.path == str(evidence) and caught.value.line == line


def test_bad_evidence_in_a_dict(tmp_path):
    path = tmp_path / "model.uai"
    path.write_text("\n".join(GOOD))
    with pytest.raises(ValueError, match="evidence: expected a variable from 0 to 1, got 2"):
        read_uai(path, {2: 0})
    with pytest.raises(ValueError, match="evidence: expected a state of variable 1, from 0 to 2"):
        read_uai(path, {1: 3})


def test_a_damaged_gzip_file(tmp_path):
    path = tmp_path / "bad.uai.gz"
    path.write_bytes(gzip.compress("\n".join(GOOD).encode())[:-9])
    with pytest.raises(UAIError, match="the gzip file is damaged"):
        read_uai(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_uai(tmp_path / "none.uai")


def test_bad_states_and_values(tmp_path):
    path = tmp_path / "model.uai"
    path.write_text("\n".join(GOOD))
    model = read_uai(path)
    with pytest.raises(ValueError, match="states of 2 variables, got 1"):
        model.score([0])
    with pytest.raises(ValueError, match="variable 1 has the states 0 to 2, got 3"):
        model.score([0, 3])
    with pytest.raises(ValueError, match="variable 1 has the states 0 to 2, got -1"):
        model.values([0, -1])
    with pytest.raises(fm.ShapeError, match=r"values must have shape \(5,\), got \(2,\)"):
        model.assignment(np.zeros(2))
    with pytest.raises(fm.GraphError, match="NaN"):
        model.assignment(np.full(5, np.nan))
    with pytest.raises(fm.GraphError, match="no value yet"):
        model.assignment()


def test_io_comes_with_the_package():
    code = "import factormax as fm, sys; fm.io.read_uai; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- The real files ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uai")
    unpack(folder)
    return folder


@needs_data
def test_the_real_files_are_read(real):
    listed = json.loads(ARCHIVE.with_name("manifest.json").read_text())
    assert len(listed) > 50
    rng = np.random.default_rng(0)
    for entry in listed:
        model = read_uai(real / entry["file"])
        assert model.num_variables == entry["vars"]
        assert len(model.tables) == entry["factors"]
        assert max(model.cardinalities) == entry["max_card"]
        assert max(map(len, model.scopes)) == entry["max_arity"]
        assert sum(table.size for table in model.tables) == entry["table_entries"]
        states = [int(rng.choice(domain)) for domain in model.domains]
        expected = pytest.approx(model.score(states), rel=1e-12, abs=1e-8)
        assert graph_score(model, model.values(states)) == expected


@needs_data
def test_binary_grids_are_solved(real):
    paths = sorted([*real.glob("grids/*.uai"), *real.glob("segmentation/Segmentation_1[3469].uai")])
    assert len(paths) == 23
    for path in paths:
        model = read_uai(path)
        assert {factor.kind for factor in model.graph._factors} == {"Pair"}
        assert model.graph.solve().converged, path.name


#: The best log values, found and proved by HiGHS on the same graphs as mixed-integer programs.
OPTIMA = {
    "grids/PE_Grids_11": 387.894789,
    "grids/PE_Grids_13": 766.548260,
    "grids/PE_Grids_14": 1145.202466,
    "objdet/ObjectDetection_11": -241.359037,
    "opengm/pedigree9": -282.996596,
    "protein/pdb1aho": -104.750707,
    "protein/pdb1hyp": -82.926369,
    "protein/pdb1xy2": 0.0,
    "protein/pdb2fdn": -49.203318,
    "segmentation/Segmentation_13": -49.858745,
}


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMA)
def test_the_optimum_lies_between_value_and_bound(real, name):
    best, close = OPTIMA[name], 1e-6 * (1 + abs(OPTIMA[name]))
    model = read_uai(real / f"{name}.uai")
    relaxed = model.graph.solve_map(on_failure="ignore")
    assert model.offset + float(relaxed.upper_bound) >= best - close
    decoded = model.graph.decode(time_limit=10, on_failure="ignore")
    assert model.offset + float(decoded.upper_bound) >= best - close
    if np.isfinite(decoded.objective):
        value = model.score(model.assignment())
        assert value == pytest.approx(model.offset + float(decoded.objective), abs=close)
        assert value <= best + close
        assert not decoded.optimal or value >= best - close


@needs_data
def test_a_relaxation_that_is_tight_ends_the_search(real):
    """The tolerance of a node's bound alone must not keep it open."""
    model = read_uai(real / "protein/pdb2fdn.uai")
    assert model.graph.decode(max_nodes=40).optimal

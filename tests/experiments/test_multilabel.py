"""Multilabel: the readers, the metric, and a run on made-up data."""

from __future__ import annotations

import gzip
import sys
import types

import numpy as np
import pytest
from real_data import real_data

torch = pytest.importorskip("torch")

from experiments.log import RunFile  # noqa: E402
from experiments.multilabel.__main__ import main  # noqa: E402
from experiments.multilabel.arff import label_columns, read_table  # noqa: E402
from experiments.multilabel.data import (  # noqa: E402
    Dataset,
    load,
    make_synthetic,
    read_arff,
    read_npz,
    read_openml,
)
from experiments.multilabel.metrics import best_threshold, example_f1  # noqa: E402
from experiments.multilabel.model import INITS, MODELS, Labeller  # noqa: E402
from experiments.multilabel.task import Multilabel  # noqa: E402

BIBTEX, needs_bibtex = real_data("bibtex")

HEADER = """\
% a comment
@relation 'two words: -C 2'

@attribute size numeric
@ATTRIBUTE 'kind of \\'it\\'' {small, 'very large'}
@attribute flag {0,1}
@attribute TAG_a {0,1}
@attribute TAG_b {0,1}

@data
"""
DENSE = HEADER + "1.5, 'very large', 0, 1, 0\n% between\n-2,small,1,0,1\n"
SPARSE = HEADER + "{0 1.5, 1 'very large', 3 1}\n{0 -2,2 1,4 1}\n"
ROWS = [[1.5, 1, 0, 1, 0], [-2, 0, 1, 0, 1]]


# ---- reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_arff_dense_and_sparse(tmp_path, text):
    path = tmp_path / "a.arff"
    path.write_text(text)
    attributes, rows = read_table(path)
    assert [a.name for a in attributes] == ["size", "kind of 'it'", "flag", "TAG_a", "TAG_b"]
    np.testing.assert_array_equal(rows, np.array(ROWS, np.float32))


def test_a_sparse_row_leaves_out_the_first_nominal_value(tmp_path):
    path = tmp_path / "a.arff"
    path.write_text("@relation r\n@attribute a {1,0}\n@attribute b {x,y}\n@data\n{}\n{0 0, 1 y}\n")
    np.testing.assert_array_equal(read_table(path)[1], [[1, 0], [0, 1]])


@pytest.mark.parametrize(
    "text, message",
    [
        (HEADER + "1,small,0,0\n", "line 11: 4 values for 5 columns"),
        (HEADER + "?,small,0,0,1\n", "line 11: could not convert"),
        (HEADER + "1,medium,0,0,1\n", "'medium' is no value of kind"),
        (HEADER + "{7 1}\n", "line 11: there is no column 7"),
        ("@attribute a string\n", "line 1: type string"),
        (HEADER, "no rows after @data"),
    ],
)
def test_a_bad_arff_says_where(tmp_path, text, message):
    path = tmp_path / "a.arff"
    path.write_text(text)
    with pytest.raises(SystemExit, match=message):
        read_table(path)


def test_labels_by_number_prefix_or_xml(tmp_path):
    path = tmp_path / "a.arff"
    path.write_text(DENSE)
    names = tmp_path / "a.xml"
    labels = '<label name="TAG_a"></label><label name="TAG_b"></label>'
    names.write_text(f'<labels xmlns="http://mulan.sourceforge.net/labels">{labels}</labels>')
    attributes, _ = read_table(path)
    for how in (2, "TAG_", names):
        np.testing.assert_array_equal(label_columns(attributes, how), [False] * 3 + [True] * 2)
    with pytest.raises(SystemExit, match="makes 0 of 5 columns labels"):
        label_columns(attributes, "LABEL")
    names.write_text('<labels><label name="TAG_c"/></labels>')
    with pytest.raises(SystemExit, match=r"no columns: \['TAG_c'\]"):
        label_columns(attributes, names)


def test_the_files_of_a_mulan_archive(tmp_path):
    folder = tmp_path / "toy"
    folder.mkdir()
    for split in ("train", "test"):
        with gzip.open(folder / f"toy-{split}.arff.gz", "wt") as file:
            file.write(SPARSE)
    with pytest.raises(SystemExit, match=r"toy.xml is not there"):
        load(tmp_path, "toy")
    (folder / "toy.xml").write_text('<labels><label name="TAG_a"/><label name="TAG_b"/></labels>')
    data = load(tmp_path, "toy")
    assert (data.name, data.label_names) == ("toy", ("TAG_a", "TAG_b"))
    np.testing.assert_array_equal(data.X_test, np.array(ROWS, np.float32)[:, :3])
    np.testing.assert_array_equal(data.Y_train, np.eye(2))


def test_npz_of_both_layouts(tmp_path):
    data = make_synthetic(20, 10)
    arrays = {key: getattr(data, key) for key in ("X_train", "Y_train", "X_test", "Y_test")}
    names = {"label_names": np.array(data.label_names)}
    csr = dict(names)
    for key, array in arrays.items():
        rows, columns = array.nonzero()
        csr[f"{key}_indptr"] = np.searchsorted(rows, np.arange(len(array) + 1))
        csr[f"{key}_indices"], csr[f"{key}_shape"] = columns.astype(np.int16), array.shape
    packed = dict(names)
    for split in ("train", "test"):
        y = arrays[f"Y_{split}"]
        packed[f"X_{split}"] = arrays[f"X_{split}"]
        packed[f"Y_{split}"], packed[f"Y_{split}_shape"] = np.packbits(y > 0, axis=1), y.shape
    for name, parts in (("csr", csr), ("packed", packed)):
        np.savez(tmp_path / f"{name}.npz", **parts)
        found = read_npz(tmp_path / f"{name}.npz")
        assert (found.name, found.label_names) == (name, data.label_names)
        for key, array in arrays.items():
            assert getattr(found, key).dtype == np.float32
            np.testing.assert_array_equal(getattr(found, key), array)


def test_openml_through_scikit_learn(monkeypatch):
    scipy_sparse = pytest.importorskip("scipy.sparse")
    x = np.arange(30.0).reshape(10, 3)
    y = np.array([["TRUE", "FALSE"], ["FALSE", "TRUE"]] * 5, dtype=object)
    answers = {
        "known": (x, ["a", "b", "c"], y, ["TAG_1", "TAG_2"]),
        "sparse": (scipy_sparse.csr_matrix(x), ["a", "b", "c"], y == "TRUE", ["TAG_1", "TAG_2"]),
        "unknown": (np.hstack([x, y == "TRUE"]), ["a", "b", "c", "TAG_1", "TAG_2"], None, []),
    }

    def fetch_openml(*, name, version, as_frame):
        if name not in answers:
            raise ValueError(f"No known dataset {name}")
        assert not as_frame
        data, features, target, targets = answers[name]
        return types.SimpleNamespace(
            data=data, feature_names=features, target=target, target_names=targets
        )

    fake = types.ModuleType("sklearn.datasets")
    fake.fetch_openml = fetch_openml
    monkeypatch.setitem(sys.modules, "sklearn", types.ModuleType("sklearn"))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", fake)
    for name, labels in (("known", None), ("sparse", None), ("unknown", "TAG_"), ("unknown", 2)):
        data = read_openml(name, labels=labels)
        assert data.X_train.shape == (8, 3) and data.Y_test.shape == (2, 2)
        everything = np.concatenate([data.X_train, data.X_test])
        np.testing.assert_array_equal(np.sort(everything, axis=0), x)
        first = np.concatenate([data.Y_train, data.Y_test])[np.argsort(everything[:, 0]), 0]
        np.testing.assert_array_equal(first, [1, 0] * 5)
        assert data.label_names == ("TAG_1", "TAG_2")
    with pytest.raises(SystemExit, match="does not say which columns"):
        read_openml("unknown")
    with pytest.raises(SystemExit, match="No known dataset other"):
        read_openml("other")


def test_openml_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match=r"factormax\[experiments\]"):
        read_openml("bibtex")


def test_missing_data_names_files_and_flag(tmp_path):
    with pytest.raises(SystemExit, match=r"bibtex\.npz.* --data FOLDER .*FACTORMAX_DATA"):
        load(tmp_path, "bibtex")
    with pytest.raises(
        SystemExit, match=r"no data folder is known.* --data FOLDER .*FACTORMAX_DATA"
    ):
        load(None, "bibtex")


def test_data_that_do_not_fit_are_refused():
    x, y = np.zeros((3, 2), np.float32), np.zeros((3, 1), np.float32)
    with pytest.raises(SystemExit, match="do not fit together"):
        Dataset("d", x, y, x, y[:2], ("a",))
    with pytest.raises(SystemExit, match="must be 0 or 1"):
        Dataset("d", x, y + 2, x, y, ("a",))


@needs_bibtex
def test_bibtex_is_the_same_from_arff_and_npz():
    npz, arff = (load(BIBTEX.parent, "bibtex", source) for source in ("npz", "arff"))
    assert npz.X_train.shape == (4880, 1836) and npz.Y_test.shape == (2515, 159)
    assert npz.cardinality == pytest.approx(2.402, abs=1e-3)
    for key in ("X_train", "Y_train", "X_test", "Y_test"):
        np.testing.assert_array_equal(getattr(npz, key), getattr(arff, key))
    assert npz.label_names == arff.label_names and npz.feature_names == arff.feature_names
    path = BIBTEX / "bibtex-test.arff.gz"
    assert read_arff(path, path, "TAG_").label_names == npz.label_names


# ---- measuring -----------------------------------------------------------------------------------


def test_example_f1_by_hand():
    y = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]])
    p = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0], [1, 0, 0]]).bool()
    assert example_f1(p, y) == pytest.approx(100 * np.mean([1, 2 / 3, 0, 1, 0]))


def test_the_best_threshold_and_of_equals_the_middle_one():
    y = torch.tensor([[1, 0], [0, 1]])
    assert best_threshold(torch.tensor([[0.3, 0.1], [0.2, 0.28]]), y) == 0.25
    assert best_threshold(torch.tensor([[0.9, 0.1], [0.1, 0.9]]), y) == 0.5


# ---- the models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS[1:])
def test_what_is_certain_is_what_the_layer_predicts(model):
    torch.manual_seed(0)
    labeller = Labeller(20, 6, model, hidden=16)
    with torch.no_grad():
        labeller.mrf.weight.normal_(std=0.1)
        labeller.score[-1].weight *= 60
    x = torch.randn(200, 20)
    confidence = labeller.confidence(x)
    certain = ((confidence == 0) | (confidence == 1)).all(dim=1)
    assert certain.sum() > 20
    best = labeller.mrf.predict(labeller.score(x), kind=labeller.kind)
    torch.testing.assert_close(best[certain], confidence[certain])
    assert labeller.mrf.temperature == 1  # as in training


def test_the_losses_are_those_of_single_labels_while_pairs_are_zero():
    x, y = torch.randn(7, 5), torch.randint(0, 2, (7, 4)).float()
    clock = Multilabel(make_synthetic(10, 5), "hinge", hidden=4).clock
    sign = 2 * y - 1
    expected = {
        "unstructured": lambda s: torch.log1p((-sign * s).exp()),
        "hinge": lambda s: (1 - sign * s).clamp(min=0),
        "lp-sparsemap": lambda s: s * (s.clamp(0, 1) - y) - (s.clamp(0, 1) ** 2 - y) / 2,
    }
    for model, of_label in expected.items():
        labeller = Labeller(5, 4, model, hidden=8)
        torch.testing.assert_close(
            labeller.loss(x, y, clock), of_label(labeller.score(x)).sum(dim=1).mean()
        )


def test_glorot_is_wider_at_the_first_layer_and_has_no_bias():
    own, glorot = (Labeller(200, 5, "hinge", hidden=100, init=init).score for init in INITS)
    assert own[0].weight.abs().max() <= 200**-0.5 < glorot[0].weight.abs().max() <= (6 / 300) ** 0.5
    assert all((layer.bias == 0).all() for layer in glorot[::2])


def test_what_is_held_out_is_not_trained_on():
    data = make_synthetic(50, 10)
    task = Multilabel(data, "unstructured", validation=0.2, hidden=4)
    assert sum(len(batch) for batch in task.batches(np.random.default_rng(0))) == 40
    assert len(task.batches(np.random.default_rng(0))) == 2  # 32 and 8
    rows = torch.cat([task._splits["train"][0], task._splits["valid"][0]])
    np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(data.X_train, axis=0))
    whole = Multilabel(data, "unstructured", validation=0, limit=30, hidden=4)
    assert whole.evaluate("valid") == {} and len(whole.batches(np.random.default_rng(0))[0]) == 30


# ---- a run ---------------------------------------------------------------------------------------


def test_smoke(tmp_path):
    argv = ["--dataset", "synthetic", "--hidden", "32", "--epochs", "6", "--threads", "1"]
    argv += ["--learning-rate", "0.005", "--quiet", "--output", str(tmp_path), "--refit"]
    argv += ["--device", "cpu"]
    main(argv)
    for model in MODELS:
        chosen = RunFile(tmp_path / "multilabel" / f"synthetic-{model}-seed0.jsonl").read()
        refit = RunFile(tmp_path / "multilabel" / f"synthetic-refit-{model}-seed0.jsonl").read()
        assert chosen.result["test"]["f1"] > 70  # predicting nothing: 0, everything: 42
        assert refit.result["test"]["f1"] > 70 and not refit.result["valid"]
        assert len(refit.epochs) == chosen.result["epoch"]
        threshold = chosen.result["observed"]["threshold"]
        assert refit.result["observed"]["threshold"] == threshold
        in_layer = sum(epoch["layer_seconds"] for epoch in chosen.epochs)
        assert (in_layer > 0) == (model != "unstructured")


def test_refit_needs_something_held_out(capsys):
    with pytest.raises(SystemExit):
        main(["--refit", "--validation", "0", "--dataset", "synthetic"])
    assert "--validation" in capsys.readouterr().err

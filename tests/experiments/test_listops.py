"""ListOps: the grammar, the gold trees, the model, and a run on made-up data."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from real_data import real_data

torch = pytest.importorskip("torch")

import factormax.nn as fnn  # noqa: E402
from experiments.listops import data  # noqa: E402
from experiments.listops.__main__ import main  # noqa: E402
from experiments.listops.data import (  # noqa: E402
    Expressions,
    evaluate,
    generate,
    load,
    make_splits,
    parse,
    read_tsv,
)
from experiments.listops.model import MODELS, BiLSTM, GraphConvolution, LatentTree, Tagger  # noqa: E402
from experiments.listops.task import ListOps, accuracy_and_f1  # noqa: E402
from experiments.log import RunFile  # noqa: E402

TEST_FILE, needs_data = real_data("listops/listops_test_d20s.tsv.gz")

NESTED = "[MAX 2 9 [MIN 4 7 ] 0 ]"


def most_dependents(expressions: Expressions) -> int:
    """Of any token in the gold trees; the root is no token."""
    most = 0
    for index in torch.arange(len(expressions)).split(512):
        batch = expressions.batch(index)
        position = torch.arange(batch.tokens.shape[1])
        arcs = batch.present & (batch.heads != position)
        counts = torch.zeros_like(batch.heads).scatter_add(1, batch.heads, arcs.long())
        most = max(most, int(counts.max()))
    return most


# ---- expressions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MIN 4 7 ]", 4),
        ("[MAX 4 7 5 ]", 7),
        ("[MED 4 9 5 ]", 5),
        ("[MED 4 9 5 8 ]", 6),  # 6.5, truncated
        ("[SM 4 9 5 ]", 8),
        (NESTED, 9),
    ],
)
def test_values(text, value):
    assert evaluate(text.split()) == value


def test_gold_tree():
    tree = parse(NESTED.split())
    #               MAX 2  9  MIN 4  7  ]  0  ]
    assert tree.heads == [0, 0, 0, 0, 3, 3, 5, 0, 7]
    assert tree.valency == [4, 0, 0, 2, 0, 0, 0, 0, 0]


def test_generated_expressions():
    expressions = generate(2000, seed=1, max_length=60)
    assert len({" ".join(e.tokens) for e in expressions}) == len(expressions) == 2000
    assert all(evaluate(e.tokens) == e.label for e in expressions)
    assert max(len(e.tokens) for e in expressions) <= 60
    assert expressions == generate(2000, seed=1, max_length=60)
    assert expressions[:100] != generate(100, seed=2, max_length=60)


def test_gold_trees_keep_the_budget_of_five():
    expressions = Expressions(e.tokens for e in generate(2000))
    assert most_dependents(expressions) == 5


def test_closing_brackets_hang_from_tokens_without_other_dependents():
    for expression in generate(500):
        heads = parse(expression.tokens).heads
        dependents = Counter(h for i, h in enumerate(heads) if h != i)
        for token, head in zip(expression.tokens, heads, strict=True):
            if token == "]":
                assert dependents[head] == 1


def test_reading(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text(f"9\t{NESTED}\n4\t( ( [MIN 4 ) 7 ) ] )\n")
    assert [" ".join(e.tokens) for e in read_tsv(path)] == [NESTED, "[MIN 4 7 ]"]
    path.write_text(f"9\t{NESTED}\n4\t[AVG 4 7 ]\n")
    with pytest.raises(ValueError, match=r"a\.tsv, line 2: not a label"):
        read_tsv(path)


@needs_data
def test_the_published_test_set():
    expressions = read_tsv(TEST_FILE)
    assert len(expressions) == 10_000
    assert all(evaluate(e.tokens) == e.label for e in expressions)
    assert read_tsv(TEST_FILE.with_name("test_d20s.tsv.gz")) == expressions
    kept = Expressions(e.tokens for e in expressions)
    assert len(kept) == 8933
    assert kept.valency_counts() == {2: 10194, 3: 10338, 4: 10557, 5: 10392}
    assert most_dependents(kept) == 5


@needs_data
@pytest.mark.slow
def test_the_splits():
    splits = load(TEST_FILE.parents[1])
    assert (len(splits.train), len(splits.valid), len(splits.test)) == (70_399, 10_000, 8933)


def test_without_a_training_file_one_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "TRAINING", 300)
    test = [" ".join(e.tokens) for e in generate(50)]  # the first that would be drawn
    (tmp_path / "listops").mkdir()
    lines = [f"{evaluate(text.split())}\t{text}\n" for text in test]
    (tmp_path / "listops" / "test_d20s.tsv").write_text("".join(lines))
    splits = load(tmp_path)
    assert len(splits.train) + len(splits.valid) == 300
    assert len(splits.test) == 50
    words = splits.train.batch(torch.arange(len(splits.train))).words()
    assert not {" ".join(w) for w in words} & set(test)


def test_missing_data(tmp_path, monkeypatch):
    both = r"--data FOLDER .*FACTORMAX_DATA"
    with pytest.raises(SystemExit, match=rf"listops_test_d20s\.tsv\.gz in .*{both}"):
        load(tmp_path)
    monkeypatch.setenv("FACTORMAX_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match=rf"listops_test_d20s\.tsv\.gz in .*{both}"):
        main(["--output", str(tmp_path)])
    monkeypatch.delenv("FACTORMAX_DATA")
    with pytest.raises(SystemExit, match=rf"no data folder is known.*{both}"):
        main(["--output", str(tmp_path)])


# ---- batches -------------------------------------------------------------------------------------


def test_batches_hold_what_was_read():
    texts = ["[MIN 4 7 ]", NESTED, "3", "[SM 1 1 1 1 1 1 ]"]
    expressions = Expressions([text.split() for text in texts], max_length=9)
    assert expressions.lengths.tolist() == [4, 9, 1, 8]
    batch = expressions.batch(torch.tensor([2, 0]))
    assert batch.words() == [["3"], ["[MIN", "4", "7", "]"]]
    assert batch.heads.tolist() == [[0, 0, 0, 0], [0, 0, 0, 2]]
    assert batch.valency.tolist() == [[0, 0, 0, 0], [2, 0, 0, 0]]
    assert batch.present.sum(dim=1).tolist() == batch.lengths.tolist() == [1, 4]
    assert len(Expressions([NESTED.split()], max_length=8)) == 0


def test_an_epoch_has_every_expression_once_in_batches_of_similar_length():
    splits = make_splits((1000, 10, 10))
    task = ListOps(splits, "gold", batch_size=16)
    batches = task.batches(np.random.default_rng(0))
    assert sorted(torch.cat(list(batches)).tolist()) == list(range(1000))
    assert {len(b) for b in batches} <= {16, 1000 % 16}
    padding = [
        1 - float(b.lengths.double().mean()) / b.tokens.shape[1]
        for b in map(splits.train.batch, batches)
        if b.tokens.shape[1] > 20
    ]
    assert np.mean(padding) < 0.2
    again = task.batches(np.random.default_rng(0))
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))


def test_held_out_expressions_are_new():
    splits = make_splits((300, 50, 50))
    parts = [splits.train, splits.valid, splits.test]
    texts = [{" ".join(w) for w in p.batch(torch.arange(len(p))).words()} for p in parts]
    assert [len(t) for t in texts] == [300, 50, 50]
    assert len(set.union(*texts)) == 400


# ---- the model -----------------------------------------------------------------------------------


def test_bilstm_is_that_of_packed_sequences():
    torch.manual_seed(0)
    ours = BiLSTM(6, 4)
    theirs = torch.nn.LSTM(6, 4, batch_first=True, bidirectional=True)
    theirs.load_state_dict(
        {
            name + suffix: value
            for part, suffix in ((ours.forwards, ""), (ours.backwards, "_reverse"))
            for name, value in part.state_dict().items()
        }
    )
    x, lengths = torch.randn(3, 7, 6), torch.tensor([7, 2, 5])
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        x, lengths, batch_first=True, enforce_sorted=False
    )
    expected, _ = torch.nn.utils.rnn.pad_packed_sequence(theirs(packed)[0], batch_first=True)
    there = torch.arange(7) < lengths[:, None]
    torch.testing.assert_close(ours(x, lengths)[there], expected[there])


@pytest.mark.parametrize("budget", [None, 2])
def test_latent_tree_is_the_layer_of_the_library(budget):
    torch.manual_seed(0)
    scores, lengths = torch.randn(3, 6, 6), torch.tensor([6, 1, 4])
    present = torch.arange(6) < lengths[:, None]
    arcs = LatentTree(budget, temperature=0.5)(scores, present)
    expected = fnn.DependencyTree(valency=budget, temperature=0.5)(scores, lengths=lengths)
    torch.testing.assert_close(arcs, expected)
    if budget is not None:
        dependents = arcs.sum(dim=1) - arcs.diagonal(dim1=1, dim2=2)
        assert dependents.max() <= budget + 1e-4


def test_convolution_sums_the_messages():
    torch.manual_seed(0)
    layer = GraphConvolution(5)
    arcs = torch.rand(4, 4)
    v = layer.vector
    for i in range(4):
        total = layer.itself(v)
        for j in range(4):
            if j != i:
                total = total + arcs[j, i] * layer.from_modifiers(v)
                total = total + arcs[i, j] * layer.from_head(v)
        torch.testing.assert_close(layer(arcs)[i], torch.relu(total))


@pytest.mark.parametrize("model", MODELS)
def test_padding_changes_nothing(model):
    torch.manual_seed(0)
    tagger = Tagger(model, temperature=0.1)
    expressions = Expressions([NESTED.split(), "[MIN 4 7 ]".split()])
    alone = tagger(expressions.batch(torch.tensor([1])))
    padded = tagger(expressions.batch(torch.tensor([0, 1])))
    torch.testing.assert_close(padded[1, :4], alone[0], atol=1e-4, rtol=1e-4)


def test_every_parameter_of_the_latent_model_is_trained():
    torch.manual_seed(0)
    task = ListOps(make_splits((64, 8, 8), max_length=15), "tree+budget")
    task.loss(torch.arange(64)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in task.model.parameters())


def test_fixed_trees_know_nothing_of_the_tokens():
    one, other = Expressions(["[MIN 4 7 ]".split()]), Expressions(["[SM 1 2 ]".split()])
    tagger = Tagger("left-to-right")
    first = torch.tensor([0])
    assert torch.equal(tagger(one.batch(first)), tagger(other.batch(first)))


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_left_on_the_cpu(model, monkeypatch):
    """On the device without numbers, where all but the layer runs."""
    monkeypatch.setattr(LatentTree, "forward", lambda self, scores, present: scores)
    batch = make_splits((8, 1, 1), 20).train.batch(torch.arange(8)).to(torch.device("meta"))
    assert Tagger(model).to("meta")(batch).is_meta


def test_unknown_model():
    with pytest.raises(ValueError, match="There is no model 'forest': choose from left-to-right"):
        Tagger("forest")


def test_metrics():
    perfect = accuracy_and_f1(torch.diag(torch.tensor([3, 1, 4, 1])))
    assert perfect == {"accuracy": 100, "f1": 100}
    one_tag = torch.zeros(4, 4, dtype=torch.long)
    one_tag[:, 2] = torch.tensor([5, 5, 10, 0])
    found = accuracy_and_f1(one_tag)
    assert found["accuracy"] == pytest.approx(50)
    assert found["f1"] == pytest.approx(100 * (2 * 10 / (10 + 20)) / 4)


# ---- the whole -----------------------------------------------------------------------------------


def run(tmp_path, model, *flags, dataset="listops-generated"):
    main([model, "--output", str(tmp_path), "--quiet", "--threads", "1", "--device", "cpu", *flags])
    result = RunFile(tmp_path / "listops" / f"{dataset}-{model}-seed0.jsonl").read()
    assert result is not None and result.result is not None
    return result


def test_smoke(tmp_path):
    """Gold trees tell everything, the chain nothing, and a latent tree learns."""
    flags = [
        "--generate",
        "1500",
        "--max-length",
        "20",
        "--epochs",
        "4",
        "--learning-rate",
        "0.005",
    ]
    gold = run(tmp_path, "gold", *flags)
    chain = run(tmp_path, "left-to-right", *flags)
    tree = run(tmp_path, "tree+budget", *flags)
    assert gold.result["test"]["f1"] == 100
    assert chain.result["test"]["f1"] < 30
    assert tree.result["test"]["f1"] > 40
    assert tree.epochs[-1]["layer_seconds"] > 0
    shown = tree.result["exhibits"]
    assert np.shape(shown["arcs"]) == (len(shown["tokens"]),) * 2
    np.testing.assert_allclose(np.sum(shown["arcs"], axis=1), 1, atol=0.02)


@pytest.mark.parametrize("model", ["tree", "tree+budget"])
def test_the_solver_of_the_paper(tmp_path, model):
    flags = ["--generate", "200", "--max-length", "12", "--epochs", "2", "--learning-rate", "0.005"]
    done = run(tmp_path, model, *flags, "--solver", "paper", dataset="listops-generated-paper")
    assert done.epochs[1]["loss"] < done.epochs[0]["loss"]

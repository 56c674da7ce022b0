"""The NLI experiment: reading, batching, the model, and a short training on made-up pairs."""

import gzip
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from experiments.log import RunFile  # noqa: E402
from experiments.nli.__main__ import main  # noqa: E402
from experiments.nli.data import (  # noqa: E402
    LABELS,
    Corpus,
    Pair,
    Vocabulary,
    load,
    read_jsonl,
    read_tsv,
    read_vectors,
    tokenize,
    toy,
)
from experiments.nli.figures import draw_attention  # noqa: E402
from experiments.nli.model import ATTENTIONS, DecomposableAttention  # noqa: E402
from experiments.nli.task import NLITask  # noqa: E402

JOINT = [name for name in ATTENTIONS if name != "softmax"]


@pytest.fixture
def corpus(tmp_path):
    return Corpus.load(tmp_path, "toy", tmp_path / "none")


# ---- data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Two dogs run.", "two dogs run ."),
        ("I can't, they're John's", "i ca n't , they 're john 's"),
        ("the U.S. (1,000 miles)", "the u.s. ( 1,000 miles )"),
        ("blond-hair — 19th", "blond - hair — 19th"),
        ("don’t wait...", "do n't wait ..."),
        ("", ""),
    ],
)
def test_tokenize(text, words):
    assert tokenize(text) == words.split()


def test_public_jsonl(tmp_path):
    path = tmp_path / "snli_1.0_dev.jsonl"
    records = [
        {"gold_label": label, "sentence1": "A man sleeps.", "sentence2": "A man runs."}
        for label in ("contradiction", "-", "neutral")
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    pairs = read_jsonl(path)
    assert [LABELS[pair.label] for pair in pairs] == ["contradiction", "neutral"]
    assert pairs[0].hypothesis == ["a", "man", "runs", "."]


def test_tsv_keeps_quotes_and_names_a_bad_label(tmp_path):
    path = tmp_path / "some.tsv.gz"
    with gzip.open(path, "wt") as file:
        file.write('label\tpremise\thypothesis\nentailment\tHe said "go\tHe spoke"\n')
    assert read_tsv(path) == [Pair(["he", "said", '"', "go"], ["he", "spoke", '"'], 0)]
    with gzip.open(path, "wt") as file:
        file.write("label\tpremise\thypothesis\nperhaps\ta\tb\n")
    with pytest.raises(SystemExit, match=r"some\.tsv\.gz: unknown label 'perhaps'"):
        read_tsv(path)


def test_public_files_come_first_and_multinli_is_halved_by_premise(tmp_path):
    names = {"train": "multinli_1.0_train", "held out": "multinli_1.0_dev_matched"}
    (tmp_path / "multinli_1.0").mkdir()
    for name in names.values():
        records = [
            {"gold_label": "neutral", "sentence1": f"premise {i // 3}", "sentence2": f"no {i}"}
            for i in range(60)
        ]
        path = tmp_path / "multinli_1.0" / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    parts = load(tmp_path, "mnli")
    premises = [{pair.premise[1] for pair in parts[split]} for split in ("valid", "test")]
    assert len(parts["train"]) == len(parts["valid"]) + len(parts["test"]) == 60
    assert all(premises) and not premises[0] & premises[1]


def test_missing_files_are_named(tmp_path, monkeypatch):
    both = r"--data FOLDER .*FACTORMAX_DATA"
    with pytest.raises(SystemExit, match=rf"nli/snli_train_sub\.tsv\.gz in .*{both}"):
        load(tmp_path, "snli")
    monkeypatch.delenv("FACTORMAX_DATA", raising=False)
    with pytest.raises(SystemExit, match=rf"no data folder is known.*{both}"):
        main(["softmax", "--output", str(tmp_path), "--quiet"])
    with pytest.raises(SystemExit, match=r"no word vectors at .*--vectors"):
        read_vectors(tmp_path / "glove.6B.100d.txt", ["a"])


def test_vectors_of_both_formats(tmp_path):
    rng = np.random.default_rng(0)
    words, table = ["a", "dog", "'s", "unused"], rng.standard_normal((4, 3)).astype(np.float32)
    np.savez(tmp_path / "vectors.npz", words=words, vectors=table)
    lines = [" ".join([word, *map(str, row)]) for word, row in zip(words, table, strict=True)]
    (tmp_path / "glove.txt").write_text("\n".join(lines) + "\n")
    for name in ("vectors.npz", "glove.txt"):
        found = read_vectors(tmp_path / name, ["a", "'s", "dog", "zebra"])
        assert sorted(found) == ["'s", "a", "dog"]
        np.testing.assert_allclose(found["dog"], table[1], rtol=1e-6)


def test_unknown_words_have_a_vector_of_their_own():
    known = {"a": np.ones(4, dtype=np.float32)}
    counts = {"a": 6, "daan": 1, "zelon": 1}
    vocabulary = Vocabulary(counts, known)
    other = Vocabulary({"zelon": 1, "daan": 3}, known)
    assert vocabulary.coverage == 6 / 8
    assert torch.equal(vocabulary.vectors[1], torch.ones(4)) and not vocabulary.vectors[0].any()
    for word in ("daan", "zelon"):
        vectors = [v.vectors[v.numbers[word]] for v in (vocabulary, other)]
        assert torch.equal(*vectors) and vectors[0].any()
    assert not torch.equal(vocabulary.vectors[2], vocabulary.vectors[3])


def test_batches_are_a_partition_and_little_padded(corpus):
    train = corpus.splits["train"]
    batches = train.batches(64, np.random.default_rng(3))
    again = train.batches(64, np.random.default_rng(3))
    other = train.batches(64, np.random.default_rng(4))
    assert sum(len(batch.labels) for batch in batches) == len(train) == 1920
    assert all(torch.equal(a.premise, b.premise) for a, b in zip(batches, again, strict=True))
    assert any(
        a.premise.shape != b.premise.shape or not torch.equal(a.premise, b.premise)
        for a, b in zip(batches, other, strict=True)
    )
    for batch in batches:
        assert batch.premise.shape == (len(batch.labels), int(batch.premise_lengths.max()))
        there = torch.arange(batch.premise.shape[1]) < batch.premise_lengths[:, None]
        assert torch.equal(batch.premise > 0, there)
    cells = sum(batch.premise.numel() for batch in batches)
    assert cells < 1.2 * int(train.premise_lengths.sum())
    seen = sorted(row for batch in batches for row in batch.premise[:, :4].tolist())
    assert seen == sorted(train.premise[:, :4].tolist())


def test_long_sentences_are_cut(tmp_path):
    corpus = Corpus.load(tmp_path, "toy", tmp_path / "none", longest=5, limit=50)
    assert corpus.facts["train"] == len(corpus.splits["train"]) == 50
    assert corpus.splits["train"].premise.shape[1] == 5
    assert 50 < corpus.facts["cut_pairs"] < 100


def test_toy_is_what_it_says():
    pairs = toy(300, np.random.default_rng(0))
    for premise, hypothesis, label in pairs:
        strange = [word for word in hypothesis if word not in premise]
        kinds = {"entailment": [], "contradiction": ["opposite"], "neutral": ["new"]}
        assert [word.rstrip("0123456789") for word in strange] == kinds[LABELS[label]]
    assert {pair.label for pair in pairs} == {0, 1, 2}


# ---- model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_and_the_other_pairs_change_nothing(corpus, attention):
    torch.manual_seed(0)
    task = NLITask(corpus, attention)
    task.model.eval()
    valid = corpus.splits["valid"]
    with torch.no_grad():
        together = task.model(valid.take(torch.arange(12)))
        alone = torch.cat([task.model(valid.take(torch.tensor([i]))) for i in range(12)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention_sums(corpus, attention):
    torch.manual_seed(0)
    task = NLITask(corpus, attention)
    batch = corpus.splits["valid"].batches(100)[1]
    with torch.no_grad():
        to_hypothesis, to_premise = task.model.attend(batch)
    rows, columns = to_hypothesis.sum(dim=2), to_premise.sum(dim=1)
    m, n = batch.premise_lengths, batch.hypothesis_lengths
    if attention == "softmax":
        torch.testing.assert_close(rows.sum(dim=1), m.float())
        torch.testing.assert_close(columns.sum(dim=1), n.float())
    else:
        assert torch.equal(to_hypothesis, to_premise)
        shorter = torch.minimum(m, n).float()
        torch.testing.assert_close(rows.sum(dim=1), shorter, rtol=0, atol=1e-4)
        assert max(float(rows.max()), float(columns.max())) <= 1 + 1e-4


def test_the_two_matchings_agree(corpus):
    weights = []
    for attention in ("matching", "lp-matching"):
        torch.manual_seed(0)
        task = NLITask(corpus, attention)
        with torch.no_grad():
            weights.append(task.model.attend(corpus.splits["valid"].take(torch.arange(30)))[0])
    torch.testing.assert_close(*weights, rtol=0, atol=1e-4)


def test_parameters_are_few_and_vectors_are_none_of_them(corpus):
    model = NLITask(corpus, "softmax").model
    assert sum(p.numel() for p in model.parameters()) == 91_003
    assert "vectors" not in model.state_dict()
    wide = DecomposableAttention(torch.zeros(2, 300), model.attention)  # the paper's vectors
    assert sum(p.numel() for p in wide.parameters()) == 111_003


def test_nothing_is_left_on_the_cpu(corpus):
    """On the device without numbers, where all but the layer runs."""
    model = NLITask(corpus, "softmax").model.to("meta")
    (batch, *_) = corpus.splits["valid"].batches(4)
    assert model(batch.to(torch.device("meta"))).is_meta


def test_dropout_keeps_the_mean():
    from experiments.nli.model import _Dropout

    torch.manual_seed(0)
    dropout, x = _Dropout(0.33), torch.ones(1001, 101)
    dropped = dropout(x)
    assert abs(float((dropped == 0).float().mean()) - 0.33) < 0.005
    torch.testing.assert_close(dropped.max(), torch.tensor(1 / 0.67))
    assert dropout.eval()(x) is x


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_smoke(tmp_path, attention):
    """Two short trainings' worth of pairs is enough to be well above chance."""
    arguments = [attention, "--dataset", "toy", "--output", str(tmp_path), "--quiet"]
    arguments += ["--batch-size", "32", "--epochs", "3", "--threads", "1", "--device", "cpu"]
    main(arguments)
    run = RunFile(tmp_path / "nli" / f"toy-{attention}-seed0.jsonl").read()
    assert run.result["test"]["accuracy"] > 60
    assert len(run.epochs) == 3 and run.epochs[2]["loss"] < run.epochs[0]["loss"]
    assert (run.epochs[0]["layer_seconds"] > 0) == (attention in JOINT)
    assert ("transition" in run.result["observed"]) == (attention == "lp-sequential")
    facts = run.result["exhibits"]["data"]
    assert (facts["train"], facts["vector_size"]) == (1920, 100)


def test_exhibits_and_their_picture(tmp_path):
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(0)
    long = [Pair(p.premise * 2, p.premise[::-1] + p.hypothesis * 2, p.label) for p in toy(90, rng)]
    counts = {word: 1 for pair in long for word in (*pair.premise, *pair.hypothesis)}
    vocabulary = Vocabulary(counts, {})
    encoded = vocabulary.encode(long, 60)
    splits = {"train": encoded, "valid": encoded, "test": encoded}
    corpus = Corpus(splits, vocabulary.vectors, long, {})
    shown = []
    for attention in ("softmax", "lp-sequential"):
        task = NLITask(corpus, attention)
        with torch.no_grad():
            shown.append(json.loads(json.dumps(task.exhibits())))
    pairs = shown[0]["pairs"]
    assert [pair["label"] for pair in pairs] == [label for label in LABELS for _ in range(5)]
    for pair in pairs:
        assert 8 <= len(pair["premise"]) <= 14 and 8 <= len(pair["hypothesis"]) <= 14
        weights = np.array(pair["to_hypothesis"])
        assert weights.shape == (len(pair["premise"]), len(pair["hypothesis"]))
        np.testing.assert_allclose(weights.sum(axis=1), 1, atol=0.01)
    path = tmp_path / "deep" / "attention.png"
    draw_attention(*shown, path, pair=2)
    assert path.stat().st_size > 10_000
    shown[1]["pairs"].reverse()
    with pytest.raises(ValueError, match="not the same data"):
        draw_attention(*shown, path)

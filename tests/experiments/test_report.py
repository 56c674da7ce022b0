"""Tables and figures from result files, and the page that shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from experiments import report
from experiments.log import RunFile, read_runs

ROOT = Path(__file__).parents[2]
MACHINE = {"processor": "a processor", "cores": 4, "threads": 1}


def write_run(folder: Path, model="tree", seed=0, f1=70.0, dataset="listops", **header) -> None:
    file = RunFile(folder / "listops" / f"{dataset}-{model}-seed{seed}.jsonl")
    file.start(
        {
            "experiment": "listops",
            "dataset": dataset,
            "model": model,
            "seed": seed,
            "parameters": 1234,
            "settings": {"learning_rate": 1e-3},
            "machine": MACHINE,
            **header,
        }
    )
    for epoch in (1, 2):
        file.append(
            "epoch",
            epoch=epoch,
            loss=1.0,
            steps=10,
            seconds=2.0,
            layer_seconds=0.5,
            valid={"f1": f1 + epoch},
            observed={},
        )
    file.append("result", epoch=2, valid={"f1": f1 + 2}, test={"f1": f1}, observed={}, exhibits={})


def test_means_spread_and_the_paper(tmp_path):
    for seed, f1 in enumerate((70.0, 72.0)):
        write_run(tmp_path, "tree", seed, f1)
    write_run(tmp_path, "gold", 0, 99.0)
    tables = report.sections(read_runs(tmp_path))
    gold, tree = tables["listops"].splitlines()[2:]
    assert "| 71.00 ± 1.41 |" in tree and "| 69.12 " in tree
    assert gold.startswith("| gold") and "| 99.00 " in gold and "| – " in gold
    times = tables["listops-times"]
    assert "1,234" in times and "25%" in times and "200.0" in times
    assert "1 thread of 4 cores, a processor" in times


def test_the_paper_is_found_for_runs_of_the_same_data(tmp_path):
    write_run(tmp_path, dataset="listops-paper")
    assert "69.12" in report.sections(read_runs(tmp_path))["listops-paper"]


def test_made_up_and_partial_data_stand_alone(tmp_path):
    write_run(tmp_path, dataset="listops-generated")
    write_run(tmp_path, settings={"learning_rate": 1e-3, "limit": 50})
    tables = report.sections(read_runs(tmp_path))
    assert "69.12" not in tables["listops-generated"] + tables["listops"]


def test_runs_with_other_settings_have_rows_of_their_own(tmp_path):
    write_run(tmp_path, seed=0)
    write_run(tmp_path, seed=1, settings={"learning_rate": 1e-3, "limit": 50})
    rows = report.sections(read_runs(tmp_path))["listops"].splitlines()[2:]
    assert len(rows) == 2
    assert any("tree (limit 50)" in row for row in rows)


def test_a_seed_twice(tmp_path):
    write_run(tmp_path / "one")
    write_run(tmp_path / "two")
    with pytest.raises(SystemExit, match="seed twice"):
        report.sections(read_runs(tmp_path))


def test_unfinished_runs_do_not_count(tmp_path):
    write_run(tmp_path, seed=0)
    path = tmp_path / "listops" / "listops-tree-seed1.jsonl"
    path.write_text(
        (tmp_path / "listops" / "listops-tree-seed0.jsonl").read_text().rsplit("\n", 2)[0] + "\n"
    )
    assert len(read_runs(tmp_path)) == 1


def test_page_and_figures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    write_run(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- report: listops -->\nold\n<!-- end -->\nAfter. <!-- end -->")
    argv = ["--results", tmp_path, "--page", page, "--figures", tmp_path / "figures"]
    report.main([str(a) for a in argv])
    filled = page.read_text()
    assert "old" not in filled and "| tree " in filled
    assert filled.startswith("Before.") and filled.endswith("After. <!-- end -->")
    assert (tmp_path / "figures" / "listops-curves.png").stat().st_size > 1000
    assert "listops-curves.png" in capsys.readouterr().out
    report.main([str(a) for a in argv])
    assert page.read_text() == filled


def test_nothing_to_report(tmp_path):
    with pytest.raises(SystemExit, match=r"No finished run.*experiments\.listops"):
        report.main(["--results", str(tmp_path)])


def test_the_committed_page_says_what_the_files_say():
    page = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    runs = read_runs(ROOT / "experiments" / "results")
    assert report.fill_page(page, report.sections(runs)) == page, "run python -m experiments.report"
    for figure in ("bibtex-curves", "listops-curves", "snli-curves", "snli-attention"):
        assert f"figures/{figure}.png" in page
        assert (ROOT / "docs" / "figures" / f"{figure}.png").exists()

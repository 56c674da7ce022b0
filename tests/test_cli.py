"""The command `factormax`, run as a user would."""

import math
import subprocess
import sys
import time

import pytest

import factormax as fm
from factormax import cli
from factormax.cli import main

# log values: 00: 0, 01: log 2, 10: log 2, 11: log 20; variable 2 stands alone.
MODEL = "MARKOV\n3\n2 2 3\n2\n2 0 1\n1 2\n\n4\n1 2 2 20\n\n3\n1 5 1\n"


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.uai"
    path.write_text(MODEL)
    return str(path)


def printed(capsys) -> dict[str, str]:
    """The lines of the output, by their first word."""
    out, err = capsys.readouterr()
    assert err == ""
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()}


@pytest.mark.parametrize("query", ["--exact", "--map", "--sparse", None])
def test_solve(model, capsys, query):
    assert main(["solve", model, *([query] if query else [])]) == 0
    lines = printed(capsys)
    assert lines["assignment"] == "1 1 1"
    value, base10 = math.log(100), 2.0
    assert lines["value"] == f"{value:.9g} (log), {base10:.9g} (log10)"
    assert lines["file"] == model
    assert lines["model"].startswith("3 variables of at most 3 states, 2 tables of at most 2")
    assert lines["graph"] == "5 binary variables, 1 Pair, 1 Xor"
    assert "s reading" in lines["time"] and "s solving" in lines["time"]
    if query != "--sparse":
        bound = float(lines["bound"].split()[0])
        assert bound == pytest.approx(value, abs=1e-5)
    if query == "--map":
        assert "optimal" in lines["status"]
    elif query == "--sparse":
        assert lines["status"] == fm.Status.CONVERGED.value
    else:
        assert lines["status"] == "Optimal (proved)." and int(lines["nodes"]) >= 0


def test_nobody_reads(model):
    """As in `factormax solve model.uai | head -0`."""
    command = [sys.executable, "-m", "factormax", "solve", model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.parametrize(
    "option",
    [
        ("--max-nodes", "x"),
        ("--max-nodes", "1.5"),
        ("--max-nodes", "9" * 12),
        ("--time-limit", "x"),
        ("--time-limit", "inf"),
    ],
    ids=str,
)
def test_options_that_are_no_numbers(model, capsys, option):
    with pytest.raises(SystemExit) as exit_:
        main(["solve", model, *option])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {option[0]}: expected a" in error and option[1] in error


def test_evidence(model, tmp_path, capsys):
    evidence = tmp_path / "model.evid"
    evidence.write_text("1\n2 0 0 2 2\n")
    assert main(["solve", model, "--evidence", str(evidence), "--sparse"]) == 0
    lines = printed(capsys)
    assert lines["assignment"].startswith("0") and lines["assignment"].endswith("2")
    assert lines["model"].endswith("2 observed")


def test_output_of_an_assignment(model, tmp_path, capsys):
    output = tmp_path / "answer.MPE"
    assert main(["solve", model, "--exact", "--output", str(output)]) == 0
    assert output.read_text() == "MPE\n3 1 1 1\n"


def test_output_of_marginals(model, tmp_path, capsys):
    output = tmp_path / "answer.MAR"
    assert main(["solve", model, "--sparse", "--output", str(output)]) == 0
    kind, numbers = output.read_text().splitlines()
    assert kind == "MAR"
    assert [float(x) for x in numbers.split()] == pytest.approx([3, 2, 0, 1, 2, 0, 1, 3, 0, 1, 0])


def test_limits(tmp_path, capsys):
    # A ring of three that can't all differ: the relaxation is fractional.
    ring = tmp_path / "ring.uai"
    table = "4\n1 3 3 1\n"
    ring.write_text(f"MARKOV\n3\n2 2 2\n3\n2 0 1\n2 1 2\n2 0 2\n{3 * table}")
    assert main(["solve", str(ring), "--max-nodes", "1000", "--time-limit", "30"]) == 0
    lines = printed(capsys)
    assert float(lines["value"].split()[0]) == pytest.approx(2 * math.log(3))
    assert main(["solve", str(ring), "--map"]) == 0
    lines = printed(capsys)
    assert "fractional" in lines["status"]
    assert float(lines["bound"].split()[0]) == pytest.approx(3 * math.log(3), abs=1e-5)


def test_what_did_not_converge_is_said(tmp_path, capsys):
    chain = tmp_path / "chain.uai"
    n = 30
    scopes = "\n".join(f"2 {i} {i + 1}" for i in range(n - 1))
    tables = "\n".join(f"4 {1 + i % 3} 2 0.3 {1 + i % 5}" for i in range(n - 1))
    chain.write_text(f"MARKOV {n}\n{'2 ' * n}\n{n - 1}\n{scopes}\n{tables}\n")
    assert main(["solve", str(chain), "--sparse", "--max-iter", "1"]) == 1
    assert "max_iter" in printed(capsys)["status"]


def fails(arguments: list[str], code: int, capsys) -> str:
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert err.startswith("factormax: ") and err.count("\n") == 1
    return err


def test_bad_files(model, tmp_path, capsys):
    bad = tmp_path / "bad.uai"
    bad.write_text(MODEL.replace("20", "twenty"))
    err = fails(["solve", str(bad)], 2, capsys)
    assert f"{bad}, line 9: expected a number, got 'twenty'" in err
    assert "No such file" in fails(["solve", str(tmp_path / "none.uai")], 2, capsys)
    assert "line 1" in fails(["solve", model, "--evidence", model], 2, capsys)
    assert "directory" in fails(["solve", str(tmp_path)], 2, capsys)


def test_infeasible(tmp_path, capsys):
    path = tmp_path / "zero.uai"
    path.write_text("MARKOV 1 2 1 1 0 2 0 0")
    assert "every assignment has potential 0" in fails(["solve", str(path)], 3, capsys)


def test_infeasible_found_by_the_solver(tmp_path, capsys):
    # Three variables that are pairwise different: no table shows it.
    path = tmp_path / "odd.uai"
    path.write_text(
        "MARKOV 3 2 2 2  4  2 0 1  2 1 2  2 0 2  3 0 1 2"
        + 3 * "  4 0 1 1 0"
        + "  8 1 1 1 1 1 1 1 1.5"
    )
    assert main(["solve", str(path), "--exact"]) == 3
    lines = printed(capsys)
    assert lines["status"] == fm.Status.INFEASIBLE.value
    assert "assignment" not in lines
    assert main(["solve", str(path), "--sparse"]) == 0  # one half each satisfies the relaxation
    assert printed(capsys)["value"] == "none: the rounded assignment is impossible"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--map", "--time-limit", "1"], "--time-limit can't be used with --map"),
        (["--sparse", "--max-nodes", "1"], "--max-nodes can't be used with --sparse"),
        (["--exact", "--max-iter", "1"], "--max-iter can't be used with --exact"),
    ],
)
def test_options_that_do_not_fit(model, capsys, arguments, message):
    assert message in fails(["solve", model, *arguments], 2, capsys)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "COMMAND"),
        (["solve"], "file"),
        (["solve", "x", "--map", "--exact"], "not allowed with"),
        (["solve", "x", "--time-limit", "-1"], "expected a positive number, got -1"),
        (["solve", "x", "--max-nodes", "0"], "expected a whole number, at least 1, got 0"),
        (["solve", "x", "--max-nodes", "many"], "expected a whole number, at least 1, got many"),
    ],
)
def test_usage(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"factormax {fm.__version__}\n"


def test_progress(capsys):
    with cli._progress("waiting", True, every=0.01):
        time.sleep(0.1)
    assert capsys.readouterr().err.startswith("waiting: 0.0 s\n")
    with cli._progress("waiting", False, every=0.01):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with cli._progress("waiting", True, every=0.01):
        time.sleep(0.1)
    err = capsys.readouterr().err
    assert err.count("\rwaiting: ") > 1 and "\n" not in err and err.endswith("\r\x1b[K")


def test_as_a_module(model):
    done = subprocess.run(
        [sys.executable, "-m", "factormax", "solve", model, "--sparse"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "assignment  1 1 1\n" in done.stdout and done.stderr == ""
    done = subprocess.run(
        [sys.executable, "-m", "factormax", "solve", "none.uai"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr

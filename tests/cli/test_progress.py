"""Progress: phases by name while they last, how long a comparison may still take, and what is said at the end."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from greedy_gnorm.cli import progress
from greedy_gnorm.cli.app import main
from greedy_gnorm.cli.progress import Progress
from greedy_gnorm.phases import Phase, counted, listening, phase


def words(phases):
    return [" ".join(filter(None, [each.name, each.place])) for each in phases]


def test_phases_lie_inside_one_another_and_end_with_their_block():
    heard = []
    with listening(lambda phases: heard.append(words(phases))):
        for _ in counted("ab", "Scoring", "batch"):
            with pytest.raises(KeyboardInterrupt), phase("Evaluating"):
                raise KeyboardInterrupt
    outer = [f"Scoring batch {number} of 2" for number in (1, 2)]
    inner = [[each, *more] for each in outer for more in ([], ["Evaluating"], [])]
    assert heard == [*inner, [outer[1]], []]
    with phase("Nobody listens"):
        assert len(heard) == 8


def test_the_time_left_is_that_of_the_share_that_is_left(monkeypatch):
    work = Phase("Comparing", 4, "part")
    monkeypatch.setattr("greedy_gnorm.phases.time.monotonic", lambda: work.started + 60)
    assert work.seconds_left is None
    work.advance()
    assert work.seconds_left == pytest.approx(180)
    work.reached(0.5)
    assert work.seconds_left == pytest.approx(60)


def test_a_terminal_shows_the_phases_while_they_last(monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(progress, "err", screen)
    with Progress() as shown, phase("Scoring", 3, "batch") as work:
        work.advance()
        shown._live.refresh()
    assert "Scoring" in screen.file.getvalue()
    assert "batch 2 of 3" in screen.file.getvalue()


def test_elsewhere_only_a_long_phase_gets_a_line(capsys):
    for patience, quiet in ((30, False), (0, True), (0, False)):
        with Progress(patience=patience, quiet=quiet), phase("Saving"), phase("Scoring", 3, "batch") as work:
            assert patience or quiet or "Saving: 0 s" in capsys.readouterr().err
            work.advance()
        assert ("Scoring: batch 2 of 3" in capsys.readouterr().err) == (patience == 0 and not quiet)


def test_a_run_names_its_phases_and_says_which_step_it_chose_and_why(model_folder, data_file, tmp_path, capsys):
    heard = []
    call = ["prune", str(model_folder), "--data", str(data_file), "--out", str(tmp_path / "run"), "--samples", "12"]
    with listening(lambda phases: heard.extend(each.name for each in phases)):
        assert main([*call, "--stop", "drop=50%"]) == 0
    assert [name for name in dict.fromkeys(heard) if name != "Testing"] == [  # with more rows some are left to test on
        "Loading torch and transformers", "Loading the model", "Reading rows", "Evaluating", "Scoring",
        "Measuring speed", "Saving the model", "Drawing figures", "Writing the report",
    ]  # fmt: skip
    text = capsys.readouterr().out
    result = json.loads((tmp_path / "run" / "run.json").read_text())["result"]
    assert result["why"] == "the last one within 0.5 of the unpruned accuracy"
    assert f"Chose step {result['solution']} of {result['steps']}: {result['why']}.\n" in text
    assert f"The run ended after step {result['steps']}: no head is left to remove.\n" in text


def test_a_comparison_counts_its_parts_and_fits_a_terminal(model_folder, data_file, tmp_path, capsys, monkeypatch):
    """It writes to a folder of its own where none is named."""
    monkeypatch.chdir(tmp_path)
    call = ["compare", str(model_folder), "--data", str(data_file), "--samples", "12", "--methods", "random,magnitude"]
    assert main([*call, "--runs", "2", "--trajectories", "1"]) == 0
    text = capsys.readouterr()
    steps = [line for line in text.err.splitlines() if "  step " in line]
    assert [line.split("  ")[0] for line in steps[::9]] == ["random-0", "magnitude-0", "magnitude-1"]
    assert [line.split("  ")[-1].split(",")[0] for line in steps[::9]] == [f"part {part} of 3" for part in (1, 2, 3)]
    assert max(map(len, text.out.splitlines())) <= 100
    (header,) = (line.split("  ") for line in text.out.splitlines() if line.strip().startswith("method"))
    assert len([name for name in header if name.strip()]) == 5
    assert (tmp_path / "runs" / "classifier-compared" / "experiment.json").exists()
    assert main([*call, "--runs", "2", "--trajectories", "1", "--resume", "--quiet"]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert main(["score", str(model_folder), "--data", str(data_file), "--samples", "12", "--quiet"]) == 0
    assert (tmp_path / "runs" / "classifier-scores" / "scores.json").exists()

"""The benchmarks: the command runs, and every part of it measures something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import missing
from tests.launching import NotInstalled, find_program

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.crowd
def test_a_quick_round_measures_every_part(tmp_path):
    try:
        find_program("redis-server", "valkey-server")
    except NotInstalled as error:
        missing("redis", str(error))

    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert figures["uncontended"]["redis"]["distlock_app"]["us"] > 0
    assert figures["contended"]["redis"]["distlock_app"]["2"]["rate"] > 0
    assert figures["threads"]["redis"]["distlock_app"]["2"] > 0
    assert figures["held"]["redis"]["bytes"] > 0
    assert figures["renewal"]["redis"]["lost"] == 0
    assert figures["tasks"]["redis"]["count"] == 20
    assert figures["saving"]["sqlite"]["versioned"] > 0
    assert "## contended" in done.stdout


@pytest.mark.parametrize("page", ["benchmarks.md", "choosing-a-guard.md"])
def test_tables_go_between_their_marks(page, tmp_path):
    from benchmarks import page as writer

    docs = ROOT / "docs/explanation"
    for name in writer.PAGES:
        (tmp_path / name).write_text((docs / name).read_text())
    about = {"cores": 2, "cpu": "x", "load": 0.0, "python": "3", "packages": {}, "servers": {}}
    about["loads"] = {"guards": 3.7, "saving": 0.2}
    rows = {"f": {"1": [12345.0, 0.0]}}
    figures = {"machine": about, "guards": {"mysql": rows}, "saving": {"sqlite": {"error": "no"}}}

    writer.write(figures, tmp_path)

    old, new = (docs / page).read_text(), (tmp_path / page).read_text()
    assert ("12,345" in new) == ("before the run: 3.7" in new) == (page == "choosing-a-guard.md")
    assert ("saving, sqlite: no" in new) == (page == "benchmarks.md")
    assert new.count("<!-- end -->") == old.count("<!-- end -->")


def test_the_page_begins_with_ours_beside_the_fastest_other_library():
    from benchmarks import page

    free = {"raw: x": {"us": 2.0}, "distlock_app": {"us": 3.0}, "its engine alone": {"us": 1.0}}
    free |= {"slow": {"us": 9.0}, "fast": {"us": 4.0}, "absent": {"error": "no"}}
    wanted = {
        title: {"2": {"rate": 5.0, "longest_ms": 1.0}, "8": {"rate": rate, "longest_ms": 7.0}}
        for title, rate in (("raw: y", 90.0), ("distlock_app", 60.0), ("slow", 50.0))
    }
    figures = {"uncontended": {"redis": free, "locmem": {"error": "no"}}}
    figures["contended"] = {"redis": wanted}

    (row,) = page.summary(figures).splitlines()[2:]

    assert row == "| Redis | 3 | 1.50 | 4: fast | 60, 7 ms | 50, 7 ms: slow |"


def test_the_page_shows_the_targets_that_were_missed(monkeypatch):
    from benchmarks import targets

    def found(results, limit):
        yield "it", results["reached"], limit, " µs"

    monkeypatch.setattr(targets, "TARGETS", {found: [(10,), (30,)]})

    text = targets.missed({"reached": 20})

    assert text.startswith("1 of 2 were reached")
    assert "| it | ≤ 10 µs | 20 µs | **no** |  |" in text
    assert "≤ 30" not in text


def test_a_lock_that_two_held_at_a_time_has_no_figures():
    from benchmarks.contended import _judged

    ours, theirs = [0.1, 0.2, 0.4], [0.3, 0.5, 0.6]  # asked, got, free

    def judged(*turns: list[float]) -> dict[str, float]:
        return _judged([{"turns": [turn], "cpu": 0.1} for turn in turns], 4, 0.0, 1.0)

    assert judged(ours, theirs)["rate"] == pytest.approx(2 / 0.8)
    with pytest.raises(RuntimeError, match="held by two at a time"):
        judged(ours, [0.3, 0.35, 0.6])


def test_of_several_turns_the_median_counts_and_an_error_is_not_lost():
    from benchmarks.running import medians

    slow = {"raw": {"us": 9.0}, "ours": {"us": 4.0}, "peer": {"us": 1.0}}
    usual = {"raw": {"us": 2.0}, "ours": {"us": 3.0}, "peer": {"error": "no answer"}}
    fast = {"raw": {"us": 1.0}, "ours": {"us": 5.0}, "peer": {"us": 1.0}}

    assert medians([slow, usual, fast]) == {
        "raw": {"us": 2.0},
        "ours": {"us": 4.0},
        "peer": {"error": "no answer"},
    }
    assert medians([{"error": "skipped"}, fast]) == {"error": "skipped"}

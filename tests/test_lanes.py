"""tests/run.sh: which tests a run has, and what becomes of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests import machine
from tests.lanes import SERVERS, Choice, Lane, plan
from tests.launching import ROOT
from tests.machine import PIP, Environments, Pair
from tests.running import LaneRun, Run, Stopped, _summary, parsed
from tests.servers import KINDS

EVERY = ("3.10", "3.11", "3.12", "3.13", "3.14")


def names(choice=None, versions=EVERY):
    return [f"{lane.name} {lane.pair}" for lane in plan(choice or Choice(), versions)[0]]


def test_a_whole_run_has_both_lines_of_django_on_every_database():
    found = names()

    for database in "sqlite", "mysql", "postgresql":
        assert f"new-{database} 3.14-6.1" in found
        assert f"slow-{database} 3.14-6.1" in found
        assert f"old-{database} 3.11-5.2" in found
        assert f"contract-{database} 3.10-5.2" in found
    assert {"once-sqlite 3.14-6.1", "slow-once-sqlite 3.14-6.1"} < set(found)
    assert {"new-mysql9 3.14-6.1", "lowest-sqlite 3.10-5.2", "wheel-sqlite 3.13-6.0"} < set(found)
    assert found[-1] == "checks 3.14-6.1"
    assert len(found) == len(set(found)) == 18


def test_a_run_names_the_pythons_and_pairs_that_it_does_not_have():
    lanes, skipped = plan(Choice(), ["3.11", "3.14"])

    assert {str(lane.pair) for lane in lanes} == {"3.11-5.2", "3.14-6.1"}
    assert "lowest: no Python for it is here" in skipped
    assert "wheel: no Python for it is here" in skipped
    assert "Python 3.12" in plan(Choice(), EVERY)[1]


def test_without_a_second_old_python_the_first_runs_what_needs_no_database():
    [old] = [lane for lane in plan(Choice(), ["3.11", "3.13"])[0] if lane.name == "old-sqlite"]

    assert "once" not in old.marks


def test_one_python_is_enough():
    assert names(versions=["3.11"])[0] == "once-sqlite 3.11-5.2"
    assert names(versions=[]) == []


def test_a_quick_run_has_one_python_and_the_checks():
    assert names(parsed(["--quick"])) == [
        f"{lane} 3.14-6.1" for lane in ("once-sqlite", "new-sqlite", "checks")
    ]


def test_only_one_database_has_both_lines_of_django():
    found = names(parsed(["--only=mysql"]))

    assert set(found) == {
        *("new-mysql 3.14-6.1", "slow-mysql 3.14-6.1", "new-mysql9 3.14-6.1"),
        *("old-mysql 3.11-5.2", "checks 3.14-6.1"),
    }


def test_what_is_to_come_is_tried_on_every_database_in_a_run_of_its_own():
    assert names(parsed(["--upstream"])) == [
        f"upstream-{database} 3.14-upstream" for database in ("sqlite", "mysql", "postgresql")
    ]
    assert not any("upstream" in name for name in names())


def test_coverage_is_measured_on_every_database_without_what_cannot_be_traced():
    lanes, _ = plan(parsed(["--coverage"]), EVERY)

    assert {lane.name for lane in lanes} == {
        f"coverage-{database}" for database in ("sqlite", "mysql", "postgresql")
    }
    assert all("not crowd" in lane.marks for lane in lanes)


@pytest.mark.parametrize(("covered", "result"), [("1", "ok"), ("0", "FAILED")])
def test_too_little_coverage_fails_the_run(run, monkeypatch, covered, result):
    monkeypatch.setattr(Pair, "bin", Path(sys.executable).parent)
    (run.work / "coverage").mkdir()
    source = run.work / "half.py"
    source.write_text(f"for _ in range({covered}):\n" + "    x = 1\n" * 30)
    env = {**os.environ, "COVERAGE_FILE": str(run.work / "coverage/data")}
    command = ["-m", "coverage", "run", "--parallel-mode", "--source=.", source.name]
    subprocess.run([sys.executable, *command], cwd=run.work, env=env, check=True)
    monkeypatch.chdir(run.work)
    run.work_off([])

    run.report_coverage(Pair("3.13", "6.1"))

    assert result in run.table[0]
    assert bool(run.failed) is (result == "FAILED")


def test_pre_releases_are_installed_of_what_is_listed(tmp_path):
    pair = Pair("3.13", "upstream", "upstream")

    wanted = Environments(Run(Choice(), tmp_path).run, compiler=True)._requirements(pair)

    assert "Django>=6.0a0" in wanted and not any("~=upstream" in line for line in wanted)


@pytest.mark.parametrize("uv", [True, False])
def test_an_environment_is_made_by_uv_or_by_pip_where_that_cannot_be_had(uv, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "VENVS", tmp_path)
    asked = []

    def run(*command, out=None):
        words = [str(word) for word in command]
        asked.append(words)
        if "venv" in words:
            Path(words[-1], "bin").mkdir(parents=True, exist_ok=True)
        if words[-1] == "uv" and uv:
            (tmp_path / "uv/bin/uv").touch()
        return words[-1] != "uv" or uv

    version = ".".join(map(str, sys.version_info[:2]))
    environments = Environments(run, compiler=False)

    assert environments.make(Pair(version, "6.1"))
    assert asked[-1][1 : 3 if uv else 4] == (["pip", "install"] if uv else ["-m", "pip", *PIP[:1]])
    made = len(asked)
    assert environments.make(Pair(version, "6.1")) and len(asked) == made  # it is kept


def test_what_follows_two_dashes_is_for_pytest():
    assert parsed(["--only=redis", "--", "-x", "--lf"]) == Choice(
        only="redis", pytest=("-x", "--lf")
    )


def test_every_server_is_known():
    assert set(SERVERS) == set(KINDS)


@pytest.fixture
def run(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("DISTLOCK_TEST_")]:
        monkeypatch.delenv(name)
    return Run(Choice(), tmp_path)


def test_lanes_run_at_the_same_time_but_not_on_a_server_that_was_given(run, tmp_path, monkeypatch):
    assert run.at_once > 1

    monkeypatch.setenv("DISTLOCK_TEST_REDIS_URL", "redis://127.0.0.1:1/0")

    assert Run(Choice(), tmp_path).at_once == 1


@pytest.mark.parametrize(
    ("code", "result"),
    [("pass", "ok"), ("raise SystemExit(3)", "FAILED"), ("os.abort()", "FAILED")],
)
def test_a_check_that_fails_or_is_killed_fails_the_run(run, code, result):
    passed = run.run(sys.executable, "-c", f"import os; {code}")
    run.record(Pair("3.13", "6.1"), "ruff", "ok" if passed else "FAILED", time.monotonic())

    assert result in run.table[0]
    assert bool(run.failed) is (result == "FAILED")


def test_a_lane_that_breaks_fails_the_run(run, capsys):
    run.work_off([Lane("new", "sqlite", Pair("2.7", "1.11"), "not slow")])

    assert run.failed
    assert "new-sqlite" in capsys.readouterr().out


def test_what_failed_is_printed_once_more_at_the_end_of_a_run(run, monkeypatch, capsys):
    lane = LaneRun(run, Lane("slow", "sqlite", Pair("3.13", "6.1"), "slow"), run.work, None)
    tests = run.work / "test_that_fails.py"
    tests.write_text("def test_stock(): assert 7 == 8")
    monkeypatch.setattr(Pair, "bin", Path(sys.executable).parent)

    lane._test(str(tests), "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"))

    assert _summary(run) == 1
    printed = capsys.readouterr().out
    assert "assert 7 == 8" in printed
    assert printed.endswith("FAILED: slow-sqlite on 3.13-6.1\n")


def test_where_a_process_stood_that_ended_in_a_test_is_printed_at_the_end(run, monkeypatch, capsys):
    tests = run.work / "tests/test_that_ends.py"
    tests.parent.mkdir()
    tests.write_text("import os\ndef test_stock(): os.abort()")
    monkeypatch.setattr(Pair, "bin", Path(sys.executable).parent)

    with (run.work / "log").open("w") as log:
        lane = LaneRun(run, Lane("slow", "sqlite", Pair("3.13", "6.1"), "slow"), run.work, log)
        lane._test(str(tests), "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"))

    assert _summary(run) == 1
    printed = capsys.readouterr().out
    assert '\ntests/test_that_ends.py", line 2 in test_stock\n' in printed


def test_a_run_that_ends_starts_nothing_more_and_ends_what_runs(run):
    ended = []
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    thread = threading.Thread(target=lambda: ended.append(run.exit_code(*sleeper)))
    thread.start()
    deadline = time.monotonic() + 20
    while not run.children and time.monotonic() < deadline:
        time.sleep(0.01)

    run.stop()
    thread.join(20)

    assert ended == [-signal.SIGTERM]
    with pytest.raises(Stopped):
        run.exit_code(*sleeper)


def test_the_script_explains_itself_and_refuses_what_it_does_not_know():
    for argument, code in ("--help", 0), ("--fast", 2), ("--quick --only=mysql", 2):
        command = ["sh", "tests/run.sh", *argument.split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code
        assert "--only" in done.stdout + done.stderr

"""Golden files: missing, equal, differing and updated ones, as a user's own suite meets them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from . import forks

pytest_plugins = ["pytester"]

TESTS = """
import pytest

TEXT = "linear: f16 <- cast(x)\\nsoftmax: f32 <- widen(linear)"

def test_casts(ampgraph_golden):
    ampgraph_golden(TEXT)

class TestGroup:
    @pytest.mark.parametrize("case", ["plain", "with/slash", "with:slash"])
    def test_named(self, ampgraph_golden, case):
        ampgraph_golden(case)
        ampgraph_golden("second", name="again")

def test_twice(ampgraph_golden):
    ampgraph_golden("once")
    ampgraph_golden("once")
"""
ALL_BUT_TWICE = ("-k", "not twice")


ROOT = str(Path(__file__).parent.parent)


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", ROOT)
    pytester.makepyfile(test_model=TESTS)
    return pytester


def run(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    # In another process: modules that a run in this process imports are imported once more after it.
    done = forks.run("-m", "pytest", "-p", "pytest_ampgraph", "-p", "no:xdist", *arguments, cwd=suite.path)
    return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)


def goldens(suite: pytest.Pytester) -> list[str]:
    return sorted(path.name for path in (suite.path / "golden" / "test_model").glob("*"))


def test_a_missing_file_fails_and_is_not_written(suite: pytest.Pytester) -> None:
    result = run(suite, "-k", "test_casts")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*there is no golden file golden/test_model/test_casts.txt yet; pytest --ampgraph-update writes it:"]
    )
    assert not (suite.path / "golden").exists()


def test_update_writes_and_then_all_is_equal(suite: pytest.Pytester) -> None:
    result = run(suite, "--ampgraph-update", *ALL_BUT_TWICE)
    result.assert_outcomes(passed=4, deselected=1)
    result.stdout.fnmatch_lines(["ampgraph: golden files 7 written"])
    # A checksum tells apart what a file name cannot.
    assert [re.sub("-[0-9a-f]{8}", "-#", name) for name in goldens(suite)] == [
        "TestGroup.test_named-plain.again.txt",
        "TestGroup.test_named-plain.txt",
        *["TestGroup.test_named-with-slash-#.txt"] * 2,
        *["TestGroup.test_named-with-slash.again-#.txt"] * 2,
        "test_casts.txt",
    ]
    result = run(suite, *ALL_BUT_TWICE)
    result.assert_outcomes(passed=4, deselected=1)
    result.stdout.no_fnmatch_line("*golden files*")


def test_a_difference_is_shown_as_a_diff_and_not_written(suite: pytest.Pytester) -> None:
    run(suite, "--ampgraph-update", "-k", "test_casts")
    suite.makepyfile(test_model=TESTS.replace("softmax: f32", "softmax: f16"))
    result = run(suite, "-k", "test_casts")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*differs from golden/test_model/test_casts.txt; pytest --ampgraph-update accepts it:",
            "* --- golden/test_model/test_casts.txt",
            "* +++ this run",
            "*  linear: f16 <- cast(x)",
            "* -softmax: f32 <- widen(linear)",
            "* +softmax: f16 <- widen(linear)",
        ]
    )
    result.stdout.no_fnmatch_line("*pytest_plugin*")
    assert "softmax: f32" in (suite.path / "golden/test_model/test_casts.txt").read_text()
    result = run(suite, "--ampgraph-update", "-k", "test_casts")
    result.stdout.fnmatch_lines(["ampgraph: golden files 1 updated"])
    assert "softmax: f16" in (suite.path / "golden/test_model/test_casts.txt").read_text()


def test_one_name_twice_is_a_mistake(suite: pytest.Pytester) -> None:
    result = run(suite, "--ampgraph-update", "-k", "test_twice")
    result.stdout.fnmatch_lines(["*compares with test_twice.txt twice: give the second one a name=.*"])


def test_a_model_is_compared_by_its_cast_map(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_model="""
        import ampgraph, torch

        def test_casts(ampgraph_golden):
            ampgraph_golden(ampgraph.convert(torch.nn.Linear(4, 4), (torch.randn(2, 4),), dtype="float16"))
        """
    )
    run(pytester, "--ampgraph-update").assert_outcomes(passed=1)
    golden = (pytester.path / "golden/test_model/test_casts.txt").read_text()
    assert golden == "linear: f16 <- cast(input), cast(weight), cast(bias)\noutput <- cast(linear)\n"


def test_workers_write_and_the_summary_counts(suite: pytest.Pytester) -> None:
    result = suite.runpytest_subprocess(
        "-p", "pytest_ampgraph", "-n", "2", "--ampgraph-update", *ALL_BUT_TWICE
    )
    result.stdout.fnmatch_lines(["ampgraph: golden files 7 written"])


def test_a_session_without_the_fixture_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(
        "import sys\n\ndef test_light():\n    assert not {'torch', 'ampgraph'} & sys.modules.keys()\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_ampgraph", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_plugin_is_declared_under_its_own_name() -> None:
    declared = (Path(ROOT) / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\npytest_ampgraph = "pytest_ampgraph"' in declared

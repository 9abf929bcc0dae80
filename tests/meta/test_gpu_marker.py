"""The ``gpu`` marker, on machines with and without a device: our conftest runs over a few sample tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import conftest_on_a_machine_with

SAMPLE = """
import pytest

@pytest.mark.gpu
def test_on_the_device(): pass

@pytest.mark.gpu
def test_skips_itself(): pytest.skip("some reason")

def test_anywhere(): pass
"""


def run_pytest(folder: Path, devices: int, *arguments: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(conftest_on_a_machine_with(devices))
    (folder / "test_sample.py").write_text(SAMPLE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_without_a_device_gpu_tests_are_skipped_and_counted_once(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, 0)
    assert code == 0
    assert output.count("no CUDA device") == 1
    assert "gpu tests: 2 skipped, no CUDA device" in output
    assert "1 passed, 2 skipped" in output


def test_the_count_is_of_the_selected_tests(tmp_path: Path) -> None:
    _, output = run_pytest(tmp_path, 0, "-k", "on_the_device or anywhere")
    assert "gpu tests: 1 skipped, no CUDA device" in output


def test_with_a_device_they_run(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, 1)
    assert code == 0
    assert "2 passed, 1 skipped" in output
    assert "no CUDA device" not in output


def test_gpu_required_makes_a_skip_a_failure(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, 1, "--gpu-required")
    assert code == 1
    assert "1 failed, 2 passed" in output
    assert "some reason" in output


def test_gpu_required_without_a_device_is_refused(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, 0, "--gpu-required")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "there is no CUDA device here" in output


def test_the_progress_file_tells_start_result_and_end(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    run_pytest(tmp_path, 1, "--progress-file", str(path), "-k", "anywhere")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "result", "end"]
    assert {line["test"] for line in lines} == {"test_sample.py::test_anywhere"}
    assert lines[1]["outcome"] == "passed"

"""Every example runs as a user runs it, is short, and says what it teaches."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))

#: What the last lines of the output must say.
SAYS = {
    "texture_to_cupy.py": "the texture shows the inverted picture: True",
    "texture_to_torch.py": "shared: True",
    "cupy_allocator.py": "0 bytes",
    "animated_vertices.py": "largest error",
    "nv12_to_rgb.py": "all four exact: True",
    "asyncio_service.py": "100 answers, all right: True",
    "two_streams.py": "largest error: ",
    "find_a_race.py": "find_a_race.py:27\nwith the wait: 50 orders, no hazard",
    "graph_per_frame.py": "frames shown exactly: 10 of 10",
}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_example_is_short_and_has_its_header(path):
    text = path.read_text()
    assert len(text.splitlines()) < 120
    header = text.split('"""')[1]
    for word in ("Teaches:", "Shows:", "Needs:"):
        assert word in header


def test_every_example_has_its_expected_output():
    assert {path.name for path in FILES} == set(SAYS)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.interop if "torch" in name else ()) for name in SAYS],
)
def test_example_runs(name):
    if "torch" in name:
        assert importlib.util.find_spec("torch"), "the interop tests need PyTorch"
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert SAYS[name] in done.stdout
    if "largest error" in SAYS[name]:
        assert float(done.stdout.split()[-1]) < 1e-5


@pytest.mark.gpu
def test_the_streams_of_the_pipeline_overlap():
    """Uploads run beside kernels, all but the first; half of that is asked for, on a machine that may be busy."""
    path = str(EXAMPLES / "two_streams.py")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=240)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("uploads beside a kernel")]
    assert int(line.split(": ")[1].partition("%")[0]) >= 40, done.stdout

"""The demo end to end, as a user starts it; its picture against separate NumPy and SciPy code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from cuglue.tools import demo, scene


def run_demo(tmp_path: Path, *arguments: str, **env: str) -> tuple[str, np.ndarray]:
    out = tmp_path / "demo.png"
    command = [sys.executable, "-m", "cuglue", "demo", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **env})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, np.asarray(Image.open(out))


def expected_edges(picture: np.ndarray) -> np.ndarray:
    """|Sobel x| + |Sobel y| of the integer luma, by SciPy."""
    r, g, b = (picture[..., i].astype(np.int64) for i in range(3))
    luma = (77 * r + 150 * g + 29 * b) // 256
    gx = ndimage.sobel(luma, axis=1, mode="nearest")
    gy = ndimage.sobel(luma, axis=0, mode="nearest")
    return np.clip(abs(gx) + abs(gy), 0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    "arguments", [(), ("--size", "333x217"), ("--no-gl",), ("--no-gl", "--size", "61x3")]
)
def test_demo_picture_is_exact(tmp_path, arguments):
    text, both = run_demo(tmp_path, *arguments)
    width = both.shape[1] // 2
    before, after = both[:, :width], both[:, width:]
    assert before.std() > 10, "the picture shows something"
    np.testing.assert_array_equal(after, np.repeat(expected_edges(before)[..., None], 3, axis=2))
    assert "A COPY" not in text
    if "--no-gl" not in arguments:
        assert "the same memory" in text
        assert re.search(r"bytes over the bus\s+0 ", text)


def test_demo_frames_prints_rates_and_claims_no_speed_on_the_simulated_device(tmp_path):
    text, _ = run_demo(tmp_path, "--frames", "3", "--size", "160x120", CUGLUE_DRIVER="sim")
    assert re.search(r"frames per second: mapped texture\s+[\d.]+", text)
    assert re.search(r"frames per second: glReadPixels\s+[\d.]+", text)
    assert "say nothing about a GPU" in text


@pytest.mark.parametrize("text", ["1280", "axb", "0x5", "5x0", "-3x4", "99999x2", "1x2x3", ""])
def test_bad_sizes_are_refused_with_the_right_form(text):
    with pytest.raises(SystemExit, match=r"--size: got .*expected"):
        demo.parse_size(text)


def test_bad_frame_count_is_refused(tmp_path):
    command = [sys.executable, "-m", "cuglue", "demo", "--frames", "-1", "--out", str(tmp_path / "x.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "--frames: got -1, expected 0 or more" in done.stderr
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("out", ["missing/x.png", "x.nothing", "x", "."])
def test_a_picture_that_cannot_be_written_is_refused_first(tmp_path, out):
    command = [sys.executable, "-m", "cuglue", "demo", "--out", str(tmp_path / out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"--out: got .*, expected .*\n", done.stderr)


def test_knot_is_closed_and_its_normals_point_out():
    vertices, triangles = scene.torus_knot(rings=60, sides=12)
    position, normal = vertices[:, :3], vertices[:, 3:]
    np.testing.assert_allclose(np.linalg.norm(normal, axis=1), 1.0, atol=1e-5)
    edges = np.sort(
        np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]]), axis=1
    )
    _, counts = np.unique(edges, axis=0, return_counts=True)
    assert (counts == 2).all(), "every edge belongs to two triangles"
    centre = position.reshape(60, 12, 3).mean(axis=1)
    assert (
        ((position.reshape(60, 12, 3) - centre[:, None]) * normal.reshape(60, 12, 3)).sum(axis=2) > 0
    ).all()


@pytest.mark.gl
def test_scene_is_depth_tested():
    """With the depth test the near parts of the knot hide the far ones: drawing order must not matter."""
    import cuglue

    with cuglue.gl.headless():
        one = scene.Scene(96, 64)
        one.draw(0.4)
        first = one.pixels()
        from OpenGL import GL

        _, triangles = scene.torus_knot()
        backwards = np.ascontiguousarray(triangles[::-1])
        GL.glBindBuffer(GL.GL_ELEMENT_ARRAY_BUFFER, one._buffers[1])
        GL.glBufferSubData(GL.GL_ELEMENT_ARRAY_BUFFER, 0, backwards.nbytes, backwards)
        one.draw(0.4)
        np.testing.assert_array_equal(one.pixels(), first)
        assert len(np.unique(first.reshape(-1, 4), axis=0)) > 100, "lit, not flat"
        one.close()

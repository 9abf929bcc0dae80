"""The doctor: facts are collected without failing, verdicts and exit codes follow from facts alone."""

import copy
import json
import subprocess
import sys

import pytest

from cuglue.tools import doctor

GOOD = {
    "system": {"python": "3.12.3", "platform": "Linux", "wsl": False, "CUDA_VISIBLE_DEVICES": "not set"},
    "libraries": dict.fromkeys(doctor.LIBRARIES, "loads"),
    "packages": {
        **dict.fromkeys(doctor.PACKAGES),
        "cupy-cuda13x": "14.2.0",
        "cuda-bindings": "13.3.1",
        "PyOpenGL": "3.1.10",
        "torch": "2.11.0",
    },
    "cuda": {"available": True, "devices": [{"name": "NVIDIA H200", "uuid": "ab" * 16}]},
    "opengl": {
        "vendor": "NVIDIA Corporation",
        "renderer": "NVIDIA H200/PCIe",
        "version": "4.6",
        "software": False,
        "CUDA ordinal": 0,
        "device uuid": "ab" * 16,
        "EGL devices": [],
    },
}


def facts(**changes):
    out = copy.deepcopy(GOOD)
    for group, values in changes.items():
        out[group] |= values
    return out


def verdicts(**changes):
    return {v.name: v for v in doctor.judge(facts(**changes))}


LLVMPIPE = {
    "renderer": "llvmpipe (LLVM 15)",
    "vendor": "Mesa",
    "software": True,
    "CUDA ordinal": None,
    "device uuid": "00" * 16,
}
NO_CUDA = {"available": False, "devices": []}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"cuda": NO_CUDA, "opengl": LLVMPIPE}, 3),
        ({"opengl": LLVMPIPE}, 3),
        ({"opengl": {"device uuid": "cd" * 16, "CUDA ordinal": None}}, 3),
        ({"packages": {"cupy-cuda13x": None}}, 3),
        ({"cuda": NO_CUDA, "opengl": {"renderer": None, "error": "no libEGL"}}, 1),
        ({"opengl": {"renderer": None, "error": "no libEGL"}}, 1),
    ],
)
def test_exit_code(changes, code):
    assert doctor.exit_code(doctor.judge(facts(**changes))) == code


def test_every_no_has_a_way_out():
    for changes in (
        {"opengl": {"renderer": None, "error": "x"}, "libraries": {"libEGL.so.1": "missing"}},
        {"cuda": NO_CUDA, "packages": dict.fromkeys(doctor.PACKAGES), "opengl": LLVMPIPE},
        {"system": {"wsl": True}, "opengl": LLVMPIPE},
    ):
        for verdict in verdicts(**changes).values():
            assert verdict.ok or verdict.way_out, verdict


def test_software_gl_beside_a_gpu_names_the_missing_library():
    found = verdicts(opengl=LLVMPIPE, libraries={"libXext.so.6": "missing (cannot open)"})
    assert "libXext.so.6" in found["OpenGL renders on the CUDA device"].way_out


def test_hybrid_laptop_gets_the_two_variables():
    way = verdicts(opengl=LLVMPIPE)["OpenGL renders on the CUDA device"].way_out
    assert "__NV_PRIME_RENDER_OFFLOAD=1 __GLX_VENDOR_LIBRARY_NAME=nvidia" in way


def test_row_52_wsl_is_named():
    way = verdicts(system={"wsl": True}, opengl=LLVMPIPE)["OpenGL renders on the CUDA device"].way_out
    assert "WSL2" in way


def test_row_58_a_library_that_is_missing_is_found_by_loading():
    assert doctor.library_state("libc.so.6") == "loads"
    assert doctor.library_state("libsurely-not-there.so.9").startswith("missing (")


def test_json_is_one_object_with_the_exit_code():
    command = [sys.executable, "-m", "cuglue", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    report = json.loads(done.stdout)
    assert report["exit"] == done.returncode
    assert done.returncode in (0, 1, 3)
    assert set(report["facts"]) == {"system", "libraries", "packages", "cuda", "opengl"}
    assert report["facts"]["opengl"].get("renderer") or report["facts"]["opengl"]["error"]


def test_text_ends_with_the_verdict():
    done = subprocess.run(
        [sys.executable, "-m", "cuglue", "doctor"], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.rstrip().splitlines()[-1].endswith("the main job.")
    assert "Traceback" not in done.stdout + done.stderr

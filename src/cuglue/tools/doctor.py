"""``python -m cuglue doctor``: what this machine can do, and for each "no" the way out.

Owns the questions and the verdicts; asks the drivers, OpenGL and the loader, changes nothing. Exit code 0: this
machine's GPU can do the main job; 3: only the simulated device can; 1: neither.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any, NamedTuple

SUMMARY = "say what this machine can do, and what is missing"

#: Shared libraries that the main job may need, and what needs them.
LIBRARIES = {
    "libcuda.so.1": "CUDA (comes with the NVIDIA driver)",
    "libEGL.so.1": "headless OpenGL contexts",
    "libOpenGL.so.0": "OpenGL calls",
    "libGL.so.1": "moderngl",
    "libEGL_nvidia.so.0": "OpenGL on an NVIDIA GPU (comes with the NVIDIA driver)",
    "libXext.so.6": "NVIDIA's OpenGL and Vulkan libraries",
    "libvulkan.so.1": "Vulkan interop",
}
PACKAGES = (
    "cupy-cuda13x",
    "cupy-cuda12x",
    "cuda-bindings",
    "cuda-core",
    "PyOpenGL",
    "torch",
    "jax",
    "numba-cuda",
    "numba",
)


class Verdict(NamedTuple):
    """One capability: whether it is there, what was found, and the way out of a "no"."""

    name: str
    ok: bool
    found: str
    way_out: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the doctor."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print the findings; the exit code."""
    os.environ.setdefault("PYOPENGL_PLATFORM", "egl")
    facts = collect()
    verdicts = judge(facts)
    code = exit_code(verdicts)
    if options.json:
        report = {"facts": facts, "verdicts": [v._asdict() for v in verdicts], "exit": code}
        print(json.dumps(report, indent=2, default=str))
        return code
    for group, values in facts.items():
        print(group)
        for line in _lines(values):
            print(f"  {line}")
    print("verdicts")
    for verdict in verdicts:
        print(f"  [{'yes' if verdict.ok else 'no '}] {verdict.name}: {verdict.found}")
        if not verdict.ok and verdict.way_out:
            print(f"        way out: {verdict.way_out}")
    print(
        {
            0: "This machine's GPU can do the main job.",
            3: "Only the simulated device can do the main job.",
            1: "Neither a GPU nor the simulated device can do the main job.",
        }[code]
    )
    return code


def collect() -> dict[str, Any]:
    """Everything that can be found out, by group."""
    return {
        "system": system_facts(),
        "libraries": {name: library_state(name) for name in LIBRARIES},
        "packages": {name: package_version(name) for name in PACKAGES},
        "cuda": cuda_facts(),
        "opengl": gl_facts(),
    }


def system_facts() -> dict[str, Any]:
    """Python, platform, WSL."""
    version = Path("/proc/version")
    text = version.read_text() if version.exists() else ""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "wsl": "microsoft" in text.lower(),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
    }


def library_state(name: str) -> str:
    """``loads``, or why not."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return f"missing ({error})"
    return "loads"


def package_version(name: str) -> str | None:
    """Version of an installed distribution; nothing is imported."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda_facts() -> dict[str, Any]:
    """The CUDA driver and its devices."""
    from ..driver.registry import is_cuda_available, runtime_path

    if not is_cuda_available():
        return {"available": False, "library": runtime_path()}
    version = ctypes.c_int()
    ctypes.CDLL(str(runtime_path())).cuDriverGetVersion(ctypes.byref(version))
    facts: dict[str, Any] = {
        "available": True,
        "library": runtime_path(),
        "driver API": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "devices": [],
    }
    try:
        from ..driver.cuda import CudaDriver

        driver = CudaDriver()
        for ordinal in range(driver.device_count()):
            memory = driver.memory_info(ordinal)
            facts["devices"].append(
                {
                    "ordinal": ordinal,
                    "name": driver.device_name(ordinal),
                    "uuid": driver.device_uuid(ordinal).hex(),
                    "free bytes": memory.free,
                    "total bytes": memory.total,
                }
            )
    except Exception as error:  # noqa: BLE001 - a doctor reports what it meets
        facts["error"] = f"{type(error).__name__}: {error}"
    return facts


def gl_facts() -> dict[str, Any]:
    """EGL devices, and the context that cuglue would make."""
    from ..graphics import glcontext

    facts: dict[str, Any] = {}
    try:
        facts["EGL devices"] = [str(device) for device in glcontext.list_egl_devices()]
        with glcontext.headless() as context:
            facts |= {
                "vendor": context.vendor,
                "renderer": context.renderer,
                "version": context.version,
                "software": context.software,
                "CUDA ordinal": context.cuda_device,
                "device uuid": _gl_uuid(),
            }
    except Exception as error:  # noqa: BLE001 - as above
        facts["error"] = f"{type(error).__name__}: {error}"
    return facts


def _gl_uuid() -> str | None:
    """UUID of the device that the current context renders on, where the driver tells."""
    from OpenGL import GL

    names = {GL.glGetStringi(GL.GL_EXTENSIONS, i) for i in range(GL.glGetIntegerv(GL.GL_NUM_EXTENSIONS))}
    if b"GL_EXT_memory_object" not in names:
        return None
    from OpenGL.GL.EXT.memory_object import GL_DEVICE_UUID_EXT, glGetUnsignedBytei_vEXT

    uuid = (ctypes.c_ubyte * 16)()
    glGetUnsignedBytei_vEXT(GL_DEVICE_UUID_EXT, 0, uuid)
    return bytes(uuid).hex()


def judge(facts: dict[str, Any]) -> list[Verdict]:
    """A verdict per capability. Pure: facts in, verdicts out."""
    system, libraries, packages, cuda, gl = (
        facts[k] for k in ("system", "libraries", "packages", "cuda", "opengl")
    )
    renderer = gl.get("renderer")
    missing = [name for name in ("libEGL.so.1", "libOpenGL.so.0") if libraries[name] != "loads"]
    cupy = packages["cupy-cuda13x"] or packages["cupy-cuda12x"]
    devices = cuda.get("devices") or []
    gl_way = (
        "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri libopengl0"
        if missing
        else "pip install 'cuglue[gl]'"
        if not packages["PyOpenGL"]
        else "install an OpenGL driver"
    )
    same_way = _same_device_way_out(system["wsl"], cuda["available"], libraries)
    uuids = {device["uuid"] for device in devices}
    same = (
        bool(renderer)
        and not gl.get("software")
        and (gl.get("device uuid") in uuids or gl.get("CUDA ordinal") is not None)
    )
    return [
        Verdict("OpenGL", bool(renderer), str(renderer or gl.get("error")), gl_way),
        Verdict(
            "simulated device",
            True,
            "always there; " + ("with real OpenGL" if renderer else "without OpenGL"),
        ),
        Verdict(
            "CUDA device",
            bool(devices),
            devices[0]["name"] if devices else cuda.get("error", "none"),
            "install the NVIDIA driver; in a container start it with the GPU"
            if not cuda["available"]
            else "pip install 'cuglue[cuda13]'",
        ),
        Verdict(
            "CuPy and cuda.bindings",
            bool(cupy and packages["cuda-bindings"]),
            f"cupy {cupy}, cuda-bindings {packages['cuda-bindings']}",
            "pip install 'cuglue[cuda13]'",
        ),
        Verdict(
            "OpenGL renders on the CUDA device",
            same,
            f"GL device uuid {gl.get('device uuid')}, CUDA {sorted(uuids) or 'none'}",
            same_way,
        ),
        Verdict("PyTorch", bool(packages["torch"]), str(packages["torch"]), "pip install torch (optional)"),
    ]


def _same_device_way_out(wsl: bool, cuda: bool, libraries: dict[str, str]) -> str:
    """What to do where OpenGL does not render on the CUDA device."""
    if wsl:
        return "CUDA-OpenGL interop does not exist under WSL2: run on Linux or Windows itself"
    if not cuda:
        return "needs a CUDA device and its OpenGL driver"
    missing = [name for name in ("libEGL_nvidia.so.0", "libXext.so.6") if libraries[name] != "loads"]
    if missing:
        return f"install what brings {', '.join(missing)}"
    return "on a hybrid laptop start with __NV_PRIME_RENDER_OFFLOAD=1 __GLX_VENDOR_LIBRARY_NAME=nvidia"


def exit_code(verdicts: list[Verdict]) -> int:
    """0: the GPU can do the main job; 3: only the simulated device; 1: neither."""
    ok = {v.name: v.ok for v in verdicts}
    if all(
        ok[n]
        for n in ("OpenGL", "CUDA device", "CuPy and cuda.bindings", "OpenGL renders on the CUDA device")
    ):
        return 0
    return 3 if ok["simulated device"] and ok["OpenGL"] else 1


def _lines(values: Any) -> list[str]:
    out = []
    for key, value in values.items():
        if isinstance(value, list):
            out += [f"{key}:", *(f"  {item}" for item in value)] if value else [f"{key}: none"]
        else:
            out.append(f"{key}: {value}")
    return out


if __name__ == "__main__":
    sys.exit(run(argparse.Namespace(json="--json" in sys.argv)))

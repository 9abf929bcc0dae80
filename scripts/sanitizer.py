"""Plant an out-of-bounds write and see that compute-sanitizer finds it over ``DirectCudaResource(mode="sync")``.

    python scripts/sanitizer.py [--tool PATH]

Runs small programs under memcheck and prints a table for docs/gpu_runs.md: one element past the end of a 1000-byte
block over the synchronous resource (has to be found), the same program without the fault (has to be clean), the fault
over the driver's pool, whose memory lies in one large piece (what memcheck says there is written down, not judged), and
our image copies at every width, to and from memory that ends with the image (have to be clean).

Exit 0: as expected; 1: not; 2: not run: there is no device, no tool, or the machine refuses it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOUND = 86  # exit status of the tool when it found something
#: What the tool prints where it cannot work: no permission, an unknown driver, a device shared in a way it refuses.
REFUSALS = ("Unable to", "not supported", "Internal Sanitizer Error", "Failed to initialize", "permission")

PROGRAM = """
import cupy
import cuglue

KERNEL = cupy.RawKernel(
    'extern "C" __global__ void poke(unsigned char* p, long long at) {{ p[at] = 1; }}', 'poke'
)
resource = cuglue.{resource}
block = resource.allocate(1000)
KERNEL((1,), (1,), (block.ptr, cupy.int64({offset})))
cupy.cuda.Device().synchronize()
resource.deallocate(block)
resource.close()
"""


COPIES = """
from cuglue.core.device import device_state
from cuglue.core.stream import as_stream
from cuglue.driver.protocol import ArrayInfo, TexelKind
from cuglue.driver.registry import current_driver
from cuglue.graphics import image_copy

image_copy.SMALL_BYTES = 0  # our kernels, not the driver's copy
driver = current_driver()
state, stream = device_state(driver, 0), as_stream(0, device=0, driver=driver)
copier = image_copy.image_copier(state)
for bits, channels in ((8, 1), (8, 2), (8, 4), (16, 4), (32, 4)):
    for width in range(1, 68):
        info = ArrayInfo(width, 1 + width % 5, 0, bits, channels, TexelKind.UINT)
        array = driver.array_create(info, 0)
        image = image_copy.Image(state, array, info)
        memory = driver.malloc(image.nbytes, 0)
        driver.fill_async(memory, 1, image.nbytes, stream.handle)
        copier.store(image, memory, stream)
        copier.load(image, memory, stream)
        stream.synchronize()
        driver.free(memory, 0)
        image.objects.retire(stream)
        state.retire.drain()
        driver.array_destroy(array)
"""


class Case(NamedTuple):
    """One program under the tool. ``found``: whether it has to find something; None: either way."""

    name: str
    program: str
    found: bool | None


def poking(resource: str, offset: int) -> str:
    """A program that writes one byte of a block of 1000."""
    return PROGRAM.format(resource=resource, offset=offset)


CASES = (
    Case("no fault, synchronous", poking('DirectCudaResource(mode="sync")', 999), False),
    Case("1 byte past 1000, synchronous", poking('DirectCudaResource(mode="sync")', 1000), True),
    Case("1 byte past 1000, stream-ordered", poking("AsyncCudaResource()", 1000), None),
    Case("image copies of every width", COPIES, False),
)


def run(tool: str, case: Case) -> tuple[str, str]:
    """``(verdict, line of the tool)``; the verdict is found, clean, refused or crashed."""
    environment = {**os.environ, "CUGLUE_DRIVER": "cuda", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [
            tool,
            "--tool=memcheck",
            "--report-api-errors=no",
            f"--error-exitcode={FOUND}",
            sys.executable,
            "-c",
            case.program,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    said = done.stdout + done.stderr
    lines = [
        line for line in said.splitlines() if "Invalid" in line or any(word in line for word in REFUSALS)
    ]
    line = lines[0].strip() if lines else ""
    if done.returncode == FOUND and "Invalid __global__ write" in said:
        return "found", line
    if done.returncode == 0:
        return "clean", line
    if any(word in said for word in REFUSALS):
        return "refused", line
    return "crashed", line or said.strip()[-200:]


def main() -> int:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tool", default=shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    )
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    import cuglue

    if not cuglue.is_cuda_available():
        print("not run: no CUDA device", file=sys.stderr)
        return 2
    if not Path(options.tool).exists():
        print(f"not run: no compute-sanitizer at {options.tool}", file=sys.stderr)
        return 2
    print("| program | memcheck | expected |\n|---|---|---|")
    verdicts = []
    for case in CASES:
        verdict, line = run(options.tool, case)
        expected = {True: "found", False: "clean", None: "either"}[case.found]
        verdicts.append((verdict, expected))
        print(f"| {case.name} | {verdict}{f': {line}' if line else ''} | {expected} |", flush=True)
    if any(verdict == "refused" for verdict, _ in verdicts):
        print("not run: the machine refuses the tool", file=sys.stderr)
        return 2
    return int(any(expected not in ("either", verdict) for verdict, expected in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())

"""A ring of two upload slots with a wait missing: right on most runs of a GPU, found on every run without one.

Teaches: to run your own stream-ordered code on the simulated device, in CI, and read what it says of a missing wait.
Shows:   the hazard, with both call sites; then the same code with the wait, for fifty orders of the device.
Needs:   NumPy.
"""

import numpy as np

import cuglue
from cuglue.driver.protocol import CopyKind
from cuglue.testing import HazardError, SimDriver

FRAMES, NBYTES = 6, 4096


def stream_frames(driver, frames, careful: bool) -> np.ndarray:
    """Upload frames on one stream while another reads those before; two slots of device memory take turns."""
    upload, reader = cuglue.as_stream(driver.Stream()), cuglue.as_stream(driver.Stream())
    slots = [driver.malloc(NBYTES, 0) for _ in range(2)]
    was_read = [None, None]
    results = np.zeros_like(frames)
    for i, frame in enumerate(frames):
        slot, done = slots[i % 2], was_read[i % 2]
        if careful and done is not None:
            upload.wait(done)  # the line that was forgotten: the reader may still be at this slot
        driver.copy_async(slot, frame.ctypes.data, NBYTES, CopyKind.H2D, upload.handle)
        upload.submit()
        reader.wait(upload.record())
        driver.copy_async(results[i].ctypes.data, slot, NBYTES, CopyKind.D2H, reader.handle)
        reader.submit()
        was_read[i % 2] = reader.record()
    reader.synchronize()
    for slot in slots:
        driver.free(slot, 0)
    return results


def main() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (FRAMES, NBYTES), "u1")
    driver = SimDriver(seed=1)
    with cuglue.use_driver(driver):
        try:
            stream_frames(driver, frames, careful=False)
        except HazardError as error:
            print(error)
    for seed in range(50):
        driver = SimDriver(seed=seed)
        with cuglue.use_driver(driver):
            assert (stream_frames(driver, frames, careful=True) == frames).all()
            driver.check()
        assert driver.inventory()["malloc"] == 0
    print("with the wait: 50 orders, no hazard")


if __name__ == "__main__":
    main()

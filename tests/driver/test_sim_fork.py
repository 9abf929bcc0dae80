"""The simulated device belongs to the process that made it."""

import os

from cuglue.driver.protocol import CopyKind
from cuglue.driver.sim import SimDriver
from cuglue.errors import DriverError


def test_a_forked_child_is_refused_as_by_cuda_and_changes_nothing() -> None:
    driver = SimDriver()
    ptr, host = driver.malloc(64, 0), driver.host_alloc(64)
    stream = driver.stream_create(0)
    driver.fill_async(ptr, 7, 64, stream)
    driver.copy_async(host, ptr, 64, CopyKind.D2H, stream)
    pid = os.fork()
    if pid == 0:
        codes = []
        for call in (
            lambda: driver.stream_synchronize(stream),
            lambda: driver.malloc(64, 0),
            lambda: driver.stream_query(stream),
            lambda: driver.free(ptr, 0),
        ):
            try:
                call()
                codes.append(0)
            except DriverError as error:
                codes.append(error.code)
        os._exit(0 if codes == [3, 3, 3, 3] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    driver.stream_synchronize(stream)
    assert bytes(driver.host_view(host, 64, False)) == b"\x07" * 64
    assert driver.hazards == []

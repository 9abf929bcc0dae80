"""The driver's capture of a stream: begun, ended, and never left open by an end that was refused.

Owns the three calls and what becomes of a graph that nobody wants. Must not know what is recorded or why.
"""

from __future__ import annotations

from functools import partial

from ..core.stream import Stream
from ..driver.protocol import CaptureMode, CaptureStatus
from ..errors import CuglueError


def begin(stream: Stream) -> None:
    """Record what is queued on ``stream`` from now on, instead of running it.

    Another thread that found the stream not capturing, and orders something by it or by the whole device, is let end.

    Raises:
        DriverError: refused; the stream is as before.
    """
    state = stream.state
    with state.ordering, stream.marking, state.beginning:
        stream.driver.capture_begin(stream.handle, CaptureMode.RELAXED)


def end(stream: Stream) -> int:
    """End the capture; the driver's graph.

    Raises:
        DriverError: there is no graph. The stream records no longer: a capture that the driver left open is thrown
            away, now or with the next drain.
    """
    try:
        return stream.driver.capture_end(stream.handle)
    except BaseException:
        try:
            throw_away(stream)
        except CuglueError:
            stream.state.retire.forget(partial(throw_away, stream))
        raise


def throw_away(stream: Stream) -> None:
    """End the capture of ``stream``, if there is one still, without a graph."""
    if stream.capture_status() is not CaptureStatus.NONE:
        destroy(stream, stream.driver.capture_end(stream.handle))


def discard(stream: Stream) -> None:
    """End the capture, and give its graph back. Raises what :func:`end` does."""
    driver = stream.driver
    graph = end(stream)
    try:
        driver.graph_destroy(graph)  # and no call of ours up to it: an interrupt would lose the graph
    except CuglueError:
        stream.state.retire.forget(partial(driver.graph_destroy, graph))


def destroy(stream: Stream, graph: int) -> None:
    """Give the driver's graph back, now or with the next drain: what was recorded does not depend on it."""
    driver = stream.driver
    try:
        driver.graph_destroy(graph)
    except CuglueError:
        stream.state.retire.forget(partial(driver.graph_destroy, graph))

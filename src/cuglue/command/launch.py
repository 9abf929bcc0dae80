"""One launch: arguments checked and bound, work ordered, enqueued and stamped.

Owns the sequence that ``Runtime.launch`` and ``Command.kernel`` share. Must not know either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..arguments import whole_of
from ..errors import LaunchError
from .kernels import Kernel, KernelContext, dimensions
from .lane import Lane
from .operands import Declared
from .perform import Skipped, perform
from .resolve import bind
from .taint import Journal


def launch(
    context: KernelContext,
    lane: Lane,
    kernel: Any,
    grid: Any,
    block: Any,
    args: Sequence[Any],
    *,
    shared: int = 0,
    strict: bool = False,
    declared: Callable[[Any], Declared | None] | None = None,
    journal: Journal | None = None,
) -> Skipped | None:
    """Enqueue ``kernel`` on the stream of ``lane``, after everything that its arguments wait for.

    A grid with a zero in it launches nothing and succeeds; its arguments are checked all the same. A kernel that would
    read bytes which were never written, because the work that should have is the one that failed, is not run: its
    outputs count as unwritten too, and the answer says why.

    Ordering: only enqueues. The host blocks while a kernel is compiled, at its first launch.

    Raises:
        LaunchError: the arguments do not fit the kernel, or the driver refused; nothing was enqueued.
        UsageError: undeclared, foreign or closed memory.
        CaptureError: an argument would have to wait for, or be waited for by, a stream outside the capture.
    """
    grid_, block_ = dimensions("grid", grid), dimensions("block", block)
    if type(shared) is not int or shared < 0:
        expected = "a size in bytes, 0 or more"
        shared = whole_of("shared memory", shared, expected=expected, error=LaunchError)
    known = isinstance(kernel, Kernel)
    name = kernel.name if known else getattr(kernel, "name", "kernel")
    values, spans, uses = bind(
        name,
        kernel.parameters if known else None,
        args,
        lane.place,
        declared=declared,
        strict=strict,
        spans=context.simulated,
    )
    loaded = (context.loaded.get(kernel) if known else None) or context.find(kernel)
    if 0 in grid_:
        return None
    stream = lane.stream
    state = stream.state
    if state.retire.forgotten:
        state.retire.run_forgotten()
    if lane.window is not None:
        lane.window.hold(loaded)  # a replay launches it still when its runtime or its module is gone
    skipped = perform(
        lane,
        uses,
        name,
        state.driver.kernel_launch,
        loaded.handle,
        grid_,
        block_,
        values,
        spans,
        shared,
        stream.handle,
        journal=journal,
    )
    lane.settle()
    return skipped

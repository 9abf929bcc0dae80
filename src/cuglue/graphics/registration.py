"""A graphics resource registered with the driver: mapped while somebody needs it, unregistered once.

Owns the count of users, the driver's map and unmap calls, and the order between streams that map the same resource.
Must not know what the resource is, nor what its memory is used for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..core.block import Block
from ..core.device import DeviceState
from ..core.stream import INVALID_HANDLE, Stream, as_stream
from ..driver.protocol import Access
from ..errors import CuglueError, DriverError
from .glops import GlOps

_NOT_MAPPED = 211  # cudaErrorNotMapped


class Registration:
    """A resource registered with the driver: mapped while somebody needs it, unregistered once.

    It is made first, and :attr:`handle` set by the statement that registers: no interrupt (Ctrl-C) comes between. One
    that is dropped is unregistered later.

    Attributes:
        handle: the driver's resource; 0: none yet.
        uses: what was queued on the object itself. The driver orders graphics and the mapping stream, not two
            mapping streams: that is done by these.
    """

    __slots__ = ("_ended", "_ending", "_mapped", "_unsure", "_users", "handle", "state", "uses")

    def __init__(self, state: DeviceState, handle: int = 0) -> None:
        self.state = state
        self.handle = handle
        self._ended = False
        self._ending = False  # an interrupt hid whether the driver unregistered it
        home = as_stream(0, device=state.device, driver=state.driver)
        self.uses = Block(0, 0, home, 0, "graphics resource")
        self._users = 0
        self._mapped = False  # without users too, where an unmap failed
        self._unsure = False  # an interrupt (Ctrl-C) hid whether the driver mapped or unmapped it

    @property
    def mapped(self) -> bool:
        """Whether somebody has the object mapped."""
        return self._users > 0

    def map(self, stream: Stream) -> Block:
        """Map the resource, or share the mapping there is; gives :attr:`uses`."""
        if self._users and not self._unsure:
            self.uses.prepare(stream, Access.READ)
        else:
            self._before(stream)
            _ask((self,), stream, mapped=True)
        self._users += 1
        return self.uses

    def unmap(self, stream: Stream) -> None:
        """Undo one :meth:`map`; the last one hands the object back after all its uses, which are noted by then."""
        if self._users == 1:
            self._give_back(stream)
        self._users -= 1

    def undo_map(self, stream: Stream, error: BaseException) -> None:
        """:meth:`unmap` because something after the mapping failed with ``error``.

        If that fails too, the next :meth:`map` or :meth:`unregister` hands the object back first.
        """
        self._users -= 1
        if not self._users:
            try:
                self._give_back(stream)
            except CuglueError as second:
                error.add_note(f"giving the object back failed too: {second}")

    def end_map(self, stream: Stream, error: BaseException | None) -> None:
        """:meth:`unmap`, or :meth:`undo_map` where something went wrong in between."""
        if error is None:
            self.unmap(stream)
        else:
            self.undo_map(stream, error)

    def unregister(self) -> None:
        """End the registration. Again it does nothing, or goes on where it failed or was interrupted."""
        if self._ended or not self.handle:
            return
        if self._mapped:
            last = self.uses.write_stream
            self._give_back(
                last if last.nameable() else as_stream(None, device=last.device, driver=last.driver)
            )
        try:
            self.state.driver.graphics_unregister(self.handle)
        except DriverError as error:
            if not self._ending or error.code != INVALID_HANDLE:
                raise
        except BaseException:
            self._ending = True
            raise
        self._ended = True

    def forget(self, action: Callable[[], None]) -> None:
        """Let ``action`` run later where the resource's calls run. For finalisers: only appends to a queue."""
        self.state.retire.forget(action)

    def __del__(self) -> None:
        try:
            if self.handle and not self._ended:
                self.forget(self.unregister)
        except AttributeError:
            pass  # its making was interrupted: it has registered nothing

    # --- steps ----------------------------------------------------------------------------------------------------
    def _before(self, stream: Stream) -> None:
        """What comes before the driver maps the resource."""
        self._give_back(stream)
        self.uses.prepare(stream, Access.READ_WRITE)

    def _after(self, stream: Stream, *, mapped: bool) -> None:
        """What comes after the driver mapped or unmapped the resource."""
        self._mapped = mapped
        self.uses.finish(stream, Access.WRITE)

    def _give_back(self, stream: Stream) -> None:
        """Unmap the resource, if the driver has it mapped, after all its uses."""
        if not self._mapped:
            return
        self.uses.prepare(stream, Access.READ_WRITE)
        try:
            _ask((self,), stream, mapped=False)
        except DriverError as error:
            if not self._unsure or error.code != _NOT_MAPPED:
                raise
            self._mapped = False
        self._unsure = False


def _ask(group: Sequence[Registration], stream: Stream, *, mapped: bool) -> None:
    """The driver's map or unmap. One that is interrupted may have been done or not: the next unmap finds out."""
    driver = group[0].state.driver
    try:
        call = driver.graphics_map if mapped else driver.graphics_unmap
        call([registration.handle for registration in group], stream.handle)
        for registration in group:
            registration._after(stream, mapped=mapped)
    except CuglueError:
        raise  # the driver refused, and nothing changed
    except BaseException:
        for registration in group:
            registration._after(stream, mapped=True)  # whatever became of it, it is a use on this stream
            registration._unsure = True
        raise


def map_together(group: Sequence[Registration], stream: Stream, held: list[Registration]) -> None:
    """:meth:`Registration.map` of several resources of one device, with one driver call. They are added to ``held``."""
    fresh = [r for r in group if not r._users or r._unsure]
    for registration in fresh:
        registration._before(stream)
    if fresh:
        _ask(fresh, stream, mapped=True)
    hold(group, held)


def hold(group: Iterable[Registration], held: list[Registration]) -> None:
    """One more user of each that is mapped, or was mapped just now. They are added to ``held``, each once."""
    for registration in dict.fromkeys(group):
        if registration._mapped:
            registration._users += 1
            held.append(registration)


def let_go(held: list[Registration]) -> None:
    """Undo :func:`hold` where others have them mapped as well: nothing is left to order."""
    while held:
        held[-1]._users -= 1
        held.pop()


def unmap_together(leaving: Mapping[Registration, int], stream: Stream) -> None:
    """Hand back, by one driver call, those that have no users but so many who leave, and are about to call ``unmap``.

    Where it fails nothing has changed. Of which nobody knows whether they are mapped, those are left to ``unmap``.
    """
    last = [r for r, users in leaving.items() if r._mapped and not r._unsure and r._users == users]
    for registration in last:
        registration.uses.prepare(stream, Access.READ_WRITE)
    if last:
        _ask(last, stream, mapped=False)


def undo_map_together(group: Sequence[Registration], stream: Stream, error: BaseException) -> None:
    """:meth:`Registration.undo_map` of several resources."""
    for registration in group:
        registration.undo_map(stream, error)


class GlRegistration(Registration):
    """A registration whose calls run where an OpenGL context is current.

    Attributes:
        ops: brings them there.
    """

    __slots__ = ("ops",)

    def __init__(self, state: DeviceState, ops: GlOps, handle: int = 0) -> None:
        self.ops = ops
        super().__init__(state, handle)

    def forget(self, action: Callable[[], None]) -> None:
        """Inherited. On the context's thread, with its next call; with the context the registration is gone."""
        self.ops.post(action)

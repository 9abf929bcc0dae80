"""A recorder misused in every order: each call does what a few lines of model say, and nothing is left behind."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import pytest
from memory_tools import fill

import cuglue
from cuglue import AsyncCudaResource, LaunchRecorder
from cuglue.errors import StreamMisuse

CALLS = ("write", "stranger", "preflight", "commit", "a with that fails")


class Model:
    """What a strict recorder has to answer."""

    def __init__(self) -> None:
        self.noted = self.rejected = self.frozen = self.done = False

    def refuses(self, call: str) -> bool:
        if call in ("write", "stranger"):
            return self.done or self.frozen
        if call == "commit":
            return self.done or (not self.frozen and (self.noted or self.rejected))
        return self.done or self.rejected  # preflight, and the way into a with statement

    def take(self, call: str) -> None:
        if call == "write":
            self.noted = True
        elif call == "stranger":
            self.rejected = True
        elif call == "preflight":
            self.frozen = True
        else:
            self.done = True


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_misuse_in_every_order(sim: Any, length: int) -> None:
    resource = AsyncCudaResource()
    home, user = (cuglue.as_stream(sim.Stream()) for _ in range(2))
    for order in itertools.product(CALLS, repeat=length):
        block = resource.allocate(64, home)
        recorder, model = LaunchRecorder(user), Model()
        for call in order:
            try:
                perform(call, recorder, block, user, model)
            except StreamMisuse:
                assert model.refuses(call), (order, call)
            else:
                assert not model.refuses(call), (order, call)
                model.take(call)
        used = block.write_stream is user
        assert used == (model.done and model.noted), order
        del recorder
        gc.collect(0)
        user.state.retire.run_forgotten()
        assert resource._tickets is None or resource._tickets._open == {}, order
        resource.deallocate(block)
    resource.reap_pending()
    assert resource.bytes_outstanding == 0


def perform(call: str, recorder: LaunchRecorder, block: Any, user: Any, model: Model) -> None:
    if call == "write":
        recorder.write(block)
    elif call == "stranger":
        recorder.read(np.zeros(4))
    elif call == "preflight":
        recorder.preflight()
    elif call == "commit":
        if model.frozen and model.noted and not model.done:
            fill(block, 1, user)  # the launch
        recorder.commit()
    else:
        with pytest.raises((ZeroDivisionError, StreamMisuse)) as caught:
            with recorder:
                raise ZeroDivisionError
        if caught.type is StreamMisuse:
            raise caught.value

"""Array libraries that are loaded when somebody asks for their arrays, and that may be missing.

Owns the error then, and the quick way to PyTorch's tensors. Must not know who owns the memory.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from ..driver.protocol import LEGACY_STREAM
from ..errors import UnsupportedError
from .copies import on_host


def library(name: str, title: str) -> Any:
    """The module ``name`` of the library ``title``.

    Raises:
        UnsupportedError: it is not installed, or cannot be loaded.
    """
    try:
        return sys.modules.get(name) or import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"an array of {title}",
            got=f"{type(error).__name__}: {error}",
            expected=f"{title} in this environment",
            hint=f"Install {title}, or use .numpy() for a copy on the host",
            reason=f"no_{name}",
        ) from error


def torch_tensor(view: Any) -> Any:
    """What :meth:`ArrayView.torch` gives."""
    owner = view.export_owner
    owner.check_exportable()
    torch = library("torch", "PyTorch")
    current = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if current is None or owner.readonly or on_host(owner) or not torch.cuda.is_initialized():
        return torch.from_dlpack(view)
    # from_dlpack asks for the same stream as an object, which takes PyTorch longer than all the rest.
    return torch.from_dlpack(view.__dlpack__(stream=current(owner.device) or LEGACY_STREAM))

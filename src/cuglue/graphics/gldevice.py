"""Which CUDA device shares memory with the OpenGL context current on this thread.

Owns the match between renderer and device, and the words for each way in which there is none. The driver would say
"OS call failed" or "invalid value". Must not know what is to be registered.
"""

from __future__ import annotations

from ..arguments import whole_of
from ..core.device import DeviceState, device_state
from ..driver.protocol import Driver
from ..errors import UnsupportedError
from .glcontext import GlContext, current


def device_of_context(driver: Driver, device: int | None, what: str) -> DeviceState:
    """The device that can map objects of the current context.

    Args:
        driver: the driver that maps.
        device: ordinal that the caller insists on; None takes the one that renders.
        what: the object to be registered, for messages.

    Raises:
        UnsupportedError: ``reason`` is "graphics_gl" (the driver has no OpenGL interop), "software_renderer",
            "device_mismatch" (another GPU, or another maker's, renders).
    """
    if device is not None:
        device = device_state(
            driver, whole_of("device", device, expected="an ordinal, an int of 0 or more")
        ).device
    if not driver.capabilities(device or 0).graphics_gl:
        raise UnsupportedError(
            f"registering {what}",
            got=f"the {driver.name} driver without OpenGL interop",
            expected="a driver that shares memory with OpenGL",
            hint="Under WSL there is none: run on Linux or Windows itself",
            reason="graphics_gl",
        )
    if driver.capabilities(device or 0).simulated:
        return device_state(driver, device or 0)  # it reads OpenGL's objects wherever they are drawn
    context = current()
    if context.software:
        raise UnsupportedError(
            f"registering {what}",
            got=f"the software renderer {context.renderer!r}",
            expected="OpenGL on the CUDA device",
            hint=_advice(context),
            reason="software_renderer",
        )
    rendering = driver.gl_devices()
    if not rendering or (device is not None and device not in rendering):
        wanted = f"CUDA device {device}" if device is not None else "a CUDA device"
        raise UnsupportedError(
            f"registering {what}",
            got=f"OpenGL on {context.renderer!r} ({context.vendor}), "
            + (
                f"which is CUDA device {', '.join(map(str, rendering))}"
                if rendering
                else "which is none of CUDA's"
            ),
            expected=f"OpenGL on {wanted}"
            + (f" ({driver.device_name(device)})" if device is not None else ""),
            hint=_advice(context),
            reason="device_mismatch",
        )
    return device_state(driver, rendering[0] if device is None else device)


def _advice(context: GlContext) -> str:
    if "nvidia" in context.vendor.lower():
        return "Render and map on the same GPU: cuglue.gl.headless(device=...) makes such a context"
    return (
        "Start the program with __NV_PRIME_RENDER_OFFLOAD=1 __GLX_VENDOR_LIBRARY_NAME=nvidia, install NVIDIA's "
        "EGL/GLX libraries, or use cuglue.gl.headless(); CUGLUE_DRIVER=sim maps any renderer without a GPU"
    )

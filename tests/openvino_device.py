"""Lets OpenVINO's plugin list this machine's processor, whoever made it.

Knows: that the plugin lists a device only when its vendor is Intel, although its processor kernels run on any x86-64.
Does not know: the code under test, but for the name under which it registers the plugin.

So that what is proved on OpenVINO is proved on every test machine, the vendor number that onnxruntime holds for the
processor is overwritten in this process's memory. Nothing outside the tests does that: there such a machine is told
that the plugin has no device for it.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

INTEL = 0x8086
_HELD_POINTER = 16
"""Bytes from a pybind11 object's start to its pointer to the C++ object: behind reference count and type."""
_VENDOR_WORD = 1
"""onnxruntime's OrtHardwareDevice starts with the device type and the vendor number, four bytes each."""


@contextlib.contextmanager
def processor_listed_by_openvino() -> Iterator[None]:
    """While it lasts, the processor counts as Intel's. Sessions opened meanwhile live on."""
    import onnxruntime

    from appliance.runtime.providers import openvino

    device = next(one.device for one in onnxruntime.get_ep_devices() if one.ep_name == "CPUExecutionProvider")
    real = int(device.vendor_id)
    if real == INTEL:
        yield
        return
    if openvino._register.cache_info().currsize:
        # Registered before, when the plugin saw nothing to list.
        onnxruntime.unregister_execution_provider_library(openvino.LIBRARY)
        openvino._register.cache_clear()
    _set_vendor(device, real, INTEL)
    try:
        yield
    finally:
        _set_vendor(device, INTEL, real)


def _set_vendor(device: Any, known: int, wanted: int) -> None:
    held = ctypes.cast(id(device) + _HELD_POINTER, ctypes.POINTER(ctypes.c_void_p))[0]
    words = ctypes.cast(held, ctypes.POINTER(ctypes.c_uint32))
    assert words[_VENDOR_WORD] == known, "onnxruntime keeps its devices in another way now: mend tests/openvino_device.py"
    words[_VENDOR_WORD] = wanted
    assert device.vendor_id == wanted

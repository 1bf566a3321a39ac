"""Energy meters: the joules that a processor has used so far."""

import ctypes
from pathlib import Path
from typing import Protocol

import torch

from alight.errors import BadInput

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"


class Meter(Protocol):
    """Counts the joules that a device uses."""

    def joules(self) -> float:
        """Return the joules since a fixed moment."""
        ...


class RaplMeter:
    """The energy counters of all processor packages under Linux (Intel and AMD: Running Average Power Limit)."""

    def __init__(self, folder: Path = POWERCAP) -> None:
        packages = [path for path in sorted(folder.glob("*-rapl:*")) if path.name.count(":") == 1]
        self.counters = [path / "energy_uj" for path in packages]
        try:
            self.ranges = [int((path / "max_energy_range_uj").read_text()) for path in packages]
            self.last = self._counts()
        except OSError as error:
            raise BadInput(
                f"the processor's energy counter cannot be read ({error}):"
                f" as root, chmod a+r {folder}/*-rapl:*/energy_uj; or measure unit='ms'"
            ) from error
        if not packages:
            raise BadInput(f"this machine has no energy counter under {folder}: measure unit='ms' or 'FLOPs'")
        self.used = 0

    def joules(self) -> float:
        """Return the joules since the meter was made; counters may wrap around to zero."""
        counts = self._counts()
        pairs = zip(counts, self.last, self.ranges, strict=True)
        self.used += sum(now - before if now >= before else now - before + full for now, before, full in pairs)
        self.last = counts
        return self.used / 1e6

    def _counts(self) -> list[int]:
        return [int(path.read_text()) for path in self.counters]


class NvmlMeter:
    """The energy counter of an NVIDIA GPU, from its driver."""

    def __init__(self, device: torch.device) -> None:
        try:
            self.library = ctypes.CDLL(NVML)
        except OSError as error:
            raise BadInput(f"the GPU's energy counter cannot be read ({error}): measure unit='ms'") from error
        self.handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(self.handle))

    def joules(self) -> float:
        """Return the joules since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self.handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self.library, name)(*arguments):
            raise BadInput(f"the GPU's energy counter cannot be read ({name} failed with {code}): measure unit='ms'")


def meter_for(device: torch.device) -> Meter:
    """Return the meter of a device; raise an error that says why if there is none."""
    if device.type == "cuda":
        return NvmlMeter(device)
    if device.type == "cpu":
        return RaplMeter()
    raise BadInput(f"there is no energy meter for {device.type}: measure unit='ms'")

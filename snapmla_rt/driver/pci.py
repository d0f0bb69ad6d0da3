"""Which GPUs the machine's buses list: found without loading any library of the driver.

A child of a fork crashes in CUDA when its parent had initialised NVML (seen with driver 580.159),
so nothing of the driver is loaded at import; the kernel's own list of devices is read instead.
"""

from __future__ import annotations

from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = 0x10DE
_HOPPER_IDS = range(0x2300, 0x2400)  # GH100: H100, H800, H200, H20, GH200


def _number(path: Path) -> int:
    try:
        return int(path.read_text(), 16)
    except (OSError, ValueError):
        return 0


def has_hopper(devices: Path = PCI_DEVICES) -> bool:
    """Whether a Hopper GPU is on a PCI bus; False too where the system does not show its buses."""
    try:
        folders = list(devices.iterdir())
    except OSError:
        return False
    return any(
        _number(folder / "vendor") == _NVIDIA and _number(folder / "device") in _HOPPER_IDS
        for folder in folders
    )

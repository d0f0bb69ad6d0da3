"""Hopper GPUs among the devices that the kernel lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapmla_rt.driver.pci import has_hopper


def bus(folder: Path, *devices: tuple[str, str]) -> Path:
    """A folder like /sys/bus/pci/devices with these (vendor, device) pairs."""
    for index, (vendor, device) in enumerate(devices):
        place = folder / f"0000:{index:02x}:00.0"
        place.mkdir()
        (place / "vendor").write_text(vendor + "\n")
        (place / "device").write_text(device + "\n")
    return folder


@pytest.mark.parametrize(
    "devices, expected",
    [
        ([], False),
        ([("0x8086", "0x2335")], False),  # another vendor's device of the same number
        ([("0x10de", "0x20b2")], False),  # A100
        ([("0x10de", "0x2901")], False),  # B200
        ([("0x10de", "0x20b2"), ("0x10de", "0x2335")], True),  # H200 beside an A100
        ([("0x10de", "0x2330")], True),  # H100
        ([("0x10de", "not a number")], False),
    ],
)
def test_hopper_by_number(tmp_path: Path, devices: list[tuple[str, str]], expected: bool) -> None:
    assert has_hopper(bus(tmp_path, *devices)) is expected


def test_without_a_list_of_devices(tmp_path: Path) -> None:
    assert has_hopper(tmp_path / "absent") is False
    (tmp_path / "0000:00:00.0").mkdir()  # a device that says nothing of itself
    assert has_hopper(tmp_path) is False

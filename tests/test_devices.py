"""libtpu, where it is installed, says nothing on a machine without a TPU."""

import importlib.util
import os
import subprocess
import sys

import pytest

from jprm import devices

CODE = "from jprm.apps.cli import main; main(['--version']); import jax; print(jax.devices()[0].platform)"
NAMES = {*devices.VARIABLES, "JAX_PLATFORMS", "JAX_FORCE_TPU_INIT"}


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: the extra `tpu`")
def test_a_command_without_a_tpu_is_silent():
    env = {name: value for name, value in os.environ.items() if name not in NAMES}
    run = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and run.stdout.splitlines()[1:] == ["cpu"]
    assert run.stderr == ""


@pytest.mark.parametrize(
    ("vendor", "device", "platforms", "quiet"),
    [
        ("0x8086", "0x0062", None, True),
        ("0x1ae0", "0x0042", None, True),  # a network card of Google's
        ("0x1ae0", "0x0062", None, False),  # v5p
        ("0x1ae0", "0xffff", None, False),  # a TPU to come
        ("0x8086", "0x0062", "tpu", False),  # requested: its errors are the user's
    ],
)
def test_a_tpu_is_left_alone(tmp_path, monkeypatch, vendor, device, platforms, quiet):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    if platforms:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    (tmp_path / "0000:00:00.0").mkdir()
    (tmp_path / "0000:00:00.0" / "vendor").write_text(vendor + "\n")
    (tmp_path / "0000:00:00.0" / "device").write_text(device + "\n")
    devices.quiet_without_tpu(str(tmp_path))
    assert {name: os.environ.get(name) for name in devices.VARIABLES} == (
        devices.VARIABLES if quiet else dict.fromkeys(devices.VARIABLES)
    )

"""GPUs, by a player of written-down NVML answers: no test machine has a GPU.

tests/gold/nvml-h100.json: names of calls, fields, structures and error codes are those of nvml.h as in nvidia-ml-py;
the values are made up. Errors are the package's own exceptions; without a driver the real package answers.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from ringtap.collectors.collector_interface import Context
from ringtap.collectors.gpu import GpuCollector
from ringtap.core.append_only_logs import Field, open_records

pytestmark = pytest.mark.shares

GOLD = Path(__file__).parents[2] / "gold" / "nvml-h100.json"
MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal")


class Player:
    """Answers the few NVML calls with what is written down, one answer after the other, then the last for ever."""

    NVMLError, NVMLError_NoPermission = pynvml.NVMLError, pynvml.NVMLError_NoPermission
    NVMLError_GpuIsLost, nvmlMemory_v2 = pynvml.NVMLError_GpuIsLost, pynvml.nvmlMemory_v2  # noqa: N815

    def __init__(self, path: Path = GOLD) -> None:
        self._recorded = json.loads(path.read_text())
        self._played: dict[tuple[object, ...], int] = {}
        self.opened = 0
        self.lost: set[int] = set()
        self.others = 0  # GPUs before these that are not this job's
        self.reserved_bytes = 0
        slices = {number for device in self._recorded["devices"] for number in device.get("slices", [])}
        self._whole = [number for number in range(len(self._recorded["devices"])) if number not in slices]

    def nvmlInit(self) -> None:  # noqa: N802
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.others + len(self._whole)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index < self.others:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return self._whole[index - self.others]

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        if handle == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:  # noqa: N802
        return len(self._recorded["devices"][handle]["slices"])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> int:  # noqa: N802
        found = self._recorded["devices"][handle]["slices"][index]
        if found is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return int(found)

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int = 0) -> SimpleNamespace:  # noqa: N802
        self._raise_if_lost(handle)
        if version and not self.reserved_bytes:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)  # a driver before 510
        answer = self._next((handle, "memory"), self._recorded["devices"][handle]["calls"]["nvmlDeviceGetMemoryInfo"])
        return SimpleNamespace(
            **answer | {"used": answer["used"] - (self.reserved_bytes if version and not handle else 0)}
        )

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return self._recorded["devices"][handle]["name"].encode()  # older bindings give bytes

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return str(self._recorded["devices"][handle]["uuid"])

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return str(self._recorded["driver"])

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[tuple[int, int]]) -> list[SimpleNamespace]:  # noqa: N802
        self._raise_if_lost(handle)
        answers = self._recorded["devices"][handle]["calls"]["nvmlDeviceGetFieldValues"]
        if "error" in answers:
            raise pynvml.NVMLError(answers["error"])
        values = []
        for number, scope in fields:
            answer = answers[str(number)]
            if isinstance(answer, dict):
                values.append(SimpleNamespace(nvmlReturn=answer["error"], valueType=0, value=None))
                continue
            assert scope == 0xFFFFFFFF, "without a scope NVML gives the traffic of link 0 alone"
            one = self._next((handle, number), answer)
            value = SimpleNamespace(**{MEMBERS[one["type"]]: one["value"]})
            values.append(SimpleNamespace(nvmlReturn=0, valueType=one["type"], value=value))
        return values

    def _raise_if_lost(self, handle: int) -> None:
        if handle in self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    def _next(self, key: tuple[object, ...], answers: list[Any]) -> Any:
        place = self._played.get(key, 0)
        self._played[key] = place + 1
        return answers[min(place, len(answers) - 1)]

    def __getattr__(self, call: str) -> Any:
        def play(handle: int, *arguments: int) -> Any:
            self._raise_if_lost(handle)
            answers = self._recorded["devices"][handle]["calls"][call]
            if isinstance(answers, dict) and "error" in answers:
                raise pynvml.NVMLError(answers["error"])
            if isinstance(answers, dict):
                answers = answers[str(arguments[0])]
            answer = self._next((handle, call, *arguments), answers)
            return SimpleNamespace(**answer) if isinstance(answer, dict) else answer

        return play


def collector(tmp_path: Path, player: Player) -> GpuCollector:
    made = GpuCollector(Context(tmp_path, 0.01))
    made.nvml = player  # type: ignore[misc]
    return made


def rows(path: Path) -> list[dict[str, int]]:
    log = open_records(path)
    return [dict(zip((field.name for field in log.fields), row, strict=True)) for row in log.tail()]


def test_what_a_gpu_supports_becomes_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringtap.collectors.gpu._PERIOD_S", 60.0)  # the first measurement of PCIe is in all samples
    player = Player()
    taken = collector(tmp_path, player)
    assert taken.every_s == pytest.approx(1 / 6)  # NVML's own sampling is no faster
    taken.start()
    taken.sample()
    assert taken.stop() == {"gpus": 3, "failed_readings": 0, "lost": {}}
    assert player.opened == 0
    seen = rows(tmp_path / "gpu/gpu0.rec")
    assert [row["utilization_pct"] for row in seen][-1] == 99
    assert seen[-1]["power_mw"] == 643210
    # the field counts KiB, all links together
    assert seen[0]["nvlink_tx_bytes"] == 5000 * 1024
    # measured in thousands of bytes per second
    assert seen[0]["pcie_tx_bytes_per_s"] == 1_200_000
    assert seen[-1]["energy_mj"] == 18446744073709551000
    log = open_records(tmp_path / "gpu/gpu0.rec")
    columns = {field.name: field for field in log.fields}
    assert columns["power_mw"] == Field("power_mw", "<u8", "mW", "gauge", 0)
    assert columns["nvlink_rx_bytes"] == Field("nvlink_rx_bytes", "<u8", "bytes", "counter", 64)
    assert log.about["name"] == "NVIDIA H100 80GB HBM3"
    assert log.about["uuid"].startswith("GPU-")
    assert log.about["absent"] == {"pcie_tx_bytes": "Not Supported", "pcie_rx_bytes": "Not Supported"}


def test_what_is_not_supported_is_named_each_with_its_reason(tmp_path: Path) -> None:
    taken = collector(tmp_path, Player())
    taken.start()
    taken.stop()
    log = open_records(tmp_path / "gpu/gpu1-mig1.rec")
    assert log.about["uuid"].startswith("MIG-")
    assert [field.name for field in log.fields] == ["t_ns", "mono_ns", "memory_used_bytes", "memory_total_bytes"]
    absent = log.about["absent"]
    assert absent["utilization_pct"] == "Not Supported"
    assert absent["power_mw"] == "Insufficient Permissions"
    assert absent["nvlink_tx_bytes"] == "Invalid Argument"
    assert absent["pcie_tx_bytes_per_s"] == "Not Supported"


def test_pcie_is_measured_beside_the_samples_not_within(tmp_path: Path) -> None:
    """A reading takes 20 ms a direction; a sample of eight GPUs must not."""
    player = Player()
    slept_s = 0.2

    def slow(handle: int, way: int) -> int:
        time.sleep(slept_s)
        return 8_400_000

    taken = collector(tmp_path, player)
    taken.start()
    player.nvmlDeviceGetPcieThroughput = slow
    due_s = time.monotonic() + 10
    while rows(tmp_path / "gpu/gpu0.rec")[-1]["pcie_rx_bytes_per_s"] != 8_400_000_000 and time.monotonic() < due_s:
        before_s = time.thread_time()
        taken.sample()
        assert time.thread_time() - before_s < slept_s
        time.sleep(0.05)
    taken.stop()
    assert rows(tmp_path / "gpu/gpu0.rec")[-1]["pcie_rx_bytes_per_s"] == 8_400_000_000


def test_pcie_rates_that_fail_later_are_counted(tmp_path: Path) -> None:
    player = Player()
    taken = collector(tmp_path, player)
    taken.start()

    def fails(handle: int, way: int) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    player.nvmlDeviceGetPcieThroughput = fails
    (meter,) = [one.meter for one in taken._gpus if one.meter]
    meter.join(10)  # which it ends by itself
    taken.sample()
    assert taken.stop()["failed_readings"] == 2 * 2  # both rates, in this sample and in the last one


def test_a_gpu_that_is_lost_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    player = Player()
    taken = collector(tmp_path, player)
    taken.start()
    player.lost.add(0)
    taken.sample()
    taken.sample()
    facts = taken.stop()
    assert facts["gpus"] == 2
    assert "GPU is lost" in facts["lost"]["gpu0"]
    assert len(rows(tmp_path / "gpu/gpu0.rec")) == 1
    assert len(rows(tmp_path / "gpu/gpu1.rec")) == 4


def test_the_last_gpu_to_go_ends_the_collector(tmp_path: Path) -> None:
    player = Player()
    taken = collector(tmp_path, player)
    taken.start()
    player.lost |= {0, 1, 2}
    with pytest.raises(OSError, match="does not answer: GPU is lost"):
        taken.sample()
    assert set(taken.stop()["lost"]) == {"gpu0", "gpu1", "gpu1-mig1"}


def test_check_names_the_gpus(tmp_path: Path) -> None:
    player = Player()
    check = collector(tmp_path, player).check()
    assert (check.state, check.reason.split(":")[0]) == ("ok", "3 GPUs")
    assert player.opened == 0


def test_gpus_of_other_jobs_are_left_out(tmp_path: Path) -> None:
    player = Player()
    player.others = 2
    taken = collector(tmp_path, player)
    assert taken.check().state == "ok"
    taken.start()
    taken.stop()
    assert sorted(path.stem for path in tmp_path.glob("gpu/*.rec")) == ["gpu2", "gpu3", "gpu3-mig1"]


def test_memory_in_use_is_without_what_the_driver_reserves(tmp_path: Path) -> None:
    for reserved_bytes in (0, 500_000_000):
        player = Player()
        player.reserved_bytes = reserved_bytes
        taken = collector(tmp_path / str(reserved_bytes), player)
        taken.start()
        taken.stop()
    first, second = (rows(tmp_path / name / "gpu/gpu0.rec")[0] for name in ("0", "500000000"))
    assert first["memory_used_bytes"] - second["memory_used_bytes"] == 500_000_000
    assert first["memory_total_bytes"] == second["memory_total_bytes"]


def test_without_a_driver_the_reason_is_nvmls_own(tmp_path: Path) -> None:
    taken = GpuCollector(Context(tmp_path, 1.0))
    check = taken.check()
    if check.state == "ok":
        pytest.skip("needs a machine without a GPU; this one has a GPU")
    assert "NVML Shared Library Not Found" in check.reason or "Driver Not Loaded" in check.reason
    assert check.remedy
    with pytest.raises(OSError, match="does not answer"):
        taken.start()


def test_without_the_package_the_remedy_installs_it(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['pynvml'] = None\n"
        "from pathlib import Path\n"
        "from ringtap.collectors.collector_interface import Context\n"
        "from ringtap.collectors.gpu import GpuCollector\n"
        "print(GpuCollector(Context(Path('.'), 1.0)).check())"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "unavailable" in said
    assert "[gpu]" in said

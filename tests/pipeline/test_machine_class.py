from __future__ import annotations

import pytest

from batchgen.pipeline.cluster.placement import Machine
from batchgen.pipeline.machine_class import (
    CLASSES,
    GPU,
    LARGE_GPU,
    MANY_GPUS,
    NUMA_SERVER,
    PROCESSOR,
    SMALL_GPU,
    SMALL_PROCESSOR,
    MachineClass,
    class_of,
    smallest_gpu,
)

ONE = [[0, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("machine", "device", "gigabytes", "expected"),
    [
        (Machine([[0, 1]], []), "cpu", 0, SMALL_PROCESSOR),
        (Machine(ONE, []), "cpu", 0, PROCESSOR),
        (Machine([[0, 1], [2, 3]], []), "cpu", 0, NUMA_SERVER),
        (Machine(ONE, ["0"]), "cpu", 80, PROCESSOR),
        (Machine(ONE, ["0"]), "cuda", 24, SMALL_GPU),
        (Machine(ONE, ["0"]), "cuda", 0, SMALL_GPU),
        (Machine(ONE, ["0"]), "cuda", 80, GPU),
        (Machine(ONE, ["0"]), "cuda", 141, LARGE_GPU),
        (Machine([[0, 1], [2, 3]], ["0", "1"]), "cuda", 80, MANY_GPUS),
        (Machine(ONE, ["0", "1"]), "cuda:1", 80, GPU),
    ],
)
def test_a_machine_has_one_class(machine: Machine, device: str, gigabytes: int, expected: MachineClass) -> None:
    assert class_of(machine, device, gigabytes * 10**9) == expected


def test_names_differ_and_every_block_divides_a_segment() -> None:
    assert len({each.name for each in CLASSES}) == len(CLASSES)
    assert all(64 % each.block_size == 0 for each in CLASSES)


def test_without_nvidia_smi_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert smallest_gpu() == 0

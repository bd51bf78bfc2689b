"""A machine is shared out among its workers: GPUs by name, cores by NUMA node."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.config import EngineConfig
from batchgen.errors import JobError
from batchgen.pipeline.cluster.placement import (
    Machine,
    core_groups,
    num_workers,
    numa_nodes,
    parse_cores,
    place,
    visible_gpus,
)

AUTO = EngineConfig()
CPU = EngineConfig(device="cpu")
TWO_NODES = Machine([[0, 1, 2, 3], [4, 5, 6, 7]], [])
TWO_GPUS = Machine([[0, 1, 2, 3]], ["GPU-aa", "MIG-bb"])


def test_core_lists_are_read_as_the_kernel_writes_them() -> None:
    assert parse_cores("0-2,8,10-11\n") == [0, 1, 2, 8, 10, 11]
    assert parse_cores("\n") == []


def test_nodes_hold_only_cores_that_may_be_used(tmp_path: Path) -> None:
    for node, cores in enumerate(["0-3", "4-7", "8-11"]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    assert numa_nodes([2, 3, 5], tmp_path) == [[2, 3], [5]]
    assert numa_nodes([1, 2], tmp_path / "none") == [[1, 2]]


@pytest.mark.parametrize(
    ("value", "names"),
    [("0,2", ["0", "2"]), ("GPU-aa, MIG-bb", ["GPU-aa", "MIG-bb"]), ("", []), ("1,-1,0", ["1"]), ("NoDevFiles", [])],
)
def test_gpus_are_called_as_the_variable_calls_them(value: str, names: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == names


def test_auto_is_one_for_each_gpu_or_each_node() -> None:
    assert num_workers("auto", AUTO, TWO_GPUS) == 2
    assert num_workers("auto", CPU, TWO_GPUS) == 1
    assert num_workers("auto", AUTO, TWO_NODES) == 2
    assert num_workers("auto", EngineConfig(device="cuda:1"), TWO_GPUS) == 1
    assert num_workers(3, AUTO, TWO_GPUS) == 3


def test_each_worker_gets_a_gpu_of_its_own() -> None:
    placed = place(2, AUTO, TWO_GPUS)
    assert [each.environ["CUDA_VISIBLE_DEVICES"] for each in placed] == ["GPU-aa", "MIG-bb"]
    assert [each.cores for each in placed] == [[0, 1], [2, 3]]
    with pytest.raises(JobError, match="3 workers need as many GPUs, and 2 are visible"):
        place(3, AUTO, TWO_GPUS)
    with pytest.raises(JobError, match="cuda:0 is one device"):
        place(2, EngineConfig(device="cuda:0"), TWO_GPUS)


def test_workers_on_a_processor_share_cores_and_memory() -> None:
    placed = place(4, CPU, TWO_NODES)
    assert [each.cores for each in placed] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [each.memory_share for each in placed] == [0.25] * 4
    assert [each.environ for each in placed] == [{"OMP_NUM_THREADS": "2"}] * 4
    assert place(2, EngineConfig(threads=3), TWO_NODES)[0].environ == {"OMP_NUM_THREADS": "3"}


@given(
    st.integers(1, 20),
    st.lists(st.integers(1, 6), min_size=1, max_size=4).map(
        lambda sizes: [list(range(sum(sizes[:at]), sum(sizes[: at + 1]))) for at in range(len(sizes))]
    ),
)
def test_no_core_is_idle_or_shared_and_no_group_crosses_a_node_without_need(count: int, nodes: list[list[int]]) -> None:
    groups = core_groups(count, nodes)
    cores = [core for node in nodes for core in node]
    assert len(groups) == count
    assert all(groups)
    assert {core for group in groups for core in group} == set(cores)
    if count <= len(cores):
        assert sum(map(len, groups)) == len(cores)
    if count >= len(nodes):
        assert all(any(set(group) <= set(node) for node in nodes) for group in groups)

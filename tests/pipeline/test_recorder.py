from __future__ import annotations

from pathlib import Path

from batchgen.data.files import OutputFiles
from batchgen.data.metrics_log import MetricsLog, read_metrics
from batchgen.pipeline.progress import ProgressSnapshot, Several
from batchgen.pipeline.recorder import Recorder


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def record(directory: Path, seconds: float, step: float) -> list[float]:
    """Seconds of the points of a run of some length that is updated every `step` seconds."""
    clock = Clock()
    recorder = Recorder(MetricsLog(OutputFiles(), directory, "a"), clock)
    for number in range(int(seconds / step)):
        recorder.update(ProgressSnapshot(num_rows=9, num_done=number, kv_use=1 / 3))
        clock.now += step
    recorder.close()
    recorder.close()
    (found,) = read_metrics(OutputFiles(), directory)
    assert found.points[-1]["num_done"] == number
    assert found.points[0]["kv_use"] == 0.3333
    return [point["seconds"] for point in found.points]


def test_points_are_a_second_apart_and_the_last_snapshot_is_always_kept(tmp_path: Path) -> None:
    assert record(tmp_path, 4, 0.25) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_long_run_has_points_ever_further_apart(tmp_path: Path) -> None:
    points = record(tmp_path, 86_400, 1)
    assert 2_000 < len(points) < 3_200
    assert (points[-1] - points[-3]) / 2 > 86_400 / 600


def test_several_watchers_hear_the_same(tmp_path: Path) -> None:
    heard: list[str] = []

    class Ear:
        def phase(self, name: str) -> None:
            heard.append(f"phase {name}")

        def update(self, snapshot: ProgressSnapshot) -> None:
            heard.append(f"update {snapshot.num_done}")

        def message(self, text: str) -> None:
            heard.append(f"message {text}")

        def close(self) -> None:
            heard.append("close")

    both = Several(Ear(), Ear())
    both.phase("a")
    both.update(ProgressSnapshot(num_rows=2, num_done=1))
    both.message("b")
    both.close()
    assert heard[::2] == heard[1::2] == ["phase a", "update 1", "message b", "close"]

"""The folder's clock: steps of the wall clock age nothing, restarts do, and a reboot within bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from cachesvc.storage.file.disk import MOST_DOWN_MS, FolderClock, Moments

DAY = 86_400_000


@dataclass
class Machine:
    """A machine's clocks, ms."""

    since_boot: int = 5_000_000
    wall: int = 1_800_000_000_000
    boot: str = "one"

    def clock(self, folder: Path) -> FolderClock:
        made = FolderClock(Moments(lambda: self.since_boot, lambda: self.wall, lambda: self.boot))
        made.load(folder / "clock")
        return made

    def runs(self, ms: int) -> None:
        self.since_boot += ms
        self.wall += ms


def save(clock: FolderClock, folder: Path) -> None:
    clock.save(folder / "clock", folder / "aside")


@pytest.mark.parametrize("step", [8 * DAY, -8 * DAY, -1_800_000_000_000])
def test_a_step_of_the_wall_clock_ages_nothing(step: int, tmp_path: Path) -> None:
    machine = Machine()
    clock = machine.clock(tmp_path)
    began = clock.now_ms()
    machine.runs(1000)
    machine.wall += step
    assert clock.now_ms() == began + 1000
    save(clock, tmp_path)
    machine.runs(2000)
    assert machine.clock(tmp_path).now_ms() == began + 3000, "nor does a restart after it"
    machine.wall -= step
    assert machine.clock(tmp_path).now_ms() == began + 3000


@pytest.mark.parametrize(
    ("wall", "aged"), [(60_000, 60_000), (MOST_DOWN_MS + 1, MOST_DOWN_MS), (8 * DAY, MOST_DOWN_MS), (-DAY, 0)]
)
def test_a_reboot_adds_what_the_wall_clock_says_within_bounds(wall: int, aged: int, tmp_path: Path) -> None:
    machine = Machine()
    clock = machine.clock(tmp_path)
    now = clock.now_ms()
    save(clock, tmp_path)
    machine.boot, machine.since_boot = "another", 10_000
    machine.wall += wall
    assert machine.clock(tmp_path).now_ms() == now + aged


def test_time_goes_on_while_no_daemon_runs(tmp_path: Path) -> None:
    machine = Machine()
    clock = machine.clock(tmp_path)
    now = clock.now_ms()
    save(clock, tmp_path)
    machine.runs(30 * DAY)
    assert machine.clock(tmp_path).now_ms() == now + 30 * DAY


def test_file_times_from_elsewhere_are_bounded(tmp_path: Path) -> None:
    machine = Machine()
    clock = machine.clock(tmp_path)
    began = clock.now_ms()
    machine.runs(5000)
    assert [clock.bounded(each) for each in (-1_000_000, 0, began + 70, began + 10**12)] == [
        began,
        began,
        began + 70,
        began + 5000,
    ]


@pytest.mark.parametrize("text", ["", "cachesvc clock 1: ", "?", "cachesvc clock 2: one 1 2 3 4", "\x00" * 40])
def test_a_torn_file_counts_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "clock").write_text(text, encoding="ascii")
    machine = Machine()
    assert machine.clock(tmp_path).now_ms() == machine.wall


def test_a_disk_that_takes_nothing_is_left_alone(tmp_path: Path) -> None:
    save(Machine().clock(tmp_path), tmp_path / "nowhere")

"""A bad custom server-side assignor ends only its own process and delays no heartbeat."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.services.assignors import process as assignor_process
from fencepost.coordinator.services.assignors.process import AssignorProcesses
from fencepost.groups.assignors.model import GroupSpec, MemberSpec
from fencepost.groups.assignors.remote import ComputeTarget
from tests.support.custom_assignors import CLASSES, install
from tests.unit.coordinator.services.coordinators import Services

T = bytes(15) + b"t"
GROUP = GroupSpec({name: MemberSpec(None, frozenset({T})) for name in "ab"}, {T: 4})
ROOT = Path(__file__).resolve().parents[5]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    place = install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(place))
    path = os.pathsep.join((str(place), str(ROOT), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", path)


async def computed(processes, name, group_id="g"):
    answer = asyncio.get_running_loop().create_future()
    processes.compute(ComputeTarget(group_id, name, GROUP), answer.set_result)
    return await asyncio.wait_for(answer, 30)


@pytest.mark.usefixtures("installed")
async def test_assignor_failure_is_reported_and_next_request_is_answered(monkeypatch):
    names = [*(cls.__name__.lower() for cls in CLASSES), "unimportable"]
    processes = AssignorProcesses(names)
    try:
        good = await computed(processes, "reversed")
        assert {name: len(mine) for name, mine in good.result.items()} == {"a": 2, "b": 2}
        assert (await computed(processes, "printing")).result == good.result
        says = {
            "raising": "RuntimeError: no idea",
            "exiting": "process ended",
            "greedy": "MemoryError",
            "doubling": "twice",
            "forging": "answered nonsense",
            "unimportable": "cannot be loaded",
        }
        for name, problem in says.items():
            for _ in range(2):
                answer = await computed(processes, name)
                assert answer.result is None
                assert problem in answer.problem, name
        monkeypatch.setattr(assignor_process, "START_TIMEOUT_MS", 500)
        hanging = computed(processes, "hanging")
        others = computed(processes, "reversed", "other group")
        late, prompt = await asyncio.gather(hanging, others)
        assert "did not answer" in late.problem
        assert prompt.result == good.result
    finally:
        await processes.close()


@pytest.mark.usefixtures("installed")
async def test_only_the_newest_assignment_request_of_a_group_is_answered():
    processes = AssignorProcesses(["reversed"])
    answers: list[str] = []
    try:
        for number in range(50):
            processes.compute(
                ComputeTarget(f"g{number % 2}", "reversed", GROUP),
                lambda report: answers.append(report.group_id),
            )
        await computed(processes, "reversed", "last")
        assert sorted(answers) == ["g0", "g1"]
    finally:
        await processes.close()


@pytest.mark.usefixtures("installed")
async def test_full_queue_fails_its_oldest_request(monkeypatch):
    monkeypatch.setattr(assignor_process, "MAX_WAITING_GROUPS", 2)
    processes = AssignorProcesses(["reversed"])
    try:
        reports = [computed(processes, "reversed", f"g{number}") for number in range(3)]
        oldest, *others = await asyncio.gather(*reports)
        assert oldest.group_id == "g0"
        assert oldest.result is None
        assert oldest.problem == "more than 2 groups wait for it"
        assert all(other.result is not None for other in others)
    finally:
        await processes.close()


@pytest.mark.usefixtures("installed")
async def test_dropped_request_is_not_reported_after_close(monkeypatch):
    monkeypatch.setattr(assignor_process, "MAX_WAITING_GROUPS", 1)
    processes = AssignorProcesses(["reversed"])
    reports = []
    for group_id in ("g0", "g1"):
        processes.compute(ComputeTarget(group_id, "reversed", GROUP), reports.append)
    await processes.close()
    turned = asyncio.Event()
    asyncio.get_running_loop().call_later(0, turned.set)
    await turned.wait()
    assert reports == []


def test_unknown_assignor_name_is_a_config_error():
    with pytest.raises(ConfigError, match="nobody"):
        AssignorProcesses(["nobody"])


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("uniform,org.apache.kafka.coordinator.group.assignor.UniformAssignor", "name 'uniform'"),
        ("range,uniform,org.apache.kafka.coordinator.group.assignor.RangeAssignor", "name 'range'"),
        ("", "expected 1 to 16 assignors, not 0"),
    ],
)
async def test_assignors_with_the_same_name_are_refused_at_the_start(
    tmp_path: Path, names: str, reason: str
) -> None:
    """KAFKA-20843."""
    with pytest.raises(ConfigError, match=rf"group\.consumer\.assignors: .*{reason}"):
        Services(tmp_path, {"group.consumer.assignors": names})
    kept = Services(tmp_path, {"group.consumer.assignors": names.partition(",")[0] or "range"})
    assert kept.groups.environment("g").settings.assignors.names

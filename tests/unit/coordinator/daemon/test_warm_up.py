"""A new daemon has loaded the modules that its first client needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fencepost.coordinator.daemon.warm_up import MESSAGES
from tests.support.daemon import ROOT
from tests.support.quick import only
from tests.support.raw import encode

LARGEST_PIECE = 8
"""The maximum number of modules that one step may import, directly and indirectly."""

PREPARED = """
import asyncio, json, sys
from fencepost.coordinator.daemon.warm_up import MESSAGES, warm_up
from fencepost.coordinator.handlers import Registry
from fencepost.protocol.api import ApiKey
from fencepost.protocol.messages import response_factory
from fencepost.protocol.codec import encode_response
from fencepost.protocol.schema import message_class
registry = Registry()
asyncio.run(warm_up(registry))
before = set(sys.modules)
for key, version in MESSAGES:
    registry.handler(key)
    message_class(key, version, "request"), message_class(key, version, "response")
respond = response_factory(ApiKey.INIT_PRODUCER_ID, 4)
encode_response(ApiKey.INIT_PRODUCER_ID, 4, 1, respond.error(0))
print(json.dumps([len(before), sorted(set(sys.modules) - before)]))
"""


def test_warm_up_imports_all_modules_of_a_first_connection() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PREPARED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded, late = json.loads(done.stdout)
    assert late == []
    assert loaded > 2 * len(MESSAGES)


ASKED = """
import asyncio, json, socket, struct, sys
from pathlib import Path
from fencepost import Broker
made = []
def make():
    made.append(Broker(Path(sys.argv[1]), "127.0.0.1:0"))
    return made[0]
from fencepost.coordinator.daemon.in_thread import BrokerThread
thread = BrokerThread(make)
thread.start()
thread.call(made[0].warm_up)
before = set(sys.modules)
with socket.create_connection(thread.address) as sock, sock.makefile("rb") as answers:
    for frame in map(bytes.fromhex, sys.argv[2:]):
        sock.sendall(struct.pack(">i", len(frame)) + frame)
        answers.read(struct.unpack(">i", answers.read(4))[0])
late = set(sys.modules) - before
thread.stop()
print(json.dumps(sorted(one for one in late if one.startswith(("fencepost.", "kio.")))))
"""


def test_first_requests_after_warm_up_import_no_modules(tmp_path: Path) -> None:
    frames = [
        encode("api_versions", 3, 1, "new", {"client_software_name": "n"}),
        encode("metadata", 13, 2, "new", {"topics": None}),
        encode("find_coordinator", 2, 3, "new", {"key": "id", "key_type": 1}),
        encode(
            "init_producer_id",
            4,
            4,
            "new",
            {
                "transactional_id": "id",
                "transaction_timeout": 60_000,
                "producer_id": -1,
                "producer_epoch": -1,
            },
        ),
    ]
    done = subprocess.run(
        [sys.executable, "-c", ASKED, str(tmp_path), *(frame.hex() for frame in frames)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []


STARTED = """
import asyncio, sys
from pathlib import Path
from fencepost import Broker
async def main():
    async with Broker(Path(sys.argv[1]), "127.0.0.1:0"):
        print(*sorted(one.removeprefix("fencepost.") for one in sys.modules))
asyncio.run(main())
"""


def test_standalone_broker_imports_no_cluster_modules(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTED, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "coordinator.storage.replica_manager" in loaded
    machines = ("leader", "follower", "fetcher", "observer", "lifecycle", "controller.machine")
    assert not loaded & {f"cluster.{machine}" for machine in machines}
    assert "txn.marker_queues" not in loaded
    shells = ("coordinator.controller.", "coordinator.replication.")
    errors = {f"{shell}errors" for shell in shells}
    assert {module for module in loaded if module.startswith(shells)} <= errors


OPENED = """
import asyncio, json, sys
from pathlib import Path
from tests.unit.coordinator.services.coordinators import Services
async def main():
    services = await Services(Path(sys.argv[1])).start()
    before, pieces = set(sys.modules), []
    for _ in getattr(services, sys.argv[2]).open_in_steps("id"):
        pieces.append(sorted(one for one in set(sys.modules) - before if "fencepost" in one))
        before = set(sys.modules)
    await services.stop()
    print(json.dumps(pieces))
asyncio.run(main())
"""


@pytest.mark.parametrize("coordinator", only(("groups", "txns"), "groups"))
def test_coordinator_opened_before_warm_up_imports_modules_in_small_steps(
    tmp_path: Path, coordinator: str
) -> None:
    command = [sys.executable, "-c", OPENED, str(tmp_path), coordinator]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    pieces = json.loads(done.stdout.splitlines()[-1])
    assert sum(map(len, pieces)) > LARGEST_PIECE
    assert max(map(len, pieces)) <= LARGEST_PIECE, pieces

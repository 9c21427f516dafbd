"""The tools of Apache Kafka 3.9 on brokers of both kinds, under a controller of each kind.

The same steps run with both controllers. The tools' output must be equal except for names and
addresses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import unique
from tests.support.kafka39 import (
    API_VERSIONS,
    CONFIGS,
    ELECT,
    GROUPS,
    LOG_DIRS,
    REASSIGN,
    TOPICS,
    ZOOKEEPER_SHELL,
    run_tool,
)
from tests.support.mixed import JAVA, PYTHON
from tests.support.waits import until
from tests.support.zookeeper import ZooKeeper
from tests.support.zookeeper_brokers import Brokers

P, J, K = 1, 2, 3
"""A broker of Fencepost, two of Apache Kafka."""

SETTINGS = {
    "zookeeper.session.timeout.ms": "18000",
    "offsets.topic.num.partitions": "1",
    "auto.leader.rebalance.enable": "false",
    "auto.create.topics.enable": "false",
}

STEPS = {
    "create": "Created topic TOPIC.",
    "create what is there": "TopicExistsException",
    "create with more replicas than brokers": "InvalidReplicationFactorException",
    "add partitions": "",
    "take partitions away": "InvalidPartitionsException",
    "describe": "PartitionCount: 3",
    "change a setting": "Completed updating config for topic TOPIC.",
    "describe settings": "retention.ms=86400000",
    "change a setting to what it cannot be": "InvalidConfigurationException",
    "move, slowly": "Successfully started partition reassignment for TOPIC-0",
    "verify what moves": "Reassignment of partition TOPIC-0 is still in progress.",
    "list what moves": "TOPIC-0: replicas: 3,1,2. adding: 3. removing: 2.",
    "describe what moves": "Adding Replicas: 3",
    "call it off": "Successfully cancelled partition reassignment for: TOPIC-0",
    "move": "Successfully started partition reassignment for TOPIC-0",
    "verify what was moved": "Clearing topic-level throttles on topic TOPIC",
    "elect": "Successfully completed leader election (PREFERRED) for partitions TOPIC-0",
    "elect whom is elected": "Valid replica already elected for partitions TOPIC-0",
    "log directories": "{1: ['TOPIC-0', 'TOPIC-2'], 2: ['TOPIC-1'], 3: ",
    "ask for an election in ZooKeeper": "[3, 3, 1]",
    "delete": "",
    "describe what is gone": "does not exist as expected",
}
"""Step → a part of the tools' output."""

TOLD_ALIKE = re.compile(r"org\.apache\.kafka\.common\.errors\.\w+")
"""Output of which only the exceptions must be equal: Fencepost's messages are those of newer Kafka
controllers.
"""


def _plain(said: str) -> str:
    """Return the output without random ids, the order of replicas in ISRs, times and addresses."""
    errors = TOLD_ALIKE.findall(said)
    if errors:
        return "\n".join(sorted({*errors}))
    said = re.sub(r"TopicId: [\w-]{22}", "TopicId: ID", said)
    said = re.sub(r"Isr: ([\d,]+)", lambda match: f"Isr: {sorted(match[1].split(','))}", said)
    said = said.replace("Elr: N/A", "Elr: ")
    return re.sub(r"^[\d:.]+ (?=ERROR)", "", said, flags=re.MULTILINE)


class Play:
    """Runs the tools on one topic; ``said`` has the output of each step."""

    def __init__(self, brokers: Brokers, home: Path) -> None:
        self.brokers, self._home = brokers, home
        self.name = unique("tools")
        self.said: dict[str, str] = {}
        nodes = brokers.nodes.values()
        self.servers = ("--bootstrap-server", ",".join(node.bootstrap for node in nodes))

    def tool(self, step: str, main: str, *arguments: str) -> str:
        """Run a tool, and keep its output even if it fails."""
        try:
            said = run_tool(main, *arguments)
        except AssertionError as error:
            said = str(error).partition("\n")[2]
        self.said[step] = _plain(said.replace(self.name, "TOPIC"))
        return said

    def topics(self, step: str, *arguments: str) -> str:
        return self.tool(step, TOPICS, *self.servers, "--topic", self.name, *arguments)

    def configs(self, step: str, *arguments: str) -> str:
        whose = ("--entity-type", "topics", "--entity-name", self.name)
        return self.tool(step, CONFIGS, *self.servers, *whose, *arguments)

    def reassign(self, step: str, replicas: list[int], *arguments: str) -> str:
        plan = self._home / f"{self.name}.json"
        row = {"topic": self.name, "partition": 0, "replicas": replicas}
        plan.write_text(json.dumps({"version": 1, "partitions": [row]}))
        return self.tool(
            step, REASSIGN, *self.servers, "--reassignment-json-file", str(plan), *arguments
        )

    def wait(self, leaders: list[int]) -> None:
        """Wait until each broker knows these leaders, and all replicas are in sync."""
        for node_id in self.brokers.nodes:
            until(
                lambda node_id=node_id: (  # type: ignore[misc]
                    [led for led, _ in self.brokers.leaders_and_epochs(node_id, self.name)]
                    == leaders
                ),
                f"broker {node_id} knows that {leaders} lead",
                deadline_s=120,
            )
        self.brokers.all_in_sync(self.name)

    def replicas(self) -> list[int]:
        found: list[int] = self.brokers.node(f"/brokers/topics/{self.name}")["partitions"]["0"]
        return found


def _topics_and_settings(play: Play) -> None:
    play.topics("create", "--create", "--replica-assignment", f"{J}:{P},{K}:{J}")
    play.wait([J, K])
    play.topics("create what is there", "--create", "--partitions", "1")
    many = ("--create", "--topic", f"{play.name}-many", "--replication-factor", "4")
    play.tool("create with more replicas than brokers", TOPICS, *play.servers, *many)
    all_of_them = f"{J}:{P},{K}:{J},{P}:{K}"
    play.topics(
        "add partitions", "--alter", "--partitions", "3", "--replica-assignment", all_of_them
    )
    play.wait([J, K, P])
    play.topics("take partitions away", "--alter", "--partitions", "2")
    play.topics("describe", "--describe")
    play.configs("change a setting", "--alter", "--add-config", "retention.ms=86400000")
    path = f"/config/topics/{play.name}"
    until(lambda: play.brokers.node(path)["config"], "it is in ZooKeeper")
    play.configs("describe settings", "--describe")
    play.configs(
        "change a setting to what it cannot be", "--alter", "--add-config", "retention.ms=x"
    )


def _moves(play: Play) -> None:
    with play.brokers.client(J) as client:
        for _ in range(30):
            answer = client.produce(play.name, [b"x" * 100_000], acks=-1)
            assert answer["error_code"] == "none"
    play.reassign("move, slowly", [K, P], "--execute", "--throttle", "1000")
    play.reassign("verify what moves", [K, P], "--verify", "--preserve-throttles")
    play.tool("list what moves", REASSIGN, *play.servers, "--list")
    play.topics("describe what moves", "--describe")
    play.reassign("call it off", [K, P], "--cancel")
    until(lambda: play.replicas() == [P, J] or play.replicas() == [J, P], "it is called off")
    play.reassign("move", [K, P], "--execute")
    until(lambda: play.replicas() == [K, P], "it has moved", deadline_s=120)
    play.wait([K, K, P])
    play.reassign("verify what was moved", [K, P], "--verify")


def _elections_and_the_end(play: Play) -> None:
    options = ("--election-type", "preferred", "--topic", play.name, "--partition", "0")
    play.brokers.stop(K)
    until(lambda: play.brokers.leaders(play.name)[:2] == [P, J], "others lead")
    play.brokers.nodes[K].start()
    play.wait([P, J, P])
    play.tool("elect", ELECT, *play.servers, *options)
    play.tool("elect whom is elected", ELECT, *play.servers, *options)
    where = ("--describe", "--topic-list", play.name, "--broker-list", f"{P},{J},{K}")
    found = play.tool("log directories", LOG_DIRS, *play.servers, *where)
    play.said["log directories"] = str(_parts(found)).replace(play.name, "TOPIC")
    row = {"topic": play.name, "partition": 1}
    election = json.dumps({"version": 1, "partitions": [row]}, separators=(",", ":"))
    shell = ("-server", play.brokers.connect)
    path = "/admin/preferred_replica_election"
    asked = run_tool(ZOOKEEPER_SHELL, *shell, "create", path, election)
    assert "Created" in asked
    until(lambda: play.brokers.node(path) is None, "it was held")
    play.said["ask for an election in ZooKeeper"] = str(play.brokers.leaders(play.name))
    controller = run_tool(ZOOKEEPER_SHELL, *shell, "get", "/controller")
    assert f'"brokerid":{play.brokers.controller},' in controller
    play.topics("delete", "--delete")
    until(lambda: play.brokers.node(f"/brokers/topics/{play.name}") is None, "it is gone")
    for node_id in play.brokers.nodes:
        until(
            lambda node_id=node_id: not play.brokers.leaders_and_epochs(node_id, play.name),
            "all know",
        )  # type: ignore[misc]
    play.topics("describe what is gone", "--describe")


def _parts(said: str) -> dict[int, list[str]]:
    """Return the partitions in each broker's directories, as kafka-log-dirs prints them."""
    told = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    return {
        broker["broker"]: sorted(
            part["partition"] for folder in broker["logDirs"] for part in folder["partitions"]
        )
        for broker in sorted(told["brokers"], key=lambda broker: broker["broker"])
    }


@pytest.fixture(scope="module")
def brokers(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    home = tmp_path_factory.mktemp("brokers")
    found = Brokers(home, zookeeper, {P: PYTHON, J: JAVA, K: JAVA}, SETTINGS)
    found.start()
    yield found
    found.close()


@pytest.fixture(scope="module")
def said(
    brokers: Brokers, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, str]]:
    """Return a function that returns the tools' output for a controller."""
    plays: dict[int, Play] = {}

    def of(controller: int) -> dict[str, str]:
        if controller not in plays:
            brokers.elect(controller)
            play = plays[controller] = Play(brokers, tmp_path_factory.mktemp("plans"))
            _topics_and_settings(play)
            _moves(play)
            _elections_and_the_end(play)
            assert brokers.controller == controller
        return plays[controller].said

    return of


@pytest.mark.parametrize("step", STEPS)
def test_kafka_tools_print_the_same_under_both_controllers(
    said: Callable[[int], dict[str, str]], step: str
):
    assert STEPS[step] in said(P)[step]
    assert said(P)[step] == said(J)[step]


def test_tools_show_api_versions_and_group_offsets(brokers: Brokers):
    """Run tools that do not use the controller."""
    servers = ("--bootstrap-server", ",".join(node.bootstrap for node in brokers.nodes.values()))
    told = run_tool(API_VERSIONS, *servers)
    for node in brokers.nodes.values():
        assert f"{node.bootstrap} (id: {node.node_id} rack: null) -> (" in told
    assert "ERROR" not in told
    name, group = brokers.create([J, P], via=brokers.controller), unique("group")
    with brokers.client(J) as client:
        until(lambda: client.leaders(name) == 1, "it leads")
        client.produce(name, [b"x"] * 7, acks=-1)
    reset = ("--reset-offsets", "--to-offset", "3", "--execute", "--topic", name)
    assert re.search(
        rf"{group} +{name} +0 +3", run_tool(GROUPS, *servers, "--group", group, *reset)
    )
    told = run_tool(GROUPS, *servers, "--group", group, "--describe")
    assert re.search(rf"{group} +{name} +0 +3 +7 +4", told), told
    assert group in run_tool(GROUPS, *servers, "--list")

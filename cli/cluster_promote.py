"""``fencepost cluster promote`` and ``stand-alone``: from one broker to a cluster, and back."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fencepost.cli.changes import execute_option, show_only
from fencepost.cli.output import key_values
from fencepost.cli.printing import print_lines

if TYPE_CHECKING:
    from fencepost.tools.promotion import PromotionPlan

_NEXT = """\
next:
  1. start {controllers} with Apache Kafka 4.4, each on its machine{moved}:
       bin/kafka-server-start.sh {first}
  2. start this broker as one of theirs, where it was:
       fencepost serve --config-file {broker}
the way back, until that has begun: start it as before, and remove {output};
after that: fencepost cluster stand-alone"""


@click.command("promote")
@click.argument(
    "data_dir", metavar="DATA_DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--controller",
    "controllers",
    multiple=True,
    required=True,
    metavar="ID@HOST:PORT",
    help="A controller of the new cluster and its address; several are separated by commas or by"
    " repeating the option. Three controllers survive the loss of one.",
)
@click.option(
    "--output",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory for the controllers' directories and the files of settings.",
)
@click.option(
    "--listen",
    default="127.0.0.1:9092",
    envvar="FENCEPOST_LISTEN",
    metavar="HOST:PORT",
    help="The option of `serve`, if the broker was started with it.",
)
@click.option(
    "--insecure", is_flag=True, help=("The option of `serve`, if the broker was started with it.")
)
@click.option(
    "--config",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting as for `serve`, or a new one for the broker; may be repeated.",
)
@click.option(
    "--config-file",
    envvar="FENCEPOST_CONFIG_FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The settings that the broker was started with.",
)
@click.option(
    "--controller-config",
    "controller_pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting for the controllers alone; may be repeated.",
)
@click.option(
    "--static-voters",
    is_flag=True,
    help=(
        "List the controllers in every node's settings (controller.quorum.voters), as a"
        " fixed quorum, instead of in the metadata."
    ),
)
def promote(
    data_dir: Path,
    controllers: tuple[str, ...],
    output: Path,
    listen: str,
    pairs: tuple[str, ...],
    config_file: Path | None,
    controller_pairs: tuple[str, ...],
    *,
    insecure: bool,
    static_voters: bool,
) -> None:
    """Turn a stopped standalone broker into a broker of a new Apache Kafka cluster.

    DATA_DIR is the broker's data directory. Its topics with their ids, settings, features, users,
    rules, quotas and allocated producer ids are written to OUTPUT/controller-ID/metadata, as the
    metadata with which controllers of Apache Kafka 4.4 start, or controllers of 4.3 if
    metadata.version is at most 30. OUTPUT/controller-ID also gets a controller.properties, and
    OUTPUT a broker.properties for the broker, which keeps its id, its address and its data.
    Producers, groups and open transactions live on, and clients need no restart.

    DATA_DIR is not changed. Until the broker starts with broker.properties it may start as before;
    then run this command again. Running it twice does no harm.
    """
    from fencepost.cli.serve import settings_in_environment
    from fencepost.coordinator.config.broker_config import load
    from fencepost.coordinator.config.key import ConfigError
    from fencepost.coordinator.metadata.errors import MetadataError
    from fencepost.logcore.fs import OsFileSystem
    from fencepost.tools.promotion import (
        ControllerAddress,
        PromotionError,
        PromotionRequest,
        carry_out,
        held,
        make_plan,
    )

    fs = OsFileSystem()
    try:
        named = [ControllerAddress.of(part) for text in controllers for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--controller") from error
    if insecure:
        pairs = (*pairs, "fencepost.insecure=true")
    try:
        settings = load((*settings_in_environment(os.environ), *pairs), config_file)
        more = dict(key_values(controller_pairs, "--controller-config"))
        request = PromotionRequest(
            data_dir, output, named, settings, listen, more, static=static_voters
        )
        with held(fs, data_dir):
            plan = make_plan(fs, request)
            carry_out(fs, plan, int(time.time() * 1000))
    except (PromotionError, ConfigError, MetadataError, OSError) as error:
        raise click.ClickException(str(error)) from error
    _print_plan(plan)


def _print_plan(plan: PromotionPlan) -> None:
    from fencepost.tools.promotion import BROKER_FILE, CONTROLLER_FILE

    image, request = plan.metadata.image, plan.wanted
    files = [
        plan.directory_of(controller.node_id) / CONTROLLER_FILE
        for controller in request.controllers
    ]
    print_lines(
        f"cluster {plan.meta.cluster_id}: {len(image.topics)} topics,"
        f" {image.partition_count} partitions, {len(image.scram)} users, {len(image.acls)} rules,"
        f" producer ids from {image.next_producer_id} on"
    )
    for path in (*files, request.output / BROKER_FILE):
        print_lines(f"written: {path}")
    for text in plan.warnings:
        print_lines(f"note: {text}", err=True)
    many = len(files) > 1
    fields = {
        "controllers": "the controllers" if many else "the controller",
        "moved": " (if you move it to another machine, copy its directory and set log.dirs)",
        "first": files[0] if not many else f"{request.output}/controller-ID/{CONTROLLER_FILE}",
        "broker": request.output / BROKER_FILE,
        "output": request.output,
    }
    print_lines(*(line.format(**fields) for line in _NEXT.splitlines()))


@click.command("stand-alone")
@click.argument(
    "data_dir", metavar="DATA_DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--from",
    "controllers",
    multiple=True,
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The directory (log.dirs) of a stopped controller; repeat it for a majority of the"
    " controllers.",
)
@execute_option
def stand_alone(data_dir: Path, controllers: tuple[Path, ...], *, execute: bool) -> None:
    """Turn a promoted broker into a standalone broker again.

    First give it all replicas (`topics reassign --to-brokers`) and wait until they are in sync;
    then stop the producers, then all brokers (this one last), then the controllers. The broker
    takes over the cluster's topics, settings, users, rules, quotas and allocated producer ids.
    """
    from fencepost.coordinator.metadata.errors import MetadataError
    from fencepost.logcore.fs import OsFileSystem
    from fencepost.tools import demotion
    from fencepost.tools.promotion import PromotionError, held

    fs = OsFileSystem()
    try:
        with held(fs, data_dir):
            plan = demotion.make_plan(fs, data_dir, controllers)
            if plan.image is None:
                print_lines("the broker has not joined any controllers: it stands alone")
            else:
                print_lines(
                    f"{len(plan.image.topics)} topics, {plan.image.partition_count} partitions,"
                    f" producer ids from {plan.image.next_producer_id} on"
                )
            for text in plan.forgotten:
                print_lines(f"forgotten: {text}")
            if not execute:
                show_only()
                return
            demotion.carry_out(fs, plan, int(time.time() * 1000))
    except (PromotionError, MetadataError, OSError) as error:
        raise click.ClickException(str(error)) from error
    print_lines("done: start the broker as before its promotion")

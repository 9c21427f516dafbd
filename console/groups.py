"""Views of groups: members, offsets and lag, the timeline, rebalance plans, and offset resets."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fencepost.cli import group_plan, group_reset
from fencepost.client.queries.group_view import (
    KNOWN_TYPES,
    GroupView,
    describe_group,
    existing,
    member_rows,
    offset_rows,
    summary_rows,
    texts,
    totals,
)
from fencepost.client.queries.session import ClusterSession, OffsetAndMetadata
from fencepost.client.queries.share_blame import add_past, examine
from fencepost.client.queries.share_offsets import SHARE
from fencepost.client.requests import Partition
from fencepost.client.router import ApiError
from fencepost.console.history import HistoryCache
from fencepost.console.paging import Params, number, page, required
from fencepost.console.transactions import counts
from fencepost.coordinator.history.entries import GROUP

Offsets = Mapping[Partition, OffsetAndMetadata]

MAX_ADDED = 1_000
"""The maximum number of members that a plan may add, as in the command ``groups plan``."""


def groups_view(session: ClusterSession, params: Params, history: HistoryCache) -> dict[str, Any]:
    """Return a page of the groups, each with its members and its lag."""
    del history
    rows = session.groups()
    states = counts(getattr(row, "group_state", "") for row in rows)
    state = params.get("state")
    if state:
        rows = [row for row in rows if getattr(row, "group_state", "") == state]
    paged = page(params, rows, lambda row: str(row.group_id))
    paged["rows"] = _group_rows(session, paged["rows"])
    return {"groups": paged, "states": states}


def _group_rows(session: ClusterSession, listed: list[Any]) -> list[dict[str, Any]]:
    """Return classic and consumer groups with members and lag, other groups as they were listed.

    ``error`` is the reason if a group cannot be described.
    """
    rows: list[dict[str, Any]] = [
        {
            "group": str(row.group_id),
            "state": getattr(row, "group_state", ""),
            "type": getattr(row, "group_type", ""),
            "protocol": row.protocol_type,
        }
        for row in listed
    ]
    describable = []
    for row in rows:
        if row["type"] in KNOWN_TYPES:
            try:
                describable.append(describe_group(session, row["group"]))
            except ApiError as error:
                row["error"] = str(error)
    more = {str(row["group"]): row for row in summary_rows(session, describable)}
    return [{**more.get(row["group"], {}), **row} for row in rows]


def group_view(session: ClusterSession, params: Params, history: HistoryCache) -> dict[str, Any]:
    """Return one group: its members, its offsets with lag, its timeline.

    A share group also has ``blame``: the record of each partition that holds back the start offset.
    """
    view = existing(session, required(params, "id"))
    timeline = history.of(session, GROUP, view.group)
    blamed: list[dict[str, Any]] = []
    if view.kind == SHARE:
        rows, blamed = examine(session, view)
        add_past(blamed, history.entries(GROUP, view.group))
    else:
        rows = offset_rows(session, [view])
    return {
        "group": view.group,
        "type": view.kind,
        "state": view.state,
        "assignor": view.assignor,
        "epoch": view.epoch,
        "is_active": view.is_active,
        "members": member_rows(view),
        "offsets": rows,
        "total": totals(rows),
        "blame": [row for row in blamed if row["state"] is not None],
        "history": timeline,
    }


def plan_view(session: ClusterSession, params: Params, history: HistoryCache) -> dict[str, Any]:
    """Return the assignment that a change of members would produce. Changes nothing."""
    del history
    view = existing(session, required(params, "id"))
    add = number(params, "add", 0, 0, MAX_ADDED)
    remove = tuple(name for name in params.get("remove", "").split("\n") if name)
    plan = group_plan.plan(session, view, add, remove, params.get("assignor") or None)
    none: frozenset[Partition] = frozenset()
    names = [*plan.now, *(name for name in plan.then if name not in plan.now)]
    return {
        "assignor": plan.assignor,
        "moved": plan.moved,
        "partitions": plan.partitions,
        "known": group_plan.known_assignors(view),
        "rows": [
            {
                "member": name,
                "client": next((m.client_id for m in view.members if m.member_id == name), None),
                "now": texts(plan.now.get(name, none)),
                "then": texts(plan.then[name]) if name in plan.then else None,
                "gets": texts(plan.then.get(name, none) - plan.now.get(name, none)),
                "gives": texts(plan.now.get(name, none) - plan.then.get(name, none)),
            }
            for name in names
        ],
    }


class ChangedMeanwhileError(Exception):
    """The group's offsets have changed since the preview."""


def preview(session: ClusterSession, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the offsets that a reset would commit. Changes nothing."""
    view, before, after = _reset(session, body)
    return _preview_body(view, before, after)


def reset(session: ClusterSession, body: Mapping[str, Any], undo_dir: Path) -> dict[str, Any]:
    """Commit the offsets of a preview, after writing an undo file; ``plan`` identifies the preview.

    Raises :class:`ChangedMeanwhileError`, and ValueError for a group with members.
    """
    view, before, after = _reset(session, body)
    shown = _preview_body(view, before, after)
    if body.get("plan") != shown["plan"]:
        raise ChangedMeanwhileError("the group's offsets have changed since they were shown")
    if view.is_active:
        raise ValueError(group_reset.active_group_refusal(view))
    undo = undo_dir / group_reset.undo_name(view.group, dt.datetime.now(dt.UTC))
    group_reset.write_undo(str(undo), after, before)
    group_reset.commit(session, view.group, after)
    return {**shown, "done": True, "undo": str(undo)}


def _reset(
    session: ClusterSession, body: Mapping[str, Any]
) -> tuple[GroupView, dict[Partition, OffsetAndMetadata], dict[Partition, OffsetAndMetadata]]:
    """Return the group, its committed offsets, and the offsets that ``body`` asks for."""
    view = existing(session, required(body, "group"))
    where = body.get("where")
    if not isinstance(where, dict) or "from_file" in where:
        raise ValueError("where must be one of to_earliest, to_latest, to_offset, to_datetime, …")
    try:
        target = group_reset.ResetTarget(**where)
    except TypeError as error:
        raise ValueError(f"where: {error}") from error
    topics = body.get("topics") or []
    before = session.committed(view.group)
    partitions = group_reset.select_partitions(session, before, topics, every=not topics)
    now = dt.datetime.now(dt.UTC)
    return view, before, group_reset.targets(session, target, partitions, before, now)


def _preview_body(view: GroupView, before: Offsets, after: Offsets) -> dict[str, Any]:
    rows = [
        {
            "topic": topic,
            "partition": index,
            "committed": before[topic, index].offset if (topic, index) in before else None,
            "new": position.offset,
        }
        for (topic, index), position in sorted(after.items())
    ]
    plan = hashlib.sha256(json.dumps([view.group, rows]).encode()).hexdigest()
    return {
        "group": view.group,
        "state": view.state,
        "members": len(view.members),
        "is_active": view.is_active,
        "rows": rows,
        "plan": plan,
        "done": False,
    }

// The records of a share group: in flight, and the one that keeps the start offset back.

import { h } from "./dom.js";
import { age, badge, card, command, empty, lagCell, link, mono, num, plural, quoted, table, when } from "./parts.js";

const STATES = {
  ACQUIRED: ["acquired", "info"],
  AVAILABLE: ["available", "warn"],
  ARCHIVING: ["archiving", "warn"],
  NOT_READ: ["not read", "quiet"],
  NOT_FETCHED: ["not fetched", "quiet"],
};

const place = (row) => link("topic", { name: row.topic, tab: "messages", partition: row.partition }, `${row.topic}:${row.partition}`, { class: "mono clip place-link" });

const quiet = (text = "–") => h("span", { class: "quiet" }, text);

/** Return a count of records in flight; it is unknown if the partition's leader does not report it. */
const count = (name) => (row) => (row[name] === null ? h("span", { class: "null", title: row.in_flight_error }, "unknown") : row[name] ? mono(num(row[name])) : quiet("0"));

function partitions(app) {
  const { offsets } = app.data;
  const reasons = new Map();
  for (const { in_flight_error: reason } of offsets) if (reason) reasons.set(reason, (reasons.get(reason) ?? 0) + 1);
  return card(
    "Partitions",
    [...reasons].map(([reason, number]) => `${plural(number, "partition")} without counts: ${reason}`).join("; "),
    table(
      [
        ["Partition", place, { grow: true }],
        ["Start offset", (row) => (row.committed === null ? h("span", { class: "null" }, "none yet") : mono(num(row.committed))), { right: true }],
        ["Lag", lagCell, { right: true, title: "records that no member has finished" }],
        ["Acquired", count("acquired"), { right: true, title: "records that members hold" }],
        ["Available", count("available"), { right: true, title: "records in flight that the next fetch gets, nearly all of them again" }],
        ["Oldest lock ends", (row) => when(app, row.lock_end_ms)],
        ["Deliveries", count("deliveries"), { right: true, title: "the highest delivery count of a record in flight" }],
      ],
      offsets,
      (row) => `${row.topic}:${row.partition}`,
      "offsets",
    ),
  );
}

function owner(row) {
  if (!row.member) return quiet("nobody");
  const client = row.client ? `${row.client} @ ${row.host}` : row.member;
  return h("div", { class: "stack" }, h("b", { class: "mono clip" }, client), h("span", { class: "note mono clip", title: row.member }, row.member), row.is_member ? null : h("span", { class: "note" }, "no member of the group"));
}

function blamed(app) {
  const { blame, group } = app.data;
  return card(
    "What keeps the start offset back",
    "the first record of each partition that is not finished",
    blame.length
      ? table(
          [
            ["Partition", place],
            ["Record", (row) => mono(row.last === null || row.last === row.first ? num(row.first) : `${num(row.first)}–${num(row.last)}`), { right: true }],
            ["State", (row) => badge(...(STATES[row.state] ?? [row.state]))],
            ["Deliveries", (row) => (row.deliveries ? mono(`${row.deliveries} of ${row.delivery_limit}`) : quiet()), { right: true }],
            ["Owner", owner, { grow: true }],
            ["Since", (row) => age(app, row.since_ms)],
            ["Lock ends", (row) => when(app, row.lock_end_ms)],
            ["What ends it", (row) => h("div", { class: "stack" }, h("span", {}, row.ends), row.why ? h("span", { class: "note" }, `last: ${row.why}`) : null)],
          ],
          blame,
          (row) => `${row.topic}:${row.partition}`,
          "blamed records",
        )
      : empty("Nothing", "Every record that can be read is finished, or the brokers do not report records in flight."),
    h("div", { class: "hint" }, h("span", { class: "note" }, "The same on the command line:"), command(app, `fencepost groups blame ${quoted(group)}`)),
  );
}

export function recordsTab(app) {
  if (!app.data.offsets.length) return card("Partitions", "", empty("No partitions", "A partition appears when a member subscribes to its topic."));
  return [blamed(app), partitions(app)];
}

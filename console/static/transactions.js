// Open transactions, the groups that they hold back, and fenced producers.

import { h } from "./dom.js";
import { duration } from "./format.js";
import { age, badge, card, command, empty, fact, filterBox, heldBar, link, mono, num, pager, places, plural, quoted, stateFilter, table, timeline, when } from "./parts.js";

const holder = (row) =>
  row.transactional_id
    ? link("transaction", { id: row.transactional_id }, row.transactional_id, { class: "mono clip" })
    : h("span", { class: "quiet" }, "nobody knows its id");

const producer = (row) => mono(row.producer_id >= 0 ? `${row.producer_id}:${row.epoch ?? "?"}` : "–", { title: "producer id : epoch" });

function sinceCell(app, row) {
  const open = app.now() - (row.since_ms ?? app.now());
  const share = row.timeout_ms && row.timeout_ms < 2 ** 31 - 1 ? Math.min(100, (100 * open) / row.timeout_ms) : null;
  return h(
    "div",
    { class: "since" },
    age(app, row.since_ms),
    share === null ? null : h("div", { class: "meter", title: `times out after ${duration(row.timeout_ms)}` }, h("span", { class: share > 80 ? "late" : "", style: { width: `${share}%` } })),
  );
}

const hidden = (row) =>
  row.hidden_groups.length
    ? h("span", { class: "note", title: row.hidden_groups.join(", ") }, `${plural(row.hidden_groups.length, "group")} hidden: no right to describe`)
    : null;

const waiting = (row) =>
  row.groups.length
    ? h(
        "span",
        { class: "waiting" },
        row.groups.slice(0, 4).map((one) => [
          link("group", { id: one.group }, one.group, { class: "mono clip" }),
          one.stuck ? badge("waits", "warn") : h("span", { class: "note" }, one.lag === null ? "nothing committed" : `${num(one.lag)} behind`),
        ]),
        row.groups.length > 4 ? h("span", { class: "note" }, `and ${row.groups.length - 4} more`) : null,
        hidden(row),
      )
    : row.hidden_groups.length
    ? hidden(row)
    : h("span", { class: "quiet", title: "no group has committed offsets of it, or owns it; readers without a group are not seen" }, "no group");

export function heldTable(app, rows) {
  return table(
    [
      ["Partition", (row) => link("topic", { name: row.topic, tab: "messages", partition: row.partition, isolation: "read_uncommitted" }, `${row.topic}:${row.partition}`, { class: "mono clip place-link" })],
      ["Held back", (row) => h("div", { class: "held-cell" }, h("b", { class: "mono" }, num(row.behind)), heldBar(row)), { title: "offsets between the last stable offset and the end" }],
      ["By", (row) => h("div", { class: "stack" }, holder(row), row.clients.length ? h("span", { class: "note clip" }, row.clients.join(", ")) : null), { grow: true }],
      ["Producer", producer, { title: "producer id : epoch" }],
      ["State", (row) => (row.hanging ? h("span", { title: row.hanging }, badge("hanging", "bad")) : badge(row.state ?? "unknown"))],
      ["Open for", (row) => sinceCell(app, row)],
      ["Groups that wait", waiting],
    ],
    rows,
    (row) => `${row.topic}:${row.partition}`,
    "partitions that a transaction holds back",
  );
}

const how = (app, rows) => {
  const row = rows.find((one) => one.hanging) ?? rows.find((one) => one.transactional_id);
  if (!row) return null;
  const text = row.hanging
    ? `fencepost txns abort ${row.topic}:${row.partition} --producer-id ${row.producer_id}`
    : `fencepost txns terminate ${quoted(row.transactional_id)}`;
  return h("div", { class: "hint" }, h("span", { class: "note" }, row.hanging ? "Nobody else ends a hanging one. To see what would be done:" : "To end one whose producer is dead, and see first what would be done:"), command(app, text));
};

function fences(app, found) {
  if (!found.kept || !found.rows.length) return timeline(app, found, { none: "No producer was fenced." });
  return table(
    [
      ["When", (row) => when(app, row.at_ms)],
      ["Transactional id", (row) => link("transaction", { id: row.subject }, row.subject, { class: "mono clip" }), { grow: true }],
      ["What", (row) => (row.what === "producer-refused" ? badge("refused", "bad") : badge("fenced", "warn"))],
      ["Epochs", (row) => h("span", { class: "change" }, row.change ?? "–"), { title: "→: from the fenced epoch to the new one; ≠: what was given, what holds" }],
      ["By request", (row) => row.why ?? "–"],
      ["Client", (row) => h("span", { class: "mono clip" }, [row.client, row.host].filter(Boolean).join(" @ ") || "–")],
    ],
    found.rows,
    (row) => `${row.at_ms}-${row.subject}-${row.what}-${row.change}`,
    "fenced producers",
  );
}

export const transactionsPage = {
  title: () => "Transactions",
  watch: ({ q, state, offset }) => ({ q, state, offset }),
  view(app) {
    const { held, fences: fenced, transactions, states } = app.data;
    return [
      h("h1", {}, "Transactions"),
      card(
        "Held back now",
        held.length ? plural(held.length, "partition") : "",
        held.length
          ? [heldTable(app, held), how(app, held)]
          : empty("Nobody is held back", "In every partition the last stable offset is the end: readers of committed records get all there is."),
      ),
      card("Fences", fenced.rows.length ? "newest first" : "", fences(app, fenced)),
      card(
        "All transactional ids",
        "",
        h("div", { class: "toolbar" }, filterBox(app, "Filter by id"), stateFilter(app, states)),
        transactions.rows.length
          ? table(
              [
                ["Transactional id", (row) => link("transaction", { id: row.transactional_id }, row.transactional_id, { class: "mono clip" }), { grow: true }],
                ["State", (row) => badge(row.state)],
                ["Producer", producer, { title: "producer id : epoch" }],
                ["Open for", (row) => (row.started_ms ? age(app, row.started_ms) : "–")],
                ["Timeout", (row) => (row.timeout_ms ? duration(row.timeout_ms) : "–"), { right: true, by: (row) => row.timeout_ms ?? 0 }],
                ["Partitions", (row) => (row.partitions?.length ? places(row.partitions) : "–")],
              ],
              transactions.rows,
              (row) => row.transactional_id,
              "transactional ids",
            )
          : empty(app.params.q || app.params.state ? "None fits" : "No transactional ids", app.params.q ? "Try fewer letters." : "They appear when a producer with a transactional.id starts."),
        pager(app, transactions),
      ),
    ];
  },
};

export const transactionPage = {
  title: (app) => app.params.id ?? "Transaction",
  watch: ({ id }) => ({ id }),
  view(app) {
    const { transaction: one, held, history } = app.data;
    return [
      h("p", { class: "crumb" }, link("transactions", {}, "Transactions"), " / "),
      h("h1", { class: "mono" }, one.transactional_id, badge(one.state)),
      h(
        "dl",
        { class: "facts" },
        fact("Producer id", mono(one.producer_id)),
        fact("Epoch", mono(one.epoch)),
        fact("Timeout", one.timeout_ms >= 2 ** 31 - 1 ? "none, two-phase commit" : duration(one.timeout_ms)),
        fact("Open for", one.started_ms ? age(app, one.started_ms) : "–"),
        fact("Partitions", one.partitions.length ? places(one.partitions) : "none"),
      ),
      held.length ? card("Holds back", plural(held.length, "partition"), heldTable(app, held), how(app, held)) : null,
      card("What happened, and why", history.rows.length ? "newest first, without the commits and aborts that the producer requested" : "", timeline(app, history, { none: "Nothing but commits and aborts that the producer asked for, which are not kept." })),
    ];
  },
};

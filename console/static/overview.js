// The overview of the cluster, and the problems that need attention.

import { h } from "./dom.js";
import { duration } from "./format.js";
import { badge, card, empty, link, mono, num, plural, table, timeline, to, when } from "./parts.js";

const sum = (counts) => Object.values(counts).reduce((all, one) => all + one, 0);

const tile = (view, title, count, ...below) =>
  h("a", { class: "tile", href: to(view) }, h("span", { class: "tile-title" }, title), h("span", { class: "tile-count" }, num(count)), h("span", { class: "tile-below" }, below));

const states = (counts) =>
  Object.keys(counts).length ? Object.entries(counts).map(([name, count]) => [badge(`${num(count)} ${name}`, undefined), " "]) : "none yet";

function attention(app, row) {
  const place = row.topic === undefined ? null : link("topic", { name: row.topic, tab: "partitions" }, `${row.topic}${row.partition === undefined ? "" : `:${row.partition}`}`, { class: "mono" });
  const id = row.transactional_id ? link("transaction", { id: row.transactional_id }, row.transactional_id, { class: "mono clip" }) : null;
  const open = row.since_ms ? app.now() - row.since_ms : 0;
  const stuck = row.stuck?.length
    ? [" ", plural(row.stuck.length, "group"), " cannot go on: ", row.stuck.slice(0, 3).map((one, i) => [i ? ", " : "", link("group", { id: one }, one, { class: "mono" })]), row.stuck.length > 3 ? ` and ${row.stuck.length - 3} more` : "", "."]
    : null;
  const told = {
    hanging: () => ["bad", "Hanging transaction", [place, ` — ${row.hanging}. Nobody will end it, and readers of committed records stop ${plural(row.behind, "offset")} before the end.`, stuck]],
    "held-back": () => [
      stuck && open > row.old_ms ? "bad" : open > row.old_ms ? "warn" : "info",
      "Open transaction holds readers back",
      [place, " waits for ", id ?? `producer ${row.producer_id}`, `${row.since_ms ? `, open for ${duration(open)}` : ""}: ${plural(row.behind, "offset")} are not readable yet.`, stuck],
    ],
    "held-unknown": () => ["warn", "Readers that wait are not known", [`Whether transactions hold back consumers could not be found out: ${row.error}.`]],
    silent: () => ["bad", "Broker does not answer", [mono(row.broker), " gave no answer within a second. The controller fences it once its session has ended."]],
    rebalancing: () => [
      "warn",
      row.state === "CompletingRebalance" ? "Group waits for its assignment" : "Group waits for members",
      [
        link("group", { id: row.group, tab: "why" }, row.group, { class: "mono clip" }),
        ` is ${row.state}`,
        row.error ? `; its members are not known: ${row.error}` : row.awaited ? [" and waits for ", h("b", { class: "mono" }, row.awaited)] : [`; no broker tells which of its ${plural(row.count, "member")} it waits for`, row.members.length ? `: ${row.members.join(", ")}` : ""],
        row.more > 0 ? `. In a rebalance as well: ${plural(row.more, "more group")}.` : ".",
      ],
    ],
    down: () => ["bad", "Broker is down", [mono(row.broker), " is fenced: it has no session with the controller, leads nothing and is in no ISR."]],
    leaderless: () => ["bad", "Partitions without a leader", [place, ` has ${plural(row.count, "partition")} that nobody leads.`]],
    "under-replicated": () => ["warn", "Under-replicated", [place, ` has ${plural(row.count, "partition")} with replicas that are behind.`]],
    rebalances: () => ["warn", "Many rebalances", [link("group", { id: row.group, tab: "why" }, row.group, { class: "mono" }), ` rebalanced ${row.count} times in a quarter of an hour. Last cause: ${row.why ?? "unknown"}.`]],
    fenced: () => ["info", "Producer fenced", [id, row.change ? [" ", h("span", { class: "change" }, row.change)] : null, ` — ${row.why ?? ""}, `, when(app, row.at_ms, { short: true }), row.count > 1 ? `, ${row.count} times in a quarter of an hour` : ""]],
  }[row.kind];
  const [tone, title, text] = told();
  return [tone, h("li", { class: `attention ${tone}`, "data-key": `${row.kind}-${row.broker}-${row.topic}-${row.partition}-${row.group}-${row.transactional_id}` }, h("b", {}, title), h("div", {}, text))];
}

const RANK = { bad: 0, warn: 1, info: 2 };

export const overviewPage = {
  title: () => "Overview",
  watch: () => ({}),
  view(app) {
    const data = app.data;
    const down = new Set(data.attention.filter((row) => row.kind === "down").map((row) => row.broker));
    const silent = app.pulse.silent.filter((broker) => !down.has(broker)).map((broker) => ({ kind: "silent", broker }));
    const needs = [...silent, ...data.attention].map((row) => attention(app, row)).sort((a, b) => RANK[a[0]] - RANK[b[0]]);
    const open = Object.entries(data.transactions).reduce((all, [name, count]) => all + (["Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence"].includes(name) ? count : 0), 0);
    return [
      h("h1", {}, "Overview", h("span", { class: "sub mono" }, data.cluster ?? "")),
      h(
        "div",
        { class: "tiles" },
        tile("overview", data.brokers.length === 1 ? "Broker" : "Brokers", data.brokers.length, `controller ${data.controller ?? "unknown"}`),
        tile("topics", "Topics", data.topics, `${plural(data.partitions, "partition")}, and ${data.internal_topics} internal`),
        tile("groups", "Groups", sum(data.groups), states(data.groups)),
        tile("transactions", "Open transactions", open, `${plural(sum(data.transactions), "id")}, ${plural(data.held.length, "partition")} held back`),
      ),
      card(
        "Needs attention",
        needs.length ? plural(needs.length, "matter") : "",
        needs.length ? h("ul", { class: "attentions" }, needs.map(([, node]) => node)) : empty("All is well", "No transaction holds anybody back, every partition has its leader, nobody was fenced lately."),
      ),
      h(
        "div",
        { class: "columns" },
        card("What happened last", data.history.kept ? "newest first" : "", timeline(app, data.history, { subject: true })),
        card(
          "Brokers",
          "",
          table(
            [
              ["Id", (row) => [mono(row.id), row.id === data.controller ? [" ", badge("controller", "info")] : null, row.fenced ? [" ", badge("fenced", "bad")] : null]],
              ["Address", (row) => mono(`${row.host}:${row.port}`), { grow: true }],
              ["Rack", (row) => row.rack ?? "–"],
            ],
            data.brokers,
            (row) => row.id,
            "brokers",
          ),
        ),
      ),
    ];
  },
};

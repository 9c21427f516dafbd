// Topics: partitions, producers, settings and messages.

import { h } from "./dom.js";
import { messagesTab, searchWhenAsked } from "./messages.js";
import { badge, card, choice, empty, filterBox, link, mono, num, pager, plural, table, tabs, when } from "./parts.js";

export const topicsPage = {
  title: () => "Topics",
  watch: ({ q, offset, internal }) => ({ q, offset, internal }),
  view(app) {
    const { topics, internal } = app.data;
    return [
      h("h1", {}, "Topics"),
      card(
        "Topics",
        "",
        h("div", { class: "toolbar" }, filterBox(app, "Filter by name"), choice("which topics", [["", "Yours"], ["1", `With ${num(internal)} internal`]], app.params.internal ?? "", (value) => app.set({ internal: value, offset: "" }))),
        topics.rows.length
          ? table(
              [
                ["Topic", (row) => [link("topic", { name: row.topic }, row.topic, { class: "mono clip" }), row.internal ? [" ", badge("internal", "quiet")] : null], { grow: true }],
                ["Partitions", (row) => num(row.partitions), { right: true }],
                ["Replicas", (row) => num(row.replicas), { right: true }],
                ["Offsets kept", (row) => num(row.offsets), { right: true, title: "from the log start to the end; markers and compacted records count" }],
                ["Held back", (row) => (row.held_back ? h("span", { class: "lag held" }, num(row.held_back)) : h("span", { class: "quiet" }, "–")), { right: true, title: "offsets behind an open transaction" }],
                ["Health", (row) => (row.leaderless ? badge(`${row.leaderless} without leader`, "bad") : row.under_replicated ? badge(`${row.under_replicated} under-replicated`, "warn") : badge("fine", "good"))],
              ],
              topics.rows,
              (row) => row.topic,
              "topics",
            )
          : empty(app.params.q ? "None fits" : "No topics", app.params.q ? "Try fewer letters." : "Create one with: fencepost topics create NAME"),
        pager(app, topics),
      ),
    ];
  },
};

function partitionsTab(app) {
  return card(
    "Partitions",
    plural(app.data.partitions.length, "partition"),
    table(
      [
        ["Partition", (row) => link("topic", { name: app.params.name, tab: "messages", partition: row.partition }, row.partition, { class: "mono" })],
        ["Leader", (row) => (row.leader < 0 ? badge("none", "bad") : mono(row.leader)), { right: true }],
        ["Replicas", (row) => [mono(row.replicas.join(", ")), row.offline.length ? [" ", badge(`${row.offline.join(", ")} off line`, "bad")] : null]],
        ["In sync", (row) => (row.in_sync.length < row.replicas.length ? badge(row.in_sync.join(", ") || "none", "warn") : mono(row.in_sync.join(", ")))],
        ...(app.data.partitions.some((row) => row.elr.length) ? [["May lead", (row) => mono(row.elr.join(", ") || "–"), { title: "eligible leader replicas: outside the ISR, with all that is committed" }]] : []),
        ["First", (row) => mono(num(row.first)), { right: true }],
        ["Stable", (row) => mono(num(row.stable)), { right: true, title: "where readers of committed records stop" }],
        ["End", (row) => mono(num(row.end)), { right: true }],
        ["Held back", (row) => (row.end > row.stable ? h("span", { class: "lag held" }, num(row.end - row.stable)) : h("span", { class: "quiet" }, "–")), { right: true }],
      ],
      app.data.partitions,
      (row) => row.partition,
      "partitions",
    ),
  );
}

function producersTab(app) {
  const rows = app.data.producers;
  return card(
    "Producers with sequence numbers",
    rows.length ? plural(rows.length, "producer") : "",
    rows.length
      ? table(
          [
            ["Partition", (row) => mono(row.partition), { right: true }],
            ["Producer id", (row) => mono(row.producer_id), { right: true }],
            ["Epoch", (row) => mono(row.epoch), { right: true }],
            ["Last sequence", (row) => mono(num(row.last_sequence)), { right: true }],
            ["Last write", (row) => when(app, row.last_ms), { grow: true }],
            ["Open from", (row) => (row.start_offset === null ? h("span", { class: "quiet" }, "–") : badge(`offset ${num(row.start_offset)}`, "warn"))],
          ],
          rows,
          (row) => `${row.partition}-${row.producer_id}`,
          "producers",
        )
      : empty("None", "Nobody wrote here idempotently or in transactions lately."),
  );
}

function settingsTab(app) {
  return card(
    "Settings",
    "what somebody has set stands first",
    table(
      [
        ["Key", (row) => mono(row.name), { grow: true }],
        ["Value", (row) => mono(row.value ?? "–")],
        ["", (row) => (row.is_default ? h("span", { class: "quiet" }, "default") : badge("set", "info"))],
      ],
      app.data.settings,
      (row) => row.name,
      "settings",
    ),
  );
}

const TABS = [
  ["messages", "Messages"],
  ["partitions", "Partitions"],
  ["producers", "Producers"],
  ["settings", "Settings"],
];
const PARTS = { messages: messagesTab, partitions: partitionsTab, producers: producersTab, settings: settingsTab };

export const topicPage = {
  title: (app) => app.params.name ?? "Topic",
  watch: ({ name }) => ({ name }),
  routed(app) {
    if ((app.params.tab ?? "messages") === "messages") searchWhenAsked(app);
  },
  view(app) {
    const { topic, internal, partitions } = app.data;
    const tab = Object.hasOwn(PARTS, app.params.tab ?? "") ? app.params.tab : "messages";
    const kept = partitions.reduce((sum, row) => sum + ((row.end ?? 0) - (row.first ?? 0)), 0);
    const held = partitions.reduce((sum, row) => sum + ((row.end ?? 0) - (row.stable ?? 0)), 0);
    return [
      h("p", { class: "crumb" }, link("topics", {}, "Topics"), " / "),
      h("h1", { class: "mono" }, topic, internal ? badge("internal", "quiet") : null),
      h(
        "dl",
        { class: "facts" },
        h("div", { class: "fact big" }, h("dt", {}, "Offsets kept"), h("dd", {}, num(kept))),
        h("div", { class: "fact big" }, h("dt", {}, "Held back"), h("dd", { class: held ? "held" : null }, num(held))),
        h("div", { class: "fact" }, h("dt", {}, "Partitions"), h("dd", {}, num(partitions.length))),
      ),
      tabs(app, "topic", TABS, tab, { name: app.params.name }),
      PARTS[tab](app),
    ];
  },
};

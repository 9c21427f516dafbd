// Groups: lag, members, causes of rebalances, plans, offset resets.

import { Refused, get, post } from "./api.js";
import { h } from "./dom.js";
import { recordsTab } from "./shares.js";
import { badge, card, choice, command, empty, fact, field, filterBox, lagCell, link, mono, num, pager, places, plural, quoted, select, skeleton, stateFilter, table, tabs, timeline } from "./parts.js";

export const groupsPage = {
  title: () => "Groups",
  watch: ({ q, state, offset }) => ({ q, state, offset }),
  view(app) {
    const { groups, states } = app.data;
    return [
      h("h1", {}, "Groups"),
      card(
        "Consumer groups",
        "lag counts what a reader of committed records can still get",
        h("div", { class: "toolbar" }, filterBox(app, "Filter by name"), stateFilter(app, states)),
        groups.rows.length
          ? table(
              [
                ["Group", (row) => link("group", { id: row.group }, row.group, { class: "mono clip" }), { grow: true }],
                ["State", (row) => [badge(row.state || "unknown"), row.error ? h("span", { class: "quiet", title: row.error }, " not described") : null, row.progress ? [" ", badge("Spark progress", "quiet")] : null]],
                ["Protocol", (row) => row.type || row.protocol || "–"],
                ["Members", (row) => num(row.members), { right: true }],
                ["Partitions", (row) => num(row.partitions), { right: true }],
                ["Lag", lagCell, { right: true, title: "records that a read_committed reader can still get" }],
                ["Held back", (row) => (row.held_back ? h("span", { class: "lag held" }, num(row.held_back)) : h("span", { class: "quiet" }, "–")), { right: true, title: "records behind an open transaction" }],
              ],
              groups.rows,
              (row) => row.group,
              "groups",
            )
          : empty(app.params.q || app.params.state ? "None fits" : "No groups", app.params.q ? "Try fewer letters." : "A group appears when its first member joins or commits."),
        pager(app, groups),
      ),
    ];
  },
};

// --- one group ---

const TABS = [
  ["lag", "Lag"],
  ["members", "Members"],
  ["why", "Why it rebalanced"],
  ["plan", "What if"],
  ["reset", "Reset offsets"],
];

/** The parts of a share group's page: its members share partitions, and take single records. */
const SHARE_TABS = [
  ["lag", "Records"],
  ["members", "Members"],
  ["why", "What happened"],
];

function lagTab(app) {
  const { offsets, total, members, type } = app.data;
  if (type === "share") return recordsTab(app);
  const client = Object.fromEntries(members.map((one) => [one.member, one.client]));
  const { unknown } = total;
  if (!offsets.length) return card("Offsets", "", empty("Nothing is committed", "No member owns a partition, and no offset is there."));
  return card(
    "Offsets",
    [
      total.held_back ? `${plural(total.held_back, "record")} held back by open transactions` : "",
      unknown ? `the lag of ${plural(unknown, "partition")} is not known` : "",
    ].filter(Boolean).join("; "),
    table(
      [
        ["Partition", (row) => link("topic", { name: row.topic, tab: "messages", partition: row.partition }, `${row.topic}:${row.partition}`, { class: "mono clip place-link" }), { grow: true }],
        ["Committed", (row) => (row.committed === null ? h("span", { class: "null" }, "nothing yet") : mono(num(row.committed))), { right: true }],
        ["Stable", (row) => mono(num(row.stable)), { right: true, title: "where readers of committed records stop" }],
        ["End", (row) => mono(num(row.end)), { right: true }],
        ["Lag", lagCell, { right: true }],
        ["Held back", (row) => (row.held_back ? h("span", { class: "lag held" }, num(row.held_back)) : h("span", { class: "quiet" }, "–")), { right: true }],
        ["Member", (row) => (row.member ? h("span", { class: "mono clip", title: row.member }, client[row.member] || row.member) : h("span", { class: "quiet" }, "nobody"))],
      ],
      offsets,
      (row) => `${row.topic}:${row.partition}`,
      "offsets",
    ),
  );
}

function membersTab(app) {
  const { members, type } = app.data;
  if (!members.length) return card("Members", "", empty("No members", "Nobody reads in this group now. Its offsets stay, and can be reset."));
  const columns = [
    ["Client", (row) => h("div", { class: "stack" }, h("b", { class: "mono clip" }, row.client), h("span", { class: "note mono clip", title: row.member }, row.member)), { grow: true }],
    ["Host", (row) => mono(row.host)],
    ["Instance", (row) => (row.instance ? mono(row.instance) : "–")],
  ];
  if (type === "consumer" || type === "share") columns.push(["Epoch", (row) => mono(row.epoch), { right: true }]);
  columns.push([type === "share" ? "Assigned" : "Owns", (row) => num(row.count), { right: true }], ["Partitions", (row) => places(row.assigned)]);
  if (type === "consumer")
    columns.push(["Shall own", (row) => (row.target && row.target.join() !== row.assigned.join() ? places(row.target) : h("span", { class: "quiet" }, "the same"))]);
  return card("Members", plural(members.length, "member"), table(columns, members, (row) => row.member, "members"));
}

function whyTab(app) {
  const { history, type } = app.data;
  const all = app.params.all === "1";
  const rows = all ? history.rows : history.rows.filter((row) => !["member-reconciled", "target-assigned", "generation-started"].includes(row.what) || row.why);
  return card(
    type === "share" ? "What happened" : "Why it rebalanced",
    history.rows.length ? `${plural(history.rows.length, "entry", "entries")}, newest first` : "",
    history.rows.length ? h("div", { class: "toolbar" }, choice("which entries", [["", "Causes"], ["1", "Everything"]], all ? "1" : "", (value) => app.set({ all: value }))) : null,
    timeline(app, { ...history, rows }),
  );
}

// --- what if ---

async function ask(app, name, question) {
  const mine = { asked: JSON.stringify(question), busy: true, abort: new AbortController() };
  app.local[name]?.abort?.abort();
  app.local[name] = { ...app.local[name], ...mine };
  app.render();
  try {
    mine.found = await get(name, question, mine.abort.signal);
    mine.problem = null;
  } catch (error) {
    if (mine.abort.signal.aborted) return;
    mine.problem = error.message;
  }
  mine.busy = false;
  if (app.local[name]?.asked === mine.asked) {
    app.local[name] = mine;
    app.render();
  }
}

function planQuestion(app) {
  const { id, add, remove, assignor } = app.params;
  return { id, add, remove, assignor };
}

function planTab(app) {
  const { members, assignor } = app.data;
  const state = app.local.plan;
  const removed = new Set((app.params.remove ?? "").split("\n").filter(Boolean));
  const toggle = (name) => {
    removed.has(name) ? removed.delete(name) : removed.add(name);
    app.set({ remove: [...removed].join("\n") });
  };
  const add = Number(app.params.add ?? 0);
  const found = state?.found;
  const known = found?.known ?? [];
  const text = [`fencepost groups plan ${quoted(app.params.id)}`, add ? `--add ${add}` : "", ...[...removed].map((one) => `--remove ${quoted(one)}`), app.params.assignor ? `--assignor ${app.params.assignor}` : ""].filter(Boolean).join(" ");
  return card(
    "What if",
    "computed, nothing is touched",
    members.length
      ? [
          h(
            "div",
            { class: "form" },
            field("More members", h("input", { type: "number", min: "0", max: "1000", value: String(add), "data-search": "1", oninput: (event) => app.setSoon({ add: event.target.value === "0" ? "" : event.target.value }) })),
            field("Assignor", select([["", `as now (${assignor})`], ...known.map((one) => [one, one])], app.params.assignor, (value) => app.set({ assignor: value }))),
            h(
              "fieldset",
              {},
              h("legend", {}, "Members that leave"),
              members.slice(0, 30).map((one) =>
                h("label", { class: "check" }, h("input", { type: "checkbox", checked: removed.has(one.member), onchange: () => toggle(one.member) }), h("span", { class: "mono clip", title: one.member }, one.client || one.member)),
              ),
              members.length > 30 ? h("span", { class: "note" }, `and ${members.length - 30} more; the command takes any`) : null,
            ),
          ),
          state?.problem ? h("div", { class: "banner bad", role: "alert" }, state.problem) : null,
          found
            ? [
                h("p", { class: "verdict", role: "status" }, h("b", {}, `${num(found.moved)} of ${num(found.partitions)}`), ` partitions would move, with ${found.assignor}`),
                table(
                  [
                    ["Member", (row) => h("div", { class: "stack" }, h("b", { class: "mono clip" }, row.client ?? row.member), row.client ? h("span", { class: "note mono clip" }, row.member) : null), { grow: true }],
                    ["Now", (row) => num(row.now.length), { right: true }],
                    ["Then", (row) => (row.then === null ? badge("leaves", "quiet") : num(row.then.length)), { right: true }],
                    ["Gets", (row) => (row.gets.length ? h("span", { class: "gets" }, places(row.gets)) : h("span", { class: "quiet" }, "–"))],
                    ["Gives", (row) => (row.gives.length ? h("span", { class: "gives" }, places(row.gives)) : h("span", { class: "quiet" }, "–"))],
                  ],
                  found.rows,
                  (row) => row.member,
                  "the plan",
                ),
                h("div", { class: "hint" }, h("span", { class: "note" }, "The same on the command line:"), command(app, text)),
              ]
            : state?.problem
              ? null
              : skeleton(3),
        ]
      : empty("No members", "A plan needs somebody's subscription."),
  );
}

// --- reset ---

const WHERE = {
  to_earliest: ["The oldest record", null],
  to_latest: ["Behind the newest record", null],
  to_datetime: ["A time", ["2026-01-31T12:00:00", "ISO 8601, UTC without a zone"]],
  by_duration: ["So long ago", ["PT10M", "ISO 8601: PT10M, P1DT2H"]],
  to_offset: ["An offset", ["0", "the same in each partition"]],
  shift_by: ["Forward or back", ["-100", "offsets; negative is back"]],
};

function resetQuestion(app) {
  const { id, to = "to_earliest", value, topic } = app.params;
  const [, more] = WHERE[to] ?? WHERE.to_earliest;
  const given = ["to_offset", "shift_by"].includes(to) ? Number.parseInt(value, 10) : value;
  return { group: id, topics: topic ? [topic] : [], where: { [to]: more ? given : true } };
}

async function previewReset(app, execute = false) {
  const question = resetQuestion(app);
  const state = (app.local.reset ??= {});
  state.busy = true;
  app.render();
  try {
    const found = await post("reset", execute ? { ...question, execute: true, plan: state.found.plan } : question);
    Object.assign(state, { found, problem: null });
  } catch (error) {
    Object.assign(state, { found: null, problem: error instanceof Refused ? error.message : "the console does not answer" });
  }
  state.busy = false;
  app.render();
}

function resetTab(app) {
  const { offsets, is_active: isActive, state: groupState, members } = app.data;
  const state = app.local.reset ?? {};
  const chosen = app.params.to ?? "to_earliest";
  const [, more] = WHERE[chosen] ?? WHERE.to_earliest;
  const topics = [...new Set(offsets.map((row) => row.topic))];
  const forget = (patch) => {
    app.local.reset = {};
    app.set(patch);
  };
  const { found } = state;
  const changed = found?.rows.filter((row) => row.committed !== row.new).length ?? 0;
  const writes = app.about?.allow_writes;
  const why = !writes ? "This console is read-only: start it with --allow-writes to do it here." : isActive ? `The group is ${groupState} with ${plural(members.length, "member")}: offsets can only be set while it has none.` : null;
  return card(
    "Reset offsets",
    "shown first, done then; what is committed now goes into an undo file",
    h(
      "form",
      {
        class: "form",
        onsubmit: (event) => {
          event.preventDefault();
          previewReset(app);
        },
      },
      field("Topic", select([["", "all that it has committed"], ...topics.map((one) => [one, one])], app.params.topic, (topic) => forget({ topic }))),
      field("To", select(Object.entries(WHERE).map(([name, [text]]) => [name, text]), chosen, (value) => forget({ to: value, value: "" }))),
      more ? field(more[1], h("input", { value: app.params.value ?? "", placeholder: more[0], required: true, oninput: (event) => { app.local.reset = {}; app.setSoon({ value: event.target.value }); } })) : null,
      h("button", { class: "primary", disabled: state.busy }, "Preview"),
    ),
    state.problem ? h("div", { class: "banner bad", role: "alert" }, state.problem) : null,
    found
      ? [
          found.done
            ? h("div", { class: "banner good", role: "status" }, h("div", {}, h("b", {}, `Done: ${plural(found.rows.length, "partition")} set. `), "To bring back what was:", command(app, `fencepost groups reset-offsets ${quoted(found.group)} --from-file ${quoted(found.undo)} --execute`)))
            : h(
                "div",
                { class: "verdict", role: "status" },
                h("span", {}, h("b", {}, plural(changed, "partition")), ` of ${num(found.rows.length)} would change. Nothing is done yet.`),
                h("button", { class: "danger", disabled: Boolean(why) || state.busy || !found.rows.length, onclick: () => previewReset(app, true) }, `Set ${plural(found.rows.length, "offset")}`),
                why ? h("span", { class: "note refusal" }, why) : null,
              ),
          table(
            [
              ["Partition", (row) => mono(`${row.topic}:${row.partition}`), { grow: true }],
              ["Committed", (row) => mono(num(row.committed)), { right: true }],
              ["New", (row) => h("b", { class: "mono" }, num(row.new)), { right: true }],
              [
                "Difference",
                (row) => {
                  const by = row.committed === null ? null : row.new - row.committed;
                  if (!by) return h("span", { class: "quiet" }, "–");
                  return h("span", { class: "change" }, by > 0 ? `+${num(by)}, left out` : `−${num(-by)}, again`);
                },
                { right: true },
              ],
            ],
            found.rows,
            (row) => `${row.topic}:${row.partition}`,
            found.done ? "offsets that were set" : "preview",
          ),
        ]
      : null,
  );
}

const PARTS = { lag: lagTab, members: membersTab, why: whyTab, plan: planTab, reset: resetTab };

export const groupPage = {
  title: (app) => app.params.id ?? "Group",
  watch: ({ id }) => ({ id }),
  routed(app) {
    if (app.params.tab === "plan") {
      const question = planQuestion(app);
      if (app.local.plan?.asked !== JSON.stringify(question)) ask(app, "plan", question);
    }
  },
  view(app) {
    const { group, state, type, assignor, epoch, members, total } = app.data;
    const names = type === "share" ? SHARE_TABS : TABS;
    const tab = names.some(([name]) => name === app.params.tab) ? app.params.tab : "lag";
    return [
      h("p", { class: "crumb" }, link("groups", {}, "Groups"), " / "),
      h("h1", { class: "mono" }, group, badge(state)),
      h(
        "dl",
        { class: "facts" },
        h("div", { class: "fact big" }, h("dt", {}, "Lag"), h("dd", { id: "total-lag" }, lagCell(total))),
        type === "share" ? null : h("div", { class: "fact big" }, h("dt", {}, "Held back"), h("dd", { class: total.held_back ? "held" : null }, num(total.held_back))),
        fact("Members", num(members.length)),
        fact("Protocol", type),
        fact("Assignor", assignor || "–"),
        epoch === null ? null : fact("Epoch", num(epoch)),
      ),
      tabs(app, "group", names, tab, { id: app.params.id }),
      PARTS[tab](app),
    ];
  },
};

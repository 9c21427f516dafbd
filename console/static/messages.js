// A search of messages that shows its progress and can be stopped.

import { Refused, get, stream } from "./api.js";
import { h } from "./dom.js";
import { bytes, iso, time } from "./format.js";
import { badge, card, choice, command, empty, field, mono, num, plural, quoted, select } from "./parts.js";

const SHOWN_CHARACTERS = 300;

const FROM = [
  ["newest", "the newest"],
  ["earliest", "the oldest"],
  ["latest", "now on"],
  ["-10m", "10 minutes ago"],
  ["-1h", "an hour ago"],
  ["-1d", "a day ago"],
  ["at", "an offset or time …"],
];

const ASKED = ["isolation", "partition", "from", "at", "key", "value", "header", "limit", "follow"];

function question(app) {
  const { name, tab: _tab, from, at, ...rest } = app.params;
  return { topic: name, limit: "100", ...rest, from: from === "at" ? at || "earliest" : (from ?? "newest") };
}

/** A search begins by itself when the page is opened or its parameters change. */
export function searchWhenAsked(app) {
  const asked = JSON.stringify(question(app));
  if (app.local.search?.asked !== asked) search(app);
}

async function search(app, resume) {
  const former = app.local.search;
  former?.abort.abort();
  const asked = question(app);
  const state = (app.local.search = {
    asked: JSON.stringify(asked),
    abort: new AbortController(),
    rows: resume ? former.rows : [],
    total: 0,
    remaining: 0,
    scanned: 0,
    matched: 0,
    bytes: 0,
    hidden: {},
    running: true,
    follow: asked.follow === "1",
  });
  app.render();
  const on = (event, data) => {
    if (event === "begin") Object.assign(state, { total: data.total, remaining: data.total, held: data.held_back });
    else {
      const { rows, ...progress } = data;
      Object.assign(state, progress);
      if (rows) state.rows = [...state.rows, ...rows].slice(-2_000);
      if (event === "end") state.why = data.why;
      if (event === "failed") state.problem = data.message;
    }
    app.render();
  };
  try {
    await stream("messages", resume ? { ...asked, resume } : asked, on, state.abort.signal);
    state.why ??= "stopped";
  } catch (error) {
    if (state.abort.signal.aborted) state.why = "stopped";
    else state.problem = error instanceof Refused ? error.message : "the console does not answer";
  }
  state.running = false;
  app.render();
}

// --- bytes as text ---

function pretty(text) {
  try {
    const found = JSON.parse(text);
    return typeof found === "object" && found !== null ? JSON.stringify(found, null, 2) : text;
  } catch {
    return text;
  }
}

function hex(base64) {
  const raw = atob(base64);
  const lines = [];
  for (let at = 0; at < Math.min(raw.length, 4096); at += 16) {
    const part = [...raw.slice(at, at + 16)];
    const codes = part.map((one) => one.charCodeAt(0).toString(16).padStart(2, "0")).join(" ");
    const letters = part.map((one) => (one >= " " && one <= "~" ? one : "·")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${codes.padEnd(47)}  ${letters}`);
  }
  return lines.join("\n");
}

/** Escape control and format characters, except line ends and tabs. */
const seen = (text) =>
  text.replace(/[\p{Cc}\p{Cf}]/gu, (one) => ("\n\r\t".includes(one) ? one : `\\u{${one.codePointAt(0).toString(16)}}`));

function cell(shown, none) {
  if (shown === null) return h("span", { class: "null" }, none);
  if (shown.base64 !== undefined) return [badge("binary", "quiet"), " ", h("span", { class: "note" }, bytes(shown.size))];
  if (shown.text === "") return h("span", { class: "null" }, "empty");
  return h("span", { class: "mono value" }, seen(shown.text.slice(0, SHOWN_CHARACTERS)), shown.text.length > SHOWN_CHARACTERS || shown.cut ? "…" : "");
}

function whole(title, shown, none) {
  if (shown === null) return h("div", { class: "whole" }, h("h3", {}, title), h("span", { class: "null" }, none));
  const text = shown.base64 === undefined ? seen(pretty(shown.text)) : hex(shown.base64);
  return h("div", { class: "whole" }, h("h3", {}, title, h("span", { class: "note" }, bytes(shown.size), shown.cut ? ", cut" : "", shown.base64 === undefined ? "" : ", binary")), h("pre", { tabindex: "0" }, text));
}

async function open(app, row) {
  app.local.record = { row };
  app.render();
  try {
    const found = await get("record", { topic: app.params.name, partition: row.partition, offset: row.offset });
    if (app.local.record?.row === row) app.local.record = { row: found };
  } catch (error) {
    if (app.local.record?.row === row) app.local.record.problem = error.message;
  }
  app.render();
}

function drawer(app) {
  const shown = app.local.record;
  if (!shown) return null;
  const { row } = shown;
  const close = () => {
    app.local.record = null;
    app.render();
  };
  return h(
    "aside",
    { class: "drawer", "aria-label": "the record" },
    h("header", {}, h("h2", { class: "mono" }, `${row.partition}:${num(row.offset)}`), badge(row.state), h("button", { class: "plain", onclick: close, "aria-label": "close" }, "✕")),
    h(
      "dl",
      { class: "facts small" },
      h("div", { class: "fact" }, h("dt", {}, row.timestamp_type), h("dd", { class: "mono" }, iso(row.timestamp_ms))),
      h("div", { class: "fact" }, h("dt", {}, "Compression"), h("dd", {}, row.codec)),
      row.producer_id === undefined ? null : h("div", { class: "fact" }, h("dt", {}, "Producer : epoch"), h("dd", { class: "mono" }, `${row.producer_id}:${row.producer_epoch}`)),
      row.control ? h("div", { class: "fact" }, h("dt", {}, "Marker"), h("dd", {}, `${row.control}, coordinator epoch ${row.coordinator_epoch}`)) : null,
    ),
    shown.problem ? h("div", { class: "banner bad" }, shown.problem) : null,
    row.control ? null : [
      whole("Key", row.key, "no key"),
      whole("Value", row.value, "tombstone: the value is null"),
      row.headers.length ? h("div", { class: "whole" }, h("h3", {}, "Headers"), h("table", {}, h("tbody", {}, row.headers.map(([name, value]) => h("tr", {}, h("th", { scope: "row", class: "mono" }, name), h("td", {}, cell(value, "null"))))))) : null,
      row.header_count > row.headers.length ? h("p", { class: "note" }, `and ${row.header_count - row.headers.length} more headers`) : null,
    ],
  );
}

// --- the search ---

const WHY = {
  limit: "as many as were asked for",
  budget: "the budget of one search is used up",
  end: "at the end",
  stopped: "stopped",
};

/** Save the found records as a file of JSON lines. */
function download(app, state) {
  const file = new Blob(state.rows.map((row) => `${JSON.stringify(row)}\n`), { type: "application/x-ndjson" });
  const made = document.createElement("a");
  made.href = URL.createObjectURL(file);
  made.download = `${app.params.name}.jsonl`;
  made.click();
  URL.revokeObjectURL(made.href);
}

function status(app, state) {
  const done = state.total ? Math.min(1, 1 - state.remaining / state.total) : state.running ? 0 : 1;
  const hidden = Object.entries(state.hidden ?? {}).map(([name, count]) => `${num(count)} ${name}`);
  return h(
    "div",
    { class: "search-status", role: "status", "aria-live": "polite" },
    h("div", { class: "progress", title: `${Math.round(100 * done)} %` }, h("span", { class: state.running ? "running" : "", style: { width: `${100 * done}%` } })),
    h(
      "div",
      { class: "search-counts" },
      h("span", {}, h("b", { id: "scanned" }, num(state.scanned)), " scanned"),
      h("span", {}, h("b", { id: "matched" }, num(state.matched)), " matched"),
      h("span", {}, h("b", { id: "remaining" }, num(state.remaining)), " offsets remaining"),
      h("span", { class: "note" }, bytes(state.bytes)),
      hidden.length ? h("span", { class: "note" }, `hidden by read_committed: ${hidden.join(", ")}`) : null,
      state.held && question(app).isolation !== "read_uncommitted" ? h("span", { class: "held-note" }, `${plural(state.held, "offset")} held back by an open transaction`) : null,
      state.running ? h("span", { class: "note" }, state.follow && !state.remaining ? "waits for new ones" : "searching …") : h("span", { class: "note", id: "ended" }, WHY[state.why] ?? ""),
      !state.running && state.resume && state.remaining > 0 ? h("button", { class: "plain", onclick: () => search(app, state.resume) }, "go on from here") : null,
      state.rows.length ? h("button", { class: "plain", onclick: () => download(app, state) }, "save as JSON") : null,
    ),
    state.problem ? h("div", { class: "banner bad", role: "alert" }, state.problem) : null,
  );
}

function rowsOf(app, state) {
  const newestFirst = ["newest", undefined].includes(app.params.from) || state.follow;
  const rows = newestFirst ? [...state.rows].sort((a, b) => b.timestamp_ms - a.timestamp_ms || b.offset - a.offset) : state.rows;
  if (!rows.length)
    return state.running
      ? null
      : empty(
          "No messages",
          state.remaining ? `None yet: ${plural(state.remaining, "offset")} were not looked at.` : state.scanned || state.total ? `All ${num(state.scanned)} that were looked at are hidden or do not match.` : "There is nothing in this range.",
        );
  return h(
    "div",
    { class: "table-wrap messages", role: "region", "aria-label": "messages", tabindex: "0" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ["Place", "Time", "Key", "Value", ""].map((one) => h("th", { scope: "col" }, one)))),
      h(
        "tbody",
        {},
        rows.slice(0, 500).map((row) =>
          h(
            "tr",
            { "data-key": `${row.partition}:${row.offset}`, class: `message ${row.state}` },
            h("td", {}, h("button", { class: "as-link mono", onclick: () => open(app, row) }, `${row.partition}:${num(row.offset)}`)),
            h("td", { class: "mono nowrap" }, h("time", { title: iso(row.timestamp_ms) }, time(row.timestamp_ms))),
            h("td", {}, row.control ? null : cell(row.key, "no key")),
            h("td", { class: "grow" }, row.control ? h("span", { class: "marker" }, `${row.control} marker of producer ${row.producer_id}:${row.producer_epoch}`) : cell(row.value, "tombstone")),
            h("td", { class: "nowrap" }, row.header_count ? h("span", { class: "note" }, plural(row.header_count, "header")) : null, " ", row.state === "plain" ? null : badge(row.state)),
          ),
        ),
      ),
    ),
    rows.length > 500 ? h("p", { class: "note" }, `the first 500 of ${num(rows.length)}`) : null,
  );
}

const text = (app, name, label, placeholder) =>
  field(label, h("input", { name, value: app.params[name] ?? "", placeholder, "data-search": name === "value" ? "1" : null }));

export function messagesTab(app) {
  const state = app.local.search ?? { running: true, rows: [], hidden: {}, scanned: 0, matched: 0, remaining: 0, bytes: 0, total: 0 };
  const isolation = app.params.isolation ?? "read_committed";
  const options = [["", "all"], ...app.data.partitions.slice(0, 500).map((row) => [row.partition, String(row.partition)])];
  const go = (form) => {
    const patch = Object.fromEntries(ASKED.filter((name) => form.elements[name]).map((name) => [name, form.elements[name].value]));
    const before = location.hash;
    app.set(patch);
    if (location.hash === before) search(app);
  };
  const same = `fencepost consume ${quoted(app.params.name ?? "")} --isolation ${isolation}`;
  return [
    card(
      "Messages",
      "",
      h(
        "form",
        {
          class: "form search",
          onsubmit: (event) => {
            event.preventDefault();
            if (state.running) state.abort?.abort();
            else go(event.target);
          },
        },
        h("div", { class: "field" }, h("span", {}, "Isolation level"), choice("isolation level", [["read_committed", "read_committed", "what a reader of committed records gets"], ["read_uncommitted", "read_uncommitted", "everything in the log: aborted and open records, and markers"]], isolation, (value) => app.set({ isolation: value }))),
        field("Partition", select(options, app.params.partition, (partition) => app.set({ partition }))),
        field("From", select(FROM, app.params.from ?? "newest", (from) => app.set({ from, follow: from === "latest" ? "1" : "" }))),
        app.params.from === "at" ? field("Offset or time", h("input", { name: "at", value: app.params.at ?? "", placeholder: "1234 or 2026-01-31T12:00" })) : null,
        text(app, "key", "Key has", "any"),
        text(app, "value", "Value has", "any"),
        text(app, "header", "Header has", "any"),
        field("At most", select([["20", "20"], ["100", "100"], ["500", "500"], ["1000", "1,000"]], app.params.limit ?? "100", (limit) => app.set({ limit }))),
        field("New ones", select([["", "leave out"], ["1", "wait for them"]], app.params.follow ?? "", (value) => app.set({ follow: value }))),
        h("button", { class: state.running ? "danger" : "primary", "data-go": "1" }, state.running ? "Stop" : "Search"),
      ),
      status(app, state),
      rowsOf(app, state),
      h("div", { class: "hint" }, h("span", { class: "note" }, "On the command line:"), command(app, same)),
    ),
    drawer(app),
  ];
}

// Components that several pages share.

import { h } from "./dom.js";
import { ago, duration, iso, num, plural, ranges, time } from "./format.js";

const ICONS = {
  overview: "M3 12l9-8 9 8M5 10v10h14V10M10 20v-6h4v6",
  transactions: "M4 8h14l-4-4M20 16H6l4 4",
  groups: "M8 11a3 3 0 100-6 3 3 0 000 6zM2 20c0-4 3-6 6-6s6 2 6 6M16 5a3 3 0 010 6M17 14c3 0 5 2 5 6",
  topics: "M4 6h16M4 12h16M4 18h10",
  doctor: "M12 4v16M4 12h16",
  theme: "M12 3a9 9 0 109 9 7 7 0 01-9-9z",
  help: "M9 9a3 3 0 115 2c-1 1-2 1.500-2 3M12 18v.01",
};

export const icon = (name) =>
  h("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, h("path", { d: ICONS[name] }));

/** A link to a view of the console, with its parameters in the URL. */
export function to(view, params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== "" && value != null));
  return `#/${view}${query.size ? `?${query}` : ""}`;
}

export const link = (view, params, text, more) =>
  h("a", { href: to(view, params), title: typeof text === "string" && more?.class?.includes("clip") ? text : null, ...more }, text);

const TONES = {
  Stable: "good",
  Empty: "quiet",
  Dead: "quiet",
  Ongoing: "warn",
  CompleteCommit: "good",
  CompleteAbort: "quiet",
  PrepareCommit: "info",
  PrepareAbort: "info",
  PreparingRebalance: "info",
  CompletingRebalance: "info",
  Assigning: "info",
  Reconciling: "info",
  committed: "good",
  aborted: "bad",
  open: "warn",
  undecided: "warn",
  control: "info",
};

export const badge = (text, tone) => h("span", { class: `badge ${tone ?? TONES[text] ?? "quiet"}` }, text);

export const mono = (text, more) => h("span", { class: "mono", ...more }, text);

export const when = (app, ms, { short = false } = {}) =>
  ms === null || ms === undefined
    ? "–"
    : h("time", { datetime: iso(ms), title: iso(ms) }, short ? ago(app.now() - ms) : time(ms, app.now()));

export const age = (app, ms) =>
  ms === null || ms === undefined ? "–" : h("time", { datetime: iso(ms), title: `since ${iso(ms)}` }, duration(app.now() - ms));

/** Partitions by topic, long lists folded into ranges. */
export const places = (list) =>
  list.length
    ? h("span", { class: "places" }, ranges(list).map(([name, text]) => h("span", { class: "place" }, mono(name), h("b", {}, text))))
    : h("span", { class: "quiet" }, "none");

export const card = (title, note, ...content) =>
  h(
    "section",
    { class: "card" },
    h("header", {}, h("h2", {}, title), note ? h("span", { class: "note" }, note) : null),
    content,
  );

export const fact = (name, ...value) => h("div", { class: "fact" }, h("dt", {}, name), h("dd", {}, value));

export const empty = (title, text) => h("div", { class: "empty" }, h("p", { class: "empty-title" }, title), text ? h("p", {}, text) : null);

export const skeleton = (rows = 6) =>
  h("div", { class: "skeleton", role: "status", "aria-label": "loading" }, Array.from({ length: rows }, () => h("div", {})));

/** Return the table, column and direction that the user sorts by, from the URL. */
const chosenOrder = () => {
  const [caption, title, way] = (new URLSearchParams(location.hash.split("?")[1] ?? "").get("sort") ?? "").split("~");
  return { caption, title, way };
};

function order(caption, title) {
  const [path, query] = location.hash.split("?");
  const params = new URLSearchParams(query ?? "");
  const now = chosenOrder();
  const mine = now.caption === caption && now.title === title;
  // A third click restores the original order.
  if (mine && now.way === "down") params.delete("sort");
  else params.set("sort", [caption, title, mine ? "down" : "up"].join("~"));
  location.hash = `${path}${params.size ? `?${params}` : ""}`;
}

/** Return the sort key of a cell: its time, its number, or its text; unknown values come last. */
function weight(cell) {
  const time = cell.querySelector("time")?.getAttribute("datetime");
  if (time) return [0, Date.parse(time)];
  const text = cell.textContent.trim();
  if (text === "" || text === "–" || text === "unknown") return [2, 0];
  const number = /^[≤\s]*(-?[\d,]+(?:\.\d+)?)/.exec(text);
  return number && cell.className.includes("right") ? [0, Number(number[1].replaceAll(",", ""))] : [1, text];
}

function compared(one, other) {
  if (one[0] !== other[0]) return one[0] - other[0];
  return typeof one[1] === "string" ? one[1].localeCompare(other[1], "en", { numeric: true }) : one[1] - other[1];
}

/** A table. `columns`: [title, cell(row), {right, grow, title, by}]; `key(row)` names a row, `by(row)` is a number to sort by. A click on a column's title sorts the rows that are shown. */
export function table(columns, rows, key, caption) {
  const now = chosenOrder();
  const by = now.caption === caption ? columns.findIndex(([title]) => title === now.title) : -1;
  const lines = rows.map((row) =>
    h(
      "tr",
      { "data-key": key(row) },
      columns.map(([, cell, more]) =>
        h("td", { class: [more?.right ? "right" : "", more?.grow ? "grow" : ""].join(" ").trim() || null }, cell(row)),
      ),
    ),
  );
  if (by >= 0) {
    const value = columns[by][2]?.by;
    const weights = new Map(lines.map((line, at) => [line, value ? [0, value(rows[at])] : weight(line.children[by])]));
    const sign = now.way === "down" ? -1 : 1;
    // Unknown values come last in either direction.
    lines.sort((a, b) => {
      const [one, other] = [weights.get(a), weights.get(b)];
      return (one[0] === 2 || other[0] === 2 ? 1 : sign) * compared(one, other);
    });
  }
  const sorted = (at) => (at === by ? (now.way === "down" ? "descending" : "ascending") : null);
  return h(
    "div",
    { class: "table-wrap", role: "region", "aria-label": caption, tabindex: "0" },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map(([title, , more], at) =>
            h(
              "th",
              { scope: "col", class: more?.right ? "right" : null, title: more?.title, "aria-sort": sorted(at) },
              rows.length > 1 ? h("button", { type: "button", class: "sort", onclick: () => order(caption, title) }, title, h("span", { "aria-hidden": "true" }, { ascending: " ↑", descending: " ↓" }[sorted(at)] ?? "")) : title,
            ),
          ),
        ),
      ),
      h("tbody", {}, lines),
    ),
  );
}

export function pager(app, found) {
  if (found.total <= found.limit) return h("p", { class: "pager" }, h("span", { class: "note" }, `${num(found.total)} in all`));
  const step = (offset, text, name, off) =>
    h("button", { class: "plain", "aria-label": name, "data-page": name, disabled: off, onclick: () => app.set({ offset: offset || "" }) }, text);
  const last = found.offset + found.rows.length;
  return h(
    "nav",
    { class: "pager", "aria-label": "pages" },
    step(found.offset - found.limit, "‹", "previous page", found.offset === 0),
    h("span", { class: "note" }, `${num(found.offset + 1)}–${num(last)} of ${num(found.total)}`),
    step(found.offset + found.limit, "›", "next page", last >= found.total),
  );
}

/** A box that filters a list; its text is in the URL. */
export const filterBox = (app, label) =>
  h("input", {
    type: "search",
    class: "filter",
    placeholder: label,
    "aria-label": label,
    value: app.params.q ?? "",
    "data-search": "1",
    oninput: (event) => app.setSoon({ q: event.target.value, offset: "" }),
  });

/** Buttons, one of which is chosen. */
export const choice = (label, options, chosen, pick) =>
  h(
    "div",
    { class: "choice", role: "group", "aria-label": label },
    options.map(([value, text, title]) =>
      h("button", { type: "button", title, "aria-pressed": String(value === chosen), onclick: () => pick(value) }, text),
    ),
  );

export const stateFilter = (app, states) => {
  const all = Object.values(states).reduce((sum, one) => sum + one, 0);
  const options = [["", `All ${num(all)}`], ...Object.entries(states).map(([name, count]) => [name, `${name || "unknown"} ${num(count)}`])];
  return choice("state", options, app.params.state ?? "", (state) => app.set({ state, offset: "" }));
};

export function field(label, control) {
  // Without it, the texts of a select's options would be part of its accessible name.
  control.setAttribute("aria-label", label);
  return h("label", { class: "field" }, h("span", {}, label), control);
}

export const select = (options, chosen, pick, more) =>
  h(
    "select",
    { onchange: (event) => pick(event.target.value), ...more },
    options.map(([value, text]) => h("option", { value, selected: String(value) === String(chosen ?? "") }, text)),
  );

export const tabs = (app, view, names, chosen, keep) =>
  h(
    "nav",
    { class: "tabs", "aria-label": "parts of this page" },
    names.map(([name, text]) =>
      h("a", { href: to(view, { ...keep, tab: name }), "aria-current": name === chosen ? "page" : null }, text),
    ),
  );

/** The equivalent command of the command line, with a button that copies it. */
export const command = (app, text) =>
  h(
    "div",
    { class: "command" },
    h("code", {}, text),
    h(
      "button",
      {
        class: "plain",
        type: "button",
        "aria-label": "copy the command",
        onclick: () => navigator.clipboard?.writeText(text).then(() => app.say("copied")),
      },
      "copy",
    ),
  );

/** Quote a word for a shell if necessary. */
export const quoted = (text) => (/^[\w.:@%+=,/-]+$/.test(text) ? text : `'${text.replaceAll("'", String.raw`'\''`)}'`);

const TOLD = {
  "group-created": ["The group was created", "info"],
  "group-deleted": ["The group was deleted", "quiet"],
  "group-upgraded": ["The group changed to the consumer protocol", "info"],
  "group-downgraded": ["The group changed to the classic protocol", "info"],
  "rebalance-started": ["Rebalance", "warn"],
  "group-epoch-bumped": ["New group epoch", "warn"],
  "rebalance-waits": ["Waits for members", "quiet"],
  "generation-started": ["Generation complete", "good"],
  "target-assigned": ["New target assignment", "good"],
  "assignment-refused": ["Assignment refused", "bad"],
  "assignor-failed": ["The assignor failed", "bad"],
  "member-joined": ["Member joined", "info"],
  "member-left": ["Member left", "quiet"],
  "member-expired": ["Member expired", "bad"],
  "member-fenced": ["Member fenced", "bad"],
  "member-reconciled": ["Member has its partitions", "quiet"],
  "pending-member-expired": ["A member that never joined expired", "quiet"],
  "pending-member-evicted": ["A member that never joined was evicted", "quiet"],
  "offsets-expired": ["Offsets expired", "warn"],
  "offsets-of-deleted-topic": ["Offsets of a deleted topic removed", "quiet"],
  "share-state-initialized": ["Share state initialized", "info"],
  "share-partition-loaded": ["Share partition opened", "info"],
  "share-partition-failed": ["Share partition failed", "bad"],
  "share-partition-fenced": ["Share partition dropped", "quiet"],
  "share-records-returned": ["Records are available again", "warn"],
  "share-records-given-up": ["Records were given up", "bad"],
  "share-records-dead-lettered": ["Records are in the dead-letter queue", "warn"],
  "share-dead-letter-failed": ["Not in the dead-letter queue", "bad"],
  "share-state-not-written": ["New states were not written", "bad"],
  "share-start-offset-moved": ["The log start passed the start offset", "warn"],
  "epoch-bumped": ["The id was claimed", "info"],
  "producer-id-rotated": ["New producer id", "info"],
  "producer-fenced": ["Producer fenced", "bad"],
  "producer-refused": ["Fenced producer refused", "bad"],
  "timeout-postponed": ["Timeout postponed", "quiet"],
  "transaction-aborted": ["Transaction aborted", "warn"],
  "transaction-committed": ["Transaction committed", "good"],
  "transaction-kept": ["Prepared transaction kept", "info"],
  "transaction-resumed": ["Transaction resumed", "info"],
  "transaction-timed-out": ["Transaction timed out", "bad"],
  "transactional-id-expired": ["The id expired", "quiet"],
  "broker-registered": ["Broker registered", "info"],
  "broker-fenced": ["Broker fenced", "bad"],
  "broker-unfenced": ["Broker is up", "good"],
  "broker-in-controlled-shutdown": ["Broker shuts down", "quiet"],
  "broker-unregistered": ["Broker forgotten", "quiet"],
};

const CAUSES = new Set(["rebalance-started", "group-epoch-bumped"]);

export const tellingOf = (what) => TOLD[what] ?? [what.replaceAll("-", " "), "quiet"];

function entry(app, row, { subject }) {
  const [title, tone] = tellingOf(row.what);
  const isCause = CAUSES.has(row.what);
  const client = [row.client, row.host].filter(Boolean).join(" @ ");
  const views = { group: "group", transaction: "transaction" };
  const view = views[row.scope];
  return h(
    "li",
    { class: `entry ${tone}${isCause ? " cause" : ""}`, "data-key": `${row.at_ms}-${row.what}-${row.subject}-${row.who}-${row.why}` },
    h("div", { class: "entry-time" }, when(app, row.at_ms)),
    h(
      "div",
      { class: "entry-body" },
      h(
        "div",
        { class: "entry-head" },
        h("b", {}, title),
        subject && view ? link(view, { id: row.subject, tab: view === "group" ? "why" : "" }, row.subject, { class: "mono clip" }) : null,
        subject && !view ? mono(row.subject, { class: "mono clip" }) : null,
        row.change ? h("span", { class: "change" }, row.change) : null,
      ),
      row.why && !row.trigger?.endsWith(` ${row.why}`) ? h("div", { class: "why" }, isCause ? [h("span", { class: "note" }, "because "), row.why] : row.why) : null,
      h(
        "details",
        {},
        h("summary", {}, [row.who ? mono(row.who, { class: "mono clip" }) : null, client ? h("span", { class: "clip" }, client) : null, row.trigger ? h("span", { class: "note" }, row.trigger) : null]),
        h("pre", {}, JSON.stringify(row.detail, null, 2)),
      ),
    ),
  );
}

/** Entries of the history, newest first, or a note that the cluster keeps no history. */
export function timeline(app, found, { subject = false, none = "Nothing happened yet." } = {}) {
  if (!found.kept)
    return empty(
      "No history",
      "Fencepost writes down why groups rebalance and producers are fenced, as soon as something happens. Apache Kafka keeps no such history: there nobody knows.",
    );
  if (!found.rows.length) return empty(none, "");
  return h("ol", { class: "timeline" }, found.rows.map((row) => entry(app, row, { subject })));
}

/** A bar with the offsets below and above the last stable offset. */
export function heldBar(row) {
  const first = Math.max(0, row.stable - Math.max(1, Math.round((row.end - row.stable) / 2)));
  const share = (100 * (row.stable - first)) / Math.max(1, row.end - first);
  return h(
    "div",
    { class: "held-bar", title: `stable ${num(row.stable)}, end ${num(row.end)}` },
    h("span", { class: "held-free", style: { width: `${share}%` } }),
    h("span", { class: "held-back" }),
  );
}

/** A lag, or a sum of lags. If a part of it is unknown, the cell says so. */
export const lagCell = (row) => {
  if (row.unknown) {
    const most = row.lag_at_most === null ? "there is no leader to ask" : `at most ${plural(row.lag_at_most, "record")}, from the log start`;
    const title = `nothing is committed, and auto.offset.reset decides where the members begin: ${most}`;
    return h("span", { class: "lag unknown", title }, row.lag_known ? `${num(row.lag_known)} and unknown` : "unknown");
  }
  if (row.progress) return h("span", { class: "quiet", title: "the progress of a Spark query: nothing is read from it" }, "none");
  if (row.lag === null || row.lag === undefined) return h("span", { class: "quiet" }, "–");
  return h("span", { class: row.lag ? "lag" : "lag zero" }, row.lag_is_exact === false ? "≤ " : "", num(row.lag));
};

export { num, plural };

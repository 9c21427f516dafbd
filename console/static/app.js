// The frame of all pages: routing, live data, keys. A page is a function from data to elements;
// everything that the user has chosen is in the URL.

import { Refused, follow, get, token } from "./api.js";
import { h, morphChildren } from "./dom.js";
import { duration, time } from "./format.js";
import { doctorPage } from "./doctor.js";
import { groupPage, groupsPage } from "./groups.js";
import { overviewPage } from "./overview.js";
import { empty, icon, link, skeleton, to } from "./parts.js";
import { topicPage, topicsPage } from "./topics.js";
import { transactionPage, transactionsPage } from "./transactions.js";

const PAGES = {
  overview: overviewPage,
  transactions: transactionsPage,
  transaction: transactionPage,
  doctor: doctorPage,
  groups: groupsPage,
  group: groupPage,
  topics: topicsPage,
  topic: topicPage,
};

const NAV = [
  ["overview", "Overview", "o"],
  ["transactions", "Transactions", "x"],
  ["groups", "Groups", "g"],
  ["topics", "Topics", "t"],
  ["doctor", "Doctor", "c"],
];

const THEMES = ["auto", "light", "dark"];
const TYPING_PAUSE_MS = 250;

const app = {
  view: "overview",
  params: {},
  data: null,
  about: null,
  away: null,
  pulse: { silent: [], away: null },
  refused: null,
  local: {},
  help: false,
  notice: "",
  skew: 0,
  now: () => Date.now() + app.skew,
  set(patch) {
    location.hash = to(app.view, { ...app.params, ...patch });
  },
  setSoon(patch) {
    clearTimeout(app.typing);
    app.typing = setTimeout(() => {
      history.replaceState(null, "", to(app.view, { ...app.params, ...patch }));
      routed();
    }, TYPING_PAUSE_MS);
  },
  say(text) {
    app.notice = text;
    clearTimeout(app.saying);
    app.saying = setTimeout(() => {
      app.notice = "";
      render();
    }, 2_500);
    render();
  },
  render: () => render(),
};

let stop = new AbortController();
let watched = "";

function routed() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const view = path === "" ? "overview" : Object.hasOwn(PAGES, path) ? path : "unknown";
  const params = Object.fromEntries(new URLSearchParams(query ?? ""));
  if (view !== app.view || params.id !== app.params.id || params.name !== app.params.name) {
    for (const one of Object.values(app.local)) one?.abort?.abort();
    app.local = {};
    app.data = null;
    scrollTo(0, 0);
  }
  app.view = view;
  app.path = path;
  app.params = params;
  watch();
  PAGES[view].routed?.(app);
  render();
}

function watch() {
  const wanted = PAGES[app.view].watch?.(app.params);
  if (!wanted) {
    stop.abort();
    watched = "";
    app.data = {};
    app.refused = app.away = null;
    return;
  }
  const key = JSON.stringify([app.view, wanted]);
  if (key === watched) return;
  watched = key;
  stop.abort();
  stop = new AbortController();
  app.refused = null;
  const { signal } = stop;
  follow(
    app.view,
    wanted,
    {
      data(data, at) {
        if (signal.aborted) return;
        app.data = data;
        app.skew = at - Date.now();
        app.at = at;
        app.away = app.refused = null;
        render();
      },
      pulse(told) {
        if (signal.aborted) return;
        const since = app.pulse.since ?? Date.now();
        app.pulse = { ...told, since: told.away ? since : null };
        render();
      },
      away(told) {
        if (signal.aborted) return;
        if (told.error !== "unreachable" && told.error !== "console" && told.error !== "too-many") {
          app.refused = new Refused(0, told);
        } else {
          app.away = { ...told, since: app.away?.since ?? Date.now() };
        }
        render();
      },
      refused(error) {
        if (signal.aborted) return;
        app.refused = error;
        render();
      },
    },
    signal,
  );
}

// --- rendering ---

// The liveness check may notice before the view does that no broker answers.
const away = () => app.away ?? (app.pulse.away ? { error: "unreachable", message: app.pulse.away, since: app.pulse.since } : null);

function banner() {
  const told = away();
  if (!told) return null;
  const title = told.error === "console" ? "The console does not answer" : told.error === "too-many" ? "Too many pages are open" : "No broker can be reached";
  return h(
    "div",
    { class: "banner", role: "alert" },
    h("span", { class: "spinner" }),
    h(
      "div",
      {},
      h("b", {}, title),
      h("span", {}, ` for ${duration(Date.now() - told.since)}. `),
      app.data ? `What you see is of ${time(app.at)}. ` : "",
      "It is tried again all the time.",
      h("div", { class: "note mono" }, told.message),
    ),
  );
}

function tokenForm() {
  return h(
    "form",
    {
      class: "card token",
      onsubmit: (event) => {
        event.preventDefault();
        const text = event.target.elements.token.value;
        token.set(decodeURIComponent(/#token=([^&\s]+)/.exec(text)?.[1] ?? text));
        watched = "";
        start();
      },
    },
    h("h2", {}, "Which token?"),
    token.get()
      ? h("div", { class: "banner bad", role: "alert" }, h("div", {}, h("b", {}, "That token is wrong. "), "It may be one of an earlier start of the console."))
      : null,
    h("p", {}, "This console answers only to whom it knows. Paste the token, or the whole URL, that ", h("code", {}, "fencepost console"), " printed when it started. A new start has a new token."),
    h("input", { name: "token", type: "password", autocomplete: "off", "aria-label": "token", autofocus: true }),
    h("button", { class: "primary" }, "Enter"),
  );
}

const KINDS = { group: ["groups", "group"], topic: ["topics", "topic"], transaction: ["transactions", "transactional id"] };

function missing() {
  const [list, kind] = KINDS[app.view];
  const name = app.params.id ?? app.params.name ?? "";
  return [
    h("p", { class: "crumb" }, link(list, {}, PAGES[list].title(app)), " / "),
    h("h1", { class: "mono" }, name),
    h("section", { class: "card", role: "alert" }, empty(name ? `There is no ${kind} of this name` : `Which ${kind}?`, [`${app.refused.message}. It may have been deleted, or the name is misspelt. `, link(list, {}, `All ${PAGES[list].title(app).toLowerCase()}`)])),
  ];
}

const unknownPage = {
  title: () => "No such page",
  view: () => [
    h("h1", {}, "No such page"),
    h("section", { class: "card", role: "alert" }, empty(`The console has no page “${app.path}”`, [...NAV.map(([view, text], at) => [at ? ", " : "There are ", link(view, {}, text)]), "."])),
  ],
};
PAGES.unknown = unknownPage;

function content() {
  const page = PAGES[app.view];
  if (app.refused?.status === 401) return tokenForm();
  if (app.refused && KINDS[app.view] && (/-not-found$|^unknown-topic/.test(app.refused.word) || !(app.params.id ?? app.params.name))) return missing();
  const gone = app.refused
    ? h("div", { class: "banner bad", role: "alert" }, h("div", {}, h("b", {}, "That was refused. "), app.refused.message))
    : null;
  if (!app.data)
    return [h("h1", {}, page.title(app)), gone ?? (away() ? null : skeleton())];
  return [gone, page.view(app)];
}

const KEYS = [
  ["?", "this help"],
  ["/", "filter, or search"],
  ["g then o, x, g, t, c", "overview, transactions, groups, topics, doctor"],
  ["j and k", "next and previous row"],
  ["Enter", "open it"],
  ["n and p", "next and previous page of a list"],
  ["s", "start or stop a search of messages"],
  ["d", "light, dark, or as the system"],
  ["Esc", "close, or leave a field"],
];

function helpOverlay() {
  if (!app.help) return null;
  const close = () => {
    app.help = false;
    render();
  };
  return h(
    "div",
    { class: "overlay", onclick: (event) => event.target.classList.contains("overlay") && close() },
    h(
      "div",
      { class: "dialog", role: "dialog", "aria-modal": "true", "aria-label": "keys" },
      h("header", {}, h("h2", {}, "Keys"), h("button", { class: "plain", onclick: close, "aria-label": "close" }, "✕")),
      h("dl", {}, KEYS.map(([keys, what]) => h("div", {}, h("dt", {}, keys.split(" ").map((one) => (["then", "and"].includes(one) ? ` ${one} ` : h("kbd", {}, one.replace(",", ""))))), h("dd", {}, what)))),
    ),
  );
}

const parent = { transaction: "transactions", group: "groups", topic: "topics" };

function shell() {
  const here = parent[app.view] ?? app.view;
  const state = away() ? "away" : app.refused?.status === 401 ? "locked" : app.data ? "live" : "wait";
  return h(
    "div",
    { class: "shell" },
    h("a", { class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); document.querySelector("main").focus(); } }, "to the content"),
    h(
      "aside",
      { inert: app.help },
      h("a", { class: "brand", href: to("overview") }, h("span", { class: "mark" }), h("span", {}, "Fencepost")),
      h(
        "nav",
        { "aria-label": "pages" },
        NAV.map(([view, text]) => link(view, {}, [icon(view), h("span", {}, text)], { "aria-current": view === here ? "page" : null })),
      ),
      h(
        "div",
        { class: "foot" },
        h("div", { class: `status ${state}`, role: "status" }, h("i", {}), { live: app.pulse.silent.length ? `live, broker ${app.pulse.silent.join(", ")} silent` : "live", away: "away", wait: "connecting", locked: "locked" }[state]),
        h("div", { class: "note mono clip", title: app.about?.bootstrap }, app.about?.bootstrap ?? ""),
        app.about ? h("div", { class: "note" }, app.about.allow_writes ? "may write" : "read only") : null,
        h(
          "div",
          { class: "tools" },
          h("button", { class: "plain", title: "light, dark, or as the system (d)", "aria-label": `theme: ${theme()}`, onclick: nextTheme }, icon("theme"), theme()),
          h("button", { class: "plain", title: "keys (?)", "aria-label": "help", onclick: () => { app.help = true; render(); } }, icon("help")),
        ),
      ),
    ),
    h("main", { id: "main", tabindex: "-1", inert: app.help }, banner(), content()),
    helpOverlay(),
    h("div", { class: "toast", role: "status", "aria-live": "polite" }, app.notice),
  );
}

let drawing = false;

function render() {
  if (drawing) return;
  drawing = true;
  queueMicrotask(() => {
    drawing = false;
    const root = document.getElementById("app");
    const next = h("div", {}, shell());
    morphChildren(root, next);
    document.title = `${PAGES[app.view].title(app)} · Fencepost`;
    if (app.help && !document.activeElement?.closest(".dialog")) root.querySelector(".dialog button")?.focus();
  });
}

// --- light and dark ---

function theme() {
  const kept = localStorage.getItem("fencepost-console-theme");
  return THEMES.includes(kept) ? kept : "auto";
}

function nextTheme() {
  localStorage.setItem("fencepost-console-theme", THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
  dress();
  render();
}

const dress = () => {
  document.documentElement.dataset.theme = theme();
};

// --- keys ---

const CHORD_MS = 2_000;
let chord = 0;

function rows() {
  return [...document.querySelectorAll("main tbody tr")].map((row) => row.querySelector("a, button")).filter(Boolean);
}

function keyed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const inField = event.target.closest?.("input, select, textarea");
  if (event.key === "Escape") {
    if (app.help) app.help = false;
    else if (app.local.record) app.local.record = null;
    else if (inField) inField.blur();
    render();
    return;
  }
  if (inField || app.help) return;
  const at = () => rows().indexOf(document.activeElement);
  const action = {
    "?": () => { app.help = true; render(); },
    "/": () => document.querySelector("[data-search]")?.focus(),
    j: () => rows()[Math.min(at() + 1, rows().length - 1)]?.focus(),
    k: () => rows()[Math.max(at() - 1, 0)]?.focus(),
    n: () => document.querySelector('[data-page="next page"]')?.click(),
    p: () => document.querySelector('[data-page="previous page"]')?.click(),
    s: () => document.querySelector("[data-go]")?.click(),
    d: nextTheme,
  };
  const page = Date.now() - chord < CHORD_MS ? NAV.find(([, , key]) => key === event.key) : null;
  chord = 0;
  if (page) location.hash = to(page[0]);
  else if (event.key === "g") chord = Date.now();
  else if (Object.hasOwn(action, event.key)) action[event.key]();
  else return;
  event.preventDefault();
}

// --- start ---

async function start() {
  routed();
  try {
    app.about = await get("about");
    render();
  } catch {
    // The page's own stream says what is wrong.
  }
}

token.takeFromUrl();
dress();
addEventListener("hashchange", () => {
  clearTimeout(app.typing);
  const had = token.get();
  token.takeFromUrl();
  if (token.get() !== had) watched = "";
  routed();
});
addEventListener("keydown", keyed);
setInterval(() => document.hidden || render(), 1_000);
start();

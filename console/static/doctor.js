// The rules of exactly-once that clients break, with the request that shows each breach.

import { h } from "./dom.js";
import { badge, card, command, empty, fact, link, plural, when } from "./parts.js";

const shown = (fields) =>
  Object.entries(fields)
    .map(([name, value]) => `${name}=${value}`)
    .join(", ");

function finding(app, row) {
  return card(
    row.what,
    badge(row.level, row.level === "breaks" ? "bad" : "warn"),
    h(
      "dl",
      { class: "facts" },
      fact("Rule", h("span", { title: row.title }, row.rule)),
      row.request ? fact("Client", `${row.client_id || "(no client id)"} @ ${row.host}`) : null,
      row.request ? fact("Request", row.request, " ", when(app, row.at_ms)) : null,
      fact(row.request ? "Fields" : "Setting", h("span", { class: "mono" }, shown(row.fields))),
      row.group ? fact("Group", link("group", { id: row.group }, row.group, { class: "mono" })) : null,
      row.transactional_id ? fact("Transactional id", link("transaction", { id: row.transactional_id }, row.transactional_id, { class: "mono" })) : null,
    ),
    h("p", {}, row.why),
    h("p", {}, h("b", {}, "To change: "), row.change),
  );
}

export const doctorPage = {
  title: () => "Doctor",
  watch: () => ({}),
  view(app) {
    const { findings, observes, dropped } = app.data;
    return [
      h("h1", {}, "Doctor"),
      observes ? null : h("p", { class: "note" }, "The brokers have recorded no requests. Only settings were checked."),
      dropped ? h("p", { class: "note" }, `${plural(dropped, "observation")} were too many to be recorded.`) : null,
      findings.length
        ? findings.map((row) => finding(app, row))
        : empty("Nothing found", "No request shows that a rule of exactly-once is broken."),
      h("div", { class: "hint" }, h("span", { class: "note" }, "The same in a terminal, also for one group:"), command(app, "fencepost doctor")),
    ];
  },
};

// The cell of a broker of a cluster: its brokers, and the NATS nodes that keep its journal.

import { make, set, write } from "./dom.js";
import { built, number, section, table, text } from "./tables.js";
import * as words from "./words.js";

/** Return the section of the cell; its `update` property takes a summary. It is hidden where there is none. */
export function cell() {
  const line = make("p", { class: "faint" });
  const verdict = make("p", { role: "status" });
  const [brokers, nodes] = [brokerTable(), nodeTable()];
  const part = section("Cell", line, brokers, nodes, verdict);
  part.update = (summary) => {
    set(part, "hidden", !summary.cell);
    if (!summary.cell) return;
    const { cell, owner, epoch, journal } = summary.cell;
    write(line, `${cell}, owned by ${owner ?? "no broker just now"} in epoch ${epoch}`);
    brokers.update(summary.cell.brokers);
    nodes.update(journal.nodes);
    write(verdict, [...journal.notes, summary.cell.verdict].join(". "));
  };
  return part;
}

function brokerTable() {
  return table({
    label: "Brokers",
    key: (each) => each.name,
    empty: make("p", { class: "empty" }, "No broker announces itself."),
    columns: [
      text("Broker", (each) => each.name, "name"),
      built("Role", () => state((each) => (each.role === "gone" ? "bad" : "good"), (each) => each.role), "state"),
      text("Address", (each) => each.address),
      number("Lag", (each) => (each.lag === null ? "?" : words.count(each.lag))),
    ],
  });
}

function nodeTable() {
  const kind = (each) => (each.current ? "good" : each.state === "lags" ? "warn" : "bad");
  return table({
    label: "NATS nodes",
    key: (each) => each.name,
    empty: make("p", { class: "empty" }, "No NATS node answers."),
    columns: [
      text("NATS node", (each) => `${each.name} (${each.role})`, "name"),
      built("State", () => state(kind, (each) => each.why || each.state), "state"),
      number("Lag", (each) => words.count(each.lag)),
      number("Missing", (each) => words.count(each.missing)),
      number("Damaged", (each) => words.count(each.damaged)),
    ],
  });
}

function state(kind, say) {
  const element = make("span");
  element.update = (item) => {
    set(element, "class", `mark ${kind(item)}`);
    write(element, say(item));
  };
  return element;
}

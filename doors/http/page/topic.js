// One topic: its partitions, publishing, the live tail, and its messages.

import * as broker from "./broker.js";
import { make, set, write } from "./dom.js";
import { browser } from "./messages.js";
import { number, section, table, text } from "./tables.js";
import { tail } from "./tail.js";
import * as words from "./words.js";

/** Return the view of a topic; its `update` takes a summary, its `leave` ends what goes on in it. */
export function topicView(name, history) {
  const numbers = make("p", { class: "faint" });
  const rest = make("div");
  const back = make("a", { href: "#/", class: "back" }, "← Overview");
  const view = make("div", { class: "topic" }, back, make("h1", { tabindex: "-1" }, name), numbers, rest);
  let parts = null;
  view.update = (summary) => {
    const found = summary.topics.find((each) => each.topic.name === name);
    write(numbers, found ? describe(found.topic, history) : `There is no topic ${name}.`);
    if (!found) {
      parts?.leave();
      parts = null;
      rest.replaceChildren();
    } else {
      parts ??= content(rest, found.topic);
      parts.update();
    }
  };
  view.leave = () => parts?.leave();
  return view;
}

function describe(topic, history) {
  const rate = words.rate(history.rate("published", topic.name));
  return `${words.plural(topic.messages, "message")}, ${words.bytes(topic.bytes)}, ${rate} published`;
}

function content(rest, topic) {
  const live = tail(topic.name);
  const stored = browser(topic.name, topic.partitions);
  const logs = partitions();
  const publishing = publisher(topic.name, topic.partitions);
  rest.replaceChildren(make("div", { class: "pair" }, publishing, live), stored, logs);
  return { update: () => look(topic.name, [stored, logs]), leave: () => live.stop() };
}

async function look(name, parts) {
  try {
    const { partitions } = await broker.topic(name);
    parts.forEach((part) => part.update(partitions));
  } catch {
    // the summary says by itself that the broker or the topic is gone
  }
}

function partitions() {
  const list = table({
    label: "Partitions",
    key: (each) => each.partition,
    empty: make("p", { class: "empty" }, "Reading…"),
    columns: [
      number("Partition", (each) => each.partition),
      number("First offset", (each) => words.count(each.first_offset)),
      number("Next offset", (each) => words.count(each.next_offset)),
      number("Messages", (each) => words.count(each.messages)),
      number("Size", (each) => words.bytes(each.bytes)),
      number("Segments", (each) => words.count(each.segments)),
      text("Status", (each) => (each.reason ? `${each.status}: ${each.reason}` : each.status), "state"),
    ],
  });
  const part = section("Partitions", list);
  part.update = list.update;
  return part;
}

function publisher(topic, partitions) {
  const value = make("textarea", { name: "value", rows: 4, required: true, spellcheck: "false" });
  const key = make("input", { name: "key", autocomplete: "off", spellcheck: "false" });
  const choices = Array.from({ length: partitions }, (_, each) => make("option", { value: each }, String(each)));
  const either = make("option", { value: "" }, "by key, or in turn");
  const partition = make("select", { name: "partition" }, either, ...choices);
  const button = make("button", { type: "submit", class: "primary" }, "Publish");
  const status = make("p", { role: "status", class: "faint" });

  async function send(event) {
    event.preventDefault();
    set(button, "disabled", true);
    try {
      const { id } = await broker.publish(topic, message(value.value, key.value, partition.value));
      write(status, `Stored as ${id}.`);
      value.value = "";
    } catch (error) {
      write(status, `Not published: ${error.message}`);
    }
    set(button, "disabled", false);
    value.focus();
  }

  value.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  const form = make(
    "form",
    { class: "stack", onsubmit: send, "aria-label": "Publish a message" },
    make("label", {}, "Value", value),
    make("div", { class: "row" }, make("label", {}, "Key ", key), make("label", {}, "Partition ", partition)),
    make("div", { class: "row" }, button, status),
  );
  return section("Publish", form);
}

function message(value, key, partition) {
  return { value, ...(key ? { key } : {}), ...(partition === "" ? {} : { partition: Number(partition) }) };
}

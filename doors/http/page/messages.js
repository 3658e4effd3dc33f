// Messages: as lines that open, and browsed by offset or time.

import * as broker from "./broker.js";
import { make, set, write } from "./dom.js";
import { section } from "./tables.js";
import * as words from "./words.js";

const PAGE = 50; // messages at a time

/** Return a message as a line that opens. */
export function messageLine(message) {
  const summary = make(
    "summary",
    {},
    make("span", { class: "place" }, `${message.partition}/${message.offset}`),
    make("time", { datetime: message.timestamp }, words.moment(message.timestamp)),
    message.key === null ? null : make("span", { class: "key" }, message.key),
    make("span", { class: "value" }, message.value.slice(0, 300)),
  );
  const line = make("details", { class: "message", "data-id": message.id }, summary);
  line.addEventListener("toggle", () => line.children.length > 1 || line.append(...inside(message)), { once: true });
  return line;
}

function inside(message) {
  const headers = Object.entries(message.headers).map(([name, value]) => make("li", {}, `${name}: ${value}`));
  const note = message.encoding ? make("p", { class: "faint" }, "Not text: shown as base64.") : null;
  const list = headers.length ? make("ul", { class: "plain faint" }, ...headers) : null;
  return [list, note, make("pre", { tabindex: "0" }, words.pretty(message.value))].filter(Boolean);
}

/** Return the part of a topic's view that browses; its `update` property takes the state of the partitions. */
export function browser(topic, partitions) {
  const list = make("div", { class: "messages", role: "group", "aria-label": "Messages" });
  const status = make("p", { role: "status", class: "faint" });
  const fields = searchFields(partitions);
  const older = make("button", { type: "button", onclick: () => show(shown.first - PAGE) }, "Older");
  const newer = make("button", { type: "button", onclick: () => show(shown.next) }, "Newer");
  let shown = { first: 0, next: 0 };

  async function show(offset) {
    try {
      const partition = fields.partition.value;
      const { low_watermark: low, high_watermark: high } = await broker.watermarks(topic, partition);
      const from = typeof offset === "number" ? Math.min(Math.max(offset, low), high) : offset;
      const messages = await read(topic, partition, from, high);
      list.replaceChildren(...messages.map(messageLine));
      const first = messages[0]?.offset ?? high;
      shown = { first, next: (messages.at(-1)?.offset ?? high - 1) + 1 };
      set(older, "disabled", first <= low);
      offerNewer(high);
      write(status, describe(messages, low, high));
    } catch (error) {
      write(status, error.message);
    }
  }

  function offerNewer(high) {
    set(newer, "disabled", shown.next >= high);
  }

  async function search(event) {
    event?.preventDefault();
    try {
      await show(await fields.wanted(topic));
      if (fields.from.value === "newest") list.scrollTop = list.scrollHeight;
    } catch (error) {
      write(status, error.message);
    }
  }

  fields.form.addEventListener("submit", search);
  const part = section("Messages", fields.form, list, make("div", { class: "row" }, older, newer, status));
  part.update = (states) => offerNewer(states[fields.partition.value].next_offset);
  search();
  return part;
}

/** Return a page of messages. The broker answers with what lies together, so that it may take several questions. */
async function read(topic, partition, from, high) {
  const found = [];
  let at = from;
  while (found.length < PAGE) {
    const { messages } = await broker.messages(topic, partition, at, PAGE - found.length);
    found.push(...messages);
    at = (messages.at(-1)?.offset ?? high) + 1;
    if (at >= high) break;
  }
  return found;
}

function describe(messages, low, high) {
  const kept = high > low ? `${words.count(low)} to ${words.count(high - 1)}` : "none";
  return `${messages.length ? words.plural(messages.length, "message") : "Nothing here"}; offsets kept: ${kept}.`;
}

function searchFields(partitions) {
  const numbers = Array.from({ length: partitions }, (_, number) => make("option", { value: number }, String(number)));
  const partition = make("select", { name: "partition" }, ...numbers);
  const options = [["newest", "the newest"], ["oldest", "the oldest"], ["offset", "offset"], ["time", "time"]];
  const from = make("select", { name: "from" }, ...options.map(([value, title]) => make("option", { value }, title)));
  const offset = make("input", { name: "offset", type: "number", min: 0, step: 1, value: 0, "aria-label": "Offset" });
  const time = make("input", { name: "time", type: "datetime-local", step: 1, "aria-label": "Time" });
  const choose = () => {
    offset.hidden = from.value !== "offset";
    time.hidden = from.value !== "time";
  };
  from.addEventListener("change", choose);
  choose();
  const form = make(
    "form",
    { class: "row", "aria-label": "Browse messages" },
    make("label", {}, "Partition ", partition),
    make("label", {}, "from ", from),
    offset,
    time,
    make("button", { type: "submit" }, "Show"),
  );
  const chosen = (topic) => wanted(topic, partition.value, from.value, offset.value, time.value);
  return { form, partition, from, wanted: chosen };
}

/** Return where to begin: an offset, or a time as text. */
async function wanted(topic, partition, from, offset, time) {
  if (from === "offset") return Number(offset);
  if (from === "oldest") return 0;
  if (from === "newest") return (await broker.watermarks(topic, partition)).high_watermark - PAGE;
  if (!time) throw new Error("Choose a time first.");
  return new Date(time).toISOString();
}

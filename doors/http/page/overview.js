// The overview: every topic, subscription and group, and what was given up.

import * as broker from "./broker.js";
import { cell } from "./cell.js";
import { keep, make, set, sparkline, write } from "./dom.js";
import { deadLetters } from "./letters.js";
import { built, number, section, table, text } from "./tables.js";
import * as words from "./words.js";

const EXPLAIN_EVERY = 5; // seconds between questions why a subscription stands still

/** Return the overview; its `update` property takes a summary. */
export function overview(history) {
  const parts = [glance(history), cell(), topics(history), subscriptions(history), groups(), deadLetters()];
  const view = make("div", {}, make("h1", { class: "unseen", tabindex: "-1" }, "Overview"), ...parts);
  view.update = (summary) => parts.forEach((part) => part.update(summary));
  return view;
}

function glance(history) {
  const published = tile("Published", sparkline());
  const delivered = tile("Delivered", sparkline());
  const fsync = tile("Fsync, median");
  const connections = tile("Connections");
  const part = make("dl", { class: "tiles" }, published, delivered, fsync, connections);
  part.update = (summary) => {
    const topics = summary.topics.map((each) => each.topic.name);
    const names = summary.subscriptions.map((each) => each.numbers.subscription_id);
    drawTotal(published.chart, history, "published", topics);
    drawTotal(delivered.chart, history, "delivered", names);
    published.show(words.rate(total(history, "published", topics)), `${bytesRate(history, topics)} to disk`);
    delivered.show(words.rate(total(history, "delivered", names)), words.plural(names.length, "subscription"));
    const bounds = summary.fsync.bounds;
    const latency = (quantile) => words.latency(history.fsync(quantile, bounds), bounds.at(-1));
    fsync.show(latency(0.5), `99 of 100 in ${latency(0.99)}`);
    connections.show(words.count(sum(Object.values(summary.connections))), doors(summary.connections));
  };
  return part;
}

function tile(title, chart) {
  const value = make("span", { class: "value" });
  const note = make("span", { class: "faint" });
  const box = make("div", {}, make("dt", {}, title), make("dd", {}, value, chart, note));
  box.chart = chart;
  box.show = (main, more) => {
    write(value, main);
    write(note, more);
  };
  return box;
}

function drawTotal(chart, history, kind, names) {
  const series = names.map((name) => history.rates(kind, name));
  const length = Math.max(0, ...series.map((each) => each.length));
  chart.draw(Array.from({ length }, (_, index) => sum(series.map((each) => each[index]))));
}

const sum = (numbers) => numbers.reduce((so_far, each) => so_far + each, 0);
const total = (history, kind, names) => sum(names.map((name) => history.rate(kind, name)));
const bytesRate = (history, topics) => `${words.bytes(total(history, "bytes", topics))}/s`;
const doors = (open) =>
  Object.entries(open).filter(([, number]) => number).map(([door, number]) => `${door} ${number}`).join(", ");

function topics(history) {
  const name = (each) => each.topic.name;
  const list = table({
    label: "Topics",
    key: name,
    empty: hint("No topics yet. Make one with ", "qb create-topic orders"),
    columns: [
      built("Topic", () => topicLink(name), "name"),
      number("Partitions", (each) => words.count(each.topic.partitions)),
      number("Messages", (each) => words.count(each.topic.messages)),
      number("Size", (each) => words.bytes(each.topic.bytes)),
      number("Published", (each) => words.rate(history.rate("published", name(each)))),
      built("Last minute", () => chart((each) => history.rates("published", name(each))), "chart"),
    ],
  });
  const part = section("Topics", list);
  part.update = (summary) => list.update(summary.topics, summary.omitted.topics);
  return part;
}

function topicLink(nameOf) {
  const link = make("a");
  link.update = (item) => {
    set(link, "href", `#/topics/${nameOf(item)}`);
    write(link, nameOf(item));
  };
  return link;
}

function chart(valuesOf) {
  const svg = sparkline();
  svg.update = (item) => svg.draw(valuesOf(item));
  return svg;
}

function hint(before, command) {
  return make("p", { class: "empty" }, before, make("code", {}, command));
}

function subscriptions(history) {
  const name = (each) => each.numbers.subscription_id;
  const list = table({
    label: "Subscriptions",
    key: name,
    empty: hint("No subscriptions yet. Make one with ", "qb create-subscription billing orders"),
    columns: [
      text("Subscription", name, "name"),
      built("Topic", () => topicLink((each) => each.topic)),
      number("Lag", (each) => words.count(each.numbers.lag)),
      built("Last minute", () => chart((each) => history.values("lag", name(each))), "chart"),
      number("In flight", (each) => words.count(each.numbers.in_flight)),
      number("Subscribers", (each) => words.count(each.subscribers)),
      number("Delivered", (each) => words.rate(history.rate("delivered", name(each)))),
      built("State", () => subscriptionState(history), "state"),
    ],
  });
  const part = section("Subscriptions", list);
  part.update = (summary) => list.update(summary.subscriptions, summary.omitted.subscriptions);
  return part;
}

function subscriptionState(history) {
  const mark = make("span", { class: "mark" });
  const why = make("span", { class: "why" });
  const cell = make("div", {}, mark, " ", why);
  let asked = 0;
  cell.update = (item) => {
    const stuck = history.stuckFor(item.numbers.subscription_id);
    set(mark, "class", `mark ${stuck ? "bad" : plainState(item).kind}`);
    write(mark, stuck ? `stuck for over ${words.seconds(stuck)}` : plainState(item).words);
    if (!stuck) {
      asked = 0;
      write(why, item.fault ?? "");
    } else if (now() - asked >= EXPLAIN_EVERY) {
      asked = now();
      explainInto(why, item.numbers);
    }
  };
  return cell;
}

const now = () => performance.now() / 1000;

function plainState({ numbers, fault }) {
  if (fault) return { kind: "bad", words: "stands still" };
  if (numbers.paused) return { kind: "warn", words: "paused" };
  if (numbers.outage) return { kind: "warn", words: "outage: only probes go out" };
  return numbers.lag ? { kind: "busy", words: "delivering" } : { kind: "good", words: "up to date" };
}

/** Write why the oldest message of a subscription is not settled. */
async function explainInto(element, numbers) {
  try {
    const { partitions } = await broker.subscription(numbers.subscription_id);
    const where = partitions.find((each) => each.floor < each.end);
    if (!where) return;
    const { text } = await broker.explain(numbers.subscription_id, where.partition, where.floor);
    write(element, `Offset ${where.floor} of partition ${where.partition}: ${text}`);
  } catch {
    // the summary says by itself that the broker or the subscription is gone
  }
}

function groups() {
  const list = table({
    label: "Groups",
    key: (each) => each.group,
    empty: make("p", { class: "empty" }, "No consumer groups."),
    columns: [
      text("Group", (each) => each.group, "name"),
      text("State", (each) => (each.fault ? `${each.state}; ${each.fault}` : each.state)),
      number("Members", (each) => words.count(each.members)),
      number("Lag", (each) => words.count(each.lag)),
      built("Assignment", assignment, "state"),
    ],
  });
  const part = section("Groups", list);
  part.update = (summary) => list.update(summary.groups, summary.omitted.groups);
  return part;
}

function assignment() {
  const lines = make("ul", { class: "plain" });
  lines.update = (group) => keep(lines, held(group), ([who]) => who, line);
  return lines;
}

function line() {
  const item = make("li");
  item.update = ([who, partitions]) => write(item, `${who}: ${partitions.join(", ")}`);
  return item;
}

/** Return the partitions by member: `topic/partition`, with its lag if it has some. */
function held(group) {
  const found = new Map();
  for (const { member, topic, partition, lag } of group.partitions) {
    const place = `${topic}/${partition}${lag ? ` (${words.count(lag)} behind)` : ""}`;
    const who = member ?? "unassigned";
    found.set(who, [...(found.get(who) ?? []), place]);
  }
  if (group.partitions_omitted) found.set("partitions", [words.count(group.partitions_omitted)]);
  return [...found];
}

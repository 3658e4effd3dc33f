// Dead letters: what subscriptions have given up, and another try.

import * as broker from "./broker.js";
import { keep, make, set, write } from "./dom.js";
import { built, number, section, table, text } from "./tables.js";
import * as words from "./words.js";

const LOOK_EVERY = 10; // seconds between looks at letters of which the count has not changed

/** Return the section of dead letters; its `update` property takes a summary. */
export function deadLetters() {
  const boxes = make("div");
  const part = section("Dead letters", boxes);
  part.update = (summary) => {
    const having = summary.subscriptions.filter((each) => each.numbers.dead_lettered);
    keep(boxes, having, (each) => each.numbers.subscription_id, (each) => letterBox(each.numbers.subscription_id));
    set(part, "hidden", ![...boxes.children].some((each) => !each.hidden));
  };
  return part;
}

function letterBox(subscription) {
  const status = make("span", { role: "status", class: "faint" });
  const all = make("button", { type: "button", onclick: () => retry() }, "Retry all");
  const list = table({
    label: `Dead letters of ${subscription}`,
    key: (each) => each.number,
    empty: make("p", { class: "empty" }, "None left."),
    columns: [
      text("Message", (each) => `${each.topic}/${each.partition}/${each.offset}`, "name"),
      number("Attempts", (each) => words.count(each.attempts)),
      text("Reason", (each) => each.reason || "none was given", "state"),
      text("Value", (each) => each.value.slice(0, 200), "value"),
      built("", () => retryButton(retry)),
    ],
  });
  const head = make("div", { class: "row" }, make("h3", {}, subscription), all, status);
  const box = make("div", { hidden: true }, head, list);
  let seen = { count: 0, at: 0 };

  async function look() {
    try {
      const { dead_letters } = await broker.deadLetters(subscription);
      list.update(dead_letters);
      box.hidden = !dead_letters.length;
      write(all, `Retry all ${words.count(dead_letters.length)}`);
    } catch (error) {
      write(status, error.message);
    }
  }

  async function retry(numbers) {
    try {
      await broker.retry(subscription, numbers);
      write(status, "On the way to the subscribers again.");
    } catch (error) {
      write(status, `Not retried: ${error.message}`);
    }
    await look();
  }

  box.update = ({ numbers }) => {
    const now = performance.now() / 1000;
    if (numbers.dead_lettered === seen.count && now - seen.at < LOOK_EVERY) return;
    seen = { count: numbers.dead_lettered, at: now };
    look();
  };
  return box;
}

function retryButton(retry) {
  const button = make("button", { type: "button" }, "Retry");
  button.update = ({ number, topic, partition, offset }) => {
    set(button, "aria-label", `Retry ${topic}/${partition}/${offset}`);
    button.onclick = () => retry([number]);
  };
  return button;
}

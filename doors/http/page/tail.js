// The live tail: messages as they come, by Server-Sent Events.

import * as broker from "./broker.js";
import { make, set, write } from "./dom.js";
import { messageLine } from "./messages.js";
import { section } from "./tables.js";
import * as words from "./words.js";

const SHOWN = 200; // messages; older ones make room
const AGAIN = 1000; // ms until a stream that was refused is tried again

/** Return the part of a topic's view that follows; its `stop` property ends it. */
export function tail(topic) {
  const list = make("div", { class: "messages tail", role: "log", "aria-label": "Live tail", "aria-live": "off" });
  const status = make("span", { role: "status", class: "faint" }, "Off");
  const button = make("button", { type: "button", "aria-pressed": "false", onclick: toggle }, "Follow");
  const part = section("Live tail", make("div", { class: "row" }, button, status), list);
  const stream = new Stream(topic, { status: (text) => write(status, text), came: paint(list) });

  function toggle() {
    if (stream.on) stream.stop();
    else stream.start();
    set(button, "aria-pressed", stream.on);
    write(button, stream.on ? "Stop" : "Follow");
  }

  part.stop = () => stream.stop();
  toggle();
  return part;
}

/** Return a function that takes messages and shows them with the next frame, the newest first. */
function paint(list) {
  let waiting = [];
  return (message) => {
    if (!waiting.length) {
      requestAnimationFrame(() => {
        list.prepend(...waiting.slice(-SHOWN).reverse().map(messageLine));
        while (list.children.length > SHOWN) list.lastElementChild.remove();
        waiting = [];
      });
    }
    waiting.push(message);
  };
}

class Stream {
  on = false;
  #source = null;
  #timer = 0;
  #count = 0;
  #missed = 0;
  #next = {}; // partition -> the offset that comes next

  constructor(topic, { status, came }) {
    this.topic = topic;
    this.status = status;
    this.came = came;
  }

  start() {
    this.on = true;
    this.#next = {};
    this.#missed = 0;
    this.#open();
  }

  stop() {
    this.on = false;
    clearTimeout(this.#timer);
    this.#source?.close();
    this.status("Off");
  }

  #open() {
    this.status("Connecting");
    this.#source = new EventSource(broker.tailAddress(this.topic));
    this.#source.addEventListener("joined", (event) => this.#joined(JSON.parse(event.data)));
    this.#source.addEventListener("end", (event) => this.#again(JSON.parse(event.data).reason));
    this.#source.addEventListener("message", (event) => this.#came(JSON.parse(event.data)));
    this.#source.addEventListener("error", () => this.#again("Disconnected"));
  }

  /** The browser would skip what came between; opening anew, we can at least say how much that was. */
  #again(reason) {
    this.#source.close();
    this.status(`${reason}. Trying again.`);
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#open(), AGAIN);
  }

  #joined({ next_offsets }) {
    for (const [partition, offset] of Object.entries(next_offsets)) {
      this.#missed += Math.max(0, offset - (this.#next[partition] ?? offset));
      this.#next[partition] = offset;
    }
    this.#report();
  }

  #came(message) {
    this.#count += 1;
    this.#next[message.partition] = message.offset + 1;
    this.came(message);
    this.#report();
  }

  #report() {
    const missed = this.#missed ? `; ${words.count(this.#missed)} came while disconnected and are not shown` : "";
    this.status(`Following: ${words.plural(this.#count, "message")}${missed}`);
  }
}

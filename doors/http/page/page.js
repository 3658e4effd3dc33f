// The live page: asks for a summary every second, and shows it in the view that the address names.

import * as broker from "./broker.js";
import { set, write } from "./dom.js";
import { History } from "./history.js";
import { loginForm, showSession } from "./login.js";
import { overview } from "./overview.js";
import { topicView } from "./topic.js";
import { clock } from "./words.js";

const EVERY = 1000; // ms between summaries

const main = document.getElementById("main");
const link = document.getElementById("link");
const trouble = document.getElementById("trouble");
const history = new History();
let view = null;
let latest = null; // the newest summary
let seen = null; // when it came

function choose() {
  const [, name] = location.hash.match(/^#\/topics\/([\w.-]+)$/) ?? [];
  return name ? topicView(name, history) : overview(history);
}

function route(event) {
  if (location.hash === "#main") return; // the skip link
  view?.leave?.();
  view = choose();
  main.replaceChildren(view);
  if (latest) view.update(latest);
  if (event) view.querySelector("h1").focus({ preventScroll: true });
}

async function look() {
  try {
    show(await broker.summary());
  } catch (error) {
    if (error.status === 401) askToLogIn();
    else if (error instanceof broker.Refused) tellTrouble("Not ready", `The broker is not ready: ${error.message}.`);
    else tellDisconnected();
  }
}

function askToLogIn() {
  showState("bad", "Logged out");
  trouble.hidden = true;
  set(main, "class", null);
  latest = null;
  if (!main.querySelector("form[aria-label='Log in']")) main.replaceChildren(loginForm(enter));
}

async function enter() {
  await known();
  route();
  await look();
}

const known = () =>
  showSession(document.getElementById("session"), document.getElementById("warning"), enter).catch(() => {});

function show(summary) {
  if (link.dataset.state !== "good") history.restart();
  latest = summary;
  seen = new Date();
  history.add(summary, performance.now() / 1000);
  write(document.getElementById("version"), summary.version);
  showStatus(summary.status);
  set(main, "class", null);
  view.update(summary);
}

function showStatus({ reason, damaged = [], unfinished = [], cluster = [] }) {
  showState("good", "Connected");
  const faults = [...(reason ? [reason] : []), ...damaged, ...unfinished, ...cluster];
  trouble.hidden = !faults.length;
  write(trouble, faults.join(" "));
}

function tellDisconnected() {
  const since = seen ? ` What you see is from ${clock(seen)}.` : "";
  tellTrouble("Disconnected", `Disconnected: the broker does not answer.${since} Trying again every second.`);
}

function tellTrouble(short, long) {
  showState("bad", short);
  trouble.hidden = false;
  write(trouble, long);
  set(main, "class", "stale");
}

function showState(state, words) {
  set(link, "data-state", state);
  write(link, words);
}

/** Poll once a second, but not while the page is hidden. */
async function watch() {
  for (;;) {
    const began = performance.now();
    if (!document.hidden) await look();
    await new Promise((resume) => setTimeout(resume, Math.max(100, EVERY - (performance.now() - began))));
  }
}

window.addEventListener("hashchange", route);
route();
known().then(watch);

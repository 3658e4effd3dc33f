// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export const count = (number) => whole.format(number);

export function bytes(number) {
  let unit = 0;
  while (number >= 1024 && unit < UNITS.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${number < 10 && unit ? number.toFixed(1) : Math.round(number)} ${UNITS[unit]}`;
}

export function rate(perSecond) {
  if (perSecond === 0) return "0/s";
  return perSecond < 10 ? `${perSecond.toFixed(1)}/s` : `${short.format(perSecond)}/s`;
}

/** Return a duration in the largest whole unit, rounded down. */
export function seconds(number) {
  if (number < 60) return `${Math.floor(number)} s`;
  if (number < 3600) return `${Math.floor(number / 60)} min`;
  return `${Math.floor(number / 3600)} h`;
}

/** Return a bound of latency: `≤ 2.5 ms`; null is nothing yet, infinity beyond the last bound. */
export function latency(bound, last) {
  if (bound === null) return "–";
  if (bound === Infinity) return `> ${last} s`;
  return bound < 1 ? `≤ ${+(bound * 1000).toPrecision(3)} ms` : `≤ ${bound} s`;
}

export const clock = (date) => date.toLocaleTimeString("en-GB");

/** Return a time of a message, in the reader's time zone: the clock of today, otherwise with the date. */
export function moment(iso) {
  const date = new Date(iso);
  const today = date.toDateString() === new Date().toDateString();
  const time = `${clock(date)}.${String(date.getMilliseconds()).padStart(3, "0")}`;
  return today ? time : `${date.toLocaleDateString("en-CA")} ${time}`;
}

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Return text that is JSON indented; any other text as it is. */
export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

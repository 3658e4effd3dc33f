// What the last minute of summaries says: rates, series for sparklines, who stands still.

const KEPT = 61; // summaries: a minute and the one before it
const SMOOTH = 3; // summaries over which a rate is taken
const STILL = 5; // seconds without movement until a subscription with lag counts as stuck
const FSYNC_WINDOW = 30; // summaries over which the latency is taken

export class History {
  #samples = []; // {at, published, bytes, delivered, lag: Map by name; fsync: counts}
  #moved = new Map(); // subscription -> {mark, at}

  /** Keep a summary that came at this time, in seconds. */
  add(summary, at) {
    const topics = (number) => new Map(summary.topics.map((each) => [each.topic.name, number(each)]));
    const subscriptions = (number) =>
      new Map(summary.subscriptions.map((each) => [each.numbers.subscription_id, number(each)]));
    this.#samples.push({
      at,
      published: topics((each) => each.topic.published),
      bytes: topics((each) => each.published_bytes),
      delivered: subscriptions((each) => each.delivered_messages),
      lag: subscriptions((each) => each.numbers.lag),
      fsync: summary.fsync.counts,
    });
    this.#samples.splice(0, this.#samples.length - KEPT);
    this.#notice(summary.subscriptions, at);
  }

  /** Forget the counts: the broker has started anew. */
  restart() {
    this.#samples = [];
    this.#moved.clear();
  }

  /** Return how much a count of `kind` grew a second, lately. */
  rate(kind, name) {
    const last = this.#samples.length - 1;
    return growth(this.#samples[Math.max(0, last - SMOOTH)], this.#samples[last], kind, name);
  }

  /** Return the rates of the last minute, oldest first. */
  rates(kind, name) {
    return this.#samples.slice(1).map((sample, index) => growth(this.#samples[index], sample, kind, name));
  }

  /** Return the values of the last minute, oldest first. */
  values(kind, name) {
    return this.#samples.map((sample) => sample[kind].get(name) ?? 0);
  }

  /** Return the bound of the bucket that holds this quantile of the latest syncs; null without any. */
  fsync(quantile, bounds) {
    const counts = this.#latestSyncs();
    const all = counts.reduce((sum, each) => sum + each, 0);
    let seen = 0;
    for (const [index, each] of counts.entries()) {
      seen += each;
      if (all && seen >= quantile * all) return bounds[index] ?? Infinity;
    }
    return null;
  }

  #latestSyncs() {
    const last = this.#samples.at(-1)?.fsync ?? [];
    const before = this.#samples.at(-FSYNC_WINDOW)?.fsync ?? [];
    const fresh = last.map((each, index) => each - (before[index] ?? 0));
    return fresh.some((each) => each > 0) ? fresh : last; // quiet: what was seen since the start
  }

  /** Return for how many seconds a subscription with lag has stood still, 0 if it is well. */
  stuckFor(name) {
    const { mark, at } = this.#moved.get(name) ?? {};
    const still = mark === undefined ? 0 : this.#samples.at(-1).at - at;
    return still >= STILL ? still : 0;
  }

  #notice(subscriptions, at) {
    const present = new Set();
    for (const { numbers, acked_messages, delivered_messages } of subscriptions) {
      const name = numbers.subscription_id;
      const { position, in_flight, waiting, dead_lettered } = numbers;
      const progress = [acked_messages, delivered_messages, dead_lettered, position, in_flight, waiting];
      const mark = numbers.lag && progress.join();
      present.add(name);
      if (!numbers.lag) this.#moved.delete(name);
      else if (this.#moved.get(name)?.mark !== mark) this.#moved.set(name, { mark, at });
    }
    for (const name of this.#moved.keys()) if (!present.has(name)) this.#moved.delete(name);
  }
}

function growth(before, after, kind, name) {
  const elapsed = after.at - before.at;
  const from = before[kind].get(name);
  if (elapsed <= 0 || from === undefined) return 0;
  return Math.max(0, (after[kind].get(name) ?? from) - from) / elapsed;
}

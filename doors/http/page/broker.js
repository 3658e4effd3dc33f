// The broker as the page knows it: one function a question.

const PATIENCE = 5000; // ms until a silent broker counts as gone

/** The broker has refused; its text is for people. */
export class Refused extends Error {
  constructor(status, answer) {
    super(answer?.error ?? answer?.reason ?? `the broker answered ${status}`);
    this.status = status;
    this.code = answer?.code ?? "";
  }
}

let csrf = null; // what a request by cookie must know to change something

async function ask(path, body) {
  const request = { headers: { accept: "application/json" }, signal: AbortSignal.timeout(PATIENCE) };
  if (body !== undefined) {
    request.method = "POST";
    request.headers["content-type"] = "application/json";
    if (csrf) request.headers["x-qb-csrf"] = csrf;
    request.body = JSON.stringify(body);
  }
  const response = await fetch(path, request);
  const answer = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(response.status, answer);
  return answer;
}

const of = (kind, name) => `/${kind}/${encodeURIComponent(name)}`;
const query = (fields) => `?${new URLSearchParams(fields)}`;

export async function session() {
  const known = await ask("/session");
  csrf = known.csrf;
  return known;
}
export async function login(token) {
  await session(); // one that is logged in already must know how to change that
  await ask("/login", { token });
}
export const logout = () => ask("/logout", {});
export const summary = () => ask("/summary");
export const topic = (name) => ask(of("topics", name));
export const publish = (name, message) => ask(`${of("topics", name)}/messages`, message);
export const watermarks = (name, partition) => ask(`${of("topics", name)}/partitions/${partition}/offsets`);
export const messages = (name, partition, offset, max_records) =>
  ask(`${of("topics", name)}/partitions/${partition}/messages${query({ offset, max_records })}`);
export const subscription = (name) => ask(of("subscriptions", name));
export const explain = (name, partition, offset) =>
  ask(`${of("subscriptions", name)}/explain${query({ offset, partition })}`);
export const deadLetters = (name) => ask(`${of("subscriptions", name)}/dead-letters${query({ max: 100 })}`);
export const retry = (name, numbers) =>
  ask(`${of("subscriptions", name)}/dead-letters/retry`, numbers ? { numbers } : {});
export const tailAddress = (name) => `${of("topics", name)}/tail`;

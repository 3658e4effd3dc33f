// The login form, and who is logged in.

import * as broker from "./broker.js";
import { make, write } from "./dom.js";

/** Return a form that asks for a token, and calls `entered` when the broker has taken it. */
export function loginForm(entered) {
  const field = make("input", { type: "password", id: "token", name: "token", autocomplete: "current-password" });
  const problem = make("p", { role: "alert" });
  const form = make(
    "form",
    { "aria-label": "Log in" },
    make("h1", { tabindex: "-1" }, "Log in"),
    make("label", { for: "token" }, "Token"),
    field,
    make("button", {}, "Log in"),
    problem,
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await broker.login(field.value);
      entered();
    } catch (error) {
      write(problem, error.message);
    }
    field.value = "";
  });
  return form;
}

/** Show the user in the bar, with a button to log out, and what every reader should know. */
export async function showSession(bar, warning, left) {
  const session = await broker.session();
  bar.replaceChildren();
  if (session.csrf) {
    const button = make("button", { type: "button" }, `Log out ${session.user}`);
    button.addEventListener("click", async () => {
      await broker.logout();
      left();
    });
    bar.append(button);
  }
  warning.hidden = !session.warning;
  write(warning, session.warning ?? "");
}

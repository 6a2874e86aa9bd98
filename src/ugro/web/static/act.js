// @ts-check
// Buttons that do something: <button data-post="/v1/…" data-body='{…}' data-cli="ugro …">. With data-confirm="What it
// does" it asks first: data-yes names the act ("Cancel job 5"), data-no what happens otherwise ("Keep it running").
// It shows the equivalent command, and reports the result.
// data-ask="reason: Why?" asks for a text that becomes the body's "reason". Also: [data-copy], and say() for others.
import { refresh } from "/static/parts.js";

const STAY_MS = 6000;

/** Shows a message for a while; an error stays until it is closed. */
export function say(text, look = "good", hint = "") {
  const toast = element("div", { className: `toast ${look}` }, element("p", {}, text));
  if (hint) toast.append(element("p", {}, hint));
  if (look === "bad") {
    const close = element("button", { type: "button", className: "copy" }, "close");
    close.addEventListener("click", () => toast.remove());
    toast.append(close);
    toast.setAttribute("role", "alert");
  } else setTimeout(() => toast.remove(), STAY_MS);
  document.getElementById("toasts")?.append(toast);
}

/** Posts to the API. Returns the answer; on failure shows the error and returns null. */
export async function send(method, path, body) {
  try {
    const answer = await fetch(path, {
      method,
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body ?? {}),
    });
    const text = await answer.text();
    if (answer.ok) return text ? JSON.parse(text) : {};
    const error = problem(text, answer.status);
    say(error.message, "bad", error.hint ?? "");
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    say("The agent does not answer.", "bad", "Nothing was changed. Try again when the page is live.");
  }
  return null;
}

function problem(text, status) {
  try {
    return JSON.parse(text).error;
  } catch {
    return { message: status === 401 ? "This browser is signed out." : `The agent refused the request (${status}).`, hint: text.slice(0, 200) };
  }
}

function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/**
 * Asks for confirmation. Returns the text that was entered, or null if declined. The harmless button has the focus, and
 * Escape is the same as pressing it.
 * @param {{yes: string, no: string, text: string, command: string, question: string, isDangerous: boolean}} about
 */
function ask(about) {
  const field = element("input", { type: "text", name: "text", autocomplete: "off" });
  const form = element("form", { method: "dialog" });
  form.append(element("h2", { id: "ask-title" }, `${about.yes}?`), element("p", {}, about.text));
  if (about.question) form.append(element("label", {}, about.question, field));
  if (about.command) form.append(element("p", { className: "muted small" }, "In a terminal: ", element("code", {}, about.command)));
  const no = element("button", { className: "button", value: "", type: "submit", formNoValidate: true }, about.no);
  const look = about.isDangerous ? "danger solid" : "primary";
  const yes = element("button", { className: `button ${look}`, value: "yes", type: "submit" }, about.yes);
  form.append(element("div", { className: "actions" }, no, yes));
  const dialog = element("dialog", {}, form);
  dialog.setAttribute("aria-labelledby", "ask-title");
  document.body.append(dialog);
  dialog.showModal();
  no.focus();
  return new Promise((done) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      done(dialog.returnValue === "yes" ? { text: field.value.trim() } : null);
    });
    // Enter in the field confirms, instead of pressing the first button.
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      dialog.close("yes");
    });
  });
}

async function act(button) {
  const { post, confirm = "", cli = "", yes = "", no = "Back" } = button.dataset;
  const body = JSON.parse(button.dataset.body ?? "{}");
  const [field, question = ""] = (button.dataset.ask ?? "").split(/:\s*/, 2);
  const title = yes || button.textContent.trim();
  if (confirm || field) {
    const isDangerous = button.classList.contains("danger");
    const answer = await ask({ yes: title, no, text: confirm, command: cli, question, isDangerous });
    if (!answer) return;
    if (field) body[field] = answer.text;
  }
  button.disabled = true;
  const answer = await send("POST", post, body);
  button.disabled = false;
  if (answer === null) return;
  say(`${title}: done.`, "good", cli ? `In a terminal: ${cli}` : "");
  button.dispatchEvent(new CustomEvent("ugro-acted", { bubbles: true, detail: answer }));
  await refresh();
}

async function copy(button) {
  const text = button.dataset.copy;
  if (navigator.clipboard) await navigator.clipboard.writeText(text).catch(() => copyOld(text));
  else copyOld(text); // browsers offer no clipboard without https, except on loopback
  const before = button.textContent;
  button.textContent = "copied";
  setTimeout(() => { button.textContent = before; }, 1500);
}

function copyOld(text) {
  const field = element("textarea", { value: text });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest?.("button");
  if (!button) return;
  if (button.dataset.copy !== undefined) copy(button);
  else if (button.dataset.post) act(button);
});

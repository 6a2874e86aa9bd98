// @ts-check
// Notes and tags of a job. <ugro-note job="17"> shows and edits them; editNote(17) is the dialog alone.

import { say, send } from "/static/act.js";
import { live } from "/static/live.js";

let isOpen = false;

/** Asks for text and tags. Returns the new note, or null if nothing changed. @param {string|number} job */
export async function editNote(job) {
  if (isOpen) return null;
  const note = await noteOf(job);
  if (!note) return null;
  isOpen = true;
  const wanted = await asked(job, note);
  isOpen = false;
  if (!wanted) return null;
  const answer = await send("PUT", `/v1/jobs/${encodeURIComponent(job)}/notes`, wanted);
  if (!answer) return null;
  say("Note saved.", "good", commandOf(job, answer.note));
  return answer.note;
}

async function noteOf(job) {
  const answer = await fetch(`/v1/jobs/${encodeURIComponent(job)}/notes`).catch(() => null);
  if (answer?.ok) return (await answer.json()).note;
  say("Cannot read the note.", "bad", "Try again when the page is live.");
  return null;
}

function asked(job, note) {
  const text = made("textarea", { value: note.text, maxLength: 20000, rows: 6 });
  const tags = made("input", { type: "text", value: note.tags.join(" "), autocomplete: "off", spellcheck: false });
  const form = made("form", { method: "dialog" });
  form.append(
    made("h2", { id: "note-title", textContent: `Note of job ${job}` }),
    labelled("Text", text),
    labelled("Tags, separated by spaces", tags),
    actions(),
  );
  const dialog = made("dialog", { className: "note-dialog" });
  dialog.setAttribute("aria-labelledby", "note-title");
  dialog.append(form);
  document.body.append(dialog);
  dialog.showModal();
  text.focus();
  return new Promise((done) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      done(dialog.returnValue === "save" ? { text: text.value, tags: tags.value.split(/\s+/).filter(Boolean) } : null);
    });
    // Enter in the tags field saves, instead of pressing the first button.
    tags.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      dialog.close("save");
    });
  });
}

function actions() {
  const both = made("div", { className: "actions" });
  both.append(
    made("button", { type: "submit", className: "button", value: "", textContent: "Back" }),
    made("button", { type: "submit", className: "button primary", value: "save", textContent: "Save" }),
  );
  return both;
}

function commandOf(job, note) {
  const quoted = note.text.length > 60 || /['\n]/.test(note.text) ? "…" : note.text;
  return `In a terminal: ugro note ${job} '${quoted}'${note.tags.map((tag) => ` --tag ${tag}`).join("")}`;
}

class NoteElement extends HTMLElement {
  #end = () => {};
  #box = document.createElement("div");

  connectedCallback() {
    this.replaceChildren(this.#box);
    this.#end = live.on((change) => {
      const event = change.event;
      if (change.again || (event?.kind === "note" && String(event.job) === this.getAttribute("job"))) this.#read();
    }) ?? (() => {});
    this.#read();
  }

  disconnectedCallback() {
    this.#end();
  }

  async #read() {
    const note = await noteOf(this.getAttribute("job"));
    if (note) this.#show(note);
  }

  #show(note) {
    const edit = made("button", { type: "button", className: "button", textContent: note.changed_at ? "Edit the note" : "Write a note" });
    edit.addEventListener("click", async () => {
      const changed = await editNote(note.job);
      if (changed) this.#show(changed);
      this.querySelector("button")?.focus();
    });
    const text = made("p", { className: note.text ? "note-text" : "muted", textContent: note.text || "No note." });
    const line = made("p", {});
    for (const tag of note.tags) {
      line.append(made("a", { className: "chip", textContent: tag, href: `/experiments?q=${encodeURIComponent(`tag:${tag}`)}` }), " ");
    }
    this.#box.replaceChildren(text, ...(note.tags.length ? [line] : []), edit);
  }
}

function made(name, properties) {
  return Object.assign(document.createElement(name), properties);
}

function labelled(text, input) {
  const label = made("label", { textContent: text });
  label.append(input);
  return label;
}

customElements.define("ugro-note", NoteElement);

// @ts-check
// The table of experiments: selecting rows to compare, and notes. Filtering and paging are links and forms.

import { editNote } from "/static/notes.js";
import { refresh } from "/static/parts.js";

const form = /** @type {HTMLFormElement} */ (document.getElementById("chosen"));
const button = /** @type {HTMLButtonElement} */ (document.getElementById("compare"));
const words = /** @type {HTMLElement} */ (form.querySelector("[data-chosen]"));
const boxes = () => /** @type {HTMLInputElement[]} */ ([...form.querySelectorAll('input[name="jobs"]')]);

function tell() {
  const all = boxes();
  const chosen = all.filter((box) => box.checked);
  const count = chosen.reduce((sum, box) => sum + box.value.split(",").length, 0);
  button.disabled = count < 1;
  words.textContent = count ? `${count} selected` : "selected";
  const whole = /** @type {HTMLInputElement | null} */ (form.querySelector("[data-choose-all]"));
  if (!whole) return;
  whole.checked = all.length > 0 && chosen.length === all.length;
  whole.indeterminate = chosen.length > 0 && chosen.length < all.length;
}

form.addEventListener("change", (event) => {
  const box = /** @type {HTMLInputElement} */ (event.target);
  if (box.matches("[data-choose-all]")) for (const one of boxes()) one.checked = box.checked;
  tell();
});

// One address per comparison, however many rows are selected.
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const jobs = boxes().filter((box) => box.checked).map((box) => box.value).join(",");
  if (jobs) location.assign(`/compare?jobs=${jobs}`);
});

form.addEventListener("click", async (event) => {
  const note = /** @type {HTMLElement} */ (event.target).closest("button[data-note]");
  if (note && (await editNote(note.getAttribute("data-note") ?? ""))) await refresh();
});

document.addEventListener("ugro-parts", tell);
addEventListener("pageshow", tell);
tell();

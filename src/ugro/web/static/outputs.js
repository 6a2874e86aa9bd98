// @ts-check
// Previews of a job's files open over its page. Without this script, or in a new tab, the link leads to the same page.
import { say } from "/static/act.js";

/** @param {HTMLAnchorElement} link */
async function open(link) {
  const answer = await fetch(link.href).catch(() => null);
  if (!answer?.ok) {
    say(answer ? "This file cannot be shown." : "The agent does not answer.", "bad", answer ? "It may have been removed." : "");
    return;
  }
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const preview = page.getElementById("preview");
  if (preview) show(document.importNode(preview, true), link);
}

/**
 * @param {HTMLElement} preview
 * @param {HTMLAnchorElement} link
 */
function show(preview, link) {
  const dialog = document.createElement("dialog");
  dialog.className = "preview-dialog";
  dialog.setAttribute("aria-labelledby", "preview-title");
  const close = Object.assign(document.createElement("button"), { type: "button", className: "button", textContent: "Close" });
  const whole = Object.assign(document.createElement("a"), { className: "button", href: link.href, textContent: "Open as a page" });
  preview.querySelector(".actions")?.append(whole, close);
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // beside it
  });
  dialog.addEventListener("close", () => {
    dialog.remove();
    link.focus();
  });
  dialog.append(preview);
  document.body.append(dialog);
  dialog.showModal();
  close.focus();
}

document.addEventListener("click", (event) => {
  const link = /** @type {HTMLElement} */ (event.target).closest?.("a[data-preview]");
  const isPlain = event.button === 0 && !(event.ctrlKey || event.metaKey || event.shiftKey || event.altKey);
  if (!(link instanceof HTMLAnchorElement) || !isPlain) return;
  event.preventDefault();
  open(link);
});

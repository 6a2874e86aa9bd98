// @ts-check
// The page of one job: its log, its curves, and the parts that are fetched after the page has loaded.
import {painted} from "/static/ansi.js";
import {live} from "/static/live.js";
import {say} from "/static/act.js";
import "/static/logs.js";
import "/static/curves.js";

const LEAST_PAUSE_MS = 3000;

const log = /** @type {any} */ (document.querySelector("ugro-log"));
const number = Number(log.getAttribute("job"));

/** A part that is fetched from its own address, at most every few seconds and never twice at once. */
class Fragment {
  /** @param {HTMLElement} element */
  constructor(element) {
    this.element = element;
    this.isWanted = false;
    this.isBusy = false;
    this.want();
  }

  async want() {
    this.isWanted = true;
    if (this.isBusy) return;
    this.isBusy = true;
    while (this.isWanted) {
      this.isWanted = false;
      const began = performance.now();
      await this.load();
      // Wait as long as the last fetch took: with many ranks the agent has much to read.
      await pause(Math.max(LEAST_PAUSE_MS, 5 * (performance.now() - began)));
    }
    this.isBusy = false;
  }

  async load() {
    try {
      const response = await fetch(this.element.dataset.fragment ?? "");
      if (!response.ok) throw new Error(`the agent answered ${response.status}`);
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      const places = [...this.element.querySelectorAll(".scroll")].map((box) => box.scrollTop);
      this.element.replaceChildren(...page.body.childNodes);
      this.element.dispatchEvent(new CustomEvent("ugro-none", { bubbles: true, detail: absence(this.element) }));
      this.element.querySelectorAll(".scroll").forEach((box, index) => (box.scrollTop = places[index] ?? 0));
      // No event announces that more outputs were collected.
      this.isWanted ||= !document.hidden && this.element.querySelector("[data-moves]") !== null;
    } catch (error) {
      if (this.element.querySelector(".loading")) this.element.replaceChildren(failure(error));
      this.isWanted ||= !document.hidden;
    }
  }
}

/** @param {unknown} error */
function failure(error) {
  const text = document.createElement("p");
  text.className = "loading";
  text.textContent = `Cannot load this part (${error instanceof Error ? error.message : error}); retrying.`;
  return text;
}

/** @param {number} ms */
function pause(ms) {
  return new Promise((done) => setTimeout(done, ms));
}

/** What a part without content says instead; null if it has some. @param {HTMLElement} element */
function absence(element) {
  const only = element.children.length === 1 ? element.firstElementChild : null;
  const found = element.querySelector("[data-none]") ?? (only?.matches(".empty") ? only : null);
  return found?.textContent?.trim() ?? null;
}

/** A panel without content is a line below the others. @param {CustomEvent<string | null>} event */
function collapse(event) {
  const section = /** @type {HTMLElement} */ (event.target).closest?.("[data-collapses]");
  const list = document.getElementById("absent");
  if (!(section instanceof HTMLElement) || !list) return;
  section.hidden = event.detail !== null;
  const title = section.dataset.collapses ?? "";
  list.querySelector(`[data-key="${title}"]`)?.remove();
  if (event.detail !== null) {
    const item = document.createElement("li");
    item.dataset.key = title;
    const name = Object.assign(document.createElement("b"), { textContent: title });
    item.append(name, ` ${event.detail}`);
    const titles = [...document.querySelectorAll("[data-collapses]")].map((one) => /** @type {HTMLElement} */ (one).dataset.collapses);
    const later = [...list.children].find((one) => titles.indexOf(/** @type {HTMLElement} */ (one).dataset.key) > titles.indexOf(title));
    list.insertBefore(item, later ?? null);
  }
  list.hidden = !list.children.length;
  linkSections();
}

/** Links only to panels that are there. */
function linkSections() {
  for (const link of document.querySelectorAll(".sections a")) {
    const target = document.getElementById(/** @type {HTMLAnchorElement} */ (link).hash.slice(1));
    /** @type {HTMLElement} */ (link).hidden = !target || target.hidden;
  }
}

document.addEventListener("ugro-none", (event) => collapse(/** @type {CustomEvent} */ (event)));
document.addEventListener("ugro-parts", linkSections);
linkSections();

const fragments = [...document.querySelectorAll("[data-fragment]")].map((one) => new Fragment(/** @type {any} */ (one)));

/** @param {any} change */
function heard(change) {
  const isOurs = change.event?.job === number;
  const hasGrown = change.metrics?.includes(number);
  if (isOurs || change.again) log.wake();
  for (const fragment of fragments) {
    const {events, metrics} = fragment.element.dataset;
    if (change.again || (isOurs && (events || metrics)) || (hasGrown && metrics)) fragment.want();
  }
}

/** When the job gets its nodes while the page is open, the log learns its ranks. */
function follow() {
  const facts = document.getElementById("log-facts");
  if (!facts) return;
  for (const name of ["nodes", "attempt", "attempts"]) {
    const value = facts.dataset[name] ?? "";
    if (log.getAttribute(name) !== value) log.setAttribute(name, value);
  }
}

function paintLastLines() {
  for (const line of document.querySelectorAll("[data-terminal]:not([data-painted])")) {
    line.replaceChildren(painted(line.textContent ?? "", ""));
    line.setAttribute("data-painted", "");
  }
}

live.on(heard);
new MutationObserver(() => {
  follow();
  paintLastLines();
}).observe(document.getElementById("main") ?? document.body, {
  subtree: true, childList: true, attributes: true, attributeFilter: ["data-nodes", "data-attempt", "data-attempts"],
});
paintLastLines();

document.addEventListener("click", (event) => {
  const link = /** @type {HTMLElement} */ (event.target).closest?.("[data-show-rank]");
  if (link instanceof HTMLElement) log.show(Number(link.dataset.showRank), Number(link.dataset.showAttempt) || undefined);
});

document.addEventListener("ugro-acted", (event) => {
  const answer = /** @type {CustomEvent} */ (event).detail;
  if (answer?.id && answer.id !== number) {
    say(`Submitted as job ${answer.id}.`);
    location.assign(`/jobs/${answer.id}`);
  }
});

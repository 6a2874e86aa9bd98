// @ts-check
// <ugro-log job="17" nodes="gpu1,gpu2" attempt="1" attempts="1" rank="0">: a window of a job's log.
//
// It starts at the end, follows it, and pages back by byte offsets, so a log of a gigabyte costs as much as a small one.
import {painted} from "/static/ansi.js";
import {controls, size} from "/static/logs-view.js";

const MOST_ROWS = 6000;
const NEAR = 600; // pixels from an edge at which the next page is fetched
const POLL_MS = 700;
const IDLE_MS = 3000;
const TOUCH_MS = 1500;
const FAR_BYTES = 256 * 1024; // if more than this was missed, following jumps to the end

/** @typedef {{begin: Object<string, number>, end: Object<string, number>, element: HTMLElement, rows: number}} Page */
/** @typedef {{lines: any[][], begin: any, end: any, sizes: any, attempt: number, is_live: boolean}} Answer */

class UgroLog extends HTMLElement {
  static observedAttributes = ["nodes", "attempt", "attempts"];

  connectedCallback() {
    if (!this.parts) this.begin(new URLSearchParams(location.search));
  }

  /** The job got its nodes or a new attempt: the choice of ranks changes. */
  attributeChangedCallback() {
    if (!this.parts || this.isOutdated) return;
    this.isOutdated = true; // the view stays where it is until the reader follows again
    queueMicrotask(() => this.follow.checked && this.begin(new URLSearchParams()));
  }

  /** @param {URLSearchParams} asked */
  begin(asked) {
    this.job = this.getAttribute("job");
    this.wanted = "";
    this.isOutdated = false;
    this.turn = (this.turn ?? 0) + 1; // answers to requests of an earlier turn are ignored
    /** @type {Page[]} */
    this.pages = [];
    this.pause = POLL_MS;
    this.parts = controls(this);
    this.follow.checked = !asked.has("at");
    this.listen();
    document.addEventListener("visibilitychange", this.onVisible);
    if (asked.has("rank")) this.ranks.value = asked.get("rank");
    if (asked.has("at")) this.jump(...asked.get("at").split(":").map(Number)).then(() => this.scrollIntoView());
    else this.toEnd();
  }

  disconnectedCallback() {
    this.turn += 1;
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.onVisible);
  }

  get follow() { return this.parts.follow; }
  get ranks() { return this.parts.rank; }
  get view() { return this.parts.view; }

  /** For the page: fetches new output at once. */
  wake() {
    this.pause = POLL_MS;
    if (this.follow.checked) this.later(0);
  }

  /** @param {number} rank @param {number} [attempt] */
  show(rank, attempt) {
    if (attempt && this.parts.attempt.value !== String(attempt)) this.parts.attempt.value = String(attempt);
    this.ranks.value = String(rank);
    this.changed();
  }

  catchUp() {
    if (this.isOutdated) this.begin(new URLSearchParams());
    else this.toEnd();
  }

  changed() {
    this.setAttribute("rank", this.ranks.value);
    this.follow.checked = true;
    this.remember({rank: this.ranks.value, at: null});
    this.toEnd();
  }

  // --- requests -------------------------------------------------------------------------------------------------

  /** @param {string} what @param {Object<string, string>} query @returns {Promise<any>} */
  async ask(what, query) {
    const parameters = new URLSearchParams({attempt: this.parts.attempt.value, ...query});
    if (this.ranks.value !== "all") parameters.set("rank", this.ranks.value);
    const response = await fetch(`/jobs/${this.job}/log${what}?${parameters}`, {headers: {accept: "application/json"}});
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error?.message ?? `the agent answered ${response.status}`);
    return answer;
  }

  /** @param {Object<string, string>} query @param {(answer: Answer) => void} then */
  async fetchPage(query, then) {
    const turn = this.turn;
    this.busy = true;
    try {
      const answer = await this.ask("", query);
      if (turn !== this.turn) return;
      this.classList.remove("stale");
      this.isLive = answer.is_live;
      this.sizes = answer.sizes;
      then(answer);
      this.tell();
    } catch (error) {
      if (turn === this.turn) this.fail(error);
    } finally {
      if (turn === this.turn) this.busy = false;
    }
  }

  /** @param {Error} error */
  fail(error) {
    this.classList.add("stale");
    this.parts.status.textContent = `${error.message}; retrying`;
    this.pause = IDLE_MS;
    this.later(IDLE_MS);
  }

  // --- moving ---------------------------------------------------------------------------------------------------

  clear() {
    this.turn += 1;
    this.pages = [];
    this.parts.lines.replaceChildren();
    this.parts.open.replaceChildren();
    this.view.classList.add("loading");
  }

  async toEnd() {
    this.clear();
    await this.fetchPage({}, (answer) => {
      this.append(answer);
      this.scrollToEnd();
    });
    this.later(this.pause);
  }

  async more() {
    const last = this.pages.at(-1);
    if (!last || this.busy) return;
    const before = cursor(last.end);
    await this.fetchPage(before ? {after: before} : {}, (answer) => {
      const isFar = this.follow.checked && sum(answer.sizes) - sum(answer.end) > FAR_BYTES;
      if (isFar) return void this.toEnd();
      this.append(answer);
      this.pause = cursor(answer.end) === before ? Math.min(IDLE_MS, this.pause * 1.5) : POLL_MS;
      if (this.follow.checked) this.scrollToEnd();
    });
  }

  async earlier() {
    const first = this.pages[0];
    if (!first || this.busy || !sum(first.begin)) return;
    await this.fetchPage({before: cursor(first.begin)}, (answer) => this.prepend(answer));
  }

  /** @param {number} rank @param {number} offset */
  async jump(rank, offset) {
    if (!Number.isFinite(rank) || !Number.isFinite(offset)) return;
    this.follow.checked = false;
    this.clear();
    await this.fetchPage({at: `${rank}:${offset}`}, (answer) => this.append(answer));
    await this.earlier();
    const row = this.parts.lines.querySelector(`[data-rank="${rank}"][data-offset="${offset}"]`);
    row?.classList.add("log-hit");
    if (row) this.view.scrollTop = row.offsetTop - this.view.clientHeight / 2;
    this.remember({rank: this.ranks.value, at: `${rank}:${offset}`});
  }

  // --- rows -----------------------------------------------------------------------------------------------------

  /** @param {Answer} answer */
  append(answer) {
    const whole = answer.lines.filter((line) => line[4] !== "open");
    const page = this.page(answer, whole);
    this.parts.lines.append(page.element);
    this.parts.open.replaceChildren(...answer.lines.filter((line) => line[4] === "open").map((line) => this.row(line)));
    const last = this.pages.at(-1);
    if (last && last.rows + page.rows < 200) {
      last.element.append(...page.element.childNodes);
      page.element.remove();
      this.pages[this.pages.length - 1] = {...last, end: page.end, rows: last.rows + page.rows};
    } else {
      this.pages.push(page);
    }
    this.view.classList.remove("loading");
    while (this.rows() > MOST_ROWS && this.pages.length > 1) this.drop(this.pages.shift());
  }

  /** @param {Answer} answer */
  prepend(answer) {
    const page = this.page(answer, answer.lines);
    const height = this.view.scrollHeight;
    this.parts.lines.prepend(page.element);
    this.view.scrollTop += this.view.scrollHeight - height;
    this.pages.unshift(page);
    while (this.rows() > MOST_ROWS && this.pages.length > 1) {
      this.follow.checked = false;
      this.parts.open.replaceChildren();
      this.drop(this.pages.pop());
    }
  }

  /** @param {Answer} answer @param {any[][]} lines @returns {Page} */
  page(answer, lines) {
    const element = document.createElement("div");
    element.className = "log-page";
    element.append(...lines.map((line) => this.row(line)));
    return {begin: answer.begin, end: answer.end, element, rows: lines.length};
  }

  /** @param {any[]} line */
  row([rank, offset, at, text, flag]) {
    const row = document.createElement("div");
    row.className = "log-line";
    row.dataset.rank = rank;
    row.dataset.offset = offset;
    if (at !== null) row.append(cell("log-time", new Date(at * 1000).toLocaleTimeString([], {hour12: false})));
    row.append(cell("log-rank", `r${rank}`));
    if (typeof flag === "number") {
      row.append(cell("log-lost", `${size(flag)} are missing: the node dropped them`));
      return row;
    }
    const shown = cell("log-text", "");
    shown.append(painted(text, this.wanted));
    texts.set(shown, text);
    row.append(shown);
    if (flag === "cut") row.classList.add("log-cut");
    return row;
  }

  /** @param {Page} page */
  drop(page) {
    const isAbove = page.element === this.parts.lines.firstElementChild;
    const height = this.view.scrollHeight;
    page.element.remove();
    if (isAbove) this.view.scrollTop -= height - this.view.scrollHeight;
  }

  rows() { return this.pages.reduce((count, page) => count + page.rows, 0); }

  // --- searching ------------------------------------------------------------------------------------------------

  /** @param {string} text */
  mark(text) {
    this.wanted = text.toLowerCase();
    for (const shown of this.view.querySelectorAll(".log-text")) {
      shown.replaceChildren(painted(texts.get(shown) ?? "", this.wanted));
    }
  }

  /** @param {boolean} isBack */
  async find(isBack) {
    const text = this.parts.search.value;
    if (!text) return this.mark("");
    if (text.toLowerCase() !== this.wanted) this.mark(text);
    const hunt = (this.hunt = (this.hunt ?? 0) + 1);
    const hit = this.view.querySelector(".log-hit");
    let query = hit ? {line: `${hit.dataset.rank}:${hit.dataset.offset}`} : {};
    for (let searched = 0; ; ) {
      const found = await this.ask("/search", {q: text, back: String(isBack), ...query}).catch((error) => ({error}));
      if (hunt !== this.hunt) return;
      if (found.error) return this.tell(found.error.message);
      if (found.match) return this.jump(found.match.rank, found.match.offset);
      searched += found.searched_bytes;
      if (!found.next) return this.tell(`no ${isBack ? "earlier" : "later"} “${text}” in ${size(searched)}`);
      this.tell(`searching: ${size(searched)} so far`);
      query = {place: `${found.next.rank}:${found.next.offset}`};
    }
  }

  // --- keeping up -----------------------------------------------------------------------------------------------

  listen() {
    const {view, rank, attempt, follow, wrap, times, search, form, range} = this.parts;
    view.addEventListener("scroll", () => this.scrolled(), {passive: true});
    // Only scrolling back by the reader stops following; growing or resizing the page also scrolls.
    for (const kind of ["wheel", "touchmove", "pointerdown", "keydown"]) {
      view.addEventListener(kind, () => (this.touchedAt = performance.now()), {passive: true});
    }
    new ResizeObserver(() => this.follow.checked && this.scrollToEnd()).observe(view);
    rank.addEventListener("change", () => this.changed());
    attempt.addEventListener("change", () => this.changed());
    follow.addEventListener("change", () => follow.checked && this.catchUp());
    wrap.addEventListener("change", () => this.classList.toggle("wrap", wrap.checked));
    times.addEventListener("change", () => this.classList.toggle("times", times.checked));
    search.addEventListener("input", () => search.value || this.mark(""));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.find(event.submitter?.value !== "later");
    });
    range.addEventListener("change", () => {
      const rank = Object.keys(this.sizes)[0];
      this.jump(Number(rank), Math.floor((this.sizes[rank] * range.valueAsNumber) / 1000));
    });
  }

  onVisible = () => this.wake();

  scrolled() {
    const {scrollTop, scrollHeight, clientHeight} = this.view;
    const below = scrollHeight - clientHeight - scrollTop;
    const wentUp = scrollTop < (this.scrollWas ?? 0);
    this.scrollWas = scrollTop;
    const isByHand = performance.now() - (this.touchedAt ?? -TOUCH_MS) < TOUCH_MS;
    if (wentUp && isByHand && below > 40) this.follow.checked = false;
    else if (below < 4 && this.isAtEnd()) this.follow.checked = true;
    if (wentUp && scrollTop < NEAR && !this.follow.checked) this.earlier();
    if (!wentUp && below < NEAR && !this.isAtEnd()) this.more();
    this.tell();
  }

  /** @param {number} wait_ms */
  later(wait_ms) {
    clearTimeout(this.timer);
    const turn = this.turn;
    this.timer = setTimeout(async () => {
      if (turn !== this.turn || document.hidden || !this.follow.checked) return;
      if (!this.pages.length) await this.toEnd();
      else await this.more();
      if (turn === this.turn && (this.isLive || !this.isAtEnd())) this.later(this.pause);
    }, wait_ms);
  }

  isAtEnd() {
    const last = this.pages.at(-1);
    const open = [...this.parts.open.children].length > 0;
    return Boolean(last) && (open || cursor(last.end) === cursor(this.sizes));
  }

  scrollToEnd() { this.view.scrollTop = this.view.scrollHeight; }

  /** @param {string} [words] */
  tell(words) {
    const {status, range, raw} = this.parts;
    const total = sum(this.sizes ?? {});
    const [rank] = Object.keys(this.sizes ?? {});
    const isOne = Object.keys(this.sizes ?? {}).length === 1;
    this.classList.toggle("all-ranks", !isOne);
    this.classList.toggle("is-empty", total === 0);
    range.hidden = !isOne || total < FAR_BYTES;
    const at = this.firstShown();
    if (isOne && at && document.activeElement !== range) range.value = String(Math.round((1000 * at) / total));
    raw.hidden = !isOne;
    raw.href = `/jobs/${this.job}/log/raw?rank=${rank}&attempt=${this.parts.attempt.value}`;
    status.textContent = words ?? this.words(total, isOne ? at : null);
  }

  /** @param {number} total @param {number | null} at */
  words(total, at) {
    if (!total) return this.isLive ? "no output yet" : "no output";
    const where = this.isAtEnd() && this.follow.checked ? "the end" : at === null ? "" : `from ${size(at)}`;
    const going = this.isLive ? (this.follow.checked ? "following" : "not following") : "complete";
    return [size(total), where, going].filter(Boolean).join(" · ");
  }

  firstShown() {
    const top = this.view.getBoundingClientRect();
    const row = document.elementFromPoint(top.left + 4, top.top + 6)?.closest?.(".log-line");
    return row && this.contains(row) ? Number(row.dataset.offset) : null;
  }

  /** @param {Object<string, string | null>} query */
  remember(query) {
    const url = new URL(location.href);
    for (const [name, value] of Object.entries(query)) {
      if (value === null) url.searchParams.delete(name);
      else url.searchParams.set(name, value);
    }
    history.replaceState(history.state, "", url);
  }
}

/** The original text of a line, before colouring. @type {WeakMap<Element, string>} */
const texts = new WeakMap();

/** @param {Object<string, number>} places */
function cursor(places) {
  return Object.entries(places).map(([rank, offset]) => `${rank}:${offset}`).join(",");
}

/** @param {Object<string, number>} places */
function sum(places) {
  return Object.values(places).reduce((total, value) => total + value, 0);
}

/** @param {string} name @param {string} text */
function cell(name, text) {
  const element = document.createElement("span");
  element.className = name;
  element.textContent = text;
  return element;
}

customElements.define("ugro-log", UgroLog);

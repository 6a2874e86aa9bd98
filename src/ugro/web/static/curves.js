// @ts-check
// <ugro-curves job="17">, or jobs="1,2,3" runs="ID": a chart for each metric, live. With ``runs`` an element of that id
// holds JSON {names: [..], loss: NAME, runs: [{id, name, groups: {NAME: LABEL}}]}: the names and groups of the curves.
// At first there is one chart, of the loss, with the first rank that logged it. The choice of metrics, axis, smoothing,
// scale, ranks and group is in the page's address. Event: "ugro-none", whose detail says that there are no curves, or null.

import { Curves, asked, meanOf, newestOnly } from "/static/curves-data.js";
import { tools } from "/static/curves-tools.js";
import { live } from "/static/live.js";
import "/static/chart.js";

const MOST_AT_FIRST = 6; // charts, if there is no loss
const MANY = 20; // curves in one chart; with more, only the drawn columns are fetched
const GROW_MS = 1000;
const KEYS_MS = 10_000;
const NONE = "No metrics yet. UGRO reads those of ugro.train, TensorBoard, W&B, MLflow and Hugging Face, and metrics.jsonl.";

class CurvesElement extends HTMLElement {
  #jobs = [];
  #hasMany = false;
  #runs = new Map();
  #names = [];
  #known = "";
  /** @type {Map<string, number[]>} of each metric, the ranks that logged it */
  #ranks = new Map();
  #look = null;
  /** @type {Map<string, {curves: Curves, chart: any, isLoaded: boolean, isVisible: boolean, loads: number}>} */
  #charts = new Map();
  #grid = document.createElement("div");
  #note = document.createElement("p");
  #seen = new IntersectionObserver((entries) => this.#onSeen(entries), { rootMargin: "200px" });
  #endLive = () => {};
  #waiting = 0;
  #keysAt = 0;

  connectedCallback() {
    this.#jobs = (this.getAttribute("jobs") ?? this.getAttribute("job") ?? "").split(",").filter(Boolean);
    this.#grid.className = "curves-grid";
    this.#note.className = "curves-note";
    this.#note.setAttribute("role", "status");
    this.addEventListener("ugro-zoom", (event) => this.#onZoom(event));
    this.addEventListener("ugro-cursor", (event) => this.#onCursor(event));
    this.#endLive = live.on((change) => this.#onChange(change)) ?? (() => {});
    this.#begin();
  }

  disconnectedCallback() {
    this.#endLive();
    this.#seen.disconnect();
    clearTimeout(this.#waiting);
  }

  async #begin() {
    this.#say("Loading curves…");
    this.append(this.#note, this.#grid);
    try {
      await this.#readKeys();
    } catch (error) {
      this.#fail(error);
    }
  }

  async #readKeys() {
    this.#keysAt = performance.now();
    const given = document.getElementById(this.getAttribute("runs") ?? "");
    if (given) {
      const described = JSON.parse(given.textContent ?? "{}");
      this.#hasMany = this.#jobs.length > MANY;
      this.#runs = new Map(described.runs.map((run, at) => [`job/${run.id}`, { ...run, color: at }]));
      this.#setNames(described);
    } else {
      const query = new URLSearchParams(this.#jobs.map((job) => ["job", job]));
      const found = await asked(`/v1/metrics/keys?${query}`);
      this.#ranks = ranksOf(found.keys);
      this.#hasMany = this.#jobs.length > MANY || [...this.#ranks.values()].some((ranks) => ranks.length > MANY);
      this.#setNames(found);
    }
  }

  #setNames({ names, loss }) {
    const hasRanks = [...this.#ranks.values()].some((ranks) => ranks.length > 1);
    const known = JSON.stringify([names, loss, hasRanks]);
    if (this.#look && known === this.#known) return;
    this.#known = known;
    this.#names = names;
    this.#look?.element.remove();
    const first = loss ? [loss] : names.slice(0, MOST_AT_FIRST);
    this.#look = tools(names, { first, groups: this.#groupNames(), hasRanks }, (what) => this.#onLook(what));
    this.#note.before(this.#look.element);
    this.#look.element.hidden = !names.length;
    const none = names.length ? null : this.getAttribute("empty") ?? NONE;
    this.#say(none ?? "");
    this.dispatchEvent(new CustomEvent("ugro-none", { bubbles: true, detail: none }));
    this.#arrange();
  }

  #groupNames() {
    const first = [...this.#runs.values()][0];
    return first ? Object.keys(first.groups ?? {}) : [];
  }

  /** A chart for each selected metric, in order; charts that stay keep their data. */
  #arrange() {
    const wanted = this.#look.state.keys;
    for (const [key, entry] of this.#charts) {
      if (wanted.includes(key)) continue;
      this.#seen.unobserve(entry.chart);
      this.#charts.delete(key);
    }
    for (const key of wanted) if (!this.#charts.has(key)) this.#charts.set(key, this.#makeChart(key));
    this.#grid.replaceChildren(...wanted.map((key) => this.#charts.get(key).chart));
    this.#grid.classList.toggle("has-one", wanted.length === 1);
    for (const { chart } of this.#charts.values()) chart.toggleAttribute("tall", wanted.length === 1);
    this.#applyLook();
  }

  #makeChart(key) {
    const chart = document.createElement("ugro-chart");
    chart.dataset.key = key;
    chart.setAttribute("empty", "Loading…");
    this.#seen.observe(chart);
    const curves = new Curves({ jobs: this.#jobs, key, rank: this.#rankOf(key), columns: this.#columns() });
    return { curves, chart, isLoaded: false, isVisible: false, loads: 0 };
  }

  /** The rank whose curve is shown; null: all. Of several jobs it is the first, which nearly always logs. */
  #rankOf(key) {
    if (this.#jobs.length > 1) return 0;
    return this.#look.state.hasAllRanks ? null : (this.#ranks.get(key)?.[0] ?? 0);
  }

  #labelOf(key) {
    const isOne = this.#jobs.length === 1 && !this.#look.state.hasAllRanks && (this.#ranks.get(key)?.length ?? 0) > 1;
    return isOne ? `${key}, rank ${this.#rankOf(key)}` : key;
  }

  /** The columns to fetch: with many curves, only those that are drawn. */
  #columns() {
    if (!this.#hasMany) return undefined;
    return this.#look.state.x === "step" ? ["steps", "means"] : ["steps", "means", "times"];
  }

  #applyLook() {
    const { smooth, isLog } = this.#look.state;
    for (const [key, entry] of this.#charts) {
      entry.chart.setAttribute("label", this.#labelOf(key));
      entry.chart.setAttribute("smooth", String(smooth));
      entry.chart.toggleAttribute("log", isLog);
      if (entry.isLoaded) this.#show(key);
    }
  }

  #onLook(what) {
    if (what === "ranks" || (what === "x" && this.#hasMany)) this.#loadAnew();
    else if (what === "keys") this.#arrange();
    else this.#applyLook();
  }

  #loadAnew() {
    for (const [key, entry] of this.#charts) {
      entry.curves.which.columns = this.#columns();
      entry.curves.which.rank = this.#rankOf(key);
      entry.isLoaded = false;
      entry.chart.zoomTo(null);
      if (entry.isVisible) this.#load(key);
    }
    this.#applyLook();
  }

  // --- loading --------------------------------------------------------------------------------------------------

  #onSeen(entries) {
    for (const { target, isIntersecting } of entries) {
      const key = /** @type {HTMLElement} */ (target).dataset.key;
      const entry = this.#charts.get(key);
      if (!entry) continue;
      entry.isVisible = isIntersecting;
      if (isIntersecting && !entry.isLoaded) this.#load(key);
    }
  }

  async #load(key) {
    const entry = this.#charts.get(key);
    entry.isLoaded = true;
    entry.loads += 1;
    try {
      await entry.curves.load(this.#bins(entry));
      entry.chart.setAttribute("empty", "No values yet.");
    } catch (error) {
      entry.isLoaded = false;
      entry.chart.setAttribute("empty", `Cannot load: ${error.message}`);
    }
    entry.loads -= 1;
    if (entry.isLoaded) this.#show(key);
  }

  #bins(entry) {
    const width = Math.round(entry.chart.clientWidth / 2) || 300;
    return this.#jobs.length > 200 ? 100 : Math.min(600, Math.max(50, width));
  }

  #show(key) {
    const entry = this.#charts.get(key);
    // What is here while other columns are on their way may lack those that the axis needs.
    if (entry && !entry.loads) entry.chart.data = { x: this.#look.state.x, series: this.#series(entry.curves.shown) };
  }

  #series(curves) {
    const places = this.#places();
    if (this.#jobs.length <= 1) return ofOneJob(curves, places);
    const newest = newestOnly(curves);
    const group = this.#look.state.group;
    if (group) return this.#grouped(newest, group, places);
    return newest.map((curve) => {
      const run = this.#runs.get(curve.owner);
      return { ...columns(curve, places), key: curve.owner, name: run?.name ?? curve.owner.replace("job/", "job "), color: run?.color };
    });
  }

  #grouped(curves, group, places) {
    const members = new Map();
    for (const curve of curves) {
      const label = this.#runs.get(curve.owner)?.groups?.[group] ?? curve.owner;
      members.set(label, [...(members.get(label) ?? []), curve]);
    }
    return [...members].map(([label, own]) => ({ ...meanOf(own, places), odd: undefined, key: label, name: `${label} (${own.length})` }));
  }

  /** The positions of a curve's points on the selected axis. */
  #places() {
    const { x } = this.#look.state;
    if (x === "step") return (curve) => curve.steps;
    if (x === "time") return (curve) => curve.times;
    return (curve) => curve.times.map((time) => time - curve.times[0]);
  }

  // --- live updates ---------------------------------------------------------------------------------------------

  #onChange(change) {
    if (!change.metrics || this.#waiting) return;
    if (!change.metrics.some((job) => this.#jobs.includes(String(job)))) return;
    this.#waiting = window.setTimeout(() => {
      this.#waiting = 0;
      this.#grow();
    }, GROW_MS);
  }

  async #grow() {
    try {
      if (!this.hasAttribute("runs") && performance.now() - this.#keysAt > (this.#names.length ? KEYS_MS : 0)) await this.#readKeys();
      for (const [key, entry] of this.#charts) {
        if (!entry.isLoaded || !entry.isVisible) continue;
        await entry.curves.grow();
        this.#show(key);
      }
      this.#say("");
    } catch (error) {
      this.#fail(error);
    }
  }

  async #onZoom(event) {
    const { key } = event.target.dataset;
    const entry = this.#charts.get(key);
    if (!entry) return;
    const { first, last } = event.detail;
    const range = first === null ? null : /** @type {[number, number]} */ ([first, last]);
    const steps = range && this.#look.state.x !== "step" ? entry.curves.stepsBetween(range, this.#places()) : range;
    try {
      await entry.curves.look(this.#jobs.length > MANY ? null : steps);
      this.#show(key);
    } catch (error) {
      this.#fail(error);
    }
  }

  #onCursor(event) {
    for (const { chart } of this.#charts.values()) if (chart !== event.target) chart.cursor = event.detail.x;
  }

  #say(text) {
    this.#note.textContent = text;
  }

  #fail(error) {
    this.#say(`Cannot load curves: ${error.message}. The next change retries.`);
    this.dispatchEvent(new CustomEvent("ugro-none", { bubbles: true, detail: null }));
  }
}

/** A curve for each rank; curves of older attempts are pale. */
function ofOneJob(curves, places) {
  const newest = Math.max(0, ...curves.map((curve) => curve.attempt));
  const hasRanks = new Set(curves.map((curve) => curve.rank)).size > 1;
  return curves.map((curve) => {
    const isOld = curve.attempt < newest;
    const words = [hasRanks ? `rank ${curve.rank}` : "", isOld || newest > 1 ? `attempt ${curve.attempt}` : ""];
    const name = words.filter(Boolean).join(", ") || curve.key;
    return { ...columns(curve, places), key: `${curve.attempt}/${curve.rank}`, name, color: curve.rank, isFaint: isOld };
  });
}

function columns(curve, places) {
  return { xs: places(curve), mins: curve.lows, maxs: curve.highs, means: curve.means, odd: curve.odd };
}

/** @param {{key: string, rank: number}[]} keys */
function ranksOf(keys) {
  const found = new Map();
  for (const { key, rank } of keys) found.set(key, new Set([...(found.get(key) ?? []), rank]));
  return new Map([...found].map(([key, ranks]) => [key, [...ranks].sort((left, right) => left - right)]));
}

customElements.define("ugro-curves", CurvesElement);

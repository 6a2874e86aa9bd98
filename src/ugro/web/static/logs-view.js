// @ts-check
// The controls of <ugro-log>, created once.

/** @param {number} bytes */
export function size(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let amount = bytes / 1024;
  let unit = 0;
  while (amount >= 1024 && unit < units.length - 1) {
    amount /= 1024;
    unit += 1;
  }
  return `${amount.toFixed(1)} ${units[unit]}`;
}

/** @param {HTMLElement} log */
export function controls(log) {
  const nodes = (log.getAttribute("nodes") ?? "").split(",").filter(Boolean);
  const ranks = nodes.map((node, rank) => [String(rank), `${rank} · ${node}`]);
  if (ranks.length !== 1) ranks.unshift(["all", "all ranks"]);
  const attempts = Number(log.getAttribute("attempts") ?? 1);
  const tries = Array.from({length: attempts}, (_, number) => [String(number + 1), String(number + 1)]);
  const rank = choice(ranks, log.getAttribute("rank"));
  const attempt = choice(tries, log.getAttribute("attempt"));
  const search = made("input", {type: "search", name: "find", placeholder: "find in the whole log", "data-filter": ""});
  search.setAttribute("aria-label", "Find in the whole log");
  const form = made("form", {class: "log-find", role: "search"}, search, turner("earlier", "↑"), turner("later", "↓"));
  const [follow, wrap, times] = ["checkbox", "checkbox", "checkbox"].map((type) => made("input", {type}));
  const raw = made("a", {class: "log-raw", download: ""}, "download");
  const range = made("input", {type: "range", min: "0", max: "1000", "aria-label": "Position in the log", hidden: ""});
  const status = made("span", {class: "log-status", role: "status"});
  const lines = made("div", {class: "log-lines"});
  const open = made("div", {class: "log-open"});
  const view = made("div", {class: "log-view", tabindex: "0", role: "group", "aria-label": "Lines of the log"}, lines, open);
  log.replaceChildren(
    made("div", {class: "log-bar"},
      labelled("rank", rank, ranks.length < 2), labelled("attempt", attempt, attempts < 2), form,
      ticked("follow", follow), ticked("wrap", wrap), ticked("times", times)),
    view,
    made("div", {class: "log-foot"}, range, status, raw),
  );
  return {rank, attempt, search, form, follow, wrap, times, raw, range, status, lines, open, view};
}

/** @param {string[][]} options @param {string | null} chosen */
function choice(options, chosen) {
  const select = document.createElement("select");
  for (const [value, text] of options) select.add(new Option(text, value, false, value === chosen));
  return select;
}

/** @param {string} word @param {HTMLElement} control @param {boolean} isHidden */
function labelled(word, control, isHidden) {
  const label = made("label", {class: "log-choice"}, `${word} `, control);
  label.hidden = isHidden;
  return label;
}

/** @param {string} word @param {HTMLElement} box */
function ticked(word, box) {
  return made("label", {class: "log-tick"}, box, ` ${word}`);
}

/** @param {string} word @param {string} sign */
function turner(word, sign) {
  const attributes = {type: "submit", class: "button small", value: word, "aria-label": `Find ${word}`};
  return made("button", {...attributes, title: `Find ${word}`}, sign);
}

/** @param {string} name @param {Object<string, string>} attributes @param {...(Node | string)} content @returns {any} */
function made(name, attributes, ...content) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...content);
  return element;
}

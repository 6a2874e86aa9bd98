// @ts-check
// The controls of curves: metrics, axis, smoothing, scale, ranks, grouping. All of them are in the address.

const MOST_OPEN = 12; // metrics that are all shown as choices; more are in a list that opens
let count = 0;

/**
 * @param {string[]} keys @param {{first: string[], groups: string[], hasRanks: boolean}} options ``first``: shown at first
 * @param {(what: "keys" | "look" | "ranks" | "x") => void} tell
 */
export function tools(keys, options, tell) {
  const state = fromAddress(keys, options);
  const element = Object.assign(document.createElement("div"), { className: "curves-tools" });
  const changed = (what) => {
    toAddress(state, options);
    tell(what);
  };
  element.append(
    axis(state, changed),
    smoothing(state, changed),
    logarithmic(state, changed),
    ...(options.hasRanks ? [ranks(state, changed)] : []),
    ...(options.groups.length ? [grouping(state, options.groups, changed)] : []),
    ...(keys.length > 1 ? [choice(state, keys, changed)] : []),
  );
  return { element, state };
}

function fromAddress(keys, { first, groups }) {
  const query = new URLSearchParams(location.search);
  const wanted = query.getAll("key").filter((key) => keys.includes(key));
  const x = query.get("x") ?? "";
  const group = query.get("group") ?? "";
  return {
    keys: wanted.length ? keys.filter((key) => wanted.includes(key)) : first,
    x: ["step", "time", "seconds"].includes(x) ? x : "step",
    smooth: Math.min(0.99, Math.max(0, Number(query.get("smooth")) || 0)),
    isLog: query.get("log") === "1",
    hasAllRanks: query.get("ranks") === "all",
    group: groups.includes(group) ? group : "",
  };
}

function toAddress(state, { first }) {
  const url = new URL(location.href);
  const set = (name, value) => (value ? url.searchParams.set(name, value) : url.searchParams.delete(name));
  set("x", state.x === "step" ? "" : state.x);
  set("smooth", state.smooth ? String(state.smooth) : "");
  set("log", state.isLog ? "1" : "");
  set("ranks", state.hasAllRanks ? "all" : "");
  set("group", state.group);
  url.searchParams.delete("key");
  if (state.keys.join("\n") !== first.join("\n")) {
    for (const key of state.keys) url.searchParams.append("key", key);
  }
  history.replaceState(history.state, "", url);
}

function axis(state, changed) {
  const options = [["step", "Step"], ["time", "Time"], ["seconds", "Time since start"]];
  return select("X axis", options, state.x, (value) => {
    state.x = value;
    changed("x");
  });
}

function grouping(state, groups, changed) {
  return select("Group by", [["", "nothing"], ...groups.map((name) => [name, name])], state.group, (value) => {
    state.group = value;
    changed("look");
  });
}

function ranks(state, changed) {
  return tick("All ranks", state.hasAllRanks, (isOn) => {
    state.hasAllRanks = isOn;
    changed("ranks");
  });
}

/** One control for all charts of a page. @param {{smooth: number}} state @param {(what: "look") => void} changed */
export function smoothing(state, changed) {
  const input = Object.assign(document.createElement("input"), { type: "range", min: "0", max: "0.99", step: "0.01" });
  input.value = String(state.smooth);
  const shown = document.createElement("output");
  shown.textContent = state.smooth.toFixed(2);
  input.addEventListener("input", () => {
    state.smooth = Number(input.value);
    shown.textContent = state.smooth.toFixed(2);
    changed("look");
  });
  return labelled("Smoothing", input, shown);
}

function logarithmic(state, changed) {
  return tick("Log scale", state.isLog, (isOn) => {
    state.isLog = isOn;
    changed("look");
  });
}

function choice(state, keys, changed) {
  const fieldset = document.createElement("fieldset");
  fieldset.className = "curves-choice";
  fieldset.setAttribute("aria-label", "Metrics");
  const details = Object.assign(document.createElement("details"), { className: "curves-keys" });
  const summary = document.createElement("summary");
  const tell = () => (summary.textContent = `Metrics: ${state.keys.length} of ${keys.length} ▾`);
  for (const key of keys) {
    fieldset.append(tick(key, state.keys.includes(key), (isOn) => {
      state.keys = keys.filter((one) => (one === key ? isOn : state.keys.includes(one)));
      tell();
      changed("keys");
    }));
  }
  tell();
  if (keys.length <= MOST_OPEN) return fieldset;
  details.append(summary, fieldset);
  return details;
}

function tick(text, isOn, tell) {
  const input = Object.assign(document.createElement("input"), { type: "checkbox", checked: isOn });
  input.addEventListener("change", () => tell(input.checked));
  const label = document.createElement("label");
  label.append(input, text);
  return label;
}

function select(text, options, value, tell) {
  const element = document.createElement("select");
  for (const [name, words] of options) element.append(new Option(words, name, false, name === value));
  element.addEventListener("change", () => tell(element.value));
  return labelled(text, element);
}

function labelled(text, ...inputs) {
  const label = document.createElement("label");
  const id = `curves-${(count += 1)}`;
  inputs[0].id = id;
  label.htmlFor = id;
  label.append(text, ...inputs);
  return label;
}

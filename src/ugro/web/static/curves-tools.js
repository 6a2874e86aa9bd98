// @ts-check
// The controls of curves: metrics, axis, smoothing, scale, grouping. All of them are in the address.

let count = 0;

/**
 * @param {string[]} keys @param {{most: number, groups: string[]}} options
 * @param {(what: "keys" | "look" | "x") => void} tell
 */
export function tools(keys, options, tell) {
  const state = fromAddress(keys, options);
  const element = Object.assign(document.createElement("div"), { className: "curves-tools" });
  const changed = (what) => {
    toAddress(state, keys, options);
    tell(what);
  };
  element.append(
    axis(state, changed),
    smoothing(state, changed),
    logarithmic(state, changed),
    ...(options.groups.length ? [grouping(state, options.groups, changed)] : []),
    ...(keys.length > 1 ? [choice(state, keys, changed)] : []),
  );
  return { element, state };
}

function fromAddress(keys, { most, groups }) {
  const query = new URLSearchParams(location.search);
  const wanted = query.getAll("key").filter((key) => keys.includes(key));
  const x = query.get("x") ?? "";
  const group = query.get("group") ?? "";
  return {
    keys: wanted.length ? keys.filter((key) => wanted.includes(key)) : atFirst(keys, most),
    x: ["step", "time", "seconds"].includes(x) ? x : "step",
    smooth: Math.min(0.99, Math.max(0, Number(query.get("smooth")) || 0)),
    isLog: query.get("log") === "1",
    group: groups.includes(group) ? group : "",
  };
}

function toAddress(state, keys, { most }) {
  const url = new URL(location.href);
  const set = (name, value) => (value ? url.searchParams.set(name, value) : url.searchParams.delete(name));
  set("x", state.x === "step" ? "" : state.x);
  set("smooth", state.smooth ? String(state.smooth) : "");
  set("log", state.isLog ? "1" : "");
  set("group", state.group);
  url.searchParams.delete("key");
  if (state.keys.join("\n") !== atFirst(keys, most).join("\n")) {
    for (const key of state.keys) url.searchParams.append("key", key);
  }
  history.replaceState(history.state, "", url);
}

/** Metrics that UGRO records, not the script. */
export const isOurs = (key) => /^(advice|plan|profile)\//.test(key);

function atFirst(keys, most) {
  const logged = keys.filter((key) => !isOurs(key));
  return (logged.length ? logged : keys).slice(0, most);
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

function smoothing(state, changed) {
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
  const input = Object.assign(document.createElement("input"), { type: "checkbox", checked: state.isLog });
  input.addEventListener("change", () => {
    state.isLog = input.checked;
    changed("look");
  });
  const label = document.createElement("label");
  label.append(input, "Log scale");
  return label;
}

function choice(state, keys, changed) {
  const details = Object.assign(document.createElement("details"), { className: "curves-keys" });
  const summary = document.createElement("summary");
  const fieldset = document.createElement("fieldset");
  const tell = () => (summary.textContent = `Metrics: ${state.keys.length} of ${keys.length} ▾`);
  fieldset.setAttribute("aria-label", "Metrics");
  for (const key of keys) {
    const input = Object.assign(document.createElement("input"), { type: "checkbox", checked: state.keys.includes(key) });
    input.addEventListener("change", () => {
      state.keys = keys.filter((one) => (one === key ? input.checked : state.keys.includes(one)));
      tell();
      changed("keys");
    });
    const label = document.createElement("label");
    label.append(input, key);
    fieldset.append(label);
  }
  tell();
  details.append(summary, fieldset);
  return details;
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

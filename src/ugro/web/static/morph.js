// @ts-check
// Makes one element like another with as few changes as possible. Children are matched by id or data-key, else in order.
// The user's state stays: typed text, open details, and everything inside [data-keep] and custom elements.

const KEPT_ATTRIBUTES = new Set(["open", "data-local", "aria-busy", "disabled", "tabindex"]);

export function morph(from, to) {
  if (from.hasAttribute("data-keep")) return;
  const isCustom = from.localName.includes("-");
  syncAttributes(from, to, isCustom);
  if (isCustom || from.localName === "textarea" || from.localName === "select") return;
  syncChildren(from, to);
}

function syncAttributes(from, to, isCustom) {
  for (const { name, value } of to.attributes) {
    if (from.getAttribute(name) !== value && !KEPT_ATTRIBUTES.has(name)) from.setAttribute(name, value);
  }
  if (isCustom) return; // it has its own children
  for (const { name } of [...from.attributes]) {
    if (!to.hasAttribute(name) && !KEPT_ATTRIBUTES.has(name)) from.removeAttribute(name);
  }
}

const keyOf = (node) => (node.nodeType === Node.ELEMENT_NODE ? node.id || node.getAttribute("data-key") : null);

function syncChildren(from, to) {
  const keyed = new Map();
  for (const child of from.children) if (keyOf(child)) keyed.set(keyOf(child), child);
  let place = from.firstChild;
  for (const wanted of [...to.childNodes]) {
    const match = matching(wanted, place, keyed);
    if (match === null) {
      from.insertBefore(document.importNode(wanted, true), place);
      continue;
    }
    if (match !== place) from.insertBefore(match, place);
    else place = place.nextSibling;
    if (match.nodeType === Node.ELEMENT_NODE) morph(match, wanted);
    else if (match.data !== wanted.data) match.data = wanted.data;
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function matching(wanted, place, keyed) {
  const key = keyOf(wanted);
  if (key) {
    const found = keyed.get(key);
    keyed.delete(key);
    return found?.localName === wanted.localName ? found : null;
  }
  if (!place || place.nodeType !== wanted.nodeType || keyOf(place)) return null;
  return place.nodeType !== Node.ELEMENT_NODE || place.localName === wanted.localName ? place : null;
}

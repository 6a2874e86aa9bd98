// @ts-check
// Terminal output as text nodes: colours become classes, other escape sequences are removed.

const COLOUR = /\x1b\[([0-9;]*)m/;
// Sequences that begin with ESC or a one-byte form of it: strings (titles, links), then all others. A string without an
// end is text, as in cli/untrusted.py.
const STRINGS = /(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\r\x1b\x90\x98\x9c-\x9f]{0,4096}(?:\x07|\x1b\\|\x9c)/g;
const SEQUENCES = /(?:\x1b\[|\x9b)(?![0-9;]*m)[0-?]*[ -/]*[@-~]?|\x1b[ -/]*[0-Z\\^-~]|\x1b(?!\[)/g;
// Other control characters, and those that change the direction of text, which could disguise a line.
const CONTROLS = /[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

/** @param {string} text one line; of a progress bar, only its last state is kept */
function cleaned(text) {
  const shown = text.replace(/\r+$/, "").replace(STRINGS, "");
  return shown.slice(shown.lastIndexOf("\r") + 1).replace(SEQUENCES, "").replace(CONTROLS, "");
}

/**
 * @param {string} text
 * @param {string} wanted lower case; what is searched for, and marked
 * @returns {DocumentFragment}
 */
export function painted(text, wanted) {
  const fragment = document.createDocumentFragment();
  const parts = cleaned(text).split(COLOUR);
  /** @type {string[]} */
  let classes = [];
  parts.forEach((part, number) => {
    if (number % 2) {
      classes = styled(classes, part);
    } else if (part) {
      fragment.append(...marked(part, wanted, classes));
    }
  });
  return fragment;
}

/** @param {string[]} classes @param {string} codes */
function styled(classes, codes) {
  let now = classes;
  for (const code of codes.split(";").map(Number)) {
    if (code === 0) now = [];
    else if (code === 1) now = [...now, "ansi-bold"];
    else if (code === 22) now = now.filter((name) => name !== "ansi-bold");
    else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97)) now = [...uncoloured(now), `ansi-${code % 10}`];
    else if (code === 38 || code === 48) break; // followed by parameters of its own
    else if (code === 39) now = uncoloured(now);
  }
  return now;
}

/** @param {string[]} classes */
function uncoloured(classes) {
  return classes.filter((name) => name === "ansi-bold");
}

/** @param {string} text @param {string} wanted @param {string[]} classes @returns {Node[]} */
function marked(text, wanted, classes) {
  const nodes = [];
  const lower = text.toLowerCase();
  let begin = 0;
  // Some letters become longer in lower case; then nothing is marked, rather than the wrong place.
  const canMark = wanted && lower.length === text.length;
  for (let at = canMark ? lower.indexOf(wanted) : -1; at >= 0; at = lower.indexOf(wanted, begin)) {
    if (at > begin) nodes.push(piece("span", text.slice(begin, at), classes));
    nodes.push(piece("mark", text.slice(at, at + wanted.length), []));
    begin = at + wanted.length;
  }
  if (begin < text.length) nodes.push(piece("span", text.slice(begin), classes));
  return nodes;
}

/** @param {string} name @param {string} text @param {string[]} classes @returns {Node} */
function piece(name, text, classes) {
  if (name === "span" && !classes.length) return document.createTextNode(text);
  const element = document.createElement(name);
  element.classList.add(...classes);
  element.textContent = text;
  return element;
}

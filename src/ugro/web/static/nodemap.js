// @ts-check
// The map of many nodes: one stop of the Tab key, arrow keys move, and a line below names the node.

const ROWS = { ArrowDown: 1, ArrowUp: -1 };
const STEPS = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };

const STOPS = '[data-squares] a:not([tabindex="-1"])';

const squareOf = (event) => event.target.closest?.("[data-squares] a") ?? null;

/** The number of squares in a row. */
function width(squares) {
  const second = squares.findIndex((one) => one.offsetTop > squares[0].offsetTop);
  return second < 0 ? squares.length : second;
}

function moved(squares, here, key) {
  const to = here + (STEPS[key] ?? ROWS[key] * width(squares));
  if (key in ROWS && (to < 0 || to >= squares.length)) return here;
  return Math.min(Math.max(to, 0), squares.length - 1);
}

function tell(square) {
  const line = document.querySelector("[data-square-words]");
  if (line) line.textContent = square.getAttribute("aria-label");
}

document.addEventListener("keydown", (event) => {
  const square = squareOf(event);
  if (!square || !(event.key in STEPS || event.key in ROWS) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const squares = [...square.closest("[data-squares]").querySelectorAll("a")];
  squares[moved(squares, squares.indexOf(square), event.key)].focus();
});

/** Makes it the stop of the Tab key. */
function stopAt(square) {
  for (const other of document.querySelectorAll(STOPS)) if (other !== square) other.tabIndex = -1;
  if (square) square.tabIndex = 0;
}

document.addEventListener("focusin", (event) => {
  const square = squareOf(event);
  if (!square) return;
  stopAt(square);
  tell(square);
});
// The previous stop may have been filtered away.
document.addEventListener("ugro-parts", () => stopAt(document.querySelector(STOPS) ?? document.querySelector("[data-squares] a")));
document.addEventListener("mouseover", (event) => {
  const square = squareOf(event);
  if (square) tell(square);
});

// @ts-check
// The form that launches a job again with changes. Only changed fields are sent: they override the job file, as options
// of "ugro launch -f" do. An error is shown beside what it is about, and nothing that was typed is lost.

const form = /** @type {HTMLFormElement} */ (document.getElementById("again"));
const text = /** @type {HTMLTextAreaElement} */ (document.getElementById("text"));
const problem = /** @type {HTMLElement} */ (document.getElementById("again-problem"));
const command = /** @type {HTMLElement} */ (document.getElementById("again-cli"));
const button = /** @type {HTMLButtonElement} */ (form.querySelector("button[type=submit]"));
const fields = /** @type {(HTMLInputElement | HTMLTextAreaElement)[]} */ ([...form.querySelectorAll("[data-flag]")]);

const isChanged = (field) => field.value !== field.defaultValue;
const quoted = (word) => (/^[\w./:=@%+,-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

function follow() {
  const options = [];
  for (const field of fields) {
    field.closest(".field")?.classList.toggle("changed", isChanged(field));
    if (isChanged(field) && field.value.trim() && field instanceof HTMLInputElement) options.push(field.dataset.flag, quoted(field.value.trim()));
  }
  const line = [command.dataset.start, ...options].join(" ");
  const [code, copy] = [command.querySelector("code"), command.querySelector("button")];
  if (code) code.textContent = line;
  if (copy) copy.dataset.copy = line;
}

function clear() {
  problem.hidden = true;
  for (const one of [text, ...fields]) one.removeAttribute("aria-invalid");
}

/** @param {{message: string, hint?: string | null}} error */
function show(error) {
  const line = /^job\.yaml:(\d+): /.exec(error.message);
  const field = fields.find((one) => isChanged(one) && error.message.startsWith(one.dataset.flag ?? "?"));
  const [what, hint] = /** @type {HTMLElement[]} */ ([...problem.children]);
  what.textContent = line ? `Line ${line[1]}: ${error.message.slice(line[0].length)}` : error.message;
  hint.textContent = error.hint ?? "";
  problem.hidden = false;
  if (line) select(Number(line[1]));
  else if (field) mark(field);
  else problem.focus();
}

/** @param {HTMLInputElement | HTMLTextAreaElement} field */
function mark(field) {
  field.setAttribute("aria-invalid", "true");
  field.focus();
}

/** @param {number} number */
function select(number) {
  const lines = text.value.split("\n");
  const start = lines.slice(0, number - 1).reduce((sum, one) => sum + one.length + 1, 0);
  mark(text);
  text.setSelectionRange(start, start + (lines[number - 1] ?? "").length);
  text.scrollTop = Math.max(0, number - 4) * parseFloat(getComputedStyle(text).lineHeight);
}

async function launch() {
  const changed = Object.fromEntries(fields.filter(isChanged).map((field) => [field.name, field.value]));
  const body = { key: form.dataset.key, text: text.value, fields: changed };
  const answer = await fetch(location.pathname, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  }).catch(() => null);
  if (!answer) return show({ message: "The agent does not answer.", hint: "Launching again is safe: the same content is submitted once." });
  const document = await answer.json().catch(() => ({ error: { message: `The agent refused the request (${answer.status}).` } }));
  if (answer.ok) location.assign(`/jobs/${document.id}`);
  else show(document.error);
  return undefined;
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (button.disabled) return;
  clear();
  button.disabled = true;
  await launch();
  button.disabled = false;
});
form.addEventListener("input", follow);
follow(); // a browser may have kept what was typed before
button.disabled = false; // not earlier: without this module the browser would send the form itself, and lose it

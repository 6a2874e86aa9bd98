// @ts-check
// Reads what a service answers: text that arrives in pieces, labels, vectors, or anything as JSON.

import { events } from "/static/services/events.js";
import { plainTable } from "/static/tables.js";

const MOST_ROWS = 20;
const MOST_NUMBERS = 8;

/**
 * Sends a request and shows its answer in a place; calls ``begun`` with the first piece. Returns figures, in words.
 * @param {string} path @param {object} body @param {AbortSignal} signal @param {HTMLElement} place @param {() => void} begun
 */
export async function answerOf(path, body, signal, place, begun) {
  const began = performance.now();
  const answer = await fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error(await problemOf(answer));
  const said = /** @type {HTMLElement} */ (place.querySelector(".said"));
  if (answer.headers.get("content-type")?.startsWith("text/event-stream")) return streamed(answer, said, began, begun);
  const found = await answer.json();
  if (found.results) said.replaceWith(labels(found.results));
  else if (found.data?.[0]?.embedding) said.replaceWith(vectors(found.data.map((one) => one.embedding)));
  else said.textContent = found.choices ? textOf(found.choices[0]) : JSON.stringify(found.outputs ?? found, null, 1);
  return seconds(performance.now() - began);
}

async function streamed(answer, said, began, begun) {
  const log = said.closest("[role=log]");
  let [first, pieces, usage] = [0, 0, null];
  for await (const one of events(answer.body)) {
    if (one.error) throw new Error(one.error.message ?? String(one.error));
    const text = one.choices?.[0] ? textOf(one.choices[0]) : "";
    if (text && !first) {
      first = performance.now();
      begun();
    }
    if (text) pieces += 1;
    said.append(text);
    usage = one.usage ?? usage;
    if (log) log.scrollTop = log.scrollHeight;
  }
  if (!first) return `no text, ${seconds(performance.now() - began)}`;
  const [count, took] = [usage?.completion_tokens ?? pieces, performance.now() - first];
  const speed = count > 1 && took > 0 ? `, ${((1000 * (count - 1)) / took).toFixed(1)} per second` : "";
  return `first token after ${seconds(first - began)}; ${count} tokens${speed}`;
}

function textOf(choice) {
  return choice.delta?.content ?? choice.message?.content ?? choice.text ?? "";
}

async function problemOf(answer) {
  const text = await answer.text();
  try {
    const { message, hint } = JSON.parse(text).error;
    return hint ? `${message}. ${hint}` : message;
  } catch {
    return answer.status === 401 ? "This browser is signed out." : `The agent refused the request (${answer.status}).`;
  }
}

function seconds(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

function labels(results) {
  const rows = results.slice(0, MOST_ROWS).flatMap((one, at) => one.scores.slice(0, MOST_ROWS).map(({ label, score }, place) => [place ? "" : String(at + 1), label, score.toFixed(4)]));
  return plainTable(["Text", "Label", "Score"], rows);
}

function vectors(all) {
  const rows = all.slice(0, MOST_ROWS).map((one, at) => [String(at + 1), String(one.length), `${one.slice(0, MOST_NUMBERS).map((value) => value.toFixed(4)).join(", ")}${one.length > MOST_NUMBERS ? ", …" : ""}`]);
  return plainTable(["Text", "Numbers", "Begins with"], rows);
}

// @ts-check
// Live changes, from one stream for all tabs.
//   import {live} from "/static/live.js";
//   const end = live.on(change => …)       lines of /v1/changes: {cursor, event} | {cursor, nodes} | {cursor, gone_nodes}
//                                          | {cursor, metrics: [job, …]}; and {cursor, again: true}: reload everything
//   live.onState((state, heardAt) => …)    "connecting" | "live" | "stale" | "offline" | "signed-out"

const listeners = new Set();
const watchers = new Set();
let state = "connecting";
let heardAt = Date.now();
let cursor = seenByPage();

function seenByPage() {
  const meta = document.querySelector('meta[name="ugro-cursor"]');
  return meta ? Number(meta.getAttribute("content")) : null;
}

let patienceMs = 5000;
let impatience = 0;
let port = connect();

function connect() {
  const script = "/static/live-worker.js";
  if ("SharedWorker" in window) return new SharedWorker(script, { name: "ugro live" }).port;
  return new Worker(script);
}

function sayHello() {
  port.onmessage = hear;
  port.postMessage({ hello: cursor });
  clearTimeout(impatience);
  impatience = setTimeout(startAnew, patienceMs);
}

// A worker answers every hello, unless it was ending because its last tab had closed.
function startAnew() {
  port.onmessage = null;
  leave();
  if ("terminate" in port) port.terminate();
  patienceMs *= 2;
  port = connect();
  sayHello();
}

function leave() {
  port.postMessage({ bye: true });
}

function hear({ data }) {
  clearTimeout(impatience);
  if (data.state) {
    ({ state, heardAt } = data);
    for (const watch of watchers) watch(state, heardAt);
  }
  if (data.change) {
    cursor = data.change.cursor ?? cursor;
    for (const listen of listeners) listen(data.change);
  }
}

// After the modules of the page have registered their listeners.
setTimeout(sayHello);
window.addEventListener("pagehide", leave);
window.addEventListener("pageshow", (event) => {
  if (event.persisted) sayHello();
});

export const live = {
  on(listener) {
    listeners.add(listener);
    return () => listeners.delete(listener);
  },
  onState(watcher) {
    watchers.add(watcher);
    watcher(state, heardAt);
    return () => watchers.delete(watcher);
  },
};

// @ts-check
// What happens, as it happens, in one stream for all tabs.
//   import {live} from "/static/live.js";
//   const end = live.on(change => …)       lines of /v1/changes: {cursor, event} | {cursor, nodes} | {cursor, gone_nodes}
//                                          | {cursor, metrics: [job, …]}; and {cursor, again: true}: look at everything anew
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

function connect() {
  const script = "/static/live-worker.js";
  if ("SharedWorker" in window) return new SharedWorker(script, { name: "ugro live" }).port;
  return new Worker(script);
}

const port = connect();
port.onmessage = ({ data }) => {
  if (data.state) {
    ({ state, heardAt } = data);
    for (const watch of watchers) watch(state, heardAt);
  }
  if (data.change) {
    cursor = data.change.cursor ?? cursor;
    for (const listen of listeners) listen(data.change);
  }
};
// After the modules of the page have said what they listen to.
setTimeout(() => port.postMessage({ hello: cursor }));
window.addEventListener("pagehide", () => port.postMessage({ bye: true }));
window.addEventListener("pageshow", (event) => {
  if (event.persisted) port.postMessage({ hello: cursor });
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

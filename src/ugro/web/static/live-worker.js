// The stream of changes that all tabs share, because browsers allow only six connections per host.
// A tab sends {hello: cursor} and receives all changes after it; {bye: true} when it closes.
// Without shared workers, each tab runs its own.

const MOST_KEPT = 2000;
const SILENT_MS = 15000;
const LONGEST_PAUSE_MS = 10000;

const ports = new Set();
const kept = []; // events, oldest first
const nodes = new Map(); // the newest report of each node
let completeFrom = null; // after this cursor, kept has everything
let cursor = null;
let source = null;
let state = "connecting";
let heardAt = Date.now();
let failures = 0;
let openedAt = 0;

function tell(message) {
  for (const port of ports) port.postMessage(message);
}

function become(next) {
  if (next === state) return;
  state = next;
  tell({ state, heardAt });
}

function hear() {
  heardAt = Date.now();
  failures = 0;
  become("live");
}

function open() {
  const after = cursor === null ? "" : `?after=${cursor}`;
  let hasOpened = false;
  openedAt = Date.now();
  source = new EventSource(`/live${after}`);
  source.onopen = () => {
    // The stream repeats missed events, but not missed changes of metrics.
    if (hasOpened || failures > 0) tell({ change: { cursor, again: true } });
    hasOpened = true;
    hear();
  };
  source.onmessage = (message) => {
    hear();
    take(JSON.parse(message.data));
  };
  source.addEventListener("beat", (message) => {
    hear();
    if (cursor === null) cursor = completeFrom = Number(message.lastEventId);
  });
  source.addEventListener("bye", () => become("offline"));
  source.onerror = lose;
}

function lose() {
  failures += 1;
  become("offline");
  if (source.readyState === EventSource.CLOSED) openLater();
}

async function openLater() {
  source.close();
  // EventSource does not report why it was refused.
  const answer = await fetch("/v1/agent").catch(() => null);
  if (answer?.status === 401) become("signed-out");
  setTimeout(open, Math.min(LONGEST_PAUSE_MS, 500 * 2 ** Math.min(failures, 6)));
}

function take(change) {
  cursor = change.cursor;
  if (change.event) {
    kept.push(change);
    if (kept.length > MOST_KEPT) completeFrom = kept.shift().cursor;
  }
  for (const report of change.nodes ?? []) nodes.set(report.name, report);
  for (const name of change.gone_nodes ?? []) nodes.delete(name);
  tell({ change });
}

function welcome(port, seen) {
  ports.add(port);
  port.postMessage({ state, heardAt });
  if (source === null) {
    cursor = completeFrom = seen;
    open();
    return;
  }
  if (seen === null || cursor === null) return;
  if (completeFrom === null || seen < completeFrom) port.postMessage({ change: { cursor, again: true } });
  for (const change of kept) if (change.cursor > seen) port.postMessage({ change });
  if (nodes.size) port.postMessage({ change: { cursor, nodes: [...nodes.values()] } });
}

function listen(port) {
  port.onmessage = ({ data }) => {
    if ("hello" in data) welcome(port, data.hello);
    if (data.bye) ports.delete(port);
  };
}

setInterval(() => {
  if (source === null || source.readyState === EventSource.CLOSED) return;
  if (Date.now() - Math.max(heardAt, openedAt) < SILENT_MS) return;
  // A cut connection or a hanging server sends nothing, so only a new connection shows whether the agent is there.
  if (state === "live") become("stale");
  failures += 1;
  source.close();
  open();
}, 2000);

if ("SharedWorkerGlobalScope" in self) self.onconnect = (event) => listen(event.ports[0]);
else listen(self);

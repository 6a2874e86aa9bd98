// @ts-check
// Shows whether the page is live and, if not, how old it is.
import { agoWords } from "/static/ages.js";
import { live } from "/static/live.js";

const WORDS = { connecting: "connecting", live: "live", stale: "stale", offline: "offline", "signed-out": "signed out" };
const place = document.getElementById("live");
const banner = document.getElementById("offline");
const PATIENCE_MS = 1500;
let timer = 0;

function explain(state, heardAt) {
  const since = `These values are from ${agoWords((Date.now() - heardAt) / 1000)}.`;
  if (state === "signed-out") return "This browser is signed out. On the agent's machine, run: ugro dashboard";
  if (state === "stale") return `The agent has sent nothing for a while. ${since}`;
  return `The agent does not answer; jobs continue without it. ${since} Any command starts it: ugro agent start`;
}

live.onState((state, heardAt) => {
  clearInterval(timer);
  if (!place || !banner) return;
  place.dataset.state = state;
  place.querySelector(".word").textContent = WORDS[state];
  document.documentElement.dataset.live = state;
  banner.hidden = true;
  if (state === "live" || state === "connecting") return;
  const tell = () => {
    banner.hidden = false;
    banner.textContent = explain(state, heardAt);
  };
  // A restart of the agent is over before the message appears.
  timer = setInterval(tell, PATIENCE_MS);
});

// @ts-check
// Results of test messages, by channel. The API answers 200 even if a channel failed.

document.addEventListener("ugro-acted", (event) => {
  const tried = event instanceof CustomEvent ? event.detail?.channels : null;
  const place = document.getElementById("tried");
  if (!tried || !place) return;
  place.replaceChildren(...tried.map(lineOf));
});

function lineOf({ channel, error, hint }) {
  const line = document.createElement("p");
  const status = document.createElement("span");
  status.className = `status ${error ? "bad" : "good"}`;
  status.textContent = `${error ? "✕" : "✓"} ${channel}: ${error ? "failed" : "sent"}`;
  line.append(status, error ? ` ${error}${hint ? ` (${hint})` : ""}` : "");
  return line;
}

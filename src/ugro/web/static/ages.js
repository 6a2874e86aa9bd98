// @ts-check
// <time datetime="…" data-age>: its age, kept up to date; the title has the local time.

/** The same as formatting.age on the server. */
function ageWords(seconds) {
  const passed = Math.abs(seconds);
  if (passed < 1) return "now";
  const words = lengthWords(passed);
  return seconds > 0 ? `${words} ago` : `in ${words}`;
}

export const agoWords = (seconds) => ageWords(Math.max(seconds, 0));

function lengthWords(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

function update() {
  if (document.hidden) return;
  for (const element of document.querySelectorAll("time[data-age]")) {
    const at = new Date(element.getAttribute("datetime"));
    const words = ageWords((Date.now() - at.getTime()) / 1000);
    if (element.textContent !== words) element.textContent = words;
    if (!element.hasAttribute("data-local")) {
      element.setAttribute("data-local", "");
      element.setAttribute("title", `${at.toLocaleString()} (${element.getAttribute("datetime")})`);
    }
  }
}

update();
setInterval(update, 1000);
document.addEventListener("visibilitychange", update);

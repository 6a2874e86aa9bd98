// @ts-check
// The theme: system, light or dark. A cookie tells the server, so that no page flashes.

const ORDER = [null, "light", "dark"];
const NAMES = { light: "light", dark: "dark" };
const root = document.documentElement;
const button = document.getElementById("theme");

export function nextTheme() {
  const chosen = ORDER[(ORDER.indexOf(root.dataset.theme ?? null) + 1) % ORDER.length];
  if (chosen) root.dataset.theme = chosen;
  else delete root.dataset.theme;
  const life = chosen ? 31536000 : 0;
  document.cookie = `ugro_theme=${chosen ?? ""}; path=/; max-age=${life}; samesite=strict`;
  name();
}

function name() {
  const words = NAMES[root.dataset.theme] ?? "system";
  button?.setAttribute("aria-label", `Theme: ${words}. Change it`);
}

button?.addEventListener("click", nextTheme);
name();

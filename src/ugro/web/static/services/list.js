// @ts-check
// The list of services: requests change its figures, and no event tells of them.

import { refresh } from "/static/parts.js";

const EVERY_MS = 3000;

setInterval(() => {
  if (!document.hidden) refresh();
}, EVERY_MS);

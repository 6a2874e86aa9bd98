// @ts-check
// Services: requests change their figures, and no event tells of them.

import { refresh } from "/static/parts.js";

const EVERY_MS = 3000;

setInterval(() => {
  if (!document.hidden) refresh();
}, EVERY_MS);

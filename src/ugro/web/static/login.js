// @ts-check
// Uses the link's word up, by a POST: without this script, the button does.

document.querySelector("form")?.requestSubmit();

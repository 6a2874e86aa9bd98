// @ts-check
// A table of texts.

/** @param {string[]} header @param {(string | number)[][]} rows */
export function plainTable(header, rows) {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const text of header) head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: text }));
  const body = table.createTBody();
  for (const row of rows) {
    const made = body.insertRow();
    for (const cell of row) made.insertCell().textContent = String(cell);
  }
  return table;
}

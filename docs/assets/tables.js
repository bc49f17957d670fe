// Tables of the documentation: a click on a heading sorts, and numbers are not broken across lines.
(() => {
  const SECONDS = { h: 3600, min: 60, s: 1 };
  const NUMBER = /^[-−+]?\d/;

  // What a cell begins with: 1,072,444; 0.850 ± 0.075 %; 2 min 45 s. A dash, which stands for nothing, comes last.
  const number = (text) => {
    const times = [...text.matchAll(/(\d+) (h|min|s)\b/g)];
    if (times.length) return times.reduce((sum, [, count, unit]) => sum + count * SECONDS[unit], 0);
    const found = parseFloat(text.trim().replace("−", "-").replaceAll(",", ""));
    return Number.isNaN(found) ? Infinity : found;
  };

  Tablesort.extend(
    "number",
    (text) => NUMBER.test(text.trim()) || text.trim() === "–",
    (one, other) => (number(one) === number(other) ? 0 : number(other) - number(one)),
  );
  for (const table of document.querySelectorAll("article table:not([class])")) {
    for (const cell of table.querySelectorAll("td")) {
      const text = cell.textContent.trim();
      if (NUMBER.test(text) && text.length < 24) cell.classList.add("number");
    }
    if (table.tHead) new Tablesort(table);
  }
})();

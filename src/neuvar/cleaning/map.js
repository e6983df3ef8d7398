// The confusion map of classes.
const FEW = 20, MANY = 150;
let view = "pairs", shownClasses = [];

/** The classes of the most frequent pairs, at most FEW. */
function mostConfused() {
  const classes = new Set();
  for (const [i, j] of [...data.pairs].sort((a, b) => b[2] - a[2])) {
    if (classes.size + !classes.has(i) + !classes.has(j) <= FEW) classes.add(i).add(j);
  }
  for (let k = 0; k < names.length && classes.size < FEW; k += 1) classes.add(k);
  return [...classes].sort((a, b) => a - b);
}

/** Elements of the current view: row, column, colour from 0 to 1, text. */
function elements() {
  if (view === "pairs") {
    const most = Math.max(1, ...data.pairs.map(([, , flagged]) => flagged));
    return data.pairs.map(([i, j, flagged]) => [i, j, Math.sqrt(flagged / most), count(flagged)]);
  }
  const most = Math.max(0.01, ...data.transition.filter(([i, j]) => i !== j).map(([, , share]) => share));
  return data.transition.map(([i, j, share]) => [i, j, i === j ? 0 : Math.sqrt(share / most), (100 * share).toFixed(share < 0.1 ? 1 : 0)]);
}

function describeCell(row, column) {
  if (view === "pairs") {
    const flagged = data.pairs.find(([i, j]) => i === row && j === column)?.[2] ?? 0;
    return [isolated(names[row]), " given, ", isolated(names[column]), ` suggested: ${count(flagged)} flagged`];
  }
  const element = data.transition.find(([i, j]) => i === row && j === column);
  const empty = !data.transition.some(([i]) => i === row);
  const share = empty ? "unknown" : element ? `${percent(element[2])}, interval ${percent(element[3])} – ${percent(element[4])}` : `< ${percent(data.least)}`;
  return [isolated(names[row]), row === column ? " keeps its label: " : " gets the label ", ...(row === column ? [] : [isolated(names[column]), ": "]), share];
}

function drawMap() {
  const dense = shownClasses.length > FEW + 4, position = new Map(shownClasses.map((k, i) => [k, i]));
  const table = make("table", { role: "grid", class: dense ? "map dense" : shownClasses.length > 12 ? "map small" : "map" });
  const tall = !dense && shownClasses.some((k) => names[k].length > 3);
  const axes = view === "pairs" ? ["given", "suggested"] : ["true", "given"];
  table.classList.toggle("tall", tall);
  table.append(make("caption", {}, `${axes[0]} ↓ · ${axes[1]} →`));
  const heads = shownClasses.map((k) => make("th", { scope: "col" }, isolated(names[k])));
  table.append(make("thead", {}, make("tr", {}, make("td"), ...heads)));
  const rows = shownClasses.map((k) => {
    const cells = shownClasses.map((other) => make("td", { tabindex: "-1", "data-row": k, "data-column": other, ...(k === other ? { class: "same" } : {}) }));
    return make("tr", {}, make("th", { scope: "row" }, isolated(names[k])), ...cells);
  });
  for (const [i, j, heat, words] of elements()) {
    if (!position.has(i) || !position.has(j)) continue;
    const element = rows[position.get(i)].cells[position.get(j) + 1];
    element.style.setProperty("--share", heat.toFixed(3));
    if (!dense) element.append(words);
  }
  for (const row of rows) for (const element of [...row.cells].slice(1)) element.setAttribute("role", "gridcell");
  table.append(make("tbody", {}, ...rows));
  const first = table.querySelector("[data-row]");
  if (first) first.tabIndex = 0;
  get("map").replaceChildren(table);
  const reading = view === "pairs"
    ? "Number of flagged labels for each given and suggested class. Click a cell to see its examples below."
    : "Estimated probability, in percent, of each given label for each true class. Click a cell to see its flagged examples below.";
  const part = names.length > MANY ? ` The map shows the ${FEW} most confused of ${count(names.length)} classes.` : "";
  get("reading").textContent = reading + part;
  markPair();
}

/** Given and suggested class of a cell. */
function pairOf(element) {
  const row = Number(element.dataset.row), column = Number(element.dataset.column);
  return view === "pairs" ? [row, column] : [column, row];
}

function markPair() {
  const given = get("given").value, suggested = get("suggested").value;
  const is = (pair) => String(pair[0]) === given && String(pair[1]) === suggested;
  for (const element of all('#map [aria-selected="true"]')) element.removeAttribute("aria-selected");
  const [row, column] = view === "pairs" ? [given, suggested] : [suggested, given];
  if (given && suggested) get("map").querySelector(`[data-row="${row}"][data-column="${column}"]`)?.setAttribute("aria-selected", "true");
  for (const button of all("#pairs button")) button.setAttribute("aria-pressed", String(is(button.value.split(" "))));
}

function drawFrequentPairs() {
  const most = [...data.pairs].sort((a, b) => b[2] - a[2]).slice(0, 8);
  get("pairs").hidden = !most.length;
  get("pairs").querySelector("ol").append(...most.map(([i, j, flagged]) => {
    const button = make("button", { type: "button", value: `${i} ${j}` },
      make("span", { class: "turn" }, isolated(names[i], { class: "from" }), arrow(), isolated(names[j], { class: "to" })),
      make("span", { class: "times" }, count(flagged)));
    button.style.setProperty("--share", (flagged / most[0][2]).toFixed(3));
    button.addEventListener("click", () => toggleFilter(i, j));
    return make("li", {}, button);
  }));
}

function moveInMap(event) {
  const element = event.target.closest("[data-row]");
  if (!element) return;
  const row = element.parentElement.rowIndex, column = element.cellIndex, table = element.closest("table");
  const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] ?? [0, 0];
  if (event.key === "Enter" || event.key === " ") toggleFilter(...pairOf(element));
  else if (down || right) {
    const next = table.rows[row + down]?.cells[column + right];
    if (next?.dataset.row) { element.tabIndex = -1; next.tabIndex = 0; next.focus(); }
  } else return;
  event.preventDefault();
}

function startMap() {
  const extent = get("extent").querySelector("select"), views = all(".views button"), field = get("map");
  shownClasses = names.map((_, k) => k);
  if (names.length > FEW + 4) {
    shownClasses = mostConfused();
    extent.append(make("option", { value: "few" }, `The ${FEW} most confused classes`), make("option", { value: "all" }, `All ${names.length} classes`));
    get("extent").hidden = names.length > MANY;
  }
  extent.addEventListener("change", () => { shownClasses = extent.value === "few" ? mostConfused() : names.map((_, k) => k); drawMap(); });
  for (const button of views) {
    button.addEventListener("click", () => {
      view = button.value;
      for (const one of views) one.setAttribute("aria-pressed", String(one === button));
      get("readout").replaceChildren();
      drawMap();
    });
  }
  const showReadout = (event) => {
    const element = event.target.closest("[data-row]");
    if (element) get("readout").replaceChildren(...describeCell(Number(element.dataset.row), Number(element.dataset.column)));
  };
  field.addEventListener("pointerover", showReadout);
  field.addEventListener("focusin", showReadout);
  field.addEventListener("keydown", moveInMap);
  field.addEventListener("click", (event) => { const element = event.target.closest("[data-row]"); if (element) toggleFilter(...pairOf(element)); });
  drawFrequentPairs();
  drawMap();
}

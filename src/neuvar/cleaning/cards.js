// The grid of example cards.
const PORTION = 60; // cards per list; fills all rows for 2 to 6 cards per row
const AHEAD = 30; // draws the next portion this many cards before it is needed
const SLICE = 5; // cards drawn at once in the background
let scope = "flagged"; // or "others", or "" for both
let matching = [], drawn = 0, current = null, drawingAhead = null;

const inScope = (card) => scope === "" || card.flagged === (scope === "flagged");

function preview(card) {
  const about = `Example ${card.id}`;
  if (data.pictures) return make("img", { src: data.pictures[card.i], alt: about, draggable: "false" });
  return data.numbers ? values(card, about) : bars(data.bars[card.i], about);
}

/** Cells of a table: columns of text as paragraphs, others as rows with their names. */
function values(card, about) {
  const rows = [], texts = [];
  data.numbers[card.i].forEach((value, position) => {
    const k = data.which ? data.which[card.i][position] : position, name = data.columns[k];
    if (data.texts?.includes(k)) {
      const heading = data.columns.length > 1 ? [make("span", { class: "name" }, isolated(name))] : [];
      texts.push(make("p", { class: "text", dir: "auto" }, ...heading, value));
      return;
    }
    const unusual = data.unusual?.[card.i].includes(k);
    const attributes = unusual ? { class: "unusual", title: "Unusual value" } : {};
    const mark = unusual ? [make("span", { class: "label" }, " (unusual)")] : [];
    rows.push(make("tr", {}, make("th", { scope: "row" }, isolated(name)), make("td", attributes, String(value), ...mark)));
  });
  const hidden = data.columns.length - data.numbers[card.i].length;
  const rest = hidden ? [make("p", { class: "rest" }, `and ${count(hidden)} more column${hidden === 1 ? "" : "s"}`)] : [];
  const table = rows.length ? [make("table", { "aria-label": about }, make("tbody", {}, ...rows))] : [];
  return make("div", { class: "values" }, ...texts, ...table, ...rest);
}

function bars(values, about) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", `0 0 ${values.length} 200`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${about}: features as deviations from their means`);
  values.forEach((value, x) => {
    const bar = document.createElementNS(space, "rect");
    const set = { x: x + 0.1, width: 0.8, y: value > 0 ? 100 - value : 100, height: Math.max(Math.abs(value), 1) };
    for (const [name, number] of Object.entries(set)) bar.setAttribute(name, number);
    svg.append(bar);
  });
  return svg;
}

function draw(card) {
  const quality = card.quality < 0.001 ? "< 0.001" : card.quality.toFixed(3);
  const others = make("select", { "aria-label": "Another class", title: "Another class" }, make("option", { value: "" }, "Other…"));
  others.hidden = names.length < 3;
  const same = card.given === card.suggested;
  const wrong = `wrong: ${Math.floor(100 * card.wrong)} %${card.flagged ? "" : ", not flagged"}`;
  card.element = make("li", { class: "card", tabindex: "-1", "data-index": card.index, "data-flagged": card.flagged },
    make("div", { class: "preview" }, preview(card)),
    make("p", { class: "turn" }, isolated(names[card.given], { class: "from" }),
      ...(same ? [] : [arrow(), isolated(names[card.suggested], { class: "to" })])),
    make("p", { class: "about" }, make("span", { title: `Probability that the label is wrong; label quality ${quality}` }, wrong),
      isolated(data.id_column === "file" ? card.id : `#${card.id}`, { class: "id" })),
    make("div", { class: "choices" },
      ...(same ? [] : [make("button", { type: "button", class: "accept", value: "accept", title: "Use the suggestion (a)" }, "Accept")]),
      make("button", { type: "button", class: "reject", value: "reject", title: "Keep the given label (r)" }, same ? "Keep" : "Reject"), others));
  refresh(card);
  return card.element;
}

/** Fills a list of classes at its first use, since there may be many. */
function fillClasses(select) {
  if (select.options.length > 1) return;
  select.append(...names.map((name, k) => make("option", { value: k }, name)));
}

function refresh(card) {
  if (!card.element) return;
  const now = decisionOf(card), label = decisions.get(card.index);
  card.element.dataset.decision = now;
  for (const button of all("button", card.element)) button.setAttribute("aria-pressed", String(button.value === now));
  card.element.setAttribute("aria-label", `${card.id}: given ${names[card.given]}, ${card.given === card.suggested ? "no suggestion" : `suggested ${names[card.suggested]}`}, ${now ? `decided: ${names[label]}` : "open"}`);
  const select = card.element.querySelector("select");
  if (now === "other") fillClasses(select);
  select.value = now === "other" ? String(label) : "";
}

function choose(card, what) {
  decide([[card, what === "accept" ? card.suggested : card.given]]);
}

/** A line between flagged examples and others, if the order separates them. */
function boundary(card, before) {
  const separated = ["worst", "best"].includes(get("order").value);
  if (!separated || !before || before.flagged === card.flagged) return [];
  return [make("li", { class: "boundary" }, card.flagged ? "Flagged" : "Not flagged: these labels are probably right")];
}

function showMore(least = drawn + PORTION) {
  const end = Math.min(matching.length, Math.max(least, drawn));
  while (drawn < end) {
    // The browser lays out only the lists on the screen.
    const portion = matching.slice(drawn, drawn + PORTION);
    const elements = portion.flatMap((card, i) => [...boundary(card, matching[drawn + i - 1]), card.element ?? draw(card)]);
    get("grid").append(make("ul", { class: "portion" }, ...elements));
    drawn += portion.length;
  }
  get("more").hidden = drawn >= matching.length;
  get("more").textContent = `Show more (${count(matching.length - drawn)} left)`;
  const rest = data.flagged > cards.length ? `; issues.csv has all ${count(data.flagged)} flagged labels` : "";
  const total = cards.filter(inScope).length;
  const shown = drawn === total ? `All ${count(drawn)}` : `${count(drawn)} of ${count(total)}`;
  const flagged = data.cards.flagged < cards.length; // the page has others as well
  const kind = !flagged || scope === "" ? "examples" : scope === "flagged" ? "flagged examples" : "examples that are not flagged";
  const none = data.flagged ? "This page has no examples" : "No label is flagged";
  const text = total ? `${shown} ${kind} on this page are shown` : none;
  get("shown").textContent = `${text}${rest}.`;
}

function matches(card, words) {
  const given = get("given").value, suggested = get("suggested").value, decided = get("decided").value;
  const id = card.id.toLowerCase();
  return inScope(card) && (given === "" || card.given === Number(given)) && (suggested === "" || card.suggested === Number(suggested)) &&
    (decided === "" || decisions.has(card.index) === (decided === "made")) &&
    (!words.length || (data.id_column === "file" ? words.every((word) => id.includes(word)) : words.includes(id)));
}

function applyFilters() {
  const words = get("search").value.toLowerCase().split(data.id_column === "file" ? /\s+/ : /[\s,#]+/).filter(Boolean);
  matching = cards.filter((card) => matches(card, words));
  if (get("order").value === "best") matching.reverse();
  if (get("order").value === "sure") matching.sort((a, b) => b.wrong - a.wrong);
  if (get("order").value === "data") matching.sort((a, b) => a.index - b.index);
  get("grid").replaceChildren();
  drawn = 0;
  showMore();
  setCurrent(matching[0] ?? null);
  const filtered = ["given", "suggested", "decided", "search"].some((id) => get(id).value !== "");
  get("clear").hidden = !filtered;
  get("nothing").hidden = matching.length > 0 || !cards.some(inScope);
  for (const id of ["accept-all", "reject-all"]) get(id).disabled = !matching.length;
  for (const button of all("#scope button")) button.setAttribute("aria-pressed", String(button.value === scope));
  markPair();
  showCounts();
}

function toggleFilter(given, suggested) {
  const same = get("given").value === String(given) && get("suggested").value === String(suggested);
  get("given").value = same ? "" : given;
  get("suggested").value = same ? "" : suggested;
  if (!same) scope = "flagged"; // as the numbers of the map
  applyFilters();
}

/** Selects the card that the tab key reaches and from which arrow keys move. */
function setCurrent(card, focus = false) {
  if (current?.element) current.element.tabIndex = -1;
  current = card;
  if (!card) return;
  card.element.tabIndex = 0;
  if (!focus) return;
  card.element.focus({ preventScroll: true });
  card.element.scrollIntoView({ block: "nearest", behavior: "instant" }); // smooth scrolling lags behind keys
}

function step(card, by) {
  const to = matching.indexOf(card) + by;
  if (matching[to]) go(to);
}

function go(to) {
  if (to >= drawn) showMore(to + 1);
  setCurrent(matching[to], true);
  if (to >= drawn - AHEAD && drawn < matching.length && drawingAhead !== matching) {
    drawingAhead = matching;
    idle(drawAhead);
  }
}
// Without a timeout, the browser may never call back on a busy machine.
const idle = (task) => (globalThis.requestIdleCallback ? requestIdleCallback(task, { timeout: 200 }) : setTimeout(task));

/** Draws the next portion a few cards at a time, so that keys respond meanwhile. */
function drawAhead() {
  if (drawingAhead !== matching) return; // another filter or order
  const left = matching.slice(drawn, drawn + PORTION).filter((card) => !card.element).slice(0, SLICE);
  left.forEach(draw);
  if (left.length) idle(drawAhead);
  else { drawingAhead = null; showMore(); }
}

/** Goes to the next example without a decision; after the last one it starts again. */
function nextOpen() {
  const from = matching.indexOf(current), onCard = document.activeElement === current?.element;
  const order = matching.map((_, i) => (from + onCard + i) % matching.length);
  const to = order.find((i) => !decisions.has(matching[i].index));
  if (to !== undefined) go(to);
}

const columns = () => getComputedStyle(get("grid").firstElementChild).gridTemplateColumns.split(" ").length;

function onKey(event) {
  if (["SELECT", "INPUT"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
  const element = event.target.closest(".card");
  if (event.key.toLowerCase() === "n" && matching.length) {
    nextOpen();
    event.preventDefault();
  }
  if (!element) return;
  const card = byIndex.get(Number(element.dataset.index)), letter = event.key.toLowerCase();
  const moves = { ArrowRight: () => 1, ArrowLeft: () => -1, ArrowDown: columns, ArrowUp: () => -columns() };
  if (letter === "a" || letter === "r") {
    choose(card, letter === "a" ? "accept" : "reject");
    step(card, 1);
  } else if (letter === "u") undo();
  else if (event.key in moves) step(card, moves[event.key]());
  else return;
  event.preventDefault();
}

function startGrid() {
  // All classes, since any cell of the map can be clicked.
  for (const id of ["given", "suggested"]) get(id).append(make("option", { value: "" }, "All"), ...names.map((name, k) => make("option", { value: k }, name)));
  get("grid").classList.toggle("roomy", Boolean(data.numbers));
  get("search-name").textContent = data.id_column === "file" ? "File" : "Index";
  for (const id of ["given", "suggested", "decided", "order"]) get(id).addEventListener("change", applyFilters);
  get("search").addEventListener("input", applyFilters);
  const flagged = data.cards.flagged, numbers = { flagged, others: cards.length - flagged, "": cards.length };
  for (const button of all("#scope button")) {
    button.append(` (${count(numbers[button.value])})`);
    button.addEventListener("click", () => { scope = button.value; applyFilters(); });
  }
  get("scope").hidden = flagged === cards.length;
  get("clear").addEventListener("click", () => {
    for (const id of ["given", "suggested", "decided", "search"]) get(id).value = "";
    applyFilters();
  });
  get("more").addEventListener("click", () => { const next = drawn; showMore(); setCurrent(matching[next], true); });
  const open = () => matching.slice(0, drawn).filter((card) => !decisions.has(card.index));
  get("accept-all").addEventListener("click", () => decide(open().filter((card) => card.suggested !== card.given).map((card) => [card, card.suggested])));
  get("reject-all").addEventListener("click", () => decide(open().map((card) => [card, card.given])));
  const list = get("grid"), of = (event) => byIndex.get(Number(event.target.closest(".card")?.dataset.index));
  list.addEventListener("click", (event) => {
    const card = of(event), button = event.target.closest("button");
    if (!card || !button) return;
    if (decisionOf(card) === button.value) decide([[card, undefined]]);
    else choose(card, button.value);
  });
  list.addEventListener("change", (event) => decide([[of(event), event.target.value === "" ? undefined : Number(event.target.value)]]));
  for (const type of ["focusin", "pointerover"]) {
    list.addEventListener(type, (event) => { if (event.target.tagName === "SELECT") fillClasses(event.target); });
  }
  list.addEventListener("focusin", (event) => { if (of(event)) setCurrent(of(event)); });
  document.addEventListener("keydown", onKey); // n works from anywhere
  applyFilters();
}

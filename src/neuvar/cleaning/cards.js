// The examples, as cards in a grid.
const PORTION = 72; // whole rows of two, three, four and six
let fitting = [], drawn = 0, here = null;

function sight(card) {
  const about = `Example ${card.place}`;
  if (data.pictures) return make("img", { src: data.pictures[card.i], alt: about, draggable: "false" });
  if (data.numbers) {
    const rows = data.numbers[card.i].map((value, k) => make("tr", {},
      make("th", { scope: "row" }, isolated(data.columns[k])), make("td", {}, String(value))));
    return make("table", { "aria-label": about }, make("tbody", {}, ...rows));
  }
  return bars(data.bars[card.i], about);
}

function bars(values, about) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", `0 0 ${values.length} 200`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${about}: features as distances from their means`);
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
  card.element = make("li", { class: "card", tabindex: "-1", "data-index": card.index },
    make("div", { class: "sight" }, sight(card)),
    make("p", { class: "turn" }, isolated(names[card.given], { class: "from" }),
      arrow(), isolated(names[card.suggested], { class: "to" })),
    make("p", { class: "about" }, make("span", { title: "Quality of the label, from 0 to 1" }, `quality ${quality}`),
      isolated(data.place === "file" ? card.place : `#${card.place}`, { class: "place" })),
    make("div", { class: "choices" },
      make("button", { type: "button", class: "accept", value: "accept", title: "Use the suggestion (a)" }, "Accept"),
      make("button", { type: "button", class: "reject", value: "reject", title: "Keep the given label (r)" }, "Reject"), others));
  refresh(card);
  return card.element;
}

/** All classes are put into a list when someone reaches for it: there may be many. */
function fill(select) {
  if (select.options.length > 1) return;
  select.append(...names.map((name, k) => make("option", { value: k }, name)));
}

function refresh(card) {
  if (!card.element) return;
  const now = kind(card), label = decisions.get(card.index);
  card.element.dataset.decision = now;
  for (const button of all("button", card.element)) button.setAttribute("aria-pressed", String(button.value === now));
  card.element.setAttribute("aria-label", `${card.place}: given ${names[card.given]}, suggested ${names[card.suggested]}, ${now ? `decided: ${names[label]}` : "open"}`);
  const select = card.element.querySelector("select");
  if (now === "other") fill(select);
  select.value = now === "other" ? String(label) : "";
}

function choose(card, what) {
  decide([[card, what === "accept" ? card.suggested : card.given]]);
}

function extend(least = drawn + PORTION) {
  const end = Math.min(fitting.length, Math.max(least, drawn));
  get("grid").append(...fitting.slice(drawn, end).map((card) => card.element ?? draw(card)));
  drawn = end;
  get("more").hidden = drawn >= fitting.length;
  get("more").textContent = `Show more of the ${count(fitting.length - drawn)} that are left`;
}

function fits(card, words) {
  const given = get("given").value, suggested = get("suggested").value, decided = get("decided").value;
  const place = card.place.toLowerCase();
  return (given === "" || card.given === Number(given)) && (suggested === "" || card.suggested === Number(suggested)) &&
    (decided === "" || decisions.has(card.index) === (decided === "made")) &&
    (!words.length || (data.place === "file" ? words.every((word) => place.includes(word)) : words.includes(place)));
}

function apply() {
  const words = get("search").value.toLowerCase().split(data.place === "file" ? /\s+/ : /[\s,#]+/).filter(Boolean);
  fitting = cards.filter((card) => fits(card, words));
  if (get("order").value === "best") fitting.reverse();
  if (get("order").value === "place") fitting.sort((a, b) => a.index - b.index);
  get("grid").replaceChildren();
  drawn = 0;
  extend();
  land(fitting[0] ?? null);
  const filtered = ["given", "suggested", "decided", "search"].some((id) => get(id).value !== "");
  const rest = data.flagged > cards.length ? `; issues.csv has all ${count(data.flagged)} that are flagged` : "";
  const shown = filtered ? `${count(fitting.length)} of ${count(cards.length)}` : `All ${count(cards.length)}`;
  const found = cards.length ? `${shown} examples of this page are shown` : data.flagged ? "This page has no examples" : "No label is flagged";
  get("shown").textContent = `${found}${rest}.`;
  get("clear").hidden = !filtered;
  get("nothing").hidden = fitting.length > 0 || !cards.length;
  for (const id of ["accept-all", "reject-all"]) get(id).disabled = !fitting.length;
  mark();
}

function filterPair(given, suggested) {
  const same = get("given").value === String(given) && get("suggested").value === String(suggested);
  get("given").value = same ? "" : given;
  get("suggested").value = same ? "" : suggested;
  apply();
}

/** One card at a time can be reached with the tab key; arrow keys go on from there. */
function land(card, focus = false) {
  if (here?.element) here.element.tabIndex = -1;
  here = card;
  if (!card) return;
  card.element.tabIndex = 0;
  if (focus) card.element.focus();
}

function step(card, by) {
  const to = fitting.indexOf(card) + by;
  if (to < 0 || to >= fitting.length) return;
  if (to >= drawn) extend(to + PORTION);
  land(fitting[to], true);
}

function columns() {
  const first = fitting[0].element.offsetTop;
  const next = fitting.slice(0, drawn).findIndex((card) => card.element.offsetTop > first);
  return next < 0 ? drawn : next;
}

function typed(event) {
  const element = event.target.closest(".card");
  if (!element || event.target.tagName === "SELECT" || event.ctrlKey || event.metaKey || event.altKey) return;
  const card = byIndex.get(Number(element.dataset.index)), letter = event.key.toLowerCase();
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns() };
  if (letter === "a" || letter === "r") {
    choose(card, letter === "a" ? "accept" : "reject");
    step(card, 1);
  } else if (letter === "u") undo();
  else if (event.key in moves) step(card, moves[event.key]);
  else return;
  event.preventDefault();
}

function grid() {
  // Also classes that nothing is flagged of: any cell of the map can be chosen.
  for (const id of ["given", "suggested"]) get(id).append(make("option", { value: "" }, "All"), ...names.map((name, k) => make("option", { value: k }, name)));
  get("search-name").textContent = data.place === "file" ? "File" : "Index";
  for (const id of ["given", "suggested", "decided", "order"]) get(id).addEventListener("change", apply);
  get("search").addEventListener("input", apply);
  get("clear").addEventListener("click", () => {
    for (const id of ["given", "suggested", "decided", "search"]) get(id).value = "";
    apply();
  });
  get("more").addEventListener("click", () => { const next = drawn; extend(); land(fitting[next], true); });
  const open = () => fitting.filter((card) => !decisions.has(card.index));
  get("accept-all").addEventListener("click", () => decide(open().map((card) => [card, card.suggested])));
  get("reject-all").addEventListener("click", () => decide(open().map((card) => [card, card.given])));
  const list = get("grid"), of = (event) => byIndex.get(Number(event.target.closest(".card")?.dataset.index));
  list.addEventListener("click", (event) => {
    const card = of(event), button = event.target.closest("button");
    if (!card || !button) return;
    if (kind(card) === button.value) decide([[card, undefined]]);
    else choose(card, button.value);
  });
  list.addEventListener("change", (event) => decide([[of(event), event.target.value === "" ? undefined : Number(event.target.value)]]));
  for (const reached of ["focusin", "pointerover"]) {
    list.addEventListener(reached, (event) => { if (event.target.tagName === "SELECT") fill(event.target); });
  }
  list.addEventListener("focusin", (event) => { if (of(event)) land(of(event)); });
  list.addEventListener("keydown", typed);
  apply();
}

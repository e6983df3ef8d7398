// Shared functions and data, and the start of the page.
const count = (number) => number.toLocaleString("en");
const percent = (share) => (share < 0.0005 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`);

/** An element with attributes and children; text is never parsed as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const arrow = () => make("span", { class: "arrow" }, make("span", { class: "label" }, " suggested: "), make("span", { "aria-hidden": "true" }, "→"));
const isolated = (text, attributes = {}) => make("bdi", { title: text, ...attributes }, text);

let data, names, cards;
const byIndex = new Map();
const decisions = new Map(); // index of an example → decided label
const undoStack = [];

function load() {
  data = JSON.parse(get("data").textContent);
  names = data.names;
  const c = data.cards;
  cards = c.index.map((index, i) => ({
    i, index, id: c.id ? c.id[i] : String(index),
    given: c.given[i], suggested: c.suggested[i], quality: c.quality[i], wrong: c.wrong[i],
    flagged: i < c.flagged,
  }));
  for (const card of cards) byIndex.set(card.index, card);
  loadDecisions();
}

document.addEventListener("DOMContentLoaded", () => {
  load();
  document.querySelector("main").hidden = false;
  for (const start of [startMap, startGrid, startDecisions]) start();
});

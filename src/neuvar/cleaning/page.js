// What all parts of the page use, and how it starts.
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const get = (id) => document.getElementById(id);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const count = (number) => number.toLocaleString("en");
const percent = (share) => (share < 0.0005 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`);

// A browser may refuse storage, above all to a file; then it lasts as long as the page.
const storage = {
  get(key) { try { return localStorage.getItem(key); } catch { return null; } },
  set(key, value) { try { localStorage.setItem(key, value); } catch { /* so be it */ } },
};
const chosen = storage.get("neuvar-theme");
if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;

/** An element with attributes and children; text never becomes markup. */
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
const decisions = new Map(); // the label that was chosen, by the number of the example
const past = [];

function load() {
  data = JSON.parse(get("data").textContent);
  names = data.names;
  const c = data.cards;
  cards = c.index.map((index, i) => ({
    i, index, place: c.place ? c.place[i] : String(index),
    given: c.given[i], suggested: c.suggested[i], quality: c.quality[i],
  }));
  for (const card of cards) byIndex.set(card.index, card);
  recall();
}

function theme() {
  const button = get("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const show = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    storage.set("neuvar-theme", root.dataset.theme);
    show();
  });
  dark.addEventListener("change", show);
  show();
}

function copying() {
  for (const button of all(".copy")) {
    const code = button.parentElement.querySelector("code"), words = button.textContent;
    button.hidden = false;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        // Without leave to write to the clipboard the text is at least selected.
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = words; }, 1500);
    });
  }
}

document.addEventListener("DOMContentLoaded", () => {
  load();
  document.querySelector("main").hidden = false;
  for (const start of [theme, map, grid, taking, copying]) start();
});

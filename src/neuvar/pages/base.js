// Shared by all pages: elements, storage, the theme, and commands to copy.
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const get = (id) => document.getElementById(id);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// A browser may refuse storage, for example to local files; then settings are lost on reload.
const storage = {
  get(key) { try { return localStorage.getItem(key); } catch { return null; } },
  set(key, value) { try { localStorage.setItem(key, value); } catch { /* not stored */ } },
};
const chosen = storage.get("neuvar-theme");
if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;

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
        // Without permission to use the clipboard, select the text.
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = words; }, 1500);
    });
  }
}

document.addEventListener("DOMContentLoaded", () => { theme(); copying(); });

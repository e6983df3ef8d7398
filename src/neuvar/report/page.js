// Sortable tables, filters for claims, and lines shown alone.
function sorting() {
  for (const head of all("th[data-sortable]")) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => sort(head));
  }
}

function sort(head) {
  const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of all("th[aria-sort]", table)) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const numeric = "number" in head.dataset;
  const value = (row) => {
    const cell = row.cells[column], given = cell.dataset.sort;
    return numeric ? parseFloat(given) : given ?? cell.textContent.trim();
  };
  const rows = [...body.rows].map((row) => [value(row), row]);
  rows.sort(([a], [b]) => {
    // Cells without a number stay last in both directions.
    if (numeric && (isNaN(a) || isNaN(b))) return isNaN(a) - isNaN(b);
    const order = numeric ? a - b : a.localeCompare(b, "en", { numeric: true });
    return up ? order : -order;
  });
  body.append(...rows.map(([, row]) => row));
}

function filtering() {
  const search = get("search"), scale = get("scale");
  const buttons = all(".chipbutton"), claims = all(".claim"), rows = all(".summary tbody tr");
  // Without the links to other claims.
  const words = (claim) => all(":scope > :not(nav)", claim).map((part) => part.textContent).join(" ");
  const text = new Map(claims.map((claim) => [claim.id, words(claim).replace(/\s+/g, " ").toLowerCase()]));
  let verdict = "";

  function apply() {
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (element) =>
      (!verdict || element.dataset.verdict === verdict) &&
      (!scale.value || element.dataset.scale === scale.value) &&
      wanted.every((word) => text.get(element.dataset.claim).includes(word));
    let count = 0;
    for (const claim of claims) {
      const findings = all("[data-claim]", claim);
      for (const finding of findings) finding.hidden = !fits(finding);
      claim.hidden = findings.every((finding) => finding.hidden);
      count += !claim.hidden;
    }
    for (const row of rows) row.hidden = !fits(row);
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.value === verdict));
    get("nothing").hidden = count > 0;
    get("shown").textContent =
      count === claims.length ? `Showing ${count === 1 ? "one claim" : `all ${count} claims`}.` : `Showing ${count} of ${claims.length} claims.`;
  }
  function clear() {
    search.value = scale.value = verdict = "";
    apply();
  }

  for (const button of buttons) {
    button.addEventListener("click", () => { verdict = button.value; apply(); });
  }
  for (const button of all(".clear")) button.addEventListener("click", clear);
  search.addEventListener("input", apply);
  scale.addEventListener("change", apply);
  // A link to a hidden claim shows it again.
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    const target = link && get(link.hash.slice(1));
    if (target && target.closest("[hidden]")) clear();
  });
  document.querySelector(".filters").hidden = false;
  apply();
}

function legends() {
  for (const figure of all("figure")) {
    const buttons = all(".legend button", figure), series = all(".series", figure);
    let kept = null;
    const show = (which) => {
      for (const one of series) one.classList.toggle("dim", which !== null && !one.classList.contains(`s${which}`));
    };
    for (const button of buttons) {
      button.addEventListener("click", () => {
        kept = kept === button.value ? null : button.value;
        for (const one of buttons) one.setAttribute("aria-pressed", String(one.value === kept));
        show(kept);
      });
      button.addEventListener("pointerenter", () => show(button.value));
      button.addEventListener("pointerleave", () => show(kept));
    }
  }
}

document.addEventListener("DOMContentLoaded", () => {
  for (const start of [sorting, filtering, legends]) start();
});
addEventListener("beforeprint", () => { for (const one of all("details")) one.open = true; });

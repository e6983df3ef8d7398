// The user's decisions, and the files to download.
const key = () => `neuvar-clean-${data.key}`;

/** Loads the decisions from the browser's storage. */
function loadDecisions() {
  let stored = {};
  try { stored = JSON.parse(storage.get(key()) ?? "{}"); } catch { /* not valid JSON */ }
  if (Array.isArray(stored)) stored = {};
  for (const [index, label] of Object.entries(stored ?? {})) {
    if (byIndex.has(Number(index)) && Number.isInteger(label) && label in names) decisions.set(Number(index), label);
  }
}

function decisionOf(card) {
  const label = decisions.get(card.index);
  if (label === undefined) return "";
  return label === card.given ? "reject" : label === card.suggested ? "accept" : "other";
}

/** Sets the labels of examples; undefined clears a decision. One call is one undo step. */
function decide(changes, { undoing = false } = {}) {
  if (!changes.length) return;
  if (!undoing) undoStack.push(changes.map(([card]) => [card, decisions.get(card.index)]));
  for (const [card, label] of changes) {
    if (label === undefined) decisions.delete(card.index);
    else decisions.set(card.index, label);
    refresh(card);
  }
  storage.set(key(), JSON.stringify(Object.fromEntries(decisions)));
  showCounts();
}

function undo() {
  if (undoStack.length) decide(undoStack.pop(), { undoing: true });
}

function showCounts() {
  const kinds = { accept: 0, reject: 0, other: 0 };
  const some = cards.filter(inScope), decided = some.filter((card) => decisions.has(card.index));
  for (const card of decided) kinds[decisionOf(card)] += 1;
  const words = { accept: "accepted", reject: "rejected", other: "other" };
  const parts = Object.entries(words).filter(([name]) => kinds[name]).map(([name, word]) => ` · ${count(kinds[name])} ${word}`);
  get("count").replaceChildren(`${count(decided.length)} of ${count(some.length)} decided`, make("span", { class: "kinds" }, ...parts));
  get("progress").max = Math.max(some.length, 1);
  get("progress").value = decided.length;
  get("undo").disabled = !undoStack.length;
  for (const id of ["save-decisions", "dock-save", "forget"]) get(id).disabled = !decisions.size;
}

/** A CSV cell, quoted if necessary, and never a formula; the same as escape_cell in tables.py. */
function cell(text) {
  const formula = /^'*[=+\-@\t\r]/.test(text) && !/^[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?$/.test(text);
  const safe = formula ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
const csv = (rows) => rows.map((row) => `${row.map(cell).join(",")}\n`).join("");

function save(name, rows) {
  const address = URL.createObjectURL(new Blob([csv(rows)], { type: "text/csv;charset=utf-8" }));
  const link = make("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function saveDecisions() {
  const made = cards.filter((card) => decisions.has(card.index));
  const rows = made.map((card) => [
    card.id, names[card.given], names[card.suggested], decisionOf(card), names[decisions.get(card.index)],
  ]);
  save("decisions.csv", [[data.id_column, "given", "suggested", "decision", "label"], ...rows]);
}

function saveLabels() {
  const { given, files } = data.labels;
  const labels = [...given];
  for (const [index, label] of decisions) labels[index] = label;
  const rows = labels.map((label, index) => [files ? files[index] : String(index), names[label]]);
  save("labels.csv", [[data.id_column, "label"], ...rows]);
}

function startDecisions() {
  get("save-decisions").addEventListener("click", saveDecisions);
  get("dock-save").addEventListener("click", saveDecisions);
  get("save-labels").addEventListener("click", saveLabels);
  get("save-labels").hidden = !data.labels;
  get("too-many").hidden = Boolean(data.labels);
  get("forget").addEventListener("click", () => decide([...decisions.keys()].map((index) => [byIndex.get(index), undefined])));
  get("undo").addEventListener("click", undo);
  get("apply-command").textContent = data.command;
  showCounts();
}

// The page with the list of runs, which can be filtered, grouped, sorted, and ticked for a comparison.
import { address, ask, duration, el, estimate, moment, number, progress, repeat, spark, status, took, valueName } from "./page.js";

const STEP = 100; // rows that are added when the end of the table comes into view
const COLUMNS = [
  { title: "run", class: "run", key: (run) => run.began ?? 0, first: -1 },
  { title: "algorithm, env", class: "what", key: (run) => `${run.algorithm} ${run.env}` },
  { title: "status", class: "state", key: (run) => run.status },
  { title: "progress", class: "frames", key: (run) => run.progress ?? 0, first: -1 },
  { title: "left / time", class: "left number", key: (run) => run.eta ?? Infinity },
  { title: "return ± se", class: "return number", key: (run) => run.value ?? -Infinity, first: -1 },
  { title: "", class: "line" },
];

const runs = new Map(); // path → entry
const ticked = new Set();
const sparks = new Map(); // path → points
const asked = new Set(); // paths whose sparkline is known or on its way
const rows = new Map(); // path → row
let state = { text: "", kind: "", status: "", group: false, sort: 0, way: -1, shown: STEP };
let now = 0;
let body, count, compare, all, end;

export async function show(main, query) {
  document.title = "slm-lab view";
  state = { ...state, text: query.get("q") ?? "", kind: query.get("kind") ?? "", status: query.get("status") ?? "", group: query.get("group") === "1" };
  main.replaceChildren(...controls(), table());
  new IntersectionObserver((seen) => seen[0].isIntersecting && more()).observe(end);
  let version = 0;
  let first = true;
  await repeat(async () => {
    const answer = await ask("runs", { since: version });
    version = answer.version;
    now = answer.now;
    showFolder(answer.folder);
    if (answer.all) forget(new Set(answer.runs.map((run) => run.path)));
    for (const run of answer.runs) changed(run);
    if (first || answer.runs.length || answer.all) draw();
    first = false;
    return answer.again;
  });
}

function showFolder(path) {
  const place = document.getElementById("folder");
  place.textContent = path.split(/[/\\]/).pop() || path;
  place.title = path;
}

function forget(present) {
  for (const path of [...runs.keys()].filter((path) => !present.has(path))) {
    runs.delete(path);
    ticked.delete(path);
    rows.delete(path);
    sparks.delete(path);
    asked.delete(path);
  }
}

function changed(run) {
  if (JSON.stringify(runs.get(run.path)) === JSON.stringify(run)) return;
  runs.set(run.path, run);
  rows.delete(run.path);
  asked.delete(run.path); // the old sparkline stays until the new one is there
}

function controls() {
  const set = (name, value) => {
    state[name] = value;
    state.shown = STEP;
    remember();
    draw();
  };
  const choice = (name, label, options) =>
    el("select", { "aria-label": label, onchange: (event) => set(name, event.target.value) }, options.map(([value, text]) => {
      const option = el("option", { value }, text);
      option.selected = state[name] === value;
      return option;
    }));
  const text = el("input", { type: "search", id: "filter", placeholder: "filter: words, -word to leave out", "aria-label": "filter", value: state.text, oninput: (event) => set("text", event.target.value) });
  const kinds = [["", "all kinds"], ["run", "runs"], ["search", "searches"], ["study", "studies"]];
  const ways = [["", "any status"], ...["running", "done", "stopped", "failed", "unreadable"].map((one) => [one, one])];
  const group = el("input", { type: "checkbox", id: "group", checked: state.group, onchange: (event) => set("group", event.target.checked) });
  compare = el("button", { class: "main", id: "compare", onclick: () => location.assign(`/compare?${new URLSearchParams([...ticked].map((path) => ["run", `:${path}`]))}`) });
  count = el("span", { class: "note", id: "count", role: "status" });
  return [el("div", { class: "bar" }, text, choice("kind", "kind", kinds), choice("status", "status", ways), el("label", {}, group, "group by spec"), compare), count];
}

function remember() {
  const parts = { q: state.text, kind: state.kind, status: state.status, group: state.group ? "1" : "" };
  const query = new URLSearchParams(Object.entries(parts).filter(([, value]) => value));
  history.replaceState(null, "", query.size ? `/?${query}` : "/");
}

function table() {
  all = el("input", { type: "checkbox", "aria-label": "tick all shown runs", onchange: (event) => tickAll(event.target.checked) });
  const heads = COLUMNS.map((column, index) => el("th", { class: column.class, scope: "col" }, column.key ? el("button", { onclick: () => sortBy(index) }, column.title) : column.title));
  body = el("tbody");
  end = el("p", { class: "note" });
  return el("div", {}, el("table", { class: "list runs" }, el("thead", {}, el("tr", {}, el("th", { class: "tick" }, all), heads)), body), end);
}

function sortBy(index) {
  state.way = state.sort === index ? -state.way : COLUMNS[index].first ?? 1;
  state.sort = index;
  draw();
}

function tickAll(on) {
  for (const run of chosen()) on ? ticked.add(run.path) : ticked.delete(run.path);
  rows.clear();
  draw();
}

/** Return the runs that match the filter, in the chosen order. */
function chosen() {
  const words = state.text.toLowerCase().split(/\s+/).filter((word) => word && word !== "-");
  const matches = (run) => {
    if ((state.kind && run.kind !== state.kind) || (state.status && run.status !== state.status)) return false;
    const text = `${run.name} ${run.env} ${run.algorithm} ${run.kind} ${run.status} ${run.mode} ${run.path}`.toLowerCase();
    return words.every((word) => (word.startsWith("-") ? !text.includes(word.slice(1)) : text.includes(word)));
  };
  const key = COLUMNS[state.sort].key;
  const order = (a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * state.way || (a.path < b.path ? 1 : -1);
  return [...runs.values()].filter(matches).sort(order);
}

function draw() {
  const found = chosen();
  const counts = {};
  for (const run of found) counts[run.status] = (counts[run.status] ?? 0) + 1;
  const parts = Object.entries(counts).map(([name, of]) => `${of} ${name}`);
  count.textContent = runs.size ? `${found.length === runs.size ? runs.size : `${found.length} of ${runs.size}`} runs${parts.length ? `: ${parts.join(", ")}` : ""}` : "No runs in this folder yet: slm-lab FILE NAME train makes one; this page shows it by itself.";
  compare.textContent = ticked.size ? `compare ${ticked.size}` : "compare: tick runs";
  compare.disabled = !ticked.size;
  all.checked = found.length > 0 && found.every((run) => ticked.has(run.path));
  const lines = state.group ? grouped(found) : found;
  const focus = focusOf(document.activeElement);
  body.replaceChildren(...lines.slice(0, state.shown).map((one) => (one.heading ? heading(one) : row(one))));
  focus?.();
  end.textContent = lines.length > state.shown ? `${lines.length - state.shown} more below` : "";
  askSparklines(lines.slice(0, state.shown).filter((one) => !one.heading));
}

/** Return a function that restores the focus to a link or checkbox of the table after its row was drawn again. */
function focusOf(active) {
  const path = body.contains(active) ? active.closest("tr").dataset.path : undefined;
  return path === undefined ? null : () => rows.get(path)?.querySelector(active.localName)?.focus({ preventScroll: true });
}

function more() {
  if (chosen().length <= state.shown) return;
  state.shown += STEP;
  draw();
}

/** Return the runs grouped by spec and env, each group after its heading. The groups are in the order of their first run. */
function grouped(found) {
  const groups = new Map();
  for (const run of found) {
    const name = `${run.name}\n${run.env}`;
    groups.set(name, [...(groups.get(name) ?? []), run]);
  }
  return [...groups.values()].flatMap((group) => [{ heading: true, group }, ...group]);
}

function heading({ group }) {
  const values = group.filter((run) => run.kind === "run" && Number.isFinite(run.value)).map((run) => run.value);
  const mean = values.length ? `; ${valueName(group[0])}: mean ${number(values.reduce((sum, value) => sum + value, 0) / values.length)}, best ${number(Math.max(...values))}` : "";
  const text = `${group.length} run${group.length > 1 ? "s" : ""}${mean}`;
  return el("tr", { class: "group" }, el("td", { colspan: COLUMNS.length + 1 }, group[0].name, el("span", {}, `${group[0].env ? `${group[0].env}: ` : ""}${text}`)));
}

function row(run) {
  if (rows.has(run.path)) return rows.get(run.path);
  const tick = el("input", { type: "checkbox", checked: ticked.has(run.path), disabled: run.status === "unreadable", "aria-label": `compare ${run.path}`, onchange: (event) => {
    event.target.checked ? ticked.add(run.path) : ticked.delete(run.path);
    draw();
  } });
  const chip = run.kind !== "run" || run.mode === "dev" ? el("span", { class: "chip" }, run.kind === "run" ? run.mode : run.kind) : null;
  const known = Number.isFinite(run.value);
  const cells = [
    el("td", { class: "tick" }, tick),
    el("td", { class: "run" }, el("a", { href: address(run), class: "name" }, run.name), chip, el("div", { class: "sub", title: run.path }, moment(run.began) || run.path)),
    el("td", { class: "what" }, el("div", {}, run.algorithm || ""), el("div", { class: "sub" }, run.env || "")),
    el("td", { class: "state" }, status(run)),
    frames(run),
    el("td", { class: "left number" }, left(run)),
    el("td", { class: "return number" }, known || run.kind === "run" ? estimate(run.value, run.error) : "", known && (run.kind !== "run" || run.measure) ? el("div", { class: "sub" }, valueName(run)) : null),
    el("td", { class: "line" }, spark(sparks.get(run.path) ?? [])),
  ];
  const made = el("tr", { "data-path": run.path }, cells);
  rows.set(run.path, made);
  return made;
}

function frames(run) {
  if (run.status === "unreadable") return el("td", { class: "frames" }, el("div", { class: "sub" }, run.text));
  const text = run.kind === "run" ? `${number(run.frame)} of ${number(run.max_frame)}` : run.text;
  const sessions = run.kind === "run" && run.sessions > 1 ? ` × ${run.sessions} sessions` : "";
  return el("td", { class: "frames" }, progress(run), el("div", { class: "sub" }, text + sessions));
}

function left(run) {
  if (run.status === "running") return run.eta === null || run.eta === undefined ? "–" : `${duration(run.eta)} left`;
  return took(run) === null ? "" : duration(took(run));
}

async function askSparklines(shown) {
  const missing = shown.filter((run) => !asked.has(run.path) && run.status !== "unreadable").map((run) => run.path);
  for (const path of missing) asked.add(path);
  for (let begin = 0; begin < missing.length; begin += STEP) {
    const answer = await ask("sparklines", missing.slice(begin, begin + STEP).map((path) => ["path", path])).catch(() => ({}));
    for (const [path, points] of Object.entries(answer)) {
      sparks.set(path, points);
      rows.get(path)?.querySelector("td.line").replaceChildren(spark(points));
    }
  }
}

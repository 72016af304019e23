// The page of a search, with parallel coordinates, returns of the trials, importance of the keys, and a table of the trials.
import { address, ask, COLOURS, duration, el, facts, layout, load, number, PLOT, repeat, spark, status } from "./page.js";

// colours from the worst to the best trial, which are distinct from both backgrounds, and ordered also for colour-blind readers
const STOPS = [[98, 104, 205], [150, 84, 185], [198, 82, 140], [226, 100, 85], [240, 145, 40]];
const HEIGHT = 400;
const [TOP, BOTTOM, SIDE] = [64, 44, 46];
const BEST = 10;

export async function search(main, path) {
  const page = { path, brushes: new Map(), ticked: new Set() };
  for (const part of ["head", "parallel", "note", "scale", "curves", "importance", "table"]) page[part] = el("div", { id: part });
  page.parallel.classList.add("wide");
  page.table.classList.add("wide");
  page.note.className = "note";
  main.replaceChildren(
    page.head,
    el("h2", {}, "Trials across the searched keys"), page.note, page.scale, page.parallel,
    el("h2", {}, "Returns of the trials"), page.curves,
    el("h2", {}, "Importance of the keys"), page.importance,
    el("h2", {}, "Trials"), page.table,
  );
  let version = "";
  addEventListener("resize", () => page.data && drawParallel(page));
  await repeat(async () => {
    const answer = await ask("search", { path, version });
    if (answer.trials) await draw(page, answer);
    version = answer.version;
    return answer.again;
  });
}

async function draw(page, data) {
  page.data = data;
  page.ranked = ranked(data.trials);
  document.title = `${data.entry.name} – slm-lab view`;
  const confirm = data.confirm ? el("p", {}, el("a", { href: `/run?${new URLSearchParams({ path: data.confirm })}` }, "confirmations: the best trials, trained again with new seeds")) : "";
  page.head.replaceChildren(el("h1", {}, data.entry.name), el("p", { class: "note" }, data.entry.path), facts(data.entry), confirm);
  drawParallel(page);
  drawImportance(page.importance, data.keys);
  drawTable(page);
  await drawCurves(page);
}

/** Return the trials, best first: confirmed trials by the result of their confirmation, then finished, stopped and failed trials. */
function ranked(trials) {
  const group = (one) => (one.metric === null || one.status === "failed" ? 3 : one.confirmed !== null ? 0 : one.status === "finished" ? 1 : 2);
  return [...trials].sort((a, b) => group(a) - group(b) || (b.confirmed ?? b.metric ?? 0) - (a.confirmed ?? a.metric ?? 0) || a.trial - b.trial);
}

// ---- parallel coordinates

/** Return one axis for each searched key and one for the metric: its title, value of a trial, position of a value from 0 (bottom) to 1, and ticks. */
function axesOf({ keys, metric, trials }) {
  const names = short(keys.map((key) => key.path));
  const axes = keys.map((key, index) => ({ title: names[index], full: key.path, ...scale(trials.map((one) => one.values[key.path]), key.options, key.log), of: (one) => one.values[key.path] }));
  return [...axes, { title: metric, full: metric, ...scale(trials.map((one) => one.metric), null, false), of: (one) => one.metric ?? undefined }];
}

function scale(values, options, log) {
  if (options) {
    const step = options.length > 1 ? 1 / (options.length - 1) : 0;
    const place = (value) => (options.length > 1 ? options.indexOf(sorted(value)) * step : 0.5);
    const every = Math.ceil(options.length / 12);
    return { place, ticks: options.map((text, index) => [options.length > 1 ? index * step : 0.5, clipped(text)]).filter((_, index) => index % every === 0) };
  }
  const known = values.filter(Number.isFinite);
  const to = log ? Math.log : (value) => value;
  let [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
  const place = (value) => (to(value) - to(low)) / (to(high) - to(low));
  const inner = [0, 0.25, 0.5, 0.75, 1].map((share) => (log ? Math.exp(to(low) + share * (to(high) - to(low))) : low + share * (high - low)));
  return { place, ticks: inner.map((value) => [place(value), brief(value)]) };
}

/** Return a value as JSON with sorted keys, as the server writes options. */
function sorted(value) {
  if (Array.isArray(value)) return `[${value.map(sorted).join(", ")}]`;
  if (value && typeof value === "object") return `{${Object.keys(value).sort().map((key) => `${JSON.stringify(key)}: ${sorted(value[key])}`).join(", ")}}`;
  return JSON.stringify(value);
}

const clipped = (text) => (text.length > 16 ? `${text.slice(0, 15)}…` : text.replace(/^"(.*)"$/, "$1"));
const brief = (value) => (Math.abs(value) >= 1000 || (Math.abs(value) < 0.001 && value !== 0) ? value.toExponential(1) : String(Number(value.toPrecision(3))));

/** Return the shortest ends of paths that distinguish the paths. */
function short(paths) {
  return paths.map((path) => {
    const parts = path.split(".");
    for (let count = 1; count < parts.length; count++) {
      const end = parts.slice(-count).join(".");
      if (paths.filter((other) => other === end || other.endsWith(`.${end}`)).length === 1) return end;
    }
    return path;
  });
}

function colour(rank, count) {
  const place = (count > 1 ? 1 - rank / (count - 1) : 1) * (STOPS.length - 1);
  const index = Math.min(Math.floor(place), STOPS.length - 2);
  const mixed = STOPS[index].map((from, part) => Math.round(from + (place - index) * (STOPS[index + 1][part] - from)));
  return `rgb(${mixed.join(",")})`;
}

function drawParallel(page) {
  const { data, brushes } = page;
  const known = page.ranked.filter((one) => one.metric !== null && one.status !== "failed");
  if (!known.length) return page.parallel.replaceChildren(el("p", { class: "note" }, "No trial has a result yet."));
  page.axes = axesOf({ ...data, trials: known });
  const width = Math.max(page.parallel.clientWidth, 640, page.axes.length * 96);
  const gap = (width - 2 * SIDE) / Math.max(page.axes.length - 1, 1);
  const y = (share) => TOP + (1 - share) * (HEIGHT - TOP - BOTTOM);
  const x = (index) => SIDE + index * gap;
  const at = (one, index) => [x(index), page.axes[index].of(one) === undefined ? HEIGHT - 14 : y(page.axes[index].place(page.axes[index].of(one)))];
  const lines = known.map((one, rank) => {
    const points = page.axes.map((_, index) => at(one, index).map((value) => value.toFixed(1)).join(" "));
    const say = () => describe(page, one);
    return el("path", {
      class: "trial", d: `M${points.join("L")}`, stroke: colour(rank, known.length), "data-trial": one.trial,
      onpointerenter: (event) => { event.target.classList.add("hot"); say(); },
      onpointerleave: (event) => { event.target.classList.remove("hot"); count(page, known); },
      onclick: () => location.assign(address(data.entry, one.trial)),
    });
  });
  const svg = el("svg", { class: "parallel", viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": `${known.length} trials across ${page.axes.length} axes` });
  drawScale(page.scale, known);
  svg.append(...lines.reverse(), ...page.axes.map((axis, index) => drawAxis(page, axis, index, x(index), y)));
  page.parallel.replaceChildren(svg);
  page.select = () => {
    for (const line of lines) line.classList.toggle("out", !selected(page, known.find((one) => one.trial === Number(line.dataset.trial))));
    count(page, known);
    drawTable(page);
  };
  for (const name of brushes.keys()) if (!page.axes.some((axis) => axis.full === name)) brushes.delete(name);
  page.select();
}

function drawScale(place, known) {
  const bar = el("i");
  bar.style.background = `linear-gradient(to right, ${STOPS.map((stop) => `rgb(${stop.join(",")})`).join(", ")})`;
  const ends = [known[known.length - 1], known[0]].map((one) => `trial ${one.trial}: ${number(one.confirmed ?? one.metric)}`);
  place.replaceChildren(el("span", {}, "worst, ", ends[0]), bar, el("span", {}, "best, ", ends[1]));
}

function selected(page, one) {
  return [...page.brushes].every(([name, [low, high]]) => {
    const axis = page.axes.find((other) => other.full === name);
    const value = axis.of(one);
    return value !== undefined && axis.place(value) >= low - 1e-9 && axis.place(value) <= high + 1e-9;
  });
}

function drawAxis(page, axis, index, x, y) {
  const last = index === page.axes.length - 1;
  const anchor = index === 0 ? "start" : last ? "end" : "middle";
  const title = wrapped(axis.title).map((line, row) => el("text", { class: "title", x: index === 0 ? 4 : last ? x + SIDE - 4 : x, y: 16 + 15 * row, "text-anchor": anchor }, line));
  const ticks = axis.ticks.flatMap(([place, text]) => [
    el("line", { x1: x - 4, x2: x, y1: y(place), y2: y(place) }),
    el("text", { class: "tick", x: last ? x - 7 : x + 6, y: y(place) + 4, "text-anchor": last ? "end" : "start" }, text),
  ]);
  const brush = el("rect", { class: "brush", x: x - 7, width: 14, y: 0, height: 0 });
  const range = page.brushes.get(axis.full);
  if (range) place(brush, range, y);
  const area = el("rect", { class: "axis", x: x - 14, width: 28, y: y(1) - 8, height: y(0) - y(1) + 16 });
  listen(page, axis, area, brush, y);
  return el("g", {}, el("line", { x1: x, x2: x, y1: y(0), y2: y(1) }), ticks, title, brush, area);
}

function wrapped(text) {
  const parts = text.split(".");
  return parts.length > 1 ? [parts.slice(0, -1).join("."), parts[parts.length - 1]].map(clipped) : [text.length > 18 ? `${text.slice(0, 17)}…` : text];
}

function place(brush, [low, high], y) {
  brush.setAttribute("y", y(high));
  brush.setAttribute("height", y(low) - y(high));
}

/** Let the user select a range of an axis by dragging. A click without dragging removes the range. */
function listen(page, axis, area, brush, y) {
  const share = (event) => {
    const box = area.getBoundingClientRect();
    return Math.min(Math.max(1 - (event.clientY - box.top - 8) / (box.height - 16), 0), 1);
  };
  let from = null;
  area.addEventListener("pointerdown", (event) => {
    from = share(event);
    area.setPointerCapture(event.pointerId);
  });
  area.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const to = share(event);
    const range = [Math.min(from, to), Math.max(from, to)];
    page.brushes.set(axis.full, range);
    place(brush, range, y);
    page.select();
  });
  const end = (event) => {
    if (from !== null && Math.abs(share(event) - from) < 0.01) {
      page.brushes.delete(axis.full);
      brush.setAttribute("height", 0);
      page.select();
    }
    from = null;
  };
  area.addEventListener("pointerup", end);
  area.addEventListener("pointercancel", end);
}

function describe(page, one) {
  const values = page.axes.map((axis) => (axis.of(one) === undefined ? null : `${axis.title} ${typeof axis.of(one) === "number" ? brief(axis.of(one)) : sorted(axis.of(one))}`));
  page.note.textContent = `trial ${one.trial}, ${one.status}: ${values.filter(Boolean).join(", ")}`;
}

function count(page, known) {
  const inside = known.filter((one) => selected(page, one)).length;
  page.note.textContent = `${page.brushes.size ? `${inside} of ` : ""}${known.length} trials with a result, coloured by rank. Drag along an axis to select a range; click on a line to open its trial.`;
}

// ---- returns, importance, table

async function drawCurves(page) {
  const { data, ranked } = page;
  const frames = data.entry.max_frame || 1;
  const traces = ranked.filter((one) => data.curves[one.trial]?.length).map((one, rank) => ({
    type: "scatter", mode: "lines", name: `${rank < BEST ? `${rank + 1}. ` : ""}trial ${one.trial}${one.metric === null ? "" : `: ${number(one.metric)}`}`,
    x: data.curves[one.trial].map(([share]) => Math.round(share * frames)), y: data.curves[one.trial].map((point) => point[1]),
    line: { color: rank < BEST ? COLOURS[rank] : "#9aa1a9", width: rank < BEST ? 2 : 1 }, opacity: rank < BEST ? 1 : 0.5, showlegend: rank < BEST,
    hovertemplate: `%{x}, %{y:.4g}<extra>trial ${one.trial}</extra>`,
  }));
  if (!traces.length) return page.curves.replaceChildren(el("p", { class: "note" }, "No trial has rows yet."));
  await load("plotly.min.js");
  if (!page.plot?.isConnected) page.curves.replaceChildren((page.plot = el("div", { class: "plot" })));
  window.Plotly.react(page.plot, traces.reverse(), layout({ xaxis: { title: { text: "frames" } }, yaxis: { title: { text: "mean return (recent episodes)" } }, legend: { orientation: "h", y: -0.2, yanchor: "top", traceorder: "reversed" } }), PLOT);
}

function drawImportance(place, keys) {
  const known = keys.filter((key) => Number.isFinite(key.importance)).sort((a, b) => b.importance - a.importance);
  if (!known.length) return place.replaceChildren(el("p", { class: "note" }, "Not known yet: it needs 10 trials that ended with different results, and the package optuna."));
  const largest = Math.max(...known.map((key) => key.importance), 0.01);
  const bars = known.flatMap((key) => {
    const bar = el("i");
    bar.style.width = `${(100 * Math.max(key.importance, 0)) / largest}%`;
    return [el("span", { title: key.path }, key.path.split(".").slice(-2).join(".")), bar, el("span", {}, `${Math.round(100 * key.importance)} %`)];
  });
  place.replaceChildren(el("p", { class: "note" }, "PED-ANOVA: how far the values of a key among the best trials differ from its values among all trials."), el("div", { class: "importance" }, bars));
}

function drawTable(page) {
  const { data, ticked } = page;
  const shown = page.ranked.filter((one) => !page.brushes.size || (one.metric !== null && selected(page, one)));
  const names = short(data.keys.map((key) => key.path));
  const confirmed = shown.some((one) => one.confirmed !== null);
  const heads = ["", "trial", "status", data.metric, ...(confirmed ? ["confirmed"] : []), ...names, "frames", "time", ""];
  const compare = el("button", { class: "main", disabled: !ticked.size, onclick: () => location.assign(`/compare?${new URLSearchParams([...ticked].map((trial) => ["run", `${trial}:${data.entry.path}`]))}`) }, ticked.size ? `compare ${ticked.size}` : "compare: tick trials");
  const tick = (one) => el("input", { type: "checkbox", checked: ticked.has(one.trial), "aria-label": `compare trial ${one.trial}`, onchange: (event) => {
    event.target.checked ? ticked.add(one.trial) : ticked.delete(one.trial);
    compare.textContent = ticked.size ? `compare ${ticked.size}` : "compare: tick trials";
    compare.disabled = !ticked.size;
  } });
  const value = (one, key) => (one.values[key.path] === undefined ? "" : typeof one.values[key.path] === "number" ? brief(one.values[key.path]) : clipped(sorted(one.values[key.path])));
  const rows = shown.map((one) => el("tr", { "data-trial": one.trial },
    el("td", {}, tick(one)),
    el("td", {}, el("a", { href: address(data.entry, one.trial) }, String(one.trial))),
    el("td", {}, status(one), one.cause ? el("div", { class: "sub" }, one.cause) : null),
    el("td", { class: "number" }, number(one.metric)),
    confirmed ? el("td", { class: "number" }, number(one.confirmed)) : null,
    data.keys.map((key) => el("td", { class: "number" }, value(one, key))),
    el("td", { class: "number" }, number(one.frame)),
    el("td", { class: "number" }, duration(one.seconds)),
    el("td", {}, spark(data.curves[one.trial] ?? [])),
  ));
  const focused = page.table.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  page.table.replaceChildren(el("div", { class: "bar" }, compare), el("table", { class: "list" }, el("thead", {}, el("tr", {}, heads.map((title, index) => el("th", { scope: "col", class: index > 2 ? "number" : "" }, title)))), el("tbody", {}, rows)));
  if (focused) page.table.querySelector(`[aria-label="${focused}"]`)?.focus();
}

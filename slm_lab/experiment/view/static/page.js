// Functions that all pages use, and the choice of the page by its address.
// Texts of runs are inserted as text nodes. Names that plotly shows are escaped (see the function escaped).

/** Create an HTML element and return it. Properties that begin with "on" are event listeners, and other properties are attributes. */
export function el(tag, properties = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "circle", "rect", "g"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "checked" || name === "value" || name === "disabled" || name === "hidden") element[name] = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Send a request to the server and return the answer. Throws an Error with the server's reason. */
export async function ask(name, parameters = []) {
  const query = new URLSearchParams(parameters).toString();
  let response;
  try {
    response = await fetch(`/api/${name}${query ? `?${query}` : ""}`, { cache: "no-store" });
  } catch {
    throw new Error("slm-lab view does not answer; it was ended, or this page waits for it to start again");
  }
  const content = await response.json().catch(() => ({ error: `no answer (status ${response.status})` }));
  if (!response.ok) throw new Error(content.error);
  return content;
}

export function showProblem(text) {
  const place = document.getElementById("problem");
  place.textContent = text;
  place.hidden = !text;
}

/** Call `step` now and again after the number of seconds that `step` returns, except while the page is hidden. An error is shown, and the call is repeated. */
export function repeat(step) {
  let timer = 0;
  let waits = false;
  const run = async () => {
    if (document.hidden) {
      waits = true;
      return;
    }
    let again = 5;
    try {
      again = await step();
      showProblem("");
    } catch (error) {
      showProblem(error.message);
    }
    timer = setTimeout(run, again * 1000);
  };
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && waits) {
      waits = false;
      clearTimeout(timer);
      run();
    }
  });
  return run();
}

let scripts = {};
/** Load a script of this server, unless the script is already loaded. */
export function load(name) {
  scripts[name] ??= new Promise((resolve, reject) => {
    document.head.append(el("script", { src: `/static/${name}`, onload: resolve, onerror: () => reject(new Error(`cannot load ${name}`)) }));
  });
  return scripts[name];
}

/** Return a text that plotly shows literally. Plotly decodes entities and then interprets some tags. An invisible space after "<" prevents a tag. */
export function escaped(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "<\u200b");
}

export const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#8C8C00", "#6A51A3", "#7F7F7F"];

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value) || Math.abs(value) >= 1e4) return Math.abs(value) < 1e15 ? Math.round(value).toLocaleString("en") : value.toPrecision(4);
  return String(Number(value.toPrecision(4)));
}

/** Return the text of an estimate with its standard error, such as "487.2 ± 6.1". */
export function estimate(value, error) {
  if (value === null || value === undefined || !error) return number(value);
  const places = Math.min(Math.max(1 - Math.floor(Math.log10(Number(error.toPrecision(2)))), 0), 6);
  return `${value.toFixed(places)} ± ${error.toFixed(places)}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds) || seconds < 0) return "–";
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  if (hours >= 48) return `${Math.round(hours / 24)} days`;
  const two = (part) => String(part).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** Return the training time of a run, or the time between begin and end of a search or study, in seconds; null if unknown. */
export function took(entry) {
  return entry.seconds ?? (entry.ended && entry.began ? entry.ended - entry.began : null);
}

export function moment(seconds) {
  if (!seconds) return "";
  const time = new Date(seconds * 1000);
  const two = (part) => String(part).padStart(2, "0");
  return `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} ${two(time.getHours())}:${two(time.getMinutes())}`;
}

/** Return the address of the page of a run, search or study. */
export function address(entry, trial) {
  const parameters = new URLSearchParams({ path: entry.path });
  if (trial !== undefined && trial !== null) parameters.set("trial", trial);
  return `/run?${parameters}`;
}

export function status(entry) {
  return el("span", { class: `status ${entry.status}` }, entry.status);
}

export function progress(entry) {
  const share = Math.round(100 * (entry.progress ?? 0));
  const fill = el("i");
  fill.style.width = `${share}%`;
  return el("span", { class: `progress ${entry.status}`, role: "img", "aria-label": `${share} %`, title: `${share} %` }, fill);
}

/** Return the line of text that is shown below the title of a run, search or study. */
export function facts(entry) {
  const frames = entry.kind === "study" ? entry.text : entry.max_frame ? `${number(entry.frame)} of ${number(entry.max_frame)} frames` : "";
  const left = entry.status === "running" && entry.eta !== null && entry.eta !== undefined ? `${duration(entry.eta)} left` : "";
  const time = entry.status !== "running" && took(entry) !== null ? `took ${duration(took(entry))}` : "";
  const parts = [status(entry), el("span", {}, progress(entry), " ", entry.kind === "search" ? entry.text : frames), left, time];
  if (entry.value !== null && entry.value !== undefined) parts.push(el("span", {}, `${valueName(entry)} `, el("b", {}, estimate(entry.value, entry.error))));
  parts.push([entry.algorithm, entry.env].filter(Boolean).join(" in "), entry.began ? `began ${moment(entry.began)}` : "", entry.status === "unreadable" ? entry.text : "");
  return el("div", { class: "summary", "data-status": entry.status }, parts.filter(Boolean).map((part) => (typeof part === "string" ? el("span", {}, part) : part)));
}

/** Return a description of what the value of an entry means. */
export function valueName(entry) {
  return entry.kind === "search" ? `best ${entry.metric}` : entry.kind === "study" ? `best score (${entry.best})` : entry.measure ?? "return";
}

/** Return a small graph of points [x from 0 to 1, y]. */
export function spark(points) {
  if (!points.length) return "";
  const ys = points.map((point) => point[1]);
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const place = ([x, y]) => [2 + 116 * Math.min(x, 1), high > low ? 27 - (24 * (y - low)) / (high - low) : 15];
  const places = points.map(place);
  const [x, y] = places[places.length - 1];
  const path = places.map((one, index) => `${index ? "L" : "M"}${one[0].toFixed(1)} ${one[1].toFixed(1)}`).join("");
  const label = `return from ${number(ys[0])} to ${number(ys[ys.length - 1])}; lowest ${number(low)}, highest ${number(high)}`;
  const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
  title.textContent = label;
  return el("svg", { class: "spark", viewBox: "0 0 120 30", role: "img", "aria-label": label }, title, el("path", { d: path }), el("circle", { cx: x, cy: y, r: 2 }));
}

/** Return a plotly layout with the colours of the page. */
export function layout(changes = {}) {
  const style = getComputedStyle(document.documentElement);
  const [ink, line, page] = ["--ink", "--grid", "--card"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: line, zeroline: false, linecolor: line, automargin: true };
  const narrow = innerWidth < 600;
  return {
    paper_bgcolor: page, plot_bgcolor: page, font: { color: ink, size: 13, family: "Inter, Helvetica, Arial, sans-serif" },
    margin: { l: narrow ? 46 : 64, r: 12, t: 16, b: 46 }, height: 430, hovermode: "closest", uirevision: "same",
    legend: { orientation: "h", y: narrow ? -0.24 : -0.2, yanchor: "top" }, hoverlabel: { namelength: -1 },
    ...changes,
    xaxis: { ...axis, exponentformat: "none", separatethousands: true, rangemode: "tozero", ...changes.xaxis },
    yaxis: { ...axis, ...changes.yaxis },
  };
}

/** Settings of plotly. The button that would upload a graph is removed. */
export const PLOT = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d", "sendChartToCloud"] };

const pages = { "/": "list.js", "/run": "run.js", "/compare": "compare.js" };

async function begin() {
  const page = await import(`/static/${pages[location.pathname] ?? "list.js"}`);
  await page.show(document.getElementById("main"), new URLSearchParams(location.search));
}

if (document.getElementById("main")) begin().catch((error) => showProblem(error.message));

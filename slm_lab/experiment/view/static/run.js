// The page of a run, a trial of a search, a search or a study.
import { address, ask, el, facts, load, repeat, showProblem } from "./page.js";
import { search } from "./search.js";
import { study } from "./study.js";

export async function show(main, query) {
  const path = query.get("path") ?? "";
  const trial = query.get("trial");
  const kind = trial === null ? await kindOf(path) : "run";
  if (kind === "search") return search(main, path);
  if (kind === "study") return study(main, path);
  return run(main, path, trial);
}

/** Return the kind of a folder: "run", "search" or "study". If the request fails, return "run", because the page of a run shows the error and repeats the request. */
async function kindOf(path) {
  return (await ask("kind", { path }).catch(() => ({ kind: "run" }))).kind;
}

async function run(main, path, trial) {
  const tabs = makeTabs();
  const head = el("div");
  main.replaceChildren(head, tabs.bar, ...tabs.panels);
  const page = { path, trial, head, tabs, logs: new Logs(path), videos: "" };
  let version = "";
  await repeat(async () => {
    const answer = await ask("run", { path, ...(trial === null ? {} : { trial }), version });
    if (answer.report) await draw(page, answer);
    version = answer.version;
    if (tabs.shown === "logs") await page.logs.follow();
    return answer.again;
  });
}

async function draw(page, { entry, trials, report, logs, videos }) {
  const name = `${entry.name}${page.trial === null && !trials.length ? "" : `, trial ${entry.trial}`}`;
  document.title = `${name} – slm-lab view`;
  const crumbs = page.trial === null || trials.length ? [] : [el("a", { href: `/run?${new URLSearchParams({ path: page.path })}` }, "all trials of the search"), " "];
  const others = trials.flatMap((trial) => [" ", trial === entry.trial ? `trial ${trial}` : el("a", { href: address(entry, trial) }, `trial ${trial}`)]);
  page.head.replaceChildren(el("h1", {}, name), el("p", { class: "note" }, ...crumbs, page.path, ...others), facts(entry));
  await drawReport(page.tabs.panel("graphs"), report);
  page.tabs.count("logs", logs.length);
  page.tabs.count("videos", videos.length);
  page.logs.show(page.tabs.panel("logs"), logs);
  if (page.videos !== videos.join("\n")) {
    page.videos = videos.join("\n");
    page.tabs.panel("videos").replaceChildren(...films(page.path, videos));
  }
  page.tabs.onshow.logs = () => page.logs.follow().catch((error) => showProblem(error.message));
}

/** Draw the data of a run's report with the script that report.html uses. */
async function drawReport(panel, data) {
  await load("plotly.min.js");
  await load("report.js");
  if (panel.dataset.drawn) SLMReport.update(panel, data);
  else SLMReport.render(panel, data);
  panel.dataset.drawn = "1";
}

// ---- tabs

function makeTabs() {
  const names = ["graphs", "logs", "videos"];
  const tabs = { shown: "graphs", onshow: {} };
  const choose = (name) => {
    tabs.shown = name;
    for (const one of names) {
      buttons[one].setAttribute("aria-selected", one === name);
      panels[one].hidden = one !== name;
    }
    tabs.onshow[name]?.();
    dispatchEvent(new Event("resize")); // a graph that was hidden has no size
  };
  const buttons = Object.fromEntries(names.map((name) => [name, el("button", { role: "tab", id: `tab-${name}`, onclick: () => choose(name) }, name)]));
  const panels = Object.fromEntries(names.map((name) => [name, el("section", { role: "tabpanel", id: name, "aria-labelledby": `tab-${name}` })]));
  tabs.bar = el("div", { class: "tabs", role: "tablist" }, Object.values(buttons));
  tabs.panels = Object.values(panels);
  tabs.panel = (name) => panels[name];
  tabs.count = (name, count) => buttons[name].replaceChildren(`${name} (${count})`);
  choose("graphs");
  return tabs;
}

// ---- logs

const EARLIER = "earlier lines";

/** Panel that shows the end of one log of a run, which grows, and earlier lines of the log on request. */
class Logs {
  constructor(path) {
    Object.assign(this, { path, names: [], name: "", end: null, begin: 0 });
  }

  show(panel, names) {
    if (this.names.join("\n") === names.join("\n")) return;
    this.names = names;
    if (!names.length) return panel.replaceChildren(el("p", { class: "note" }, "This run has no logs."));
    const choose = el("select", { "aria-label": "log", onchange: (event) => this.choose(event.target.value) }, names.map((name) => el("option", { value: name }, name)));
    this.earlier = el("button", { onclick: () => this.before() }, EARLIER);
    this.text = el("pre", { class: "log", tabindex: 0 });
    panel.replaceChildren(el("div", { class: "bar" }, choose, this.earlier), this.text);
    if (names.includes(this.name)) choose.value = this.name;
    return this.choose(choose.value);
  }

  choose(name) {
    Object.assign(this, { name, end: null });
    return this.follow().catch((error) => showProblem(error.message));
  }

  ask(more) {
    return ask("log", { path: this.path, name: this.name, ...more });
  }

  async follow() {
    if (!this.name) return;
    const [name, first] = [this.name, this.end === null];
    const part = await this.ask(first ? {} : { after: this.end });
    if (name !== this.name || (!first && part.begin === part.end)) return;
    const atEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
    if (first || part.begin !== this.end) {
      this.text.textContent = part.text || "(empty)";
      this.begin = part.begin;
    } else this.text.append(part.text);
    this.end = part.end;
    this.earlier.hidden = this.begin === 0;
    if (first || atEnd) this.text.scrollTop = this.text.scrollHeight;
  }

  async before() {
    const part = await this.ask({ before: this.begin });
    const height = this.text.scrollHeight;
    this.text.prepend(part.text);
    this.begin = part.begin;
    this.earlier.hidden = this.begin === 0;
    this.text.scrollTop += this.text.scrollHeight - height;
  }
}

// ---- videos

function films(path, videos) {
  if (!videos.length) return [el("p", { class: "note" }, "No videos. This records one: "), el("pre", {}, "slm-lab enjoy@… --video")];
  return videos.map((name) => {
    const source = `/api/video?${new URLSearchParams({ path, name })}`;
    return el("figure", {}, el("video", { controls: "", preload: "metadata", src: source }), el("figcaption", { class: "note" }, name));
  });
}

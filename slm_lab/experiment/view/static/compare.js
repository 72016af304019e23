// The comparison page: several runs in one graph, statistics over their seeds, and the differences of their specs.
import { address, ask, COLOURS, el, escaped, layout, load, number, PLOT, repeat } from "./page.js";

const AXES = [["frame", "frames"], ["global_frame", "global frames"], ["opt_step", "optimizer steps"], ["wall_t", "seconds of training"]];

export async function show(main, query) {
  document.title = "compare – slm-lab view";
  const words = query.getAll("run");
  const page = { words, by: query.get("by") ?? "frame", all: false, seeds: true };
  for (const part of ["plots", "statistics", "notes", "spec"]) page[part] = el("div", { id: part });
  main.replaceChildren(el("h1", {}, "Comparison"), controls(page), page.notes, page.plots, el("h2", {}, "Returns at the end"), page.statistics, el("h2", {}, "Differences of the specs"), specControls(page), page.spec);
  let version = "";
  page.restart = () => (version = "");
  await repeat(async () => {
    const by = page.by;
    const answer = await ask("compare", [...words.map((word) => ["run", word]), ["by", by], ["version", version]]);
    if (by !== page.by) return 0;
    if (answer.settings) {
      page.data = answer;
      await draw(page);
    }
    version = answer.version;
    return answer.again;
  });
}

function controls(page) {
  const axis = el("select", { "aria-label": "horizontal axis", id: "by", onchange: async (event) => {
    page.by = event.target.value;
    page.restart();
    const answer = await ask("compare", [...page.words.map((word) => ["run", word]), ["by", page.by]]);
    page.data = answer;
    await draw(page);
  } }, AXES.map(([value, text]) => el("option", { value }, text)));
  axis.value = page.by;
  const seeds = el("input", { type: "checkbox", checked: true, onchange: (event) => { page.seeds = event.target.checked; drawPlots(page); } });
  return el("div", { class: "bar" }, el("label", {}, "over", axis), el("label", {}, seeds, "each seed"), el("a", { href: "/" }, "choose other runs"));
}

function specControls(page) {
  const all = el("input", { type: "checkbox", id: "all-keys", onchange: (event) => { page.all = event.target.checked; drawSpec(page); } });
  return el("div", { class: "bar" }, el("label", {}, all, "all keys"));
}

async function draw(page) {
  await load("plotly.min.js");
  page.notes.replaceChildren(...page.data.notes.map((text) => el("p", { class: "note" }, text)));
  drawPlots(page);
  drawStatistics(page);
  drawSpec(page);
}

// ---- graphs: one for each env

function drawPlots(page) {
  const envs = [...new Set(page.data.settings.map((one) => one.env))];
  page.graphs ??= new Map();
  for (const [env, plot] of page.graphs) if (!envs.includes(env)) plot.remove();
  page.plots.replaceChildren(...envs.flatMap((env) => {
    if (!page.graphs.has(env)) page.graphs.set(env, el("div", { class: "plot" }));
    return [el("h2", {}, env), page.graphs.get(env)];
  }));
  const label = AXES.find(([value]) => value === page.by)?.[1] ?? page.by;
  for (const env of envs) {
    const traces = page.data.settings.flatMap((one, index) => (one.env === env ? curves(page, one, index) : []));
    window.Plotly.react(page.graphs.get(env), traces, layout({ xaxis: { title: { text: label } }, yaxis: { title: { text: "mean return (evaluation, or recent episodes)" } } }), PLOT);
  }
}

const hex = (index) => COLOURS[index % COLOURS.length];

function curves(page, one, index) {
  const name = escaped(`${one.name} (${one.count})`);
  const common = { type: "scatter", mode: "lines", legendgroup: String(index), hovertemplate: `%{x}, %{y:.4g}<extra>${name}</extra>` };
  const dash = index >= COLOURS.length ? "dash" : "solid";
  const seeds = page.seeds && one.seeds.length > 1 ? one.seeds.map((seed) => ({ ...common, x: seed.x, y: seed.y, name, showlegend: false, opacity: 0.45, line: { color: hex(index), width: 1 } })) : [];
  const band = one.low && { ...common, x: [...one.x, ...[...one.x].reverse()], y: [...one.high, ...[...one.low].reverse()], fill: "toself", fillcolor: `${hex(index)}26`, line: { width: 0 }, hoverinfo: "skip", hovertemplate: undefined, showlegend: false };
  return [...(band ? [band] : []), ...seeds, { ...common, x: one.x, y: one.mean, name, line: { color: hex(index), width: 2.5, dash } }];
}

// ---- statistics

function interval(one, digits = number) {
  if (!one) return "–";
  const [value, low, high] = one;
  return low === null ? digits(value) : `${digits(value)} [${digits(low)}, ${digits(high)}]`;
}

const percent = (value) => (value === null ? "–" : `${Math.round(100 * value)} %`);
const p = (value) => (value === null || value === undefined ? "–" : value < 0.001 ? "< 0.001" : value.toFixed(3));

function table(heads, rows) {
  const cell = (one, index) => el("td", { class: index ? "number" : "" }, one);
  return el("div", { class: "wide" }, el("table", { class: "list" }, el("thead", {}, el("tr", {}, heads.map((title, index) => el("th", { scope: "col", class: index ? "number" : "" }, title)))), el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell))))));
}

function swatch(index) {
  const square = el("span", { class: "colour" });
  square.style.background = hex(index);
  return square;
}

function drawStatistics(page) {
  const { settings, pairs, overall } = page.data;
  const parts = [table(
    ["", "env", "seeds", "mean [95 %]", "median", "interquartile mean [95 %]", "status"],
    settings.map((one, index) => [el("span", {}, swatch(index), one.name), one.env, String(one.seeds_count), interval(one.final_return), number(one.median), interval(one.interquartile_mean), one.status]),
  )];
  parts.push(el("p", { class: "note" }, page.data.explained));
  if (pairs.length) {
    parts.push(el("h2", {}, `Compared with ${pairs[0].a}`), table(
      ["", "env", "difference of means [95 %]", "probability of improvement [95 %]", "p (Holm)"],
      pairs.map((one) => [one.b, one.env, interval(one.difference), interval(one.improvement, percent), p(one.p_holm)]),
    ));
    parts.push(el("p", { class: "note" }, "The difference of means has Welch's 95 % confidence interval, which is not adjusted for the number of comparisons. The probability of improvement is the probability that a seed of the row has a higher return than a seed of the first curve; 50 % means that neither is better. p (Holm) is the two-sided p-value of Welch's t-test of the difference, adjusted by Holm's method for all comparisons in the table."));
  }
  if (overall.length) {
    parts.push(el("h2", {}, "Over all envs"), table(
      ["", "seeds", "interquartile mean of normalised returns [95 %]", "probability of improvement [95 %]"],
      overall.map((one) => [one.name, String(one.seeds), interval(one.interquartile_mean), interval(one.improvement, percent)]),
    ));
  }
  page.statistics.replaceChildren(...parts);
}

// ---- differences of the specs

function drawSpec(page) {
  const { runs, spec } = page.data;
  const rows = page.all ? spec : spec.filter((row) => row.differs);
  if (runs.length < 2 && !page.all) return page.spec.replaceChildren(el("p", { class: "note" }, "A single run; tick 'all keys' to see its spec."));
  if (!rows.length) return page.spec.replaceChildren(el("p", { class: "note" }, "The specs do not differ, except in their seeds."));
  const heads = [el("th", { scope: "col" }, "key"), ...runs.map((run) => el("th", { scope: "col" }, el("a", { href: address(run, run.trial || undefined) }, run.label)))];
  const body = rows.map((row) => el("tr", {}, el("td", {}, row.key), row.values.map((value) => el("td", { class: row.differs && value !== row.values[0] ? "differs" : "" }, value ?? "–"))));
  page.spec.replaceChildren(el("div", { class: "wide" }, el("table", { class: "list spec" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, body))));
}

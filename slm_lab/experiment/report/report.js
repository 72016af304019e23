/* Draws the data of a report (see report_data.py) into an element: SLMReport.render(element, data), later SLMReport.update(element, data).
   Needs plotly.min.js; without it, everything but the graphs is shown. Texts of the data are only inserted as text. */
"use strict";
const SLMReport = (() => {
  const MAX_POINTS = 600, PRINT_WIDTH = 690;  // pixels that fit a sheet of paper
  const SMOOTHED = "smoothing";
  const DARK_COLOURS = {"#440154": "#cfa6ff", "#3B528B": "#8fb0ff", "#882255": "#ef8fbb", "#0072B2": "#4fa8e8", "#333333": "#e6e8ea",
    "#777777": "#9aa1a8", "#E3E3E3": "#33383d", "#FFFFFF": "#15181b", "#E0E0E0": "#3a4046"};
  const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches && !printing;
  let printing = false;

  // ---- elements

  const add = (parent, tag, properties = {}, text = null) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name === "class") node.className = value;
      else if (name in node && name !== "list") node[name] = value;
      else node.setAttribute(name, value);
    }
    if (text !== null) node.textContent = text;
    parent.appendChild(node);
    return node;
  };
  const section = (root, title, id) => {
    const part = add(root, "section", {id});
    if (title) add(part, "h2", {}, title);
    return part;
  };
  const link = (parent, text, href) => {  // only relative paths and anchors: a spec cannot name another scheme
    const safe = href && !/^[a-z][a-z0-9+.-]*:/i.test(href) && !href.startsWith("//");
    return safe ? add(parent, "a", {href: href.split("/").map((part) => part === ".." ? part : encodeURIComponent(part)).join("/")}, text)
      : add(parent, "span", {}, text);
  };
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "<\u200b");  // plotly decodes entities before it looks for tags
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const table = (parent, columns, rows, className = "") => {
    const wide = add(parent, "div", {class: "wide"});
    const node = add(wide, "table", {class: className});
    const head = add(add(node, "thead"), "tr");
    for (const name of columns) add(head, "th", {scope: "col"}, name);
    const body = add(node, "tbody");
    for (const row of rows) {
      const line = add(body, "tr");
      for (const cell of row) {
        const entry = add(line, "td");
        if (cell !== null && typeof cell === "object") link(entry, String(cell.text), cell.href);
        else entry.textContent = cell === null || cell === undefined ? "" : String(cell);
      }
    }
    return node;
  };

  // ---- curves

  const curveOf = (data, mode, index, column, axis) => {
    const rows = ((data.tables || {})[mode] || {})[index];
    if (!rows || !rows[column]) return null;
    const over = mode === "trial" ? "frame" : rows[axis] ? axis : axis === "global_frame" ? "frame" : axis;
    if (!rows[over]) return null;
    const points = [];
    rows[column].forEach((y, row) => {
      const x = rows[over][row];
      if (y !== null && x !== null && x !== undefined) points.push([x, y]);
    });
    points.sort((one, other) => one[0] - other[0]);
    return points.length ? {x: points.map((point) => point[0]), y: points.map((point) => point[1])} : null;
  };
  const smooth = (curve, weight) => {  // exponential moving average, corrected for its start
    if (!curve || !weight) return curve;
    let last = 0, share = 0;
    return {x: curve.x, y: curve.y.map((y) => {
      last = weight * last + (1 - weight) * y;
      share = weight * share + (1 - weight);
      return last / share;
    })};
  };
  const valueAt = (curve, x) => {  // linear interpolation; null outside
    const {x: xs, y: ys} = curve;
    if (x < xs[0] || x > xs[xs.length - 1]) return null;
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1; else high = middle;
    }
    if (xs[low] === x || low === 0) return ys[low];
    const share = (x - xs[low - 1]) / (xs[low] - xs[low - 1]);
    return ys[low - 1] + share * (ys[low] - ys[low - 1]);
  };
  const T = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101];
  const meanOf = (curves, band, bounds) => {  // over the points at which at least two of the curves have a value
    const grid = [...new Set(curves.flatMap((curve) => curve.x))].sort((one, other) => one - other);
    const every = Math.max(1, Math.ceil(grid.length / MAX_POINTS));
    const found = {x: [], y: [], low: [], high: []};
    grid.forEach((x, place) => {
      if (place % every && place !== grid.length - 1) return;
      const values = curves.map((curve) => valueAt(curve, x)).filter((value) => value !== null);
      if (values.length < Math.min(2, curves.length)) return;
      const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
      const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0), count = values.length;
      const t = T[count - 2] || 1.96 + 2.4 / Math.max(count - 1, 1);
      const half = band === "std" ? Math.sqrt(squares / count) : count > 1 ? t * Math.sqrt(squares / (count - 1) / count) : 0;
      found.x.push(x); found.y.push(mean);
      found.low.push(bounds ? Math.max(mean - half, bounds[0]) : mean - half);
      found.high.push(bounds ? Math.min(mean + half, bounds[1]) : mean + half);
    });
    return found;
  };

  // ---- graphs

  const colourOf = (data, index) => {
    const line = (data.lines || []).find((one) => one.index === index);
    return style(`--line-${(line ? Math.max(line.group, 0) : 0) % 8}`);
  };
  const withAlpha = (colour, alpha) => {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    return `rgba(${red},${green},${blue},${alpha})`;
  };
  const bandTrace = (found, colour, name) => ({
    type: "scatter", mode: "lines", x: [...found.x, ...[...found.x].reverse()], y: [...found.high, ...[...found.low].reverse()],
    fill: "toself", fillcolor: withAlpha(colour, 0.16), line: {width: 0}, hoverinfo: "skip", name, showlegend: false, meta: "band"});
  const lineTrace = (curve, name, colour, extra = {}) => ({
    type: "scatter", mode: curve.x.length <= 25 ? "lines+markers" : "lines", x: curve.x, y: curve.y, name: plain(name),
    line: {color: colour, width: 1.7, ...(extra.line || {})}, marker: {size: curve.x.length === 1 ? 9 : 4},
    hovertemplate: `%{y:.5g}<extra>${plain(name)}</extra>`, showlegend: false, ...Object.fromEntries(
      Object.entries(extra).filter(([key]) => key !== "line"))});
  const errorTrace = ({data, state}, panel, line, curve, column) => {  // ± a column of standard errors
    const errors = smooth(curveOf(data, panel.mode, line.index, column, state.axis), state.smooth);
    const half = curve.x.map((x) => (errors && valueAt(errors, x)) || 0);
    const edges = {x: curve.x, low: curve.y.map((y, at) => y - half[at]), high: curve.y.map((y, at) => y + half[at])};
    return bandTrace(edges, colourOf(data, line.index), `standard error of ${plain(line.name)}`);
  };
  const DASHES = ["solid", "dot", "dash"];

  const tracesOf = (view, panel) => {
    const {data, state} = view, weight = state.smooth, traces = [];
    const bounds = panel.bounded ? data.bounds : null;
    const several = panel.columns.length > 1;
    panel.columns.forEach(({column, label, error}, order) => {
      const curve = (index) => smooth(curveOf(data, panel.mode, index, column, state.axis), weight);
      if (panel.mode === "trial") {
        const own = smooth(curveOf(data, "trial", 0, column, "frame"), weight);
        if (own) traces.push(lineTrace(own, label, style("--ink"), {line: {width: 2.5}}));
        return;
      }
      const shown = (data.lines || []).filter((line) => !state.hidden.includes(line.index));
      const bold = new Set((data.means || []).flatMap((mean) => mean.indices.length === 1 ? mean.indices : []));
      for (const line of shown) {
        const own = curve(line.index);
        if (!own || (bold.has(line.index) && data.lines.length > 1)) continue;
        const alone = data.lines.length === 1;
        if (error && state.band !== "none") traces.push(errorTrace(view, panel, line, own, error));
        traces.push(lineTrace(own, several ? `${line.name}: ${label}` : line.name, colourOf(data, line.index),
          {line: {width: alone ? 2.5 : 1.7, dash: line.failed ? "dash" : DASHES[order % 3]}, opacity: alone ? 1 : 0.9, meta: "line"}));
      }
      for (const mean of data.means || []) {
        const all = mean.workers && !panel.main && !panel.joint ? mean.workers : mean.indices;
        const indices = all.filter((index) => !state.hidden.includes(index));
        const curves = indices.map(curve).filter((one) => one);
        if (!curves.length || (curves.length === 1 && all.length > 1)) continue;
        const found = meanOf(curves, state.band, bounds);
        const grouped = data.means.length > 1;
        const colour = grouped ? colourOf(data, indices[0]) : style("--ink");
        const count = all.length > 1 ? ` (${curves.length} of ${all.length})` : "";
        const name = curves.length === all.length ? mean.name : `${mean.name}${count}`;
        if (state.band !== "none" && curves.length > 1) traces.unshift(bandTrace(found, colour, `band of ${plain(name)}`));
        traces.push(lineTrace(found, several ? `${name}: ${label}` : name, colour,
          {line: {width: 3.2, dash: DASHES[order % 3]}, meta: "mean"}));
      }
    });
    return traces;
  };

  const axisStyle = () => ({gridcolor: style("--grid"), linecolor: style("--soft"), tickcolor: style("--soft"), zeroline: false,
    ticks: "outside", automargin: true});
  const layoutOf = (height, xTitle, yTitle) => ({
    height, margin: {l: 58, r: 26, t: 10, b: 44}, modebar: {bgcolor: "rgba(0,0,0,0)", color: style("--soft"), activecolor: style("--ink")}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: "system-ui, Helvetica, Arial, sans-serif", size: 12, color: style("--ink")},
    hovermode: "x unified", hoverlabel: {bgcolor: style("--card"), bordercolor: style("--soft"), font: {color: style("--ink")}},
    xaxis: {...axisStyle(), title: {text: plain(xTitle), standoff: 6}, separatethousands: true, exponentformat: "none", rangemode: "tozero",
      nticks: innerWidth < 600 ? 4 : 8},
    yaxis: {...axisStyle(), title: {text: plain(yTitle), standoff: 6}, exponentformat: "power"}});
  const CONFIG = {displaylogo: false, responsive: true, displayModeBar: false};
  const WITH_BUTTONS = {...CONFIG, displayModeBar: true, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]]};

  const axisLabel = (view, panel) => panel.mode === "trial" ? "frames"
    : ((view.data.axes || []).find((axis) => axis.column === view.state.axis) || {label: "frames"}).label;

  const drawPanel = (view, node, panel) => {
    const traces = tracesOf(view, panel);
    const layout = layoutOf(panel.height || 230, axisLabel(view, panel), panel.unit || "");
    if (panel.main) decorate(view, panel, traces, layout);
    if ((panel.unit || "").endsWith("share")) layout.yaxis.rangemode = "nonnegative";
    if (panel.core) layout.yaxis.range = coreRange(traces);
    if (printing) layout.width = panel.main ? PRINT_WIDTH : PRINT_WIDTH / 2 - 20;
    Plotly.react(node, traces, layout, panel.main && innerWidth >= 600 ? WITH_BUTTONS : CONFIG);
  };
  const coreRange = (traces) => {  // of most values, since early quotients of small sums may have another order of magnitude
    const values = traces.flatMap((trace) => trace.y).sort((one, other) => one - other);
    const [low, high] = [0.15, 0.85].map((share) => values[Math.floor(share * (values.length - 1))]);
    const most = high - low || Math.abs(high) || 1, at = (value) => Math.min(Math.max(value, 2 * low - high), 2 * high - low);
    return values.length ? [at(values[0]) - 0.1 * most, at(values[values.length - 1]) + 0.1 * most] : null;
  };

  const decorate = (view, panel, traces, layout) => {  // reference levels, and events on the time axis
    const {data, state} = view;
    const xs = traces.flatMap((trace) => trace.x), ys = traces.flatMap((trace) => trace.y);
    if (!xs.length) {
      layout.annotations = [{text: "no episode has ended yet", xref: "paper", yref: "paper", x: 0.5, y: 0.5, showarrow: false}];
      return;
    }
    const end = xs.reduce((most, x) => Math.max(most, x), 0);
    layout.annotations = [];
    for (const level of data.levels || []) {
      traces.unshift({type: "scatter", mode: "lines", x: [0, end], y: [level.value, level.value], name: plain(level.label), meta: "level",
        line: {color: style("--soft"), dash: "dash", width: 1.4}, showlegend: false,
        hovertemplate: `%{y:.5g}<extra>${plain(level.label)}</extra>`});
      layout.annotations.push({x: end, y: level.value, xanchor: "right", yanchor: "bottom", showarrow: false,
        text: plain(`${level.label} ${Number(level.value.toPrecision(5))}`), font: {size: 11, color: style("--soft")}});
    }
    const events = (data.events || []).map((event) => [xOf(view, event), event]).filter(([x]) => x !== null).slice(0, 60);
    if (!events.length) return;
    const top = ys.reduce((most, y) => Math.max(most, y), -Infinity);
    layout.shapes = events.map(([x, event]) => ({type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, layer: "below",
      line: {color: style(event.kind === "start" ? "--soft" : "--warn"), width: 1, dash: "dot"}}));
    traces.push({type: "scatter", mode: "markers", x: events.map(([x]) => x), y: events.map(() => top), name: "events", meta: "events",
      marker: {symbol: "triangle-down", size: 11, color: events.map(([, event]) => style(event.kind === "start" ? "--soft" : "--warn"))},
      text: events.map(([, event]) => plain(`${event.name}: ${event.text}`.slice(0, 120))), hovertemplate: "%{text}<extra></extra>",
      showlegend: false});
  };
  const xOf = ({data, state}, event) => {
    const direct = {frame: event.frame, wall_t: event.seconds}[state.axis];
    if (direct !== undefined) return direct;
    const curve = curveOf(data, "train", event.line, state.axis, "frame");
    return curve && event.frame !== null ? valueAt(curve, Math.max(curve.x[0], Math.min(event.frame, curve.x[curve.x.length - 1]))) : null;
  };

  // ---- figures that are given as plotly's JSON

  const recoloured = (value) => typeof value === "string" ? DARK_COLOURS[value] || DARK_COLOURS[value.toUpperCase()] || value
    : Array.isArray(value) ? value.map(recoloured)
    : value && typeof value === "object" ? Object.fromEntries(Object.entries(value).map(([key, part]) => [key,
      key === "colorscale" ? part.map(([at], place) => [at, part[part.length - 1 - place][1]]) : recoloured(part)])) : value;
  const drawFigure = (node, figure) => {
    const copy = JSON.parse(JSON.stringify(figure.plot));
    const {data: traces, layout} = isDark() ? recoloured(copy) : copy;
    const top = traces.some((trace) => trace.type === "parcoords") ? 70 : 24;
    layout.height = Math.max(200, (layout.height || 450) - ((layout.margin || {}).t || 60) + top);
    layout.margin = {...layout.margin, t: top, l: Math.min((layout.margin || {}).l || 80, innerWidth < 600 ? 52 : 80)};
    delete layout.title;
    if (layout.width <= node.clientWidth) delete layout.width;
    if (printing) layout.width = PRINT_WIDTH;
    Object.assign(layout, {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: {...layout.font, color: style("--ink")}, hoverlabel: {bgcolor: style("--card"), font: {color: style("--ink")}}});
    Plotly.react(node, traces, layout, CONFIG);
  };

  // ---- the page

  const stored = (folder) => {
    try { return JSON.parse(sessionStorage.getItem(`slm-report ${folder}`)) || {}; } catch { return {}; }
  };
  const store = ({data, state}) => {
    try { sessionStorage.setItem(`slm-report ${data.folder}`, JSON.stringify(state)); } catch { /* no storage: settings are not kept */ }
  };

  const watched = (view, node, draw) => {  // draw when the graph comes into view
    node.classList.add("graph");
    view.graphs.push({node, draw, drawn: false});
    view.observer.observe(node);
  };
  const drawOne = (graph) => {
    graph.drawn = true;
    try { graph.draw(graph.node); } catch (error) { graph.node.textContent = `this graph cannot be drawn: ${error.message}`; }
  };
  const redraw = (view) => {
    store(view);
    view.graphs.filter((graph) => graph.drawn).forEach(drawOne);
  };
  const drawAll = (view) => view.graphs.forEach(drawOne);

  const choice = (view, parent, label, key, options, id) => {
    const wrapped = add(parent, "label", {}, `${label} `);
    const select = add(wrapped, "select", {id});
    for (const [value, text] of options) add(select, "option", {value}, text);
    select.value = view.state[key];
    select.onchange = () => { view.state[key] = select.value; redraw(view); };
  };

  const nameOf = (one) => `${one.mode} ${one.column}`;  // of a return to choose
  const controls = (view, root) => {
    const {data, state} = view, bar = add(root, "div", {class: "controls"});
    if (data.returns.length > 1) {
      choice(view, bar, "return", "returns", data.returns.map((one) => [nameOf(one), one.label]), "choose-return");
    }
    if (data.axes.length > 1) choice(view, bar, "x axis", "axis", data.axes.map((axis) => [axis.column, axis.label]), "choose-axis");
    if ((data.means || []).some((mean) => mean.indices.length > 1)) {
      const bands = [["std", "± 1 standard deviation"], ["interval", "95 % interval of the mean"], ["none", "none"]];
      choice(view, bar, "band", "band", bands, "choose-band");
    }
    const label = add(bar, "label", {}, "smoothing ");
    const slider = add(label, "input", {type: "range", min: 0, max: 0.99, step: 0.01, id: SMOOTHED});
    slider.value = state.smooth;
    const shown = add(label, "output", {}, String(state.smooth));
    slider.oninput = () => { state.smooth = Number(slider.value); shown.textContent = slider.value; redraw(view); };
  };

  const header = (view, root) => {
    const {data} = view, top = add(root, "header");
    const line = add(top, "div", {class: "headline"});
    add(line, "h1", {}, data.title);
    if (data.status) add(line, "span", {class: `badge ${data.status}`}, data.status);
    if (data.subtitle) add(line, "span", {class: "subtitle"}, data.subtitle);
    if (data.refresh) refresher(view, line);
    const facts = add(top, "dl", {class: "facts"});
    for (const {label, value, note} of data.facts || []) {
      const fact = add(facts, "div");
      add(fact, "dt", {}, label);
      add(fact, "dd", {}, value);
      if (note) add(fact, "small", {}, note);
    }
  };
  const refresher = (view, line) => {
    const label = add(line, "label", {class: "refresh"});
    const box = add(label, "input", {type: "checkbox", id: "refresh"});
    box.checked = view.state.refresh;
    label.append(` reload every ${view.data.refresh} s`);
    box.onchange = () => { view.state.refresh = box.checked; store(view); };
    if (!view.served) setTimeout(() => { if (box.checked) location.reload(); }, 1000 * view.data.refresh);
  };

  const ranking = (view, root) => {
    const {data, state} = view;
    if (!data.ranking || !data.ranking.rows.length) return;
    const part = section(root, "", "seeds");
    const node = table(part, data.ranking.columns, data.ranking.rows.map((row) => row.cells), "ranking");
    data.ranking.rows.forEach((row, place) => {
      const cell = node.tBodies[0].rows[place].cells[0], name = cell.textContent;
      cell.textContent = "";
      const label = add(cell, "label"), box = add(label, "input", {type: "checkbox", checked: !state.hidden.includes(row.line)});
      box.dataset.line = row.line;
      add(label, "i", {class: "swatch", style: `background:${`var(--line-${swatch(data, row.line)})`}`});
      label.append(name);
      box.onchange = () => {
        state.hidden = box.checked ? state.hidden.filter((index) => index !== row.line) : [...state.hidden, row.line];
        redraw(view);
      };
    });
  };
  const swatch = (data, index) => {
    const line = data.lines.find((one) => one.index === index);
    return line ? Math.max(line.group, 0) % 8 : 0;
  };

  const returns = (view, root) => {
    const {data} = view;
    if (!data.returns || !data.returns.length) return;
    const part = section(root, "", "returns");
    controls(view, part);
    const split = add(part, "div", {class: (data.sentences || []).length ? "split" : ""});
    const card = add(split, "figure", {class: "card"});
    const caption = add(card, "figcaption", {}, "Return");
    const node = add(card, "div", {id: "graph-return"});
    watched(view, node, (node) => {
      const chosen = data.returns.find((one) => nameOf(one) === view.state.returns) || data.returns[0];
      const columns = [{column: chosen.column, label: chosen.label, error: chosen.error}];
      const unit = chosen.unit || "mean return";
      caption.textContent = chosen.unit || "Return";
      drawPanel(view, node, {columns, mode: chosen.mode, unit, height: innerWidth < 600 ? 300 : 380, main: true, bounded: !chosen.unit});
    });
    if (!(data.sentences || []).length) return;
    const said = add(split, "div", {class: "card sentences"});
    add(said, "h2", {}, "How the seeds differ");
    for (const text of data.sentences) add(said, "p", {}, text);
    add(said, "small", {}, "Differences in diagnostics are evidence, not proof of a cause.");
  };

  const findings = (view, root) => {
    const found = view.data.findings;
    if (!found) return;
    const part = section(root, "Diagnosis", "findings");
    if (!found.length) add(part, "p", {}, "No fault was found.");
    for (const one of found) {
      const card = add(part, "div", {class: `card finding ${one.severity}`});
      add(card, "strong", {}, one.title);
      if (one.severity) add(card, "small", {}, ` ${one.severity}`);
      add(card, "p", {}, one.evidence);
      if (one.advice) add(card, "p", {}, one.advice);
      if (one.key) add(card, "code", {}, one.key);
    }
  };

  const events = (view, root) => {
    const found = view.data.events || [];
    if (!found.length) return;
    const part = section(root, "Notices, restarts and failures", "events");
    const rows = found.map((one) => [one.seconds === null ? "" : one.seconds.toFixed(1), one.frame === null ? "" : one.frame.toLocaleString("en"),
      one.name, one.kind === "notice" ? "notice" : one.kind, one.text]);
    table(part, ["second", "frame", "where", "kind", "text"], rows, "texts");
  };

  const panels = (view, root) => {
    const groups = new Map();
    for (const panel of view.data.panels || []) groups.set(panel.group, [...(groups.get(panel.group) || []), panel]);
    for (const [group, own] of groups) {
      const part = section(root, group, `group-${group.toLowerCase().replace(/[^a-z]+/g, "-")}`);
      const grid = add(part, "div", {class: "grid"});
      for (const panel of own) {
        const card = add(grid, "figure", {class: "card"});
        const caption = add(card, "figcaption", {}, panel.title);
        if (panel.columns.length > 1) {
          const parts = panel.columns.map(({label}, order) => `${["——", "······", "– – –"][order % 3]} ${label}`);
          add(caption, "small", {}, parts.join("   "));
        }
        if (panel.note) add(caption, "small", {}, panel.note);
        const node = add(card, "div", {id: `graph-${panel.columns[0].column}`});
        watched(view, node, (node) => drawPanel(view, node, panel));
      }
    }
    if (view.data.thinned > 1) {
      add(root, "p", {class: "note"}, `Each point of a graph stands for ${view.data.thinned} rows of the tables.`);
    }
  };

  const figures = (view, root) => {
    for (const figure of view.data.figures || []) {
      const part = section(root, figure.title, "");
      if (figure.note) add(part, "p", {class: "note"}, figure.note);
      const card = add(part, "figure", {class: "card wide"});
      const node = add(card, "div");
      watched(view, node, (node) => drawFigure(node, figure));
      if (figure.href) link(add(part, "p", {class: "note"}), "this graph alone", figure.href);
    }
  };

  const tables = (view, root) => {
    for (const one of view.data.tables_of || []) {
      const part = section(root, one.title, "");
      table(part, one.columns, one.rows, one.texts ? "texts" : "");
      if (one.note) add(part, "p", {class: "note"}, one.note);
    }
  };

  const metrics = (view, root) => {
    const found = view.data.metrics;
    if (!found || !found.rows.length) return;
    const part = section(root, "Metrics", "metrics");
    table(part, found.columns, found.rows);
    add(part, "p", {class: "note"}, found.note);
  };

  const settings = (view, root) => {
    const found = view.data.settings;
    if (!found) return;
    const part = section(root, "Settings", "settings");
    if (found.previous) {
      const line = add(part, "p", {}, "Differences from the previous run of this name, ");
      link(line, found.previous.name, found.previous.href);
      line.append(` (${found.previous.note}):`);
      if (found.previous.rows.length) table(part, found.previous.columns, found.previous.rows, "texts");
      else line.append(" none, apart from seeds and keys that do not affect learning.");
    }
    if (found.changed) {
      const folded = add(part, "details", {open: found.changed.rows.length <= 12});
      add(folded, "summary", {}, `Keys that differ from their defaults (${found.changed.rows.length})`);
      table(folded, found.changed.columns, found.changed.rows, "texts");
    }
    if (found.spec) {
      const folded = add(part, "details");
      add(folded, "summary", {}, "The whole spec");
      add(folded, "pre", {}, found.spec);
    }
  };

  const lists = (view, root) => {
    const {data} = view;
    if ((data.commands || []).length) {
      const part = section(root, "Commands", "commands");
      table(part, ["", "command"], data.commands.map((one) => [one.label, one.command]), "commands");
    }
    if ((data.origin || []).length) {
      const part = section(root, "Origin", "origin");
      table(part, ["", ""], data.origin.map((one) => [one.label, one.value]), "texts");
    }
    if ((data.files || []).length) {
      const part = section(root, "Files", "files"), list = add(part, "ul");
      for (const file of data.files) link(add(list, "li"), file.label, file.href);
    }
    add(root, "footer", {}, `written ${data.written || ""}`);
  };

  const paragraphs = (view, root) => {
    for (const text of view.data.paragraphs || []) add(root, "p", {}, text);
  };

  const PARTS = [header, paragraphs, tables, ranking, returns, findings, events, figures, panels, metrics, settings, lists];

  const render = (root, data, served = false) => {
    const state = {axis: data.axis, returns: "", band: "std", smooth: 0, hidden: [], refresh: true, ...stored(data.folder)};
    if (data.axes && !data.axes.some((axis) => axis.column === state.axis)) state.axis = data.axis;
    if (data.returns && data.returns.length && !data.returns.some((one) => nameOf(one) === state.returns)) state.returns = nameOf(data.returns[0]);
    const observer = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
      const graph = view.graphs.find((one) => one.node === entry.target);
      if (graph && !graph.drawn && typeof Plotly !== "undefined") drawOne(graph);
    }), {rootMargin: "300px"});
    const view = {root, data, state, observer, served, graphs: []};
    if (root.slmReport) root.slmReport.observer.disconnect();
    root.slmReport = view;
    root.textContent = "";
    root.classList.add("slm-report");
    if (typeof Plotly === "undefined") {
      add(root, "p", {class: "missing"}, "The graphs are not shown: plotly.min.js is not beside this page.");
    }
    for (const part of PARTS) part(view, root);
    return view;
  };
  const update = (root, data) => {  // keeps what the user chose and opened, the focus, the place, and the graphs, which are drawn again in place
    const place = scrollY, titleOf = (graph) => graph.node.closest("figure")?.querySelector("figcaption")?.textContent;
    const drawn = new Map((root.slmReport?.graphs || []).filter((graph) => graph.drawn).map((graph) => [titleOf(graph), graph.node]));
    const opened = new Set([...root.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
    const controls = () => [...root.querySelectorAll("select, input, button, summary, a[href]")];
    const focus = controls().indexOf(document.activeElement);
    const view = render(root, data, true);
    for (const graph of view.graphs.filter((one) => drawn.has(titleOf(one)))) {
      const node = drawn.get(titleOf(graph));
      view.observer.unobserve(graph.node);
      graph.node.replaceWith(node);
      graph.node = node;
      drawOne(graph);
    }
    for (const summary of root.querySelectorAll("details > summary")) summary.parentNode.open = opened.has(summary.textContent);
    if (focus >= 0) controls()[focus]?.focus({preventScroll: true});
    scrollTo(0, place);
  };

  const restyle = () => {
    if (typeof Plotly === "undefined") return;
    for (const node of document.querySelectorAll(".slm-report")) if (node.slmReport) redraw(node.slmReport);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
  addEventListener("beforeprint", () => {
    printing = true;
    document.documentElement.classList.add("printed");
    for (const node of document.querySelectorAll(".slm-report")) if (node.slmReport && typeof Plotly !== "undefined") drawAll(node.slmReport);
  });
  addEventListener("afterprint", () => { printing = false; document.documentElement.classList.remove("printed"); restyle(); });

  return {render, update, drawAll: (root) => drawAll(root.slmReport), curveOf, meanOf, smooth};
})();

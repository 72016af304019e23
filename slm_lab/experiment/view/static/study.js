// The page of a study: its runs by entry and env.
import { address, ask, el, estimate, facts, number, progress, repeat, status } from "./page.js";

export async function study(main, path) {
  const head = el("div");
  const table = el("div", { class: "wide" });
  main.replaceChildren(head, table);
  let version = "";
  await repeat(async () => {
    const answer = await ask("study", { path, version });
    if (answer.runs) draw(head, table, answer);
    version = answer.version;
    return answer.again;
  });
}

function draw(head, table, { entry, runs }) {
  document.title = `${entry.name} – slm-lab view`;
  const compare = el("a", { href: `/compare?${new URLSearchParams({ run: `:${entry.path}` })}` }, "compare the entries");
  head.replaceChildren(el("h1", {}, entry.name), el("p", { class: "note" }, entry.path), facts(entry), el("p", {}, runs.length ? compare : "No run has begun yet."));
  const groups = new Map();
  for (const run of runs) groups.set(`${run.entry}\n${run.env}`, [...(groups.get(`${run.entry}\n${run.env}`) ?? []), run]);
  const heads = ["random_seed", "status", "progress", "return ± se"].map((title) => el("th", { scope: "col" }, title));
  table.replaceChildren(el("table", { class: "list" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, [...groups.values()].flatMap(rows))));
}

function rows(group) {
  const values = group.map((run) => run.value).filter(Number.isFinite);
  const mean = values.length ? `mean return ${number(values.reduce((sum, one) => sum + one, 0) / values.length)}` : "";
  const title = el("tr", { class: "group" }, el("td", { colspan: 4 }, String(group[0].entry), el("span", {}, `${group[0].env}; ${mean}`)));
  return [title, ...group.map((run) => el("tr", {},
    el("td", {}, el("a", { href: address(run) }, `seed ${run.random_seed}`)),
    el("td", {}, status(run), run.status === "unreadable" ? el("div", { class: "sub" }, run.text) : null),
    el("td", {}, progress(run), el("div", { class: "sub" }, `${number(run.frame)} of ${number(run.max_frame)}`)),
    el("td", {}, estimate(run.value, run.error)),
  ))];
}

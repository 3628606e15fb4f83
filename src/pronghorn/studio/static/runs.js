// All runs: a table that follows the folder, and curves of the chosen ones over each other.
import { html, useState, useMemo, useEffect, get, useAsked, State, Problem, Empty, figure, count, money, ago, to, go } from "./lib.js";
import { Plot, COLOURS } from "./plot.js";

const FIGURES = [["loss", "training loss"], ["eval", "evaluation loss"], ["lr", "learning rate"], ["grad_norm", "gradient norm"], ["rate", "tokens per second"], ["reward", "reward"], ["memory", "GPU memory, GB"], ["power", "GPU power, W"], ["utilisation", "GPU utilisation, %"]];
const AXES = [["step", "step"], ["tokens", "tokens"], ["hours", "hours"], ["cost", "cost, USD"]];
const COLUMNS = [
  ["name", "run", (run) => run.name], ["state", "state", (run) => run.state], ["step", "step", (run) => run.step ?? 0],
  ["last_loss", "loss", (run) => run.last_loss ?? Infinity], ["best_eval", "best eval", (run) => run.best_eval ?? Infinity],
  ["tokens_per_second", "tokens/s", (run) => -(run.tokens_per_second ?? 0)], ["money", "cost", (run) => -(run.money ?? 0)], ["when", "last event", (run) => -(run.when ?? 0)],
];
const GPU = "no log of the GPU beside these runs (gpu.jsonl)";
const NOTHING = { memory: GPU, power: GPU, utilisation: GPU, cost: "no price is known for these runs" };
const MOST = 40;

export function Runs({ given }) {
  const found = useAsked(() => get("runs"), 2500, []);
  const [search, look] = useState(""), [order, sort] = useState("when");
  const [chosen, choose] = useState(() => given.getAll("run"));
  const all = found.value?.runs || [];
  const shown = useMemo(() => {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const by = COLUMNS.find(([name]) => name === order)[2];
    const text = (run) => [run.folder, run.name, run.model, run.method, run.state, run.note, ...(run.tags || []).map((tag) => `#${tag}`)].join(" ").toLowerCase();
    return all.filter((run) => words.every((word) => text(run).includes(word))).sort((a, b) => (by(a) < by(b) ? -1 : by(a) > by(b) ? 1 : 0));
  }, [found.value, search, order]);
  const toggle = (folder) => choose((old) => (old.includes(folder) ? old.filter((one) => one !== folder) : [...old, folder].slice(-MOST)));
  const tags = [...new Set(all.flatMap((run) => run.tags || []))].sort();
  if (found.value && !all.length) return html`<div class="title"><h1>Runs</h1></div><${Problem} error=${found.error} />
    <${Empty}>No runs yet. <a href=${to("recipe")}>Write a recipe</a> and start one; a run started on the command line appears here by itself.<//>`;
  return html`<div class="title"><h1>Runs</h1><a class="button" href=${to("recipe")}>New run</a></div>
    <${Problem} error=${found.error} />
    <div class="row"><label class="grow">Search <input type="search" value=${search} onInput=${(e) => look(e.target.value)} placeholder="name, model, state, note, #tag" /></label>
      ${tags.map((tag) => html`<button class="tag" onClick=${() => look(`#${tag}`)}>#${tag}</button>`)}
      ${chosen.length ? html`<button class="quiet" onClick=${() => choose([])}>clear ${chosen.length} chosen</button>` : html`<span class="soft">tick runs to compare them</span>`}</div>
    ${chosen.length ? html`<${Overlay} runs=${chosen} names=${Object.fromEntries(all.map((run) => [run.folder, run.name]))} mark=${all.filter((run) => chosen.includes(run.folder)).map((run) => run.step).join()} />` : ""}
    <div class="card wide" tabindex="0" role="region" aria-label="table of runs"><table class="runs"><thead><tr><th><span class="hidden">chosen</span></th>
      ${COLUMNS.map(([name, label]) => html`<th class=${["name", "state"].includes(name) ? "" : "n"} aria-sort=${order === name ? "ascending" : "none"}><button class="head" onClick=${() => sort(name)}>${label}</button></th>`)}</tr></thead>
      <tbody>${shown.map((run) => html`<${Row} key=${run.folder} run=${run} chosen=${chosen.indexOf(run.folder)} toggle=${toggle} />`)}</tbody></table>
      ${found.value ? (shown.length ? "" : html`<p class="none">nothing found for “${search}”</p>`) : html`<p class="none">looking…</p>`}</div>`;
}

function Row({ run, chosen, toggle }) {
  const open = (event) => { if (!event.target.closest("a,input,button,label")) go("run", { run: run.folder }); };
  return html`<tr onClick=${open}><td><input type="checkbox" checked=${chosen >= 0} onChange=${() => toggle(run.folder)} aria-label=${`compare ${run.name}`} style=${chosen >= 0 ? { accentColor: `var(${COLOURS[chosen % COLOURS.length]})` } : {}} /></td>
    <td class="who"><a href=${to("run", { run: run.folder })}>${run.name}</a><small>${[(run.model || "").split("/").pop(), run.method, run.problem].filter(Boolean).join(" · ")}</small>
      ${(run.tags || []).map((tag) => html`<span class="tag">#${tag}</span>`)}</td>
    <td><${State} state=${run.state} /></td>
    <td class="n">${count(run.step)}${run.steps ? html`<small>of ${count(run.steps)}</small>` : ""}</td>
    <td class="n">${figure(run.last_loss)}</td>
    <td class="n">${run.partial ? html`<span title="the log is being read" class="soft">…</span>` : figure(run.best_eval)}${run.metric ? html`<small>${run.metric} ${figure(run.score)}</small>` : ""}</td>
    <td class="n">${run.tokens_per_second ? count(run.tokens_per_second) : "–"}</td><td class="n">${money(run.money)}</td><td class="n">${ago(run.when)}</td></tr>`;
}

function Overlay({ runs, names, mark }) {
  const [y, setY] = useState("loss"), [x, setX] = useState("step"), [log, setLog] = useState(false), [even, setEven] = useState(0.02);
  const key = runs.join("\n");
  const found = useAsked(() => get("overlay", { run: runs, y, x, smooth: even }), 0, [key, y, x, even, mark]);
  const different = useAsked(() => (runs.length > 1 ? get("differences", { run: runs }) : Promise.resolve({})), 0, [key]);
  const series = useMemo(() => (found.value || []).filter((one) => runs.includes(one.run)).map((one) => ({
    name: names[one.run] || one.run, colour: COLOURS[runs.indexOf(one.run) % COLOURS.length], x: one.x, y: log ? one.y.map((value) => (value > 0 ? value : null)) : one.y, marked: y === "eval",
  })), [found.value, log]);
  const rows = Object.entries(different.value || {});
  return html`<section class="overlay" aria-label="comparison"><${Problem} error=${found.error} />
    <div class="row"><label>Show <select value=${y} onChange=${(e) => setY(e.target.value)}>${FIGURES.map(([name, label]) => html`<option value=${name}>${label}</option>`)}</select></label>
      <label>over <select value=${x} onChange=${(e) => setX(e.target.value)}>${AXES.map(([name, label]) => html`<option value=${name}>${label}</option>`)}</select></label>
      <label>smooth <input type="range" min="0" max="0.2" step="0.005" value=${even} onChange=${(e) => setEven(Number(e.target.value))} aria-valuetext=${`${Math.round(even * 1000) / 10} % of the curve`} /></label>
      <label class="check"><input type="checkbox" checked=${log} onChange=${(e) => setLog(e.target.checked)} /> log scale</label></div>
    <${Plot} title=${FIGURES.find(([name]) => name === y)[1]} series=${series} height=${320} log=${log} unit=${AXES.find(([name]) => name === x)[1]} empty=${NOTHING[y] || NOTHING[x]} />
    ${rows.length ? html`<div class="card wide" tabindex="0" role="region" aria-label="keys that differ"><h3>Recipe keys that differ</h3><table class="diff"><thead><tr><th>key</th>${runs.map((run) => html`<th>${names[run] || run}</th>`)}</tr></thead>
      <tbody>${rows.map(([name, values]) => html`<tr><th scope="row"><code>${name}</code></th>${values.map((value) => html`<td>${value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value)}</td>`)}</tr>`)}</tbody></table></div>` : runs.length > 1 && different.value ? html`<p class="note">The recipes are the same.</p>` : ""}
    ${runs.length > 1 ? html`<p class="note">On the command line: <code>pronghorn runs ${runs.join(" ")}</code></p>` : ""}</section>`;
}

// One run, live: the server sends what is new in its log. The connection comes back by itself.
import { html, useState, useEffect, useRef, useMemo, get, post, useAsked, State, Tile, Command, Problem, Empty, figure, count, percent, money, gigabytes, duration, ago, clock, to, go } from "./lib.js";
import { Plot, smooth } from "./plot.js";
import { Checkpoints } from "./checkpoints.js";
import { Exports } from "./exports.js";
import { Rollouts } from "./rollouts.js";

const TITLES = { grad_norm: "Gradient norm", lr: "Learning rate", rate: "Tokens per second", reward: "Reward", margin: "Margin", memory: "GPU memory, GB", power: "GPU power, W", utilisation: "GPU utilisation, %" };
const GPU = ["memory", "power", "utilisation"]; // of runs that have a gpu.jsonl
const USUAL = ["grad_norm", "lr", "rate"];
const MOST_POINTS = 6000; // then the curves are asked for anew, evened down
const FEW = 40;

function useLive(folder) {
  const [facts, setFacts] = useState(null), [curves, setCurves] = useState({}), [line, setLine] = useState("opening"), [turn, again] = useState(0);
  const kept = useRef({}), waiting = useRef(0);
  useEffect(() => {
    const source = new EventSource(`/api/live?${new URLSearchParams({ run: folder })}`);
    const show = () => { if (!waiting.current) waiting.current = requestAnimationFrame(() => { waiting.current = 0; setCurves({ ...kept.current }); }); };
    source.addEventListener("facts", (event) => { setFacts(JSON.parse(event.data)); setLine("open"); });
    source.addEventListener("curves", (event) => { kept.current = JSON.parse(event.data); setLine("open"); show(); });
    source.addEventListener("gone", () => setLine("gone"));
    source.addEventListener("more", (event) => {
      const more = JSON.parse(event.data);
      for (const [name, { x, y }] of Object.entries(more)) {
        const old = kept.current[name] || { x: [], y: [] }, both = { x: old.x.slice(), y: old.y.slice() };
        y.forEach((value, i) => { if (value !== null) { both.x.push(x[i]); both.y.push(value); } });
        kept.current = { ...kept.current, [name]: both };
      }
      show();
      if ((kept.current.loss?.x.length || 0) > MOST_POINTS) again((n) => n + 1);
    });
    source.onerror = async () => {
      setLine("lost");
      try { await get("answers", { run: folder }); } catch (error) { if (error.status === 404) setLine("gone"); } // why: an outage is told above
      if (source.readyState === EventSource.CLOSED) setTimeout(() => again((n) => n + 1), 3000); // refused, not only interrupted
    };
    return () => { source.close(); cancelAnimationFrame(waiting.current); waiting.current = 0; };
  }, [folder, turn]);
  return { facts, curves, line };
}

export function Run({ given }) {
  const folder = given.get("run") || "";
  const { facts, curves, line } = useLive(folder);
  if (!facts) return html`<div class="title"><h1>${folder}</h1></div>${line === "gone" ? html`<${Gone} />` : line === "lost" ? html`<${Lost} />` : html`<p class="sub">reading the log…</p>`}`;
  const size = facts.trainable && facts.parameters ? `${count(facts.trainable)} of ${count(facts.parameters)} parameters trained` : "";
  return html`<div class="title"><h1>${facts.name || folder}</h1><${State} state=${facts.state} /></div>
    <p class="sub" title=${facts.model}>${[facts.model.startsWith("/") ? facts.model.split("/").pop() : facts.model, facts.method, facts.precision, facts.device, size].filter(Boolean).join(" · ")}</p>
    ${line === "gone" ? html`<${Gone} />` : line === "lost" ? html`<${Lost} />` : ""}
    ${facts.bad_lines ? html`<div class="why" role="status">${facts.bad_lines === 1 ? "One line" : `${facts.bad_lines} lines`} of run.jsonl cannot be read and ${facts.bad_lines === 1 ? "is" : "are"} left out; the rest counts.</div>` : ""}
    ${facts.why ? html`<p class="why">${facts.why}</p>` : ""}
    ${facts.state === "cut off" ? html`<div class="why" role="status">The process of this run is gone without a last word: it was killed, or the machine went down. ${facts.resumable ? "Resume goes on from its last checkpoint." : "There is no whole checkpoint to go on from."}</div>` : ""}
    ${facts.silent ? html`<${Silent} facts=${facts} />` : ""}
    <${Actions} folder=${folder} facts=${facts} />
    <${Tiles} facts=${facts} />
    <${Plots} facts=${facts} curves=${curves} />
    <${Stages} facts=${facts} />
    <${Answers} folder=${folder} facts=${facts} />
    <${Rollouts} folder=${folder} facts=${facts} />
    <${Checkpoints} folder=${folder} facts=${facts} />
    <${Exports} folder=${folder} facts=${facts} />
    <${Notes} folder=${folder} facts=${facts} />
    <${Output} folder=${folder} />
    <${Facts} facts=${facts} />`;
}

const Gone = () => html`<div class="why bad" role="alert">The run's folder, or its run.jsonl, is no more. What was shown last stays here; if it comes back, so does this page.</div>`;
const Lost = () => html`<p class="note" role="status">The line to the studio is interrupted; connecting again…</p>`;
const Silent = ({ facts }) => html`<div class="why" role="status">Nothing has been written since ${clock(facts.silent)}. ${facts.paused
  ? html`The process is paused; <code>kill -CONT ${facts.pid}</code> lets it go on.` : "The process is there: an evaluation or a download can take this long."}</div>`;

function Actions({ folder, facts }) {
  const [said, say] = useState(null), [error, fail] = useState(null), [busy, work] = useState(false);
  const running = facts.state === "running";
  useEffect(() => { if (!running) say((old) => (old?.stopping ? null : old)); }, [running]);
  const act = async (path, more, text) => {
    work(true); fail(null);
    try { const done = await post(path, { run: folder, ...more }); say({ text, command: done.command, stopping: path === "stop" }); }
    catch (one) { fail(one); }
    work(false);
  };
  return html`<div class="row actions">
      ${running ? html`<button class="primary" disabled=${busy || said?.stopping} onClick=${() => act("stop", {}, "It finishes this step, saves, and ends.")}>${said?.stopping ? "stopping…" : "Stop and save"}</button>` : ""}
      ${facts.resumable ? html`<button class="primary" disabled=${busy} onClick=${() => act("resume", {}, "It goes on from its last checkpoint; loading takes a moment.")}>Resume</button>` : ""}
      ${facts.report ? html`<a class="button" href=${`/page?${new URLSearchParams({ file: `${folder}/report.html` })}`} target="_blank" rel="noopener">Report</a>` : ""}
      ${facts.checkpoints.length ? html`<a class="button" href=${to("talk", { run: folder })}>Talk</a>
        <button onClick=${() => document.getElementById("export").scrollIntoView()}>Export</button>` : ""}
      <a class="button" href=${to("runs", { run: folder })}>Compare</a></div>
    ${said ? html`<div role="status" class="said-by">${said.text}<${Command} text=${said.command} /></div>` : ""}<${Problem} error=${error} />`;
}

const energy = (kwh) => (kwh === null ? "" : kwh < 0.1 ? `${+(1000 * kwh).toPrecision(3)} Wh` : `${+kwh.toPrecision(3)} kWh`);

function Tiles({ facts }) {
  const share = facts.steps ? Math.min(1, facts.step / facts.steps) : 0;
  const tiles = [
    ["training loss", figure(facts.loss.last), facts.loss.first !== null ? `from ${figure(facts.loss.first)}` : ""],
    ["evaluation loss", figure(facts.evaluation.best), facts.evaluation.best_step !== null ? `best at step ${count(facts.evaluation.best_step)}` : ""],
    ["steps", count(facts.step), facts.steps ? `of ${count(facts.steps)}` : ""],
    [facts.state === "running" ? "time left" : "wall-clock", duration(facts.state === "running" ? facts.left : facts.seconds), facts.state === "running" ? `${duration(facts.seconds)} so far` : ""],
    ["tokens per second", count(facts.tokens_per_second), "real tokens, no padding"],
    ["tokens seen", count(facts.tokens), facts.efficiency ? `packs ${percent(facts.efficiency)} full` : ""],
    ...Object.entries(facts.metrics).slice(0, 2).map(([name, one]) => [name, figure(one.best ?? one.last), one.base === null ? "" : `base model ${figure(one.base)}`]),
    ...(facts.reward.last === null ? [] : [["reward", figure(facts.reward.last), `best ${figure(facts.reward.best)}`]]),
    ["cost", money(facts.money), [facts.money_left ? `${money(facts.money_left)} to go` : facts.gpu_hours ? `${facts.gpu_hours.toFixed(2)} GPU hours` : "no GPU", energy(facts.energy)].filter(Boolean).join(", ")],
    ["checkpoints", count(facts.checkpoints.length), facts.checkpoints.length ? `last at step ${count(facts.checkpoints.at(-1))}` : "none yet"],
  ];
  const even = tiles.slice(0, tiles.length >= 12 ? 12 : 8);
  return html`${facts.state === "running" && facts.steps ? html`<div class="done" role="progressbar" aria-label="steps done" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(100 * share)}><i style=${{ width: `${100 * share}%` }}></i></div>` : ""}
    <dl class="tiles">${even.map(([label, value, more]) => html`<${Tile} label=${label} value=${value} more=${more} />`)}</dl>`;
}

function Plots({ facts, curves }) {
  const [log, setLog] = useState(false);
  const above = (y) => (log ? y.map((value) => (value > 0 ? value : null)) : y);
  const line = (name, label, colour) => {
    const { x, y } = curves[name] || { x: [], y: [] };
    if (x.length < FEW) return [{ name: label === "smoothed" ? "each step" : label, colour, x, y: above(y) }];
    return [{ name: "each step", colour, x, y: above(y), kind: "faint" }, { name: label, colour, x, y: above(smooth(y, Math.max(2, Math.round(x.length / 50)))) }];
  };
  const evals = facts.evals.filter((one) => typeof one.loss === "number" && one.step);
  const main = useMemo(() => [...line("loss", "training", "--train"), { name: "evaluation", colour: "--eval", x: evals.map((one) => one.step), y: evals.map((one) => one.loss), marked: evals.length < 60 }], [curves.loss, evals.length, log]);
  const others = Object.keys(curves).filter((name) => ![...USUAL, ...GPU, "loss"].includes(name) && curves[name].x.length).slice(0, 6);
  return html`<h2>Training</h2><${Plot} title="Loss" series=${main} height=${330} log=${log} empty="no step yet">
      <label class="switch"><input type="checkbox" checked=${log} onChange=${(e) => setLog(e.target.checked)} />log scale</label><//>
    <div class="grid3">${[...USUAL, ...others, ...GPU.filter((name) => curves[name]?.x.length)].map((name) => html`<${Small} key=${name} name=${name} curve=${curves[name]} line=${line} log=${log} />`)}</div>`;
}

function Small({ name, curve, line }) {
  const series = useMemo(() => (name === "lr" ? [{ name: "learning rate", colour: "--train", ...(curve || { x: [], y: [] }) }] : line(name, "smoothed", "--train")), [curve]);
  return html`<${Plot} title=${TITLES[name] || name} series=${series} height=${150} fromZero=${[...USUAL, ...GPU].includes(name)} />`;
}

function Stages({ facts }) {
  const all = Object.entries(facts.stages).sort((a, b) => b[1] - a[1]), total = all.reduce((sum, [, value]) => sum + value, 0);
  if (!total) return "";
  const paint = (name) => ({ background: `var(--s-${name}, var(--s-other))` });
  return html`<h2>Where the time went</h2><div class="card"><div class="stack" role="img" aria-label=${all.map(([name, value]) => `${name} ${percent(value / total)}`).join(", ")}>
      ${all.map(([name, value]) => html`<div title=${`${name} ${percent(value / total)}`} style=${{ flex: `${value / total} 0 0`, ...paint(name) }}></div>`)}</div>
    <ul class="keys">${all.slice(0, 8).map(([name, value]) => html`<li><i style=${paint(name)}></i>${name} <b>${percent(value / total)}</b> <span class="soft">${duration(value)}</span></li>`)}</ul>
    <p class="note">Stages are recorded at each checkpoint.</p></div>`;
}

function Answers({ folder, facts }) {
  const found = useAsked(() => (facts.answers ? get("answers", { run: folder }) : Promise.resolve([])), 0, [facts.answers]);
  const [wrong, only] = useState(false);
  const rows = (found.value || []).filter((row) => !wrong || Object.values(row.scores).some((score) => score < 1));
  return html`<${Problem} error=${found.error} />${rows.length || wrong ? html`<h2>Answers to held-out rows</h2><div class="card">
      ${rows.some((row) => Object.keys(row.scores).length) ? html`<label class="check"><input type="checkbox" checked=${wrong} onChange=${(e) => only(e.target.checked)} /> wrong ones only; they come first</label>` : ""}
      <table class="answers"><thead><tr><th>prompt</th><th>expected</th><th>base model</th><th>this run${rows[0]?.step ? `, step ${count(rows[0].step)}` : ""}</th></tr></thead>
      <tbody>${rows.slice(0, 30).map((row) => html`<tr><td data-label="prompt"><div class="said">${row.prompt}</div></td><td data-label="expected"><div class="said">${row.expected}</div></td>
        <td data-label="base model"><div class="said">${row.base ?? "–"}</div></td><td data-label="this run">${Object.entries(row.scores).map(([name, score]) => html`<span class=${score >= 1 ? "ok" : "ko"}>${name} ${figure(score)} </span>`)}<div class="said">${row.answer}</div></td></tr>`)}</tbody></table></div>` : ""}`;
}

function Notes({ folder, facts }) {
  const [note, write] = useState(facts.note), [tags, tag] = useState(facts.tags.join(", ")), [said, say] = useState(""), [error, fail] = useState(null);
  const save = async (event) => {
    event.preventDefault(); fail(null);
    try { const kept = await post("notes", { run: folder, note, tags: tags.split(",") }); tag(kept.tags.join(", ")); say("saved in studio.json of the run's folder"); }
    catch (one) { fail(one); }
  };
  return html`<h2>Notes</h2><form class="card notes" onSubmit=${save}><label>Note <textarea rows="3" value=${note} onInput=${(e) => { write(e.target.value); say(""); }}></textarea></label>
    <label>Tags, with commas <input value=${tags} onInput=${(e) => { tag(e.target.value); say(""); }} /></label>
    <div class="row"><button>Save</button><span class="soft" role="status">${said}</span></div><${Problem} error=${error} /></form>`;
}

function Output({ folder }) {
  const jobs = useAsked(() => get("jobs"), 4000, [folder]);
  const mine = (jobs.value || []).filter((job) => job.about === folder).slice(0, 3);
  const newest = mine[0], text = useAsked(() => (newest ? get("job", { id: newest.id }) : Promise.resolve(null)), newest?.running ? 1500 : 0, [newest?.id, newest?.running]);
  if (!newest || !text.value) return "";
  return html`<h2>Output</h2><div class="card"><${Command} text=${newest.command} /><pre class="output" tabindex="0" aria-label="output of the command">${text.value.output || "nothing yet"}</pre>
    ${newest.running ? "" : html`<p class="note">ended${newest.exit === null ? "" : ` with exit code ${newest.exit}`} · <a href=${to("jobs")}>all commands</a></p>`}</div>`;
}

function Facts({ facts }) {
  const plan = facts.memory[0][0]?.plan, measured = facts.memory[1][0];
  const groups = {};
  for (const [key, value] of Object.entries(facts.recipe)) {
    if (value === null || (typeof value === "object" && !Object.keys(value).length)) continue;
    const [section, name] = key.includes(".") ? [key.slice(0, key.indexOf(".")), key.slice(key.indexOf(".") + 1)] : ["run", key];
    (groups[section] ||= []).push([name, Array.isArray(value) || typeof value === "object" ? JSON.stringify(value) : String(value)]);
  }
  return html`${plan ? html`<h2>Memory</h2><div class="card"><dl class="facts"><dt>planned peak</dt><dd>${gigabytes(plan.peak_bytes)} of ${gigabytes(plan.budget)}</dd>
      ${measured?.peak_bytes ? html`<dt>measured peak</dt><dd>${gigabytes(measured.peak_bytes)}</dd>` : ""}</dl></div>` : ""}
    ${facts.notices.length ? html`<h2>Notices</h2><div class="card"><ul class="notices">${facts.notices.slice().reverse().slice(0, 30).map((one) => html`<li><time>${clock(one.time)}</time>${one.text}</li>`)}</ul></div>` : ""}
    <h2>Recipe</h2><div class="card recipe">${Object.entries(groups).map(([section, rows]) => html`<section><h4>${section}</h4><dl>${rows.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl></section>`)}</div>
    <h2>Sessions</h2><div class="card wide" tabindex="0" role="region" aria-label="sessions"><table><thead><tr><th class="n">session</th><th>resumed from</th><th class="n">steps</th><th class="n">time</th><th>ended</th></tr></thead>
      <tbody>${facts.sessions.map((one) => html`<tr><td class="n">${one.number}</td><td>${one.resumed_from === null ? "–" : `step ${count(one.resumed_from)}`}</td><td class="n">${count(one.steps)}</td><td class="n">${duration(one.seconds)}</td><td>${one.ended || facts.state}</td></tr>`)}</tbody></table></div>`;
}

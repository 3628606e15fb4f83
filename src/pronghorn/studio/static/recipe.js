// A recipe as a form and as text, always in agreement; the plan of it on a GPU; and the start.
import { html, useState, useEffect, useRef, get, post, useAsked, useLater, useReturns, isOutage, Command, Problem, Tile, count, percent, money, gigabytes, to, go } from "./lib.js";

const EMPTY = new Set(["", "[]", "{}"]);
const LATER = 350; // ms after the last key

export function Recipe({ given, about }) {
  const files = useAsked(() => get("files"), 0, []), fields = useAsked(() => get("fields"), 0, []).value || [];
  const [file, name] = useState(given.get("file") || ""), [text, write] = useState(""), [known, know] = useState("");
  const [read, seen] = useState({ values: {}, problems: [], run: null }), [error, fail] = useState(null), [said, say] = useState(null), [saved, keep] = useState(""), [fresh, over] = useState(false);
  const settled = useLater(text, LATER), turn = useRef(0), returned = useReturns();
  const now = useRef(""), edits = useRef(Promise.resolve()), opened = useRef(0);
  const open = async (path) => {
    fail(null); say(null);
    try { const one = await get("recipe", { file: path }); opened.current++; name(one.file); write(one.text); know(one.version); keep(one.text); seen(one); } catch (one) { fail(one); }
  };
  const begin = async () => {
    fail(null); say(null);
    const there = files.value || { data: [], models: [], recipes: [] }, data = there.data.find((one) => /train/.test(one)) || there.data[0];
    const stem = (data || "my").split("/").pop().split(".")[0];
    try {
      const one = await post("recipe/new", { model: there.models[0] || "", data: data ? [data] : [], output: `runs/${stem}` });
      opened.current++; name(`${stem}.yaml`); write(one.text); know(""); keep(""); seen(one);
    } catch (one) { fail(one); }
  };
  useEffect(() => { if (!files.value) return; if (given.get("file")) open(given.get("file")); else if (files.value.recipes.length) open(files.value.recipes[0]); else begin(); }, [files.value]);
  useEffect(() => {
    if (!settled) return;
    const mine = ++turn.current;
    post("recipe/read", { text: settled, name: file || "recipe" }).then((one) => { if (mine === turn.current) seen(one); }, fail);
  }, [settled, returned]);
  now.current = text;
  // One edit after the other, each of the text as it then stands; what is typed in the text meanwhile is edited again.
  const set = (key, value, recipe = opened.current) => (edits.current = edits.current.then(async () => {
    try {
      let before, one;
      do { before = now.current; one = await post("recipe/edit", { text: before, key, value, name: file || "recipe" }); } while (now.current !== before && opened.current === recipe);
      if (opened.current !== recipe) return;
      turn.current++; now.current = one.text; write(one.text); seen(one); fail(null);
    } catch (one) { fail(one); }
  }));
  const save = async () => {
    fail(null);
    try { const one = await post("recipe/save", { file, text, version: known }); know(one.version); keep(text); name(one.file); say({ text: `saved ${one.file}` }); files.again(); return true; } catch (one) { fail(one); return false; }
  };
  const [keys, sweep] = useState(""), [checked, check] = useState(null), later = useLater(text, 4 * LATER);
  const look = async () => { // as pronghorn check, of the text as it stands here
    const mine = text;
    check({ text: mine, busy: true });
    try { const found = await post("ask", { question: "ready", text: mine, file: file || "my.yaml", name: file || "recipe" }); check((old) => (old?.text === mine ? { text: mine, found } : old)); }
    catch (one) { check(isOutage(one) ? null : { text: mine, found: { problems: one.problems || [{ what: one.message }], unanswered: one.status !== 422 } }); }
  };
  // By itself where nothing is asked of a hub: of a name half typed, too.
  useEffect(() => { if (later && later === text && !read.problems.length && files.value?.models.includes(read.values.model)) look(); }, [later, read]);
  const verdict = checked?.text === text ? checked : null, blocked = verdict?.found?.problems && !verdict.found.unanswered;
  const run = async (verb, more = {}) => {
    say(null);
    if (text !== saved && !(await save())) return;
    try {
      const job = await post("start", { file, verb, ...more });
      if (more.queue) { say({ text: html`It waits in the <a href=${to("queue")}>queue</a>.`, command: job.command }); return; }
      say({ text: verb === "train" ? "started; it goes on when this page is closed" : "started; its output is under Commands", command: job.command, job });
      if (verb === "train") await follow(job);
    } catch (one) { fail(one); }
  };
  const follow = async (job) => { // the run's log appears some seconds after the start
    for (let i = 0; i < 240; i++) {
      const now = await get("job", { id: job.id });
      if (!now.running) { fail({ message: "", problems: [{ what: `the command ended with exit code ${now.exit}`, why: now.output.trim().split("\n").slice(-8).join("\n") }] }); return; }
      const found = await get("runs");
      const one = found.runs.find((row) => row.folder === job.about && row.state === "running" && (row.when || 0) > job.began - 5);
      if (one) { go("run", { run: one.folder }); return; }
      await new Promise((done) => setTimeout(done, 500));
    }
  };
  const sound = !read.problems.length && text;
  return html`<div class="title"><h1>Recipe</h1></div><${Problem} error=${files.error || error} />
    <div class="row"><label>File <select value=${file} onChange=${(e) => open(e.target.value)}>${[...new Set([file, ...(files.value?.recipes || [])])].filter(Boolean).map((one) => html`<option value=${one} selected=${one === file}>${one}</option>`)}</select></label>
      <button onClick=${begin}>New</button><label class="grow">Name <input value=${file} onInput=${(e) => { name(e.target.value); know(""); }} spellcheck="false" /></label>
      <button onClick=${save} disabled=${!text || text === saved}>Save</button><button onClick=${look} disabled=${!sound || verdict?.busy}>Check</button>
      <button class="primary" onClick=${() => run("train", { fresh })} disabled=${!sound || blocked} title=${blocked ? "not before the problems below are solved" : ""}>Start</button>
      <button onClick=${() => run("train", { fresh, queue: true })} disabled=${!sound || blocked}>Add to queue</button>
      <label class="check" title="the old folder of the run is renamed, not deleted"><input type="checkbox" checked=${fresh} onChange=${(e) => over(e.target.checked)} /> start over</label></div>
    ${said ? html`<div class="said-by" role="status">${said.text}<${Command} text=${said.command} /></div>` : ""}
    <${Ready} verdict=${verdict} />
    ${read.run && file ? html`<${Command} text=${`pronghorn train ${file}${fresh ? " --fresh" : ""}`} />` : ""}
    <div class="editor"><${Form} fields=${fields} values=${read.values} files=${files.value} problems=${read.problems} set=${set} /><${Text} text=${text} write=${write} problems=${read.problems} sound=${sound} /></div>
    <${Plan} text=${settled} file=${file} sound=${sound} about=${about} values=${read.values} set=${set} />
    <${Against} text=${settled} sound=${sound} />
    <section aria-label="sweep"><h2>Sweep</h2><div class="card"><div class="row"><label class="grow">values to try <input value=${keys} onInput=${(e) => sweep(e.target.value)} placeholder="train.lr=1e-4,3e-4,1e-3 lora.r=8,16" spellcheck="false" /></label><button onClick=${() => run("sweep", { keys })} disabled=${!sound}>Sweep</button><button onClick=${() => run("sweep", { keys, queue: true })} disabled=${!sound}>Add to queue</button></div>
      <p class="note">Tries each combination for a part of the run and trains the best to its end, in about 0.4 of the time that all would take. Without values, a third to ten times of train.lr. The table is under <a href=${to("jobs")}>Commands</a> when it has ended.</p></div></section>
    <p class="note"><a href=${to("data", { file })}>Look at the rows</a> as the model sees them, token by token. Another tool's config: <code>pronghorn new --from axolotl.yaml -o my.yaml</code></p>`;
}

function Ready({ verdict }) {
  if (!verdict) return "";
  if (verdict.busy) return html`<p class="note" role="status">checking model and data…</p>`;
  const one = verdict.found;
  if (one.problems) return html`<div class="ready"><${Problem} error=${one} /><p class="note">${one.unanswered ? "Not checked. The start checks again." : "A start would end with this."}</p></div>`;
  return html`<p class="note" role="status"><span class="good">ready</span> ${[one.documents === null ? "" : `${count(one.documents)} documents`, one.tokens ? `${count(one.tokens)} tokens, ${percent((one.loss_tokens || 0) / one.tokens)} with loss` : "", `${count(one.steps)} steps`, `${count(one.eval_documents)} held out`].filter(Boolean).join(" · ")}${one.notices.map((text) => html`<br />! ${text}`)}</p>`;
}

const shown = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));

function Against({ text, sound }) {
  const runs = useAsked(() => get("runs"), 0, []), [run, choose] = useState("");
  const found = useAsked(() => (run && sound && text ? post("recipe/differences", { run, text }) : Promise.resolve(null)), 0, [run, text, sound]);
  const rows = Object.entries(found.value || {});
  if (!runs.value?.runs.length) return "";
  return html`<section aria-label="differences"><h2>Differences from a run</h2><div class="card"><div class="row"><label>Run <select value=${run} onChange=${(e) => choose(e.target.value)}><option value="">choose one</option>${runs.value.runs.map((one) => html`<option value=${one.folder}>${one.folder}</option>`)}</select></label></div>
    <${Problem} error=${found.error} />${rows.length ? html`<div class="wide" tabindex="0" role="region" aria-label="keys that differ"><table class="diff"><thead><tr><th>key</th><th>${run}</th><th>this recipe</th></tr></thead><tbody>${rows.map(([key, [then, now]]) => html`<tr><th scope="row"><code>${key}</code></th><td>${shown(then)}</td><td>${shown(now)}</td></tr>`)}</tbody></table></div>`
      : found.value && run ? html`<p class="note" role="status">The same recipe.</p>` : ""}</div></section>`;
}

function Form({ fields, values, files, problems, set }) {
  const [search, look] = useState(""), words = search.toLowerCase();
  const shown = fields.filter((one) => (words ? one.key.includes(words) || one.help.toLowerCase().includes(words) : one.first || (one.key in values && values[one.key] !== one.default && !EMPTY.has(values[one.key]))));
  const choices = { "data.train": files?.data, "data.eval": files?.data, model: files?.models };
  return html`<form class="card form" onSubmit=${(e) => e.preventDefault()} aria-label="keys of the recipe">
    <label class="search">Find a key <input type="search" value=${search} onInput=${(e) => look(e.target.value)} placeholder=${`all ${fields.length} keys`} /></label>
    ${Object.entries(choices).map(([key, names]) => html`<datalist id=${`of-${key}`}>${(names || []).map((one) => html`<option value=${one} />`)}</datalist>`)}
    ${shown.map((one) => html`<${Field} key=${one.key} one=${one} value=${values[one.key] ?? ""} list=${choices[one.key] ? `of-${one.key}` : undefined} set=${set} wrong=${problems.some((p) => p.what.startsWith(`${one.key}:`) || p.what.startsWith(`${one.key} `))} />`)}</form>`;
}

function Field({ one, value, list, set, wrong }) {
  const [now, type] = useState(value), id = `key-${one.key}`;
  useEffect(() => type(value), [value]);
  const done = (e) => { if (e.target.value !== value) set(one.key, e.target.value); };
  const hint = one.help || (one.default ? `default ${one.default}` : "");
  return html`<div class=${`field ${wrong ? "wrong" : ""}`}><label for=${id}>${one.key}</label>
    ${one.choices.length ? html`<select id=${id} value=${value} onChange=${(e) => set(one.key, e.target.value)}><option value="">${one.default ? `${one.default} (default)` : "not set"}</option>${[...new Set([value, ...one.choices])].filter(Boolean).map((choice) => html`<option value=${choice} selected=${choice === value}>${choice}</option>`)}</select>`
      : html`<input id=${id} value=${now} list=${list} placeholder=${one.default} spellcheck="false" aria-invalid=${wrong} onInput=${(e) => type(e.target.value)} onChange=${done} onKeyDown=${(e) => { if (e.key === "Enter") done(e); }} />`}
    ${hint ? html`<small>${hint}</small>` : ""}</div>`;
}

function Text({ text, write, problems, sound }) {
  const box = useRef(null), gutter = useRef(null), wrong = new Set(problems.map((one) => one.line));
  const lines = text.split("\n").length;
  const jump = (line) => {
    const at = text.split("\n").slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
    box.current.focus(); box.current.setSelectionRange(at, at + (text.split("\n")[line - 1] || "").length);
    box.current.scrollTop = (line - 4) * 20;
  };
  return html`<div class="card text"><div class="lines"><div class="gutter" ref=${gutter} aria-hidden="true">${Array.from({ length: lines }, (_, i) => html`<div class=${wrong.has(i + 1) ? "bad" : ""}>${i + 1}</div>`)}</div>
      <textarea ref=${box} aria-label="the recipe as YAML" spellcheck="false" wrap="off" value=${text} onInput=${(e) => write(e.target.value)} onScroll=${(e) => { gutter.current.scrollTop = e.target.scrollTop; }}></textarea></div>
    <div role="status" class="verdict">${problems.length ? problems.map((one) => html`<div class="problem bad">${one.line ? html`<button class="quiet" onClick=${() => jump(one.line)}>line ${one.line}</button> ` : ""}<b>${one.what}</b>${one.why ? html`<div>why: ${one.why}</div>` : ""}${one.fix ? html`<div>fix: ${one.fix}</div>` : ""}</div>`)
      : sound ? html`<span class="good">valid</span> <span class="soft">· Check also looks at model and data</span>` : ""}</div></div>`;
}

function Plan({ text, file, sound, about, values, set }) {
  const [gpu, choose] = useState(""), [budget, limit] = useState(0), [asked, ask] = useState(0), [found, show] = useState(null), [error, fail] = useState(null), [busy, work] = useState(false), [longest, reach] = useState(false);
  const turn = useRef(0), wanted = useLater(asked && JSON.stringify({ asked, gpu, budget, longest }), 250);
  const vram = about.vram[gpu] || 0;
  const look = async () => {
    const mine = ++turn.current;
    work(true); fail(null);
    try {
      const one = await post("ask", { question: "plan", text, file, name: file, gpu: gpu || null, longest, set: budget ? [`memory.budget=${budget}GB`] : [] });
      if (mine !== turn.current) return;
      if (one.problems) { fail({ problems: one.problems }); show({ command: one.command, gpus: [] }); } else show({ ...one, longest });
    } catch (one) { if (mine === turn.current) fail(one); }
    if (mine === turn.current) work(false);
  };
  useEffect(() => { if (wanted && sound && text) look(); }, [wanted, text]);
  const one = found?.gpus?.length === 1 ? found.gpus[0] : null;
  return html`<section aria-label="plan"><h2>Plan</h2><div class="card"><div class="row">
      <label>GPU <select value=${gpu} onChange=${(e) => { choose(e.target.value); limit(0); }}><option value="">this machine's, or all</option>${Object.entries(about.gpus).map(([name, title]) => html`<option value=${name}>${title}</option>`)}</select></label>
      ${vram ? html`<label class="grow">memory budget ${budget ? `${budget} GB` : "all of it"} <input type="range" min=${Math.max(1, Math.round(vram / 16))} max=${Math.floor(vram)} value=${budget || Math.floor(vram)} onInput=${(e) => { limit(Number(e.target.value)); ask(asked || 1); }} /></label>` : ""}
      <label class="check"><input type="checkbox" checked=${longest} onChange=${(e) => reach(e.target.checked)} /> longest context</label>
      <button onClick=${() => ask(asked + 1)} disabled=${!sound || busy}>${busy ? "planning…" : "Plan"}</button>
      ${budget ? html`<button class="quiet" onClick=${() => set("memory.budget", `${budget}GB`)}>write memory.budget: ${budget}GB</button>` : ""}</div>
    <${Problem} error=${error} />${one ? html`<${OnePlan} one=${one} longest=${found.longest} />` : found?.gpus?.length ? html`<${Several} all=${found.gpus} />` : html`<p class="note">Memory, speed, hours and cost before anything is downloaded or started; needs no GPU.</p>`}
    <${Command} text=${found?.command} /></div></section>`;
}

const LEVELS = [["keep", "--good"], ["recompute", "--s-evaluate"], ["offload", "--s-checkpoint"]];
const kind = (level) => (/offload|host/.test(level) ? "offload" : level === "keep" ? "keep" : "recompute");

function OnePlan({ one, longest }) {
  const levels = one.plan.levels, numbers = Object.fromEntries(LEVELS.map(([name]) => [name, levels.filter((level) => kind(level) === name).length]));
  return html`${longest ? html`<p class="longest" role="status">The longest document that fits: <b>${count(one.step_tokens)} tokens</b>, one a step. The rest is of that run; a model may have been trained on less.</p>` : ""}<dl class="tiles"><${Tile} label="peak memory" value=${gigabytes(one.plan.peak_bytes)} more=${`of ${gigabytes(one.plan.budget)}`} /><${Tile} label="tokens per second" value=${count(one.tokens_per_second)} more=${one.predicted ? "predicted" : "measured costs"} />
      <${Tile} label="time" value=${one.hours === null ? "–" : one.hours < 2 ? `${Math.max(1, Math.round(one.hours * 60))} min` : `${one.hours.toFixed(1)} h`} more=${one.tokens ? `${count(one.tokens)} tokens${one.tokens_estimated ? ", estimated" : ""}` : longest ? "of no whole run" : "tokens not counted yet: Check counts them"} />
      <${Tile} label="cost" value=${money(one.cost)} more=${one.price_per_hour ? `at ${one.price_per_hour} USD an hour` : "no price known"} /></dl>
    <div class="layers" role="img" aria-label=${LEVELS.map(([name]) => `${numbers[name]} layers: ${name}`).join(", ")}>${levels.map((level) => html`<i title=${level} style=${{ background: `var(${LEVELS.find(([name]) => name === kind(level))[1]})` }}></i>`)}</div>
    <ul class="keys">${LEVELS.map(([name, colour]) => html`<li><i style=${{ background: `var(${colour})` }}></i>${name} <b>${numbers[name]}</b> ${numbers[name] === 1 ? "layer" : "layers"}</li>`)}</ul>
    ${one.plan.reasons.map((reason) => html`<p class="note">${reason}</p>`)}`;
}

const Several = ({ all }) => html`<div class="wide" tabindex="0" role="region" aria-label="plans on each GPU"><table><thead><tr><th>GPU</th><th class="n">peak memory</th><th class="n">tokens/s</th><th class="n">hours</th><th class="n">cost</th></tr></thead>
  <tbody>${all.map((one) => html`<tr><td>${one.sold_as}</td><td class="n">${gigabytes(one.plan.peak_bytes)}</td><td class="n">${count(one.tokens_per_second)}</td><td class="n">${one.hours === null ? "–" : one.hours.toFixed(2)}</td><td class="n">${money(one.cost)}</td></tr>`)}</tbody></table></div>`;

// The trained model and its base, side by side, word by word. Both are asked one after the other: they share one model.
import { html, useState, useEffect, useRef, get, post, useAsked, Command, Problem, to } from "./lib.js";

export function Talk({ given }) {
  const runs = useAsked(() => get("runs"), 0, []);
  const [run, choose] = useState(given.get("run") || ""), [job, open] = useState(null), [error, fail] = useState(null);
  const [system, instruct] = useState(""), [prompt, write] = useState(""), [heat, warm] = useState(0), [longest, limit] = useState(256), [turns, add] = useState([]), [busy, work] = useState(false), [rated, rate] = useState([]), [kept, keep] = useState(null);
  const stop = useRef(null);
  useEffect(() => { if (!run && runs.value?.runs.length) choose((runs.value.runs.find((one) => one.state === "done") || runs.value.runs[0]).folder); }, [runs.value]);
  useEffect(() => () => stop.current?.abort(), []);
  useEffect(() => {
    if (!job || job.url || !job.running) return undefined;
    const timer = setTimeout(async () => { try { open(await post("talk", { run })); } catch (one) { fail(one); } }, 1200);
    return () => clearTimeout(timer);
  }, [job]);
  const start = async () => { fail(null); add([]); try { open(await post("talk", { run })); } catch (one) { fail(one); } };
  const end = async () => { try { await post("job/stop", { id: job.id }); } catch { /* it has ended */ } open(null); };
  const asked = (system, before, model, prompt) => [...(system ? [{ role: "system", content: system }] : []), ...before.flatMap((one) => [{ role: "user", content: one.prompt }, { role: "assistant", content: one.answers[model] || "" }]), { role: "user", content: prompt }];
  const say = async (event) => {
    event.preventDefault();
    if (!prompt.trim() || busy) return;
    const turn = { prompt, system, answers: Object.fromEntries(job.models.map((name) => [name, ""])) }, before = turns;
    add([...before, turn]); write(""); work(true); fail(null);
    stop.current = new AbortController();
    try {
      for (const model of job.models) {
        await streamed({ job: job.id, model, messages: asked(system, before, model, prompt), temperature: heat, max_tokens: longest }, stop.current.signal, (piece) => { turn.answers[model] += piece; add([...before, { ...turn, answers: { ...turn.answers } }]); });
      }
    } catch (one) { if (one.name !== "AbortError") fail(one); }
    work(false);
  };
  const better = async (turn, model) => { // the prompt is what the better answer was an answer to
    const [other] = job.models.filter((name) => name !== model), before = turns.slice(0, turns.indexOf(turn));
    fail(null);
    try {
      keep(await post("prefer", { prompt: asked(turn.system, before, model, turn.prompt), chosen: turn.answers[model], rejected: turn.answers[other] }));
      rate((old) => [...old.filter((one) => one.turn !== turn), { turn, model }]);
    } catch (one) { fail(one); }
  };
  const ready = job?.running && job.url;
  return html`<div class="title"><h1>Talk</h1></div><${Problem} error=${runs.error || error} />
    <div class="row"><label>Run <select value=${run} disabled=${ready} onChange=${(e) => { choose(e.target.value); open(null); add([]); }}>${(runs.value?.runs || []).map((one) => html`<option value=${one.folder} selected=${one.folder === run}>${one.folder}</option>`)}</select></label>
      ${job?.running ? html`<button onClick=${end}>${ready ? "Unload the model" : "Cancel"}</button>` : html`<button class="primary" disabled=${!run} onClick=${start}>Load the model</button>`}
      <label>temperature ${heat} <input type="range" min="0" max="1.5" step="0.1" value=${heat} onInput=${(e) => warm(Number(e.target.value))} /></label>
      <label>longest answer, tokens <input type="number" min="1" max="100000" value=${longest} onInput=${(e) => limit(Math.max(1, Number(e.target.value) || 1))} /></label></div>
    ${runs.value && !runs.value.runs.length ? html`<div class="card none">No run to talk to yet. <a href=${to("recipe")}>Train one</a>.</div>` : ""}
    <${Command} text=${job?.command} />
    ${job && !job.url ? html`<p role="status" class="note">${job.running ? "loading the model; this takes as long as on the command line…" : "the command has ended:"}</p>${job.running ? "" : html`<pre class="output" tabindex="0">${job.output}</pre>`}` : ""}
    ${ready ? html`<label>System prompt <textarea rows="2" value=${system} onInput=${(e) => instruct(e.target.value)}></textarea></label>
      <div class="talk" aria-live="polite">${turns.map((turn) => html`<div class="turn"><div class="said mine">${turn.prompt}</div><div class="sides">${job.models.map((name) => html`<div class="card"><h4>${name}</h4><div class="said">${turn.answers[name] || "…"}</div>
        ${job.models.length === 2 && !busy ? html`<button class="quiet" aria-pressed=${rated.some((one) => one.turn === turn && one.model === name)} onClick=${() => better(turn, name)}>better</button>` : ""}</div>`)}</div></div>`)}</div>
      <form class="row" onSubmit=${say}><label class="grow">Message <textarea rows="2" value=${prompt} onInput=${(e) => write(e.target.value)} onKeyDown=${(e) => { if (e.key === "Enter" && !e.shiftKey) say(e); }}></textarea></label>
        ${busy ? html`<button type="button" onClick=${() => stop.current.abort()}>Stop</button>` : html`<button class="primary" disabled=${!prompt.trim()}>Send</button>`}</form>
      ${kept ? html`<div class="note" role="status">${kept.rows} rated, in <code>${kept.file}</code>: rows that a recipe with <code>objective: dpo</code> names as data.train. <${Command} text=${`pronghorn new preferred.yaml --objective dpo --data ${kept.file}`} /></div>` : ""}` : ""}`;
}

async function streamed(asked, signal, told) {
  const response = await fetch("/api/talk/say", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked), signal });
  if (!response.ok) throw new Error((await response.json()).error.what);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const piece = JSON.parse(line.slice(6));
      if (piece.error) throw new Error(piece.error.message);
      const text = piece.choices?.[0]?.delta?.content;
      if (text) told(text);
    }
  }
}

// Exports of a run: how large each would be before anything is written, how far one is, and what its check says.
import { html, useState, useEffect, get, post, useAsked, Problem, Command } from "./lib.js";
import { ended, failure } from "./checkpoints.js";

const UNITS = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
const size = (bytes) => { const [limit, unit] = UNITS.find(([one]) => bytes >= one) || [1, "bytes"]; return `${(bytes / limit).toFixed(limit > 1 ? 1 : 0)} ${unit}`; };
const last = (output) => output.trim().split("\n").filter((line) => line && !line.startsWith("  ")).at(-1) || "";
const USUAL = ["adapter", "merged", "gguf:q8_0", "gguf:q4_k_m", "ollama:q4_k_m", "vllm", "fp8:merged", "fp8:base", "nvfp4"];
const verdict = (passed) => (passed ? ["good", "checked"] : passed === false ? ["bad", "check failed"] : ["soft", "not checked"]);

export function Exports({ folder, facts }) {
  const [asked, ask] = useState(null), [sizes, tell] = useState(null), [job, watch] = useState(null), [error, fail] = useState(null), [all, list] = useState(false);
  const jobs = useAsked(() => get("jobs"), 0, [folder]);
  const follow = async (one) => { try { const over = await ended(one, watch); if (over.exit && over.exit !== 4) fail(failure(over)); } catch (problem) { fail(problem); } };
  useEffect(() => { const under_way = (jobs.value || []).find((one) => one.verb === "export" && one.about === folder && one.running); if (under_way && !job) follow(under_way); }, [jobs.value]);
  if (!facts.checkpoints.length) return "";
  const measure = async () => {
    fail(null);
    try {
      const started = await post("sizes", { run: folder });
      ask(started);
      const over = await ended(started), line = over.output.split("\n").find((one) => one.startsWith('{"sizes"'));
      if (line) tell(JSON.parse(line).sizes); else fail(failure(over));
    } catch (one) { fail(one); }
    ask(null);
  };
  const write = async (target) => { fail(null); try { const one = await post("export", { run: folder, to: target }); watch({ ...one, output: "" }); follow(one); } catch (one) { fail(one); } };
  const there = new Set(facts.exports.map((one) => one.folder));
  const part = job?.running ? /(\d+) ?%/.exec(last(job.output)) : null;
  return html`<h2 id="export">Export</h2><div class="card">
    ${facts.exports.length ? html`<ul class="checkpoints">${facts.exports.map((one) => { const [kind, word] = verdict(one.passed); return html`<li><b>${one.target}</b> <span class="soft">${one.folder}, ${size(one.bytes)}, of ${one.checkpoint}</span> <span class=${`pill ${kind}`}>${word}</span><small>${one.verdict}</small></li>`; })}</ul>` : ""}
    ${job?.running ? html`<div role="status">${last(job.output) || "it begins…"}${part ? html`<div class="done" role="progressbar" aria-label="export" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${part[1]}><i style=${{ width: `${part[1]}%` }}></i></div>` : ""}</div>` : ""}<${Command} text=${job?.command} />
    ${sizes ? html`<div class="wide" tabindex="0" role="region" aria-label="exports and their sizes"><table><thead><tr><th>format</th><th class="n">size</th><th class="n" title="free space that writing it takes">disk</th></tr></thead>
      <tbody>${sizes.filter((one) => all || USUAL.includes(one.to)).map((one) => html`<tr>${one.refused ? html`<td>${one.to}</td><td colspan="2" class="soft">${one.refused}</td>`
        : html`<td>${one.there || there.has(one.folder.split("/").pop()) ? html`${one.to} <small>there is one</small>` : html`<button disabled=${job?.running} onClick=${() => write(one.to)}>write ${one.to}</button>`}</td><td class="n">${size(one.bytes)}</td><td class="n">${size(one.needs)}</td>`}</tr>`)}</tbody></table></div>
      <button class="quiet" aria-expanded=${all} onClick=${() => list(!all)}>${all ? "the usual formats" : `all ${sizes.length} formats`}</button>`
      : html`<div class="row"><button onClick=${measure} disabled=${Boolean(asked)}>${asked ? "reading shapes…" : "Formats and sizes"}</button><span class="soft">${asked ? "this imports the libraries first" : "from the shapes of the weights; nothing is written or downloaded"}</span></div>`}<${Problem} error=${error} /></div>`;
}

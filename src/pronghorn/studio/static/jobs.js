// Commands that were started here, with what they print. They go on without this page and without the studio.
import { html, useState, get, post, useAsked, Command, Problem, Empty, ago, to } from "./lib.js";

const PAGES = { "data audit": "audit", sweep: "sweep" }; // what a command writes to be read

export function Jobs({ given }) {
  const found = useAsked(() => get("jobs"), 2500, []), [open, show] = useState(given.get("id") || ""), [error, fail] = useState(null);
  const stop = async (id) => { fail(null); try { await post("job/stop", { id }); found.again(); } catch (one) { fail(one); } };
  const state = (job) => (job.running ? "running" : job.exit === 0 ? "done" : job.exit === null ? "ended" : `exit code ${job.exit}`);
  const kind = (job) => (job.running ? "live" : job.exit === 0 ? "good" : job.exit === null ? "soft" : "warn");
  return html`<div class="title"><h1>Commands</h1></div><p class="sub">Each was started here and is a process of its own. You can type the same in a terminal.</p><${Problem} error=${found.error || error} />
    ${found.value && !found.value.length ? html`<${Empty}>Nothing was started from here yet.<//>` : ""}
    ${(found.value || []).map((job) => html`<div class="card job" key=${job.id}><div class="row"><span class=${`pill ${kind(job)}`}>${state(job)}</span><span class="soft">${ago(job.began)}</span>
        ${job.about && ["train", "demo", "fork", "export", "eval", "serve"].includes(job.verb) ? html`<a href=${to("run", { run: job.about })}>${job.about}</a>` : ""}
        ${PAGES[job.verb] && job.exit === 0 ? html`<a href=${`/page?${new URLSearchParams({ file: `${job.about}/${PAGES[job.verb]}.html` })}`} target="_blank" rel="noopener">${PAGES[job.verb]}</a>` : ""}
        <button class="quiet" aria-expanded=${open === job.id} onClick=${() => show(open === job.id ? "" : job.id)}>output</button>
        ${job.running ? html`<button class="quiet" onClick=${() => stop(job.id)}>stop (Ctrl-C)</button>` : ""}</div>
      <${Command} text=${job.command} />${open === job.id ? html`<${Output} id=${job.id} running=${job.running} />` : ""}</div>`)}`;
}

function Output({ id, running }) {
  const found = useAsked(() => get("job", { id }), running ? 1500 : 0, [id, running]);
  return html`<${Problem} error=${found.error} /><pre class="output" tabindex="0" aria-label="output">${found.value?.output || "nothing yet"}</pre>`;
}

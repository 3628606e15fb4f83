// Checkpoints of a run, and a new run from one of them.
import { html, useState, get, post, Problem, Command, figure, count, go } from "./lib.js";

export const ended = async (job, told = () => {}) => { // the job when it is over; `told`: each time it is looked at
  for (let now = await get("job", { id: job.id }); ; now = await get("job", { id: job.id })) {
    told(now);
    if (!now.running) return now;
    await new Promise((done) => setTimeout(done, 700));
  }
};
export const failure = (job) => ({ message: "", problems: [{ what: `the command ended with exit code ${job.exit}`, why: job.output.trim().split("\n").slice(-8).join("\n") }] });

export function Checkpoints({ folder, facts }) {
  const [step, choose] = useState(null), [name, call] = useState(""), [keys, change] = useState(""), [job, begin] = useState(null), [error, fail] = useState(null);
  if (!facts.checkpoints.length) return "";
  const loss = Object.fromEntries(facts.evals.map((one) => [one.step, one.loss]));
  const open = (one) => { choose(step === one ? null : one); call(`${folder}-from-${one}`); begin(null); fail(null); };
  const fork = async (event) => {
    event.preventDefault(); fail(null);
    try {
      const started = await post("fork", { run: folder, step, output: name, keys });
      begin(started);
      const over = await ended(started);
      if (over.exit === 0) go("run", { run: started.about }); else { begin(null); fail(failure(over)); }
    } catch (one) { begin(null); fail(one); }
  };
  return html`<h2>Checkpoints</h2><div class="card"><ul class="checkpoints">${facts.checkpoints.map((one) => html`<li><span>step ${count(one)}${one === facts.evaluation.best_step ? " · best" : ""}</span> <span class="soft">${loss[one] === undefined ? "" : `evaluation loss ${figure(loss[one])}`}</span>
      <button class="quiet" aria-expanded=${step === one} onClick=${() => open(one)}>start again from here<span class="hidden">, step ${count(one)}</span></button></li>`)}</ul>
    ${step === null ? "" : html`<form class="row" onSubmit=${fork}><label class="grow">new run <input value=${name} onInput=${(e) => call(e.target.value)} spellcheck="false" required /></label>
      <label class="grow">keys that change, if any <input value=${keys} onInput=${(e) => change(e.target.value)} placeholder="train.lr=1e-4 train.steps=2000" spellcheck="false" /></label>
      <button disabled=${Boolean(job)}>${job ? "copying…" : `Make it from step ${count(step)}`}</button></form>
      <p class="note">A folder of its own, which Resume then goes on in: with the same keys to the bit as this run did.</p>`}
    <${Command} text=${job?.command} /><${Problem} error=${error} /></div>`;
}

// Answers that a run gave while it learned from rewards: searched, by reward, sorted.
import { html, useState, get, useAsked, useLater, Problem, figure, count } from "./lib.js";

const SORTS = [["newest", "newest first"], ["oldest", "oldest first"], ["lowest", "lowest reward first"], ["highest", "highest reward first"]];

export function Rollouts({ folder, facts }) {
  const [text, look] = useState(""), [low, from] = useState(""), [high, until] = useState(""), [sort, order] = useState("newest");
  const wanted = useLater(JSON.stringify({ text, low, high, sort }), 250), mark = facts.samples.at(-1)?.step;
  const found = useAsked(() => (mark === undefined ? Promise.resolve(null) : get("rollouts", { run: folder, ...JSON.parse(wanted) })), 0, [wanted, mark]);
  if (mark === undefined) return "";
  const told = found.value;
  return html`<h2>Rollouts</h2><div class="card"><div class="row" role="search" aria-label="rollouts"><label class="grow">with this text <input type="search" value=${text} onInput=${(e) => look(e.target.value)} /></label>
      <label>reward from <input type="number" step="any" value=${low} onInput=${(e) => from(e.target.value)} /></label><label>to <input type="number" step="any" value=${high} onInput=${(e) => until(e.target.value)} /></label>
      <label>order <select value=${sort} onChange=${(e) => order(e.target.value)}>${SORTS.map(([name, label]) => html`<option value=${name}>${label}</option>`)}</select></label></div>
    <${Problem} error=${found.error} />${told ? html`<p class="note" role="status">${count(told.found)} of ${count(told.all)}${told.rows.length < told.found ? `, the first ${told.rows.length} shown` : ""}; the log has the best and the worst answer to one prompt of a step</p>
      ${told.rows.map((one) => html`<div class="sample"><small>step ${count(one.step)} · reward ${figure(one.reward)}${Object.keys(one.rewards || {}).length > 1 ? ` (${Object.entries(one.rewards).map(([name, value]) => `${name} ${figure(value)}`).join(", ")})` : ""}</small>
      <div class="said soft">${one.prompt ?? ""}</div>${one.expected ? html`<div class="said soft">expected: ${one.expected}</div>` : ""}<div class="said">${one.answer ?? ""}</div></div>`)}` : ""}</div>`;
}

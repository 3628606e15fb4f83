// Commands that wait for the GPU, in their order. A worker of its own starts them, so they go on without this page.
import { html, useState, get, post, useAsked, Command, Problem, Empty, ago, to } from "./lib.js";

const KINDS = { running: "live", waiting: "soft", cancelled: "warn" };

export function Queue() {
  const found = useAsked(() => get("queue"), 2000, []), [error, fail] = useState(null);
  const all = found.value?.entries || [], waiting = all.filter((one) => one.state === "waiting");
  const ask = async (path, given) => { fail(null); try { await post(`queue/${path}`, given); } catch (one) { fail(one); } found.again(); };
  const idle = found.value && !found.value.worker && all.some((one) => ["running", "waiting"].includes(one.state));
  return html`<div class="title"><h1>Queue</h1></div><p class="sub">Commands that wait for the GPU and run one after the other, also when this page or the studio is closed.</p><${Problem} error=${found.error || error} />
    ${idle ? html`<div class="why" role="status">No worker is there, perhaps since the machine was restarted. This starts one:<${Command} text="pronghorn queue run" /></div>` : ""}
    ${found.value && !all.length ? html`<${Empty}>Nothing waits. “Add to queue” is beside Start on the page of a <a href=${to("recipe")}>recipe</a>; in a terminal: <code>pronghorn queue add train my.yaml</code><//>` : ""}
    ${all.length ? html`<div class="card wide queue" tabindex="0" role="region" aria-label="the queue"><table><thead><tr><th class="n">order</th><th>command</th><th>state, progress</th><th><span class="hidden">change</span></th></tr></thead>
      <tbody>${all.map((one) => html`<${Row} key=${one.id} one=${one} place=${waiting.indexOf(one) + 1} last=${waiting.length} ask=${ask} />`)}</tbody></table></div>` : ""}`;
}

function Row({ one, place, last, ask }) {
  const move = (by, sign, word) => html`<button class="quiet" disabled=${place + by < 1 || place + by > last} aria-label=${`move ${word}: ${one.command}`} title=${`move ${word}`} onClick=${() => ask("move", { id: one.id, to: place + by })}>${sign}</button>`;
  const ended = one.exit === 0 ? "done" : one.exit === null ? "ended" : `exit code ${one.exit}`;
  const kind = KINDS[one.state] || (one.exit === 0 ? "good" : one.exit === null ? "soft" : "warn");
  return html`<tr><td class="n">${place || ""}</td><td><code>${one.command}</code><div>
      ${one.run ? html`<a href=${to("run", { run: one.run })}>${one.run}</a> ` : ""}${one.page ? html`<a href=${`/page?${new URLSearchParams({ file: one.page })}`} target="_blank" rel="noopener">${one.verb.split(" ").pop()}</a> ` : ""}
      ${one.began ? html`<a href=${to("jobs", { id: one.id })}>output</a> ` : ""}<span class="soft">${one.began ? `began ${ago(one.began)}` : `added ${ago(one.added)}`}</span></div></td>
    <td><span class=${`pill ${kind}`}>${one.state === "ended" ? ended : one.state}</span>${one.progress ? html`<div class="soft">${one.progress}</div>` : ""}</td>
    <td>${place ? html`${move(-1, "↑", "up")}${move(1, "↓", "down")}` : ""}${["running", "waiting"].includes(one.state) ? html`<button class="quiet" onClick=${() => ask("cancel", { id: one.id })}>cancel</button>` : ""}</td></tr>`;
}

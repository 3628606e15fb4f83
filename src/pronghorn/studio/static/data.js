// The rows of a recipe as the model sees them: which tokens carry loss, what is cut, what is doubled.
import { html, useState, useEffect, get, post, upload, useAsked, Command, Problem, count, percent, to } from "./lib.js";

export function Data({ given }) {
  const files = useAsked(() => get("files"), 0, []);
  const [file, choose] = useState(given.get("file") || ""), [text, load] = useState(""), [rows, show] = useState(null), [stats, tell] = useState(null);
  const [search, look] = useState(""), [error, fail] = useState(null), [busy, work] = useState(""), [dropped, drop] = useState(null), [over, hover] = useState(false), [audited, auditing] = useState(null);
  useEffect(() => { if (!file && files.value?.recipes.length) choose(files.value.recipes[0]); }, [files.value]);
  const ask = async (question, more, name, recipe = text) => {
    work(name); fail(null);
    try { const one = await post("ask", { question, text: recipe, file, name: file, ...more }); if (one.problems) fail({ problems: one.problems }); else return one; }
    catch (one) { fail(one); } finally { work(""); }
    return null;
  };
  useEffect(() => {
    if (!file) return;
    show(null); tell(null);
    (async () => {
      try {
        const recipe = await get("recipe", { file });
        load(recipe.text);
        if (recipe.problems.length) { fail({ problems: recipe.problems }); return; }
        show(await ask("rows", { first: 0 }, "rows", recipe.text));
        tell(await ask("stats", {}, "stats", recipe.text));
      } catch (one) { fail(one); }
    })();
  }, [file]);
  const find = async (event) => { event.preventDefault(); show(await ask("rows", { first: 0, search }, "rows")); };
  const more = async () => { const next = await ask("rows", { first: rows.next, search }, "rows"); if (next) show({ ...next, rows: [...rows.rows, ...next.rows] }); };
  const audit = async (queue) => { fail(null); try { auditing({ queue, ...(await post("start", { file, verb: "data audit", queue })) }); } catch (one) { fail(one); } };
  const take = async (list) => {
    fail(null);
    try { for (const one of list) drop(await upload(one)); files.again(); } catch (one) { fail(one); }
  };
  const dropping = { onDragOver: (e) => { e.preventDefault(); hover(true); }, onDragLeave: () => hover(false), onDrop: (e) => { e.preventDefault(); hover(false); take(e.dataTransfer.files); } };
  return html`<div class="title"><h1>Data</h1></div>
    <div class="row"><label>Recipe <select value=${file} onChange=${(e) => choose(e.target.value)}>${(files.value?.recipes || []).map((one) => html`<option value=${one} selected=${one === file}>${one}</option>`)}</select></label>
      <form class="row grow" onSubmit=${find}><label class="grow">Search the rows <input type="search" value=${search} onInput=${(e) => look(e.target.value)} /></label><button disabled=${!text || busy}>Find</button></form>
      <button disabled=${!text} onClick=${() => audit(false)}>Audit</button><button disabled=${!text} onClick=${() => audit(true)}>Add to queue</button></div>
    ${audited ? html`<div class="said-by" role="status">${audited.queue ? html`The audit waits in the <a href=${to("queue")}>queue</a>.` : html`Copies, leaks and contradictions are searched; the page is under <a href=${to("jobs")}>Commands</a>.`}<${Command} text=${audited.command} /></div>` : ""}
    <${Problem} error=${files.error || error} />
    <div class=${`drop ${over ? "over" : ""}`} ...${dropping}><label>Drop a file of data here, or <input type="file" onChange=${(e) => take(e.target.files)} /></label>
      ${dropped ? html`<p role="status">${dropped.file} is here now, ${count(dropped.bytes)} bytes. <a href=${to("recipe")}>Name it in a recipe</a> as data.train.</p>` : html`<p class="note">It is copied into data/; up to 64 MB. Larger files: copy them into the folder.</p>`}</div>
    ${busy === "rows" && !rows ? html`<p class="note" role="status">tokenizing; the first time takes a moment…</p>` : ""}
    ${stats ? html`<${Stats} stats=${stats} />` : busy === "stats" ? html`<p class="note" role="status">counting…</p>` : ""}
    ${rows ? html`<h2>Rows</h2><p class="note"><span class="t1">tokens with loss</span> <span class="t0">and without</span>. ${count(rows.count)} rows can be trained on.</p><${Command} text=${rows.command} />
      ${rows.rows.map((row) => html`<${Row} key=${row.number} row=${row} />`)}${rows.rows.length ? "" : html`<p class="none">no row has “${search}”</p>`}
      ${rows.next !== null ? html`<button onClick=${more} disabled=${Boolean(busy)}>${busy ? "reading…" : "more rows"}</button>` : ""}` : ""}`;
}

function Row({ row }) {
  const parts = row.answers || [row];
  return html`<article class="card datarow"><h4>row ${count(row.number)} <span class="soft">${row.where}</span></h4>
    ${parts.map((one) => html`${one.role ? html`<b>${one.role}</b>` : ""}<p class="note">${count(one.length)} tokens, ${count(one.loss_tokens)} with loss (${percent(one.loss_tokens / Math.max(1, one.length))})</p>
      ${one.loss_tokens ? "" : html`<p class="why">No token of this row carries loss: it trains nothing.</p>`}
      <div class="tokens">${one.tokens.map(([text, loss], i) => html`<span class=${`t${loss} ${i % 2 ? "odd" : ""}`}>${visible(text)}</span>`)}${one.cut ? html`<span class="soft"> … ${count(one.cut)} more tokens</span>` : ""}</div>`)}</article>`;
}

// Line ends and tabs stay and are marked; other control characters are shown as their numbers.
const visible = (text) => text.replace(/[\u0000-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, (c) => (c === "\n" ? "↵\n" : c === "\t" ? "→\t" : `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`));

function Stats({ stats }) {
  const { counts, lengths } = stats, most = Math.max(...lengths.bins.map((one) => one.rows));
  const junk = Object.entries(stats.junk).map(([why, one]) => [`junk: ${why}`, one.rows, one.example]);
  const rows = [["bad rows", counts.bad, stats.bad_rows_file], ["exact duplicates", stats.exact_duplicates.rows, stats.exact_duplicates.example],
    ...(stats.near_duplicates ? [["near duplicates", stats.near_duplicates.rows, stats.near_duplicates.example]] : []), ...junk,
    [`longer than ${count(stats.max_length)} tokens`, counts.too_long, ""], ["truncated", counts.truncated, ""], ["without loss", counts.no_loss, ""]];
  const nothing = counts.kept === 0 || counts.loss_tokens === 0;
  return html`<h2>Overview</h2>${nothing ? html`<div class="why bad" role="alert">No row would train anything.</div>` : ""}
    <div class="card"><div class="grid2"><div><dl class="facts"><dt>rows</dt><dd>${count(counts.kept)} of ${count(counts.read)} (${counts.format})</dd><dt>tokens</dt><dd>${count(counts.tokens)}, ${percent(stats.loss_share)} carry loss</dd>
      <dt>packing</dt><dd>${percent(stats.packing.efficiency)} of ${count(stats.packing.packs)} packs are real tokens</dd>${rows.map(([what, found, example]) => html`<dt>${what}</dt><dd>${count(found)}${found && example ? html` <span class="soft">for example ${example}</span>` : ""}</dd>`)}</dl>
      ${stats.remarks.map((one) => html`<p class="note">! ${one}</p>`)}</div>
    <div><h4>rows by length, in tokens</h4><div class="hist" role="img" aria-label=${`shortest ${lengths.smallest}, median ${lengths.median}, longest ${lengths.largest} tokens`}>${lengths.bins.map((one) => html`<div title=${`from ${count(one.low)} tokens: ${count(one.rows)} rows`}><i style=${{ height: `${Math.max(one.rows ? 1.5 : 0, (100 * one.rows) / most)}%` }}></i><b>${count(one.low)}${one.high === null ? "+" : ""}</b></div>`)}</div>
      <p class="note">shortest ${count(lengths.smallest)} · median ${count(lengths.median)} · mean ${count(lengths.mean)} · longest ${count(lengths.largest)} (${lengths.longest_row})</p></div></div></div>`;
}

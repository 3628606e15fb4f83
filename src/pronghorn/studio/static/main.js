// Which page is shown: what stands behind the # of the address.
import { html, render, useEffect, useState, get, useAsked, watchOutage } from "./lib.js";
import { Runs } from "./runs.js";
import { Run } from "./run.js";
import { Recipe } from "./recipe.js";
import { Data } from "./data.js";
import { Talk } from "./talk.js";
import { Queue } from "./queue.js";
import { Jobs } from "./jobs.js";
import { Keys } from "./keys.js";

const PAGES = { runs: ["Runs", Runs], recipe: ["Recipe", Recipe], data: ["Data", Data], talk: ["Talk", Talk], queue: ["Queue", Queue], jobs: ["Commands", Jobs] };
const HIDDEN = { run: ["Run", Run] };

function where() {
  const [path, rest] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: path in PAGES || path in HIDDEN ? path : "runs", given: new URLSearchParams(rest || "") };
}

// Asked again until the studio answers; then every page goes on by itself, with what was typed in it.
function Outage() {
  const [error, set] = useState(null);
  useEffect(() => watchOutage(set), []);
  useEffect(() => { const timer = error && setTimeout(() => get("about").catch(() => {}), 2000); return () => clearTimeout(timer); }, [error]);
  return error ? html`<div class="why bad" role="alert"><b>${error.told.what}.</b> ${error.told.fix} This page then goes on by itself.</div>` : "";
}

function App() {
  const [place, move] = useState(where());
  const about = useAsked(() => get("about"), 0, []).value;
  useEffect(() => { const moved = () => { move(where()); scrollTo(0, 0); }; addEventListener("hashchange", moved); return () => removeEventListener("hashchange", moved); }, []);
  const [title, Page] = PAGES[place.page] || HIDDEN[place.page];
  useEffect(() => { document.title = `${place.given.get("run") || title} · Pronghorn studio`; }, [place]);
  const skip = (event) => { event.preventDefault(); document.getElementById("page").focus(); };
  return html`<a class="skip" href="#page" onClick=${skip}>to the page</a>
    <header class="bar"><a class="brand" href="#/runs">Pronghorn</a>
      <nav aria-label="pages">${Object.entries(PAGES).map(([name, [label]]) => html`<a href=${`#/${name}`} aria-current=${place.page === name || (place.page === "run" && name === "runs") ? "page" : undefined}>${label}</a>`)}</nav><${Keys} /></header>
    <main id="page" tabindex="-1"><${Outage} /><${Page} key=${place.page + (place.given.get("run") || "")} given=${place.given} about=${about || { gpus: {}, vram: {} }} /></main>
    <footer>${about ? html`Pronghorn ${about.version} in <code>${about.home}</code>. Everything here is in files of this folder.` : ""}</footer>`;
}

render(html`<${App} />`, document.getElementById("app"));

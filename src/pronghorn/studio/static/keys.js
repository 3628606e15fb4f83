// Keys of the whole studio: g and a letter goes to a page, / to the search, ? shows them all.
import { html, useState, useEffect, useRef, go } from "./lib.js";

const WAIT = 1200; // ms between g and its letter
const TO = { r: ["runs", "Runs"], e: ["recipe", "Recipe"], d: ["data", "Data"], t: ["talk", "Talk"], q: ["queue", "Queue"], c: ["jobs", "Commands"] };
const typing = (target) => target.closest?.("input, select, textarea, [contenteditable]");

export function Keys() {
  const box = useRef(null), first = useRef(0), [, again] = useState(0);
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
      if (event.key === "?") { if (box.current.open) box.current.close(); else { again((n) => n + 1); box.current.showModal(); } }
      else if (box.current.open) return;
      else if (event.key === "g") first.current = event.timeStamp;
      else if (event.key === "/") { const search = document.querySelector("main input[type=search]"); if (search) { event.preventDefault(); search.focus(); } }
      else if (TO[event.key] && event.timeStamp - first.current < WAIT) { first.current = 0; go(TO[event.key][0]); document.getElementById("page").focus(); }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
  return html`<dialog ref=${box} aria-labelledby="keys-title"><h2 id="keys-title">Keys</h2><dl class="facts">${Object.entries(TO).map(([key, [, label]]) => html`<dt><kbd>g</kbd> <kbd>${key}</kbd></dt><dd>${label}</dd>`)}
    <dt><kbd>/</kbd></dt><dd>search on this page</dd><dt><kbd>?</kbd></dt><dd>these keys</dd><dt><kbd>Tab</kbd>, <kbd>Enter</kbd>, <kbd>Space</kbd></dt><dd>every control, in the order of the page</dd></dl>
    <button onClick=${() => box.current.close()}>Close</button></dialog>
    <button class="quiet keys-button" onClick=${() => box.current.showModal()} aria-label="keys">?</button>`;
}

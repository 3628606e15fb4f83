// What all pages share: html, asking the server, numbers as people read them, small parts. Text of runs only ever becomes text nodes.
export { html, render, useState, useEffect, useRef, useMemo, useCallback } from "./vendor/htm-preact.js";
import { html, useState, useEffect, useRef } from "./vendor/htm-preact.js";

export const MISSING = "–";

// ---- the server -----------------------------------------------------------------------------------------------------------

export class Refused extends Error {
  constructor(told, status, problems) { super(told.what); this.told = told; this.status = status; this.problems = problems || [told]; }
}

// Whether the studio answers, and knows this browser. Whoever watches is told of every change; nothing else need say it.
const watching = new Set(), tell = (error) => watching.forEach((told) => told(error));
export const watchOutage = (told) => { watching.add(told); return () => watching.delete(told); };
export const isOutage = (error) => error?.status === 0 || error?.status === 401;

async function answered(response) {
  const text = await response.text();
  let found = null;
  try { found = JSON.parse(text); } catch { /* told below */ }
  const error = response.ok ? null : new Refused(found?.error || { what: text.trim() || `the server answers ${response.status}` }, response.status, found?.problems);
  tell(isOutage(error) ? error : null);
  if (error) throw error;
  return found;
}

async function reach(path, options) {
  try { return await fetch(path, options); }
  catch {
    const error = new Refused({ what: "The studio does not answer; runs go on without it", fix: "Start it again in the same folder: pronghorn studio." }, 0);
    tell(error);
    throw error;
  }
}

export const query = (given) => new URLSearchParams(Object.entries(given).flatMap(([key, value]) => [].concat(value ?? []).map((one) => [key, one])));
export const get = async (path, given = {}) => answered(await reach(`/api/${path}?${query(given)}`));
export const post = async (path, given = {}) =>
  answered(await reach(`/api/${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(given) }));
export const upload = async (file) =>
  answered(await reach(`/api/data?${query({ name: file.name })}`, { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: file }));

// ---- numbers, as the report writes them -------------------------------------------------------------------------------------

export function figure(value) {
  if (value === null || value === undefined || value === "" || Number.isNaN(Number(value))) return MISSING;
  const number = Number(value), size = Math.abs(number);
  if (!Number.isFinite(number)) return String(value);
  if (size && size < 1e-3) return number.toExponential(2);
  return size >= 1000 ? Math.round(number).toLocaleString("en") : String(Number(number.toPrecision(4)));
}

export const count = (value) => (value === null || value === undefined ? MISSING : Math.round(value).toLocaleString("en"));
export const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
export const money = (value) => (value === null || value === undefined ? MISSING : value > 0 && value < 0.01 ? "under 0.01 USD" : `${value.toFixed(value < 10 ? 2 : 0)} USD`);
export const gigabytes = (bytes) => (bytes === null || bytes === undefined ? MISSING : `${(bytes / 1e9).toFixed(1)} GB`);

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(Number(seconds))) return MISSING;
  const whole = Math.round(seconds);
  if (seconds < 10) return `${Number(seconds).toFixed(1)} s`;
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.round(whole / 60)} min`;
  return `${Math.floor(whole / 3600)} h ${Math.round((whole % 3600) / 60)} min`;
}

export function ago(unix) {
  if (!unix) return MISSING;
  const passed = Date.now() / 1000 - unix;
  if (passed < 60) return "now";
  if (passed < 86400) return `${duration(passed)} ago`;
  return new Date(unix * 1000).toISOString().slice(0, 10);
}

export const clock = (unix) => (unix ? new Date(unix * 1000).toLocaleTimeString("en-GB") : "");

// ---- small parts ------------------------------------------------------------------------------------------------------------

const KINDS = { done: "good", "early stop": "good", running: "live", empty: "soft", "health stop": "bad", error: "bad", unreadable: "bad" };
export const State = ({ state }) => html`<span class=${`pill ${KINDS[state] || "warn"}`}>${state || "empty"}</span>`;

export const Tile = ({ label, value, more }) => html`<div class="tile"><dt>${label}</dt><dd>${value}<small>${more || ""}</small></dd></div>`;

export function Command({ text }) {
  const [copied, set] = useState(false);
  if (!text) return null;
  const copy = async () => { try { await navigator.clipboard.writeText(text); set(true); setTimeout(() => set(false), 1500); } catch { /* no clipboard here */ } };
  return html`<div class="command"><code>${text}</code><button class="quiet" onClick=${copy} aria-label="copy the command">${copied ? "copied" : "copy"}</button></div>`;
}

export function Problem({ error }) {
  if (!error || isOutage(error)) return null; // the line above every page has that
  const all = error.problems || [error.told || { what: error.message }];
  return html`<div class="why bad" role="alert">${all.map((one) => html`<div class="problem">
    <b>${one.what}</b>${one.where ? html` <span class="soft">${one.where}</span>` : ""}
    ${one.why ? html`<div>why: ${one.why}</div>` : ""}${one.fix ? html`<div>fix: ${one.fix}</div>` : ""}</div>`)}</div>`;
}

export const Empty = ({ children }) => html`<div class="card none">${children}</div>`;

// ---- time -------------------------------------------------------------------------------------------------------------------

// How often the studio came back: what it did not answer is asked again.
export function useReturns() {
  const [times, set] = useState(0), out = useRef(false);
  useEffect(() => watchOutage((error) => { if (!error && out.current) set((n) => n + 1); out.current = Boolean(error); }), []);
  return times;
}

// Asks again and again while the page is looked at. `every` 0: once.
export function useAsked(ask, every, needed) {
  const [state, set] = useState({ value: null, error: null });
  const again = useRef(() => {}), returned = useReturns();
  useEffect(() => {
    let over = false, timer = 0;
    const look = async () => {
      clearTimeout(timer);
      if (document.hidden && every) { timer = setTimeout(look, every); return; }
      try { const value = await ask(); if (!over) set({ value, error: null }); }
      catch (error) { if (!over) set((old) => ({ value: old.value, error })); }
      if (!over && every) timer = setTimeout(look, every);
    };
    again.current = look;
    const back = () => { if (!document.hidden && every) look(); };
    document.addEventListener("visibilitychange", back);
    look();
    return () => { over = true; clearTimeout(timer); document.removeEventListener("visibilitychange", back); };
  }, needed);
  useEffect(() => { if (isOutage(state.error)) again.current(); }, [returned]);
  return { ...state, again: () => again.current() };
}

// The newest of many values, once nothing has come for a while.
export function useLater(value, wait) {
  const [later, set] = useState(value);
  useEffect(() => { const timer = setTimeout(() => set(value), wait); return () => clearTimeout(timer); }, [value]);
  return later;
}

export const go = (page, given = {}) => { const rest = query(given).toString(); location.hash = `#/${page}${rest ? `?${rest}` : ""}`; };
export const to = (page, given = {}) => { const rest = query(given).toString(); return `#/${page}${rest ? `?${rest}` : ""}`; };

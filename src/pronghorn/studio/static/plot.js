// Line plots on a canvas, in the report's colours. uPlot is a script of its own, which sets window.uPlot.
import { html, useEffect, useRef, useState } from "./lib.js";

export const COLOURS = ["--train", "--eval", "--good", "--s-answers", "--s-checkpoint", "--s-read", "--s-wait", "--s-reference", "--s-report", "--s-load"];
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim() || "#888";
const WHOLE = Array.from({ length: 14 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** power)).flat(); // there is no step 2.5
const FRACTIONS = ["hours", "cost, USD"];
const short = (value) => {
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}B`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size && size < 1e-3) return value.toExponential(0);
  return String(+value.toPrecision(4));
};

// A centred mean, as the report's.
export function smooth(y, width) {
  const half = Math.max(1, width >> 1), sums = [0];
  for (const one of y) sums.push(sums[sums.length - 1] + (one ?? 0));
  return y.map((_, i) => {
    const left = Math.min(half, i), last = Math.min(i + left, y.length - 1);
    return (sums[last + 1] - sums[i - left]) / (last + 1 - i + left);
  });
}

function options(series, log, height, width, unit, fromZero, pointed) {
  const axis = { stroke: () => colour("--soft"), grid: { stroke: () => colour("--grid"), width: 1 }, ticks: { show: false }, font: "11.5px system-ui" };
  return {
    width, height, padding: [8, 14, 0, 0], legend: { show: false },
    scales: {
      x: { time: false },
      y: log ? { distr: 3 } : { range: (_, low, high) => {
        const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
        return [fromZero && low >= 0 ? 0 : low - room, high + room];
      } },
    },
    axes: [{ ...axis, ...(FRACTIONS.includes(unit) ? {} : { incrs: WHOLE }), values: (_, all) => all.map(short), size: 30 }, { ...axis, values: (_, all) => all.map((one) => (one === null ? "" : short(one))), size: 54 }],
    hooks: { setCursor: [pointed] },
    cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false } },
    series: [{ label: unit }, ...series.map((one) => ({
      label: one.name, stroke: () => colour(one.colour), width: one.kind === "faint" ? 1 : 2, alpha: one.kind === "faint" ? 0.35 : 1,
      spanGaps: true, points: { show: Boolean(one.marked) || one.x.length === 1, size: 7, fill: () => colour(one.colour) },
    }))],
  };
}

function aligned(series) {
  if (series.length === 1) return [series[0].x, series[0].y];
  return series.length ? window.uPlot.join(series.map((one) => [one.x, one.y])) : [[]];
}

// series: [{name, colour, x, y, kind: line | faint, marked: each of its points is shown}]
export function Plot({ title, series, height = 240, log = false, unit = "step", fromZero = false, empty = "no data yet", children }) {
  const place = useRef(null), plot = useRef(null);
  const [pointed, point] = useState(null);
  const shown = series.filter((one) => one.x.length);
  const shape = JSON.stringify([shown.map((one) => [one.name, one.colour, one.kind, one.marked, one.x.length === 1]), log, height, unit]);
  useEffect(() => {
    if (!shown.length || !window.uPlot) return undefined;
    const box = place.current;
    const one = new window.uPlot(options(shown, log, height, box.clientWidth || 300, unit, fromZero, (u) => {
      const i = u.cursor.idx;
      point(i === null || i === undefined ? null : [u.data[0][i], ...u.series.slice(1).map((_, n) => nearest(u.data[n + 1], i))]);
    }), aligned(shown), box);
    one.over.addEventListener("mouseleave", () => point(null));
    plot.current = one;
    const fit = new ResizeObserver(() => { if (box.clientWidth) one.setSize({ width: box.clientWidth, height }); });
    fit.observe(box);
    const scheme = matchMedia("(prefers-color-scheme: dark)"), repaint = () => one.redraw(false);
    scheme.addEventListener("change", repaint);
    return () => { fit.disconnect(); scheme.removeEventListener("change", repaint); one.destroy(); plot.current = null; };
  }, [shape]);
  useEffect(() => { if (plot.current && shown.length) plot.current.setData(aligned(shown)); }, [series]);
  const last = shown.map((one) => `${one.name}: ${one.y.length ? short(one.y[one.y.length - 1] ?? NaN) : "nothing"}`).join(", ");
  return html`<figure class="plot"><figcaption><h3>${title}</h3>
      <div class="legend">${shown.map((one, i) => html`<span style=${{ "--c": `var(${one.colour})` }} class=${one.kind}>${one.name}${pointed && pointed[i + 1] !== null ? html` <b>${short(pointed[i + 1])}</b>` : ""}</span>`)}
      ${pointed ? html`<span class="at">${unit} ${short(pointed[0])}</span>` : ""}${children}</div></figcaption>
    ${shown.length ? html`<div class="canvas" ref=${place} role="img" aria-label=${`${title}. ${last}`}></div>` : html`<p class="none">${empty}</p>`}</figure>`;
}

function nearest(values, i) {
  for (let at = i; at >= 0 && at > i - 50; at--) if (values[at] !== null && values[at] !== undefined) return values[at];
  return null;
}

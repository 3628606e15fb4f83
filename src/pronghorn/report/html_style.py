"""The look and the pointer read-out of report.html: kept inside the page, so that one file is the whole report."""

STYLE = """
:root{color-scheme:light dark;
--paper:#faf9f7;--card:#fff;--ink:#1d1b18;--soft:#6b665e;--faint:#a39d93;--line:#e7e3dc;--grid:#efece6;
--train:#c05a1c;--eval:#2563a8;--good:#2f7d4f;--bad:#b3261e;--warn:#9a6700;
--s-imports:#c9c4bb;--s-load:#a8a29a;--s-read:#8fc1c9;--s-tokenize:#5a9fae;--s-pack:#4779a6;--s-reference:#7c8a3c;
--s-wait:#c8453b;--s-step:#c05a1c;--s-optimizer:#e39a5b;--s-evaluate:#e3c04f;--s-answers:#b99a2e;--s-checkpoint:#8f6bb0;
--s-rollouts:#3f9c6d;--s-report:#b79cc9;--s-other:#dedad3}
@media(prefers-color-scheme:dark){:root{
--paper:#151412;--card:#1d1b19;--ink:#edeae5;--soft:#a09a90;--faint:#6e6961;--line:#302d29;--grid:#282522;
--train:#f0894a;--eval:#72a8e6;--good:#6cc28d;--bad:#f2827a;--warn:#e0b04c;
--s-imports:#56524c;--s-load:#716c65;--s-read:#77aab3;--s-tokenize:#4b8d9b;--s-pack:#4f82b3;--s-reference:#8d9b4a;
--s-wait:#d8584e;--s-step:#e07b3c;--s-optimizer:#a8673a;--s-evaluate:#cfae48;--s-answers:#a78a2f;--s-checkpoint:#9a78bd;
--s-rollouts:#4fa97a;--s-report:#77608f;--s-other:#3b3834}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-font-smoothing:antialiased}
main{max-width:1120px;margin:0 auto;padding:44px 28px 72px}
h1{font-size:34px;line-height:1.15;letter-spacing:-.02em;margin:0;font-weight:650;overflow-wrap:anywhere}
h2{font-size:19px;letter-spacing:-.01em;margin:52px 0 14px;font-weight:620}
h3{font-size:14px;margin:0;font-weight:600}
h4{font-size:12px;letter-spacing:.06em;text-transform:uppercase;color:var(--soft);margin:0 0 8px;font-weight:600}
p{margin:0}
code,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;font-size:.9em}
.brand{font-size:12px;letter-spacing:.14em;text-transform:uppercase;color:var(--train);font-weight:650;margin-bottom:10px}
.title{display:flex;flex-wrap:wrap;align-items:center;gap:8px 14px}
.pill{font-size:12.5px;font-weight:600;padding:2px 11px;border-radius:99px;border:1px solid currentColor;white-space:nowrap}
.pill.good{color:var(--good)}.pill.bad{color:var(--bad)}.pill.warn{color:var(--warn)}.pill.soft{color:var(--soft)}
.sub{color:var(--soft);margin-top:8px;overflow-wrap:anywhere}
.why{margin-top:12px;padding:10px 14px;border-left:3px solid var(--warn);background:var(--card);white-space:pre-wrap}
.why.good,.why.soft{padding:0;border:0;background:none;color:var(--soft);margin-top:4px}.why.bad{border-color:var(--bad)}
.live{margin-top:6px;font-weight:600;color:var(--train);font-variant-numeric:tabular-nums}.live span{color:var(--warn)}
.done{height:5px;border-radius:3px;background:var(--line);margin-top:10px;overflow:hidden}
.done i{display:block;height:100%;background:var(--train)}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:1px;margin:30px 0 0;background:var(--line);
border:1px solid var(--line);border-radius:12px;overflow:hidden}
.tile{background:var(--card);padding:16px 18px 14px;min-width:0}
.tile dt{font-size:12.5px;color:var(--soft)}
.tile dd{margin:2px 0 0;font-size:25px;line-height:1.25;font-weight:600;letter-spacing:-.015em;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile small{display:block;font-size:12.5px;color:var(--soft);font-weight:400;letter-spacing:0;min-height:1.5em}
.card,.plot{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 20px;margin:0}
.grid3{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:16px;margin-top:16px}
figcaption{display:flex;flex-wrap:wrap;justify-content:space-between;gap:4px 18px;margin-bottom:14px}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:12.5px}
.legend span{color:var(--soft)}
.legend span::before{content:"";display:inline-block;width:14px;height:3px;border-radius:2px;vertical-align:middle;
margin-right:6px;background:var(--c)}
.legend .faint::before{opacity:.4}.legend .dots::before{width:8px;height:8px;border-radius:50%}
.train{--c:var(--train)}.eval{--c:var(--eval)}
.frame{display:grid;grid-template:150px 38px/42px minmax(0,1fr);position:relative}
.tall .frame{grid-template:330px 40px/60px minmax(0,1fr)}
.frame.log,.plot:has([name=log]:checked) .frame{display:none}.plot:has([name=log]:checked) .frame.log{display:grid}
.switch{color:var(--soft);cursor:pointer;user-select:none}
.switch input{margin:0 5px 0 0;vertical-align:-1.5px;accent-color:var(--train)}
.unit{position:absolute;left:0;top:0;height:330px;writing-mode:vertical-rl;transform:rotate(180deg);text-align:center;
font-size:11.5px;color:var(--soft)}
.x b{position:absolute;top:22px;left:0;right:0;text-align:center;font-weight:400}
.area{position:relative;grid-area:1/2;touch-action:pan-y;cursor:crosshair}
.area svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible;display:block}
.y,.x{position:relative;font-size:11.5px;color:var(--soft);font-variant-numeric:tabular-nums}
.y{grid-area:1/1}.x{grid-area:2/2}
.y span{position:absolute;right:9px;transform:translateY(50%);line-height:1}
.x span{position:absolute;top:7px;transform:translateX(-50%);line-height:1.2;white-space:nowrap}
path{fill:none;vector-effect:non-scaling-stroke;stroke-linecap:round;stroke-linejoin:round}
path.grid{stroke:var(--grid);stroke-width:1}
path.line{stroke:var(--c);stroke-width:2}
path.faint{stroke:var(--c);stroke-width:1;opacity:.35}
path.dots{stroke:var(--c);stroke-width:7}
path.break{stroke:var(--faint);stroke-width:1.2;stroke-dasharray:4 4}
path.level{stroke:var(--faint);stroke-width:1.2;stroke-dasharray:1 4}
.name{position:absolute;top:-2px;margin-left:6px;font-size:11.5px;color:var(--soft);white-space:nowrap;pointer-events:none}
.name.before{transform:translateX(-100%);margin-left:-6px}
.name.right{top:auto;right:0;margin:0 0 3px}
.star{position:absolute;width:15px;height:15px;margin:0 0 -7.5px -7.5px;border:2px solid var(--eval);border-radius:50%;
pointer-events:none}
.star b{position:absolute;left:10px;bottom:14px;font-size:12px;color:var(--eval);white-space:nowrap;font-weight:600}
.star.left b{left:auto;right:0}
.cursor{position:absolute;top:0;bottom:0;width:1px;background:var(--faint);display:none;pointer-events:none}
.tip{position:absolute;top:8px;display:none;pointer-events:none;z-index:2;background:var(--ink);color:var(--paper);
border-radius:8px;padding:7px 11px;font-size:12.5px;line-height:1.5;white-space:nowrap;font-variant-numeric:tabular-nums}
.tip i{display:inline-block;width:8px;height:8px;border-radius:50%;margin-right:7px;background:var(--c)}
.note,.none{font-size:12.5px;color:var(--soft);margin-top:8px}
.none{padding:26px 0;text-align:center;color:var(--faint)}
.stack{display:flex;height:26px;border-radius:7px;overflow:hidden;gap:1px;margin-bottom:18px}
.stack div{min-width:1px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{font-size:12px;color:var(--soft);text-align:left;font-weight:500;padding:0 14px 7px 0;
border-bottom:1px solid var(--line)}
td{padding:7px 14px 7px 0;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0;padding-bottom:0}
td.n,th.n{text-align:right;white-space:nowrap}
td:last-child,th:last-child{padding-right:0}
.stages td{padding-top:5px;padding-bottom:5px}
.stages .key{white-space:nowrap;width:1%;padding-right:22px}
.stages .key i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:9px}
.stages .bar{width:60%}.stages .bar div{height:9px;border-radius:3px;margin-top:7px;min-width:1px}
.advice{margin-top:16px;padding:13px 18px;border-radius:12px;background:var(--card);border:1px solid var(--line);
border-left:4px solid var(--train)}
.advice b{font-weight:620}.advice span{color:var(--soft)}
.said{white-space:pre-wrap;overflow-wrap:anywhere;max-height:16em;overflow:auto}
.answers td{width:25%}.answers .said{font-size:14px}
mark{background:none;color:inherit;box-shadow:inset 0 -2px var(--eval)}
.pair{table-layout:fixed}.pair td{width:auto}.pair th{overflow-wrap:anywhere}
.ok{color:var(--good);font-weight:700}.ko{color:var(--bad)}
.mark{float:left;width:1.4em}
.recipe{columns:3;column-gap:34px}
.recipe section{break-inside:avoid;margin-bottom:20px}
.recipe dl{margin:0;display:grid;grid-template-columns:auto minmax(0,1fr);gap:2px 14px}
.recipe dt{color:var(--soft)}.recipe dd{margin:0;overflow-wrap:anywhere;text-align:right}
.recipe dt,.recipe dd{font-size:13.5px}
.wide{overflow-x:auto}
.grid2{display:grid;grid-template-columns:minmax(0,5fr) minmax(0,6fr);gap:24px 44px}
.facts{margin:0;display:grid;grid-template-columns:auto minmax(0,1fr);gap:5px 22px;align-content:start;
font-variant-numeric:tabular-nums}
.facts dt{color:var(--soft)}.facts dd{margin:0;overflow-wrap:anywhere}
.hist{display:flex;align-items:flex-end;gap:3px;height:150px;padding-bottom:20px;border:0}
.hist div{flex:1;height:100%;display:flex;align-items:flex-end;position:relative;border-bottom:1px solid var(--line)}
.hist i{display:block;width:100%;background:var(--eval);border-radius:3px 3px 0 0;opacity:.85}
.hist b{position:absolute;top:100%;left:0;margin-top:4px;font-size:11px;line-height:1;font-weight:400;color:var(--soft);
white-space:nowrap;font-variant-numeric:tabular-nums}
.hist div:nth-child(even) b{display:none}
.spaced{margin-top:20px}td.path{overflow-wrap:anywhere}
.evals th:last-child{color:var(--eval);padding-left:14px;width:1%;border-bottom:1px solid var(--line);padding-top:7px}
.evals tr:last-child th{border:0}.evals .best td{color:var(--eval);font-weight:600}
details{margin-top:14px}summary{cursor:pointer;color:var(--soft)}pre{font-size:12.5px;margin:10px 0 0}
ul.notices{margin:0;padding:0;list-style:none}
ul.notices li{padding:7px 0;border-bottom:1px solid var(--line);overflow-wrap:anywhere;white-space:pre-wrap}
ul.notices li:last-child{border:0}ul.notices time{color:var(--soft);margin-right:14px;font-size:13px}
footer{margin-top:56px;color:var(--faint);font-size:12.5px}
@media(max-width:900px){.grid3{grid-template-columns:minmax(0,1fr)}.recipe{columns:2}
.grid2{grid-template-columns:minmax(0,1fr)}.tiles{grid-template-columns:repeat(2,1fr)}}
@media(max-width:640px){main{padding:28px 16px 48px}h1{font-size:27px}h2{margin-top:40px}.recipe{columns:1}
.card,.plot{padding:15px 14px}.card{overflow-x:auto}td,th{padding-right:9px}
.tall .frame{grid-template-rows:240px 40px}.unit{height:240px}
.tile{padding:12px 14px 10px}.tile dd{font-size:21px}
.stages .bar{display:none}.stages .key{width:auto;white-space:normal}
.answers thead{display:none}.answers td{display:block;width:auto;border:0;padding:4px 0}
.answers td::before{content:attr(data-label);display:block;font-size:12px;color:var(--soft)}
.answers tr{display:block;padding:12px 0;border-bottom:1px solid var(--line)}.answers tr:last-child{border:0}}
@media print{body{background:#fff}.card,.plot,.tiles{break-inside:avoid}}
"""

# Text goes in through textContent and numbers through toPrecision only, so nothing of a run is ever read as HTML.
SCRIPT = """
for (const figure of document.querySelectorAll('figure.plot')) {
  const source = figure.querySelector('script');
  if (!source) continue;
  const data = JSON.parse(source.textContent);
  for (const area of figure.querySelectorAll('.area')) {
  const cursor = area.querySelector('.cursor'), tip = area.querySelector('.tip');
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };
  const write = value => {
    const size = Math.abs(value);
    if (size && size < 1e-3) return value.toExponential(2);
    return size >= 1000 ? Math.round(value).toLocaleString('en') : String(Number(value.toPrecision(4)));
  };
  const row = (text, colour) => {
    const line = document.createElement('div');
    if (colour) { const dot = document.createElement('i'); dot.className = colour; line.append(dot); }
    line.append(text);
    return line;
  };
  const show = event => {
    const box = area.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const want = data.x0 + share * (data.x1 - data.x0), found = data.lines.map(line => nearest(line.x, want));
    const main = data.lines.findIndex(line => !line.dots);
    const step = main < 0 ? data.lines[0].x[found[0]] : data.lines[main].x[found[main]];
    tip.replaceChildren(row('step ' + step.toLocaleString('en')));
    data.lines.forEach((line, i) => {
      const x = line.x[found[i]];
      if (line.dots && Math.abs(x - want) > (data.x1 - data.x0) * 0.025) return;
      const where = line.dots && x !== step ? ' at step ' + x.toLocaleString('en') : '';
      tip.append(row(line.name + ' ' + write(line.y[found[i]]) + where, line.colour));
    });
    const left = (step - data.x0) / (data.x1 - data.x0) * box.width;
    cursor.style.display = tip.style.display = 'block';
    cursor.style.left = left + 'px';
    tip.style.left = Math.max(0, left + 14 + tip.offsetWidth > box.width ? left - 14 - tip.offsetWidth : left + 14) + 'px';
  };
  area.addEventListener('pointermove', show);
  area.addEventListener('pointerdown', show);
  area.addEventListener('pointerleave', () => { cursor.style.display = tip.style.display = 'none'; });
  }
}
// The switch outlives a reload: it is kept behind the # of the address.
for (const box of document.querySelectorAll('[name=log]')) {
  box.checked = location.hash === '#log';
  box.addEventListener('change', () => history.replaceState(null, '', box.checked ? '#log' : '#'));
}
// While the run goes on, the file is written anew; a page that is looked at follows it.
const updated = Number(document.body.dataset.updated);
if (updated) {
  const news = document.querySelector('.live span');
  setInterval(() => {
    const silent = Math.round((Date.now() / 1000 - updated) / 60);
    if (silent >= 15) news.textContent = ' (no update for ' + silent + ' minutes: the run may have been stopped)';
    if (!document.hidden && !getSelection().toString()) location.reload();
  }, 20000);
}
"""
